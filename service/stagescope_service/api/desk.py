"""What every route works with, and the kinds of parameters that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import Depends, Path, Query, Request

from stagescope_service.api.commands import Commands
from stagescope_service.api.comparisons import Comparisons
from stagescope_service.api.engine_health import EngineHealth
from stagescope_service.api.measures import Measures
from stagescope_service.api.operator_files import OperatorFiles
from stagescope_service.api.prometheus import Counts
from stagescope_service.api.requests import pattern, step_number
from stagescope_service.api.target import Finder, Target
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue


@dataclasses.dataclass(frozen=True, slots=True)
class Desk:
    """The collaborators of the routes."""

    catalogue: Catalogue
    commands: Commands
    settings: Settings
    clock: Callable[[], float]
    finder: Finder
    measures: Measures
    operator_files: OperatorFiles
    comparisons: Comparisons
    long_comparisons: Comparisons
    engine_health: EngineHealth
    counts: Counts


async def desk_of(request: Request) -> Desk:
    """Return the app's desk."""
    desk: Desk = request.app.state.desk
    return desk


AtDesk = Annotated[Desk, Depends(desk_of)]

RUN_PATTERN: Final = r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}$"
STEP_PATTERN: Final = "^(latest|-?[0-9]{1,18})$"

Run = Annotated[
    str | None,
    Query(
        description="A run's name; default: the run whose training stage began last.",
        json_schema_extra=pattern(RUN_PATTERN),
    ),
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
StepWord = Annotated[
    str,
    Path(
        description="The trainer's step, or `latest`.",
        examples=["5", "latest"],
        json_schema_extra=pattern(STEP_PATTERN),
    ),
]


def step_target(
    desk: AtDesk,
    step: StepWord,
    run: Run = None,
    attempt: AttemptNumber = None,
    attempt_key: AttemptKey = None,
) -> Target:
    """Return the step that a path and its query name."""
    return desk.finder.step(run, attempt, step_number(step), key=attempt_key)


def attempt_target(desk: AtDesk, run: Run = None, attempt: AttemptNumber = None) -> Target:
    """Return the attempt that a query names."""
    return desk.finder.attempt(run, attempt)


StepTarget = Annotated[Target, Depends(step_target)]
AttemptTarget = Annotated[Target, Depends(attempt_target)]
Row = dict[str, Any]
