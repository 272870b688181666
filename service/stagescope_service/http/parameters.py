"""The query parameters that several routes have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request

from stagescope_service.http.requests import pattern
from stagescope_service.views.pages import STEP_PATTERN, parse_step
from stagescope_service.views.reading.dependencies import (
    AttemptQuery,
    Dependencies,
    RankQuery,
    Window,
)
from stagescope_service.views.reading.target import Target
from stagescope_service.views.run_list import MAX_COMPARED
from stagescope_wire.schema import STEP_BOUND


async def dependencies_of(request: Request) -> Dependencies:
    """Return the collaborators of the app that answers a request."""
    deps: Dependencies = request.app.state.deps
    return deps


Deps = Annotated[Dependencies, Depends(dependencies_of)]

Version = Annotated[int, Path(gt=-(10**18), lt=10**18, description="A policy version.")]
Run = Annotated[
    str | None,
    Query(
        description="A run's name, as it is stored, was given or is shown; default: the run whose "
        "training stage began last.",
    ),
]

RunPath = Annotated[
    str, Path(description="The run's name, as it is stored, was given or is shown.")
]

ChosenRuns = Annotated[
    list[str], Query(description="A run's name; given several times.", max_length=MAX_COMPARED)
]

AttemptNumber = Annotated[
    int | None,
    Query(ge=1, lt=1 << 31, description="An attempt; default: the newest that has the step."),
]

AttemptKey = Annotated[
    str | None,
    Query(max_length=500, description="Only attempts of this key, as the processes gave it."),
]

Rank = Annotated[int | None, Query(ge=0, lt=1 << 31, description="Only this rank.")]

Role = Annotated[str | None, Query(max_length=200, description="Only this role.")]

Stage = Annotated[
    str | None,
    Query(
        max_length=200,
        description="Only this stage; for statistics, the stage that they are taken from.",
    ),
]

Round = Annotated[int | None, Query(ge=0, lt=1 << 31, description="Only this round, from 0.")]

StepText = Annotated[
    str,
    Path(
        description="The trainer's step, or `latest` (the one that began last), `measured` (the "
        "newest closed one with numbers, else `latest`) or `captured` (the newest with operators, "
        "else `latest`).",
        examples=["5", "latest", "measured"],
        json_schema_extra=pattern(STEP_PATTERN),
    ),
]


async def rank_query(stage: Stage = None, role: Role = None, rank: Rank = None) -> RankQuery:
    """Return the stage and ranks of a query."""
    return {"stage": stage, "role": role, "rank": rank}


async def attempt_query(run: Run = None, attempt: AttemptNumber = None) -> AttemptQuery:
    """Return the run and attempt of a query."""
    return AttemptQuery(run, attempt)


StepBound = Annotated[int | None, Query(ge=0, lt=STEP_BOUND)]


async def window_query(
    first: Annotated[StepBound, Query(alias="from", description="The first step.")] = None,
    last: Annotated[StepBound, Query(alias="to", description="The last step.")] = None,
) -> Window:
    """Return the steps of a query; `check_window` checks them, after its other parameters."""
    return {"first": first, "last": last}


def step_target(
    deps: Deps,
    step: StepText,
    run: Run = None,
    attempt: AttemptNumber = None,
    attempt_key: AttemptKey = None,
) -> Target:
    """Return the step of a path and its query."""
    return deps.finder.named(run, attempt, parse_step(step), key=attempt_key)


def attempt_target(deps: Deps, run: Run = None, attempt: AttemptNumber = None) -> Target:
    """Return the attempt of a query."""
    return deps.finder.attempt(run, attempt)


StepTarget = Annotated[Target, Depends(step_target)]

AttemptTarget = Annotated[Target, Depends(attempt_target)]

RankQueryOf = Annotated[RankQuery, Depends(rank_query)]

AttemptQueryOf = Annotated[AttemptQuery, Depends(attempt_query)]

WindowOf = Annotated[Window, Depends(window_query)]

Metrics = Annotated[
    list[str] | None,
    Query(description="A published metric or a scalar; may be given several times.", max_length=12),
]
