"""Routes of figures that compare: operators along two dumps, attempts and runs."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from fastapi import APIRouter, Depends, Query

from stagescope_service.figures import comparison, operators
from stagescope_service.http.parameters import (
    AttemptQueryOf,
    Deps,
    Metrics,
    RankQueryOf,
    Run,
    WindowOf,
)
from stagescope_service.http.requests import pattern
from stagescope_service.http.routes.figures import FigureAnswer
from stagescope_service.views.comparisons.comparing import SIDE_PATTERN, compare_sides
from stagescope_service.views.models import figures as models
from stagescope_service.views.models.bodies import ComparisonRequest, SideFields
from stagescope_service.views.reading.dependencies import Dependencies, check_window
from stagescope_wire.schema import STEP_BOUND, read_target

router = APIRouter(tags=["figures"])

_SIDE: Final = pattern(SIDE_PATTERN)
_RANKS: Final = "Several ranks whose tensors are put together, instead of one."
_LAYOUT: Final = "The layout of these ranks, outermost axis first; default: as they reported."


async def dump_query(
    step: Annotated[int, Query(ge=0, lt=STEP_BOUND, description="The trainer's step.")],
    chosen: AttemptQueryOf,
    one: RankQueryOf,
    ranks: Annotated[
        str | None, Query(max_length=200, description=_RANKS, examples=["all", "0-3"])
    ] = None,
    layout: Annotated[
        str | None, Query(max_length=100, description=_LAYOUT, examples=["dp2tp2"])
    ] = None,
) -> SideFields:
    """Return the dump of a query."""
    return SideFields(
        run=chosen.run, attempt=chosen.attempt, step=step, ranks=ranks, layout=layout, **one
    )


async def other_dump_query(
    b_run: Annotated[str | None, Query(max_length=100, description="Another run.")] = None,
    b_attempt: Annotated[
        int | None, Query(ge=1, lt=1 << 31, description="Another attempt's number.")
    ] = None,
    b_step: Annotated[int | None, Query(ge=0, lt=STEP_BOUND, description="Another step.")] = None,
    b_stage: Annotated[str | None, Query(max_length=200, description="Another stage.")] = None,
    b_rank: Annotated[int | None, Query(ge=0, lt=1 << 31, description="Another rank.")] = None,
    b_ranks: Annotated[
        str | None, Query(max_length=200, description=_RANKS, examples=["all", "0-3"])
    ] = None,
    b_layout: Annotated[
        str | None, Query(max_length=100, description=_LAYOUT, examples=["dp2tp2"])
    ] = None,
) -> SideFields:
    """Return how the other dump of a query differs."""
    return SideFields(
        run=b_run, attempt=b_attempt, step=b_step, stage=b_stage, rank=b_rank, ranks=b_ranks,
        layout=b_layout,
    )  # fmt: skip


@router.get("/figures/operator-divergence", response_model=models.Figure)
async def operator_divergence_figure(
    deps: Deps,
    a: Annotated[SideFields, Depends(dump_query)],
    b: Annotated[SideFields, Depends(other_dump_query)],
) -> FigureAnswer:
    """Draw the relative differences of two dumps along the execution order of the first.

    The second has the run, attempt, step, stage and rank of the first, unless `b_...` names
    another one. The threshold is the same as in `/operators/divergence`.
    """
    found = await deps.computations.run(operators.divergence_info, deps, a, b)
    return FigureAnswer("operator-divergence", operators.divergence_figure(found), found)


class SidesQuery(NamedTuple):
    """The query parameters that name the sides of a comparison."""

    run: str | None
    step: int | None
    a: str | None
    b: str | None


async def sides_query(
    run: Run = None,
    step: Annotated[
        int | None, Query(ge=0, lt=STEP_BOUND, description="The step of both sides.")
    ] = None,
    a: Annotated[
        str | None,
        Query(max_length=200, description="`RUN[@ATTEMPT][:STEP]`.", json_schema_extra=_SIDE),
    ] = None,
    b: Annotated[
        str | None,
        Query(max_length=200, description="`RUN[@ATTEMPT][:STEP]`.", json_schema_extra=_SIDE),
    ] = None,
) -> SidesQuery:
    """Return the sides of a query."""
    return SidesQuery(run, step, a, b)


@router.get("/figures/comparison", response_model=models.Figure)
async def comparison_figure(
    deps: Deps,
    sides: Annotated[SidesQuery, Depends(sides_query)],
    window: WindowOf,
    metric: Metrics = None,
    at: Annotated[
        int,
        Query(ge=0, lt=1000, description="Index of the figure of tensors; 0: the flow of data."),
    ] = 0,
) -> FigureAnswer:
    """Draw two attempts or runs: their metrics over the steps, or with a step their tensors.

    Without `a` and `b` the sides are the two newest attempts of the run (that have the step). One
    side alone is compared with the run. The tensors are compared as by `POST /comparisons`: while
    that takes, the answer is 503.
    """
    one, other = await deps.computations.run(_sides, deps, sides)
    if read_target(one).step is None and read_target(other).step is None:
        check_window(window)
        found = await deps.computations.run(
            comparison.info, deps, one, other, tuple(metric or ()), window
        )
        return FigureAnswer("comparison", comparison.figure(found), found)
    compared = await compare_sides(deps, ComparisonRequest(a=one, b=other))
    drawn, note = comparison.tensors_figure(compared.to_json(), at)
    side = read_target(one)
    shown = comparison.ComparisonInfo(one, other, side.run, side.attempt, (), note, side.step)
    return FigureAnswer("comparison", drawn, shown)


def _sides(deps: Dependencies, sides: SidesQuery) -> tuple[str, str]:
    """Return both sides as texts; a missing side is the run."""
    run, step, a, b = sides
    if a is None and b is None:
        return comparison.newest_attempts(deps, run, step)
    name = deps.finder.attempt(run).run if a is None or b is None else ""
    one, other = (
        text if step is None or read_target(text).step is not None else f"{text}:{step}"
        for text in (a or name, b or name)
    )
    return one, other
