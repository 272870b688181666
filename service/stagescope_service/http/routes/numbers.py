"""Routes about the numbers of a step, and about one number over the steps of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query

from stagescope_service.http.parameters import (
    AttemptNumber,
    AttemptQueryOf,
    Deps,
    Rank,
    RankQueryOf,
    Role,
    Round,
    Stage,
    StepTarget,
    WindowOf,
)
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views import series as series_view
from stagescope_service.views.models import numbers as models
from stagescope_service.views.models import routing as routing_models
from stagescope_service.views.models.runs import Series
from stagescope_service.views.reading.step_summaries import Slice
from stagescope_service.views.series import MAX_SERIES_STEPS, SeriesQuery
from stagescope_service.views.series_points import By
from stagescope_service.views.steps import numbers as view
from stagescope_service.views.steps import one as one_view
from stagescope_service.views.steps import routing as routing_view
from stagescope_service.views.steps.numbers import SliceBy, metrics_of

router = APIRouter(tags=["steps"])


@router.get("/steps/{step}", response_model=models.OneStep)
def step(
    deps: Deps,
    target: StepTarget,
    ranks: RankQueryOf,
    attempt: AttemptNumber = None,
    round: Round = None,
) -> Answer:
    """Return a step: the steps before and after it, and its numbers or why it has none.

    A step without numbers is no error here: `numbers` is null, and `unmeasured` says why. With
    `rank`, `role`, `stage` or `round` the numbers are of that slice. With `attempt` the attempt's
    own steps are the neighbours, and beyond them the current steps.
    """
    part = Slice(**ranks)
    return Answer(one_view.one(deps, target, part, round, is_own=attempt is not None))


@router.get("/steps/{step}/metrics", response_model=models.Metrics)
def metrics(deps: Deps, target: StepTarget, ranks: RankQueryOf, round: Round = None) -> Answer:
    """Return the step's metrics under their published names, and what they rest on.

    `complete` is `complete`, `partial` or `unknown` for a closed step. For an open step it is
    `open`: its numbers are assembled from what has arrived so far, and `missing` names the ranks
    that have not. With `rank`, `role`, `stage` or `round` the numbers are of that slice. Read
    `comparable` and `comparability` before you trust a number. The verdict `not measured` means
    that one stream is a copy, or that a token is finite in neither. The whole step has its verdict
    in `step_comparable`. Ranks that repeated the step within the attempt are in `begun_again`: both
    passes count.
    """
    return Answer(metrics_of(deps, target, Slice(**ranks), round))


@router.get("/steps/{step}/rounds", response_model=models.Rounds)
def rounds(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    ranks: RankQueryOf,
    by: Annotated[
        SliceBy,
        Query(description="Mask segments, true turns, or trainer version - token's version."),
    ] = "round",
) -> Answer:
    """List the mismatch by round; `tokens`, `abs_diff_sum` and `diff_sum` add up to `whole`.

    A row's `comparable` is of its own tokens: read it with the row's `step_comparable`.
    """
    return Answer(view.rounds(deps, target, page, ranks, by))


@router.get("/steps/{step}/ranks", response_model=models.Ranks)
def ranks(deps: Deps, target: StepTarget, page: PageOf, ranks: RankQueryOf) -> Answer:
    """List the mismatch by rank, with where each ran.

    The numbers of a rank are its own, even if a replica counts in its place (`parts_counted` 0),
    and so is its verdict: read `comparable` with the row's `step_comparable`.
    """
    return Answer(view.ranks(deps, target, page, ranks))


@router.get("/steps/{step}/tokens", response_model=models.Tokens)
def tokens(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    ranks: RankQueryOf,
    round: Round = None,
    kind: Annotated[Literal["worst", "nonfinite"] | None, Query(description="Only these.")] = None,
) -> Answer:
    """List the worst tokens (|p - q| descending), then those whose p or q is not finite.

    There are up to 64 of each, as a summary keeps them, for the step or for the requested rank.
    """
    return Answer(view.tokens(deps, target, page, ranks, round, kind))


@router.get("/steps/{step}/routing", response_model=routing_models.Routing)
def routing(deps: Deps, target: StepTarget, page: PageOf, ranks: RankQueryOf) -> Answer:
    """Return whether rollout and trainer chose the same experts, a row for each layer.

    `text` says how much of the mismatch lies in tokens with another expert, and `faults` what is
    wrong with the routes themselves. Layers count from 0 among those with routes.
    """
    return Answer(routing_view.routing(deps, target, page, ranks))


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


@router.get("/series", response_model=Series)
def series(
    deps: Deps,
    query: Annotated[SeriesQuery, Depends(series_query)],
    chosen: AttemptQueryOf,
    window: WindowOf,
    superseded: Annotated[
        bool, Query(description="Also steps that a later attempt did again.")
    ] = False,
    limit: Annotated[
        int, Query(ge=1, le=MAX_SERIES_STEPS, description="Most steps, the newest.")
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
    return Answer(series_view.series(deps, query, chosen, window, superseded, limit))
