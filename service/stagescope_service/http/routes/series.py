"""The route for one number over the steps of a run: a published metric or a scalar, or slices."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from stagescope_service.http.parameters import AttemptQueryOf, Deps, Rank, Role, Stage, WindowOf
from stagescope_service.http.requests import Answer
from stagescope_service.views import series as view
from stagescope_service.views.models import runs as models
from stagescope_service.views.series import By, SeriesQuery

router = APIRouter(tags=["steps"])


async def series_query(
    metric: Annotated[
        str, Query(max_length=500, description="A published metric, or a scalar's name.")
    ],
    by: Annotated[By | None, Query(description="A series for each; scalars only by rank.")] = None,
    stage: Annotated[Stage, Query(description="Scalars: only those of this stage.")] = None,
    role: Role = None,
    rank: Rank = None,
) -> SeriesQuery:
    """Return the series of a query."""
    return {"metric": metric, "by": by, "stage": stage, "role": role, "rank": rank}


@router.get("/series", response_model=models.Series)
def series(
    deps: Deps,
    query: Annotated[SeriesQuery, Depends(series_query)],
    chosen: AttemptQueryOf,
    window: WindowOf,
    superseded: Annotated[
        bool, Query(description="Also steps that a later attempt did again.")
    ] = False,
    limit: Annotated[
        int, Query(ge=1, le=view.MAX_SERIES_STEPS, description="Most steps, the newest.")
    ] = 10_000,
) -> Answer:
    """Return one number over the steps of a run, as columns: `steps` and, aligned, the others.

    These columns have one entry a step, ascending: `steps`, `attempts`, `superseded_by`, `complete`
    (as in `/steps`), `comparable`, `suspects`, `reasons` and `begun_again`. The verdict on the
    step's streams is `comparable`, the checks behind it are `suspects`. In `reasons` is why a step
    has no value (null: it has one). Ranks that repeated the step within its attempt are in
    `begun_again`: both passes count. Each of `series` has a `name`, `values`, and its `stage`,
    `role`, `rank`, `round` or `staleness` if it is of one. A value is null where there is none,
    "nan" where it is NaN. A scalar's value is the mean over its ranks and parts, with `low` and
    `high`. Scalars of several stages or roles are a series each.

    Without `attempt` it reads the current attempts: a step that a later attempt repeats is left
    out, unless `superseded` includes it. The `to` of the steps before is `earlier_to`. Steps that
    only a superseded attempt has are in `note`. Null: there are none.
    """
    return Answer(view.series(deps, query, chosen, window, superseded, limit))
