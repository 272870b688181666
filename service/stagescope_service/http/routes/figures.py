"""Routes of figures: each returns one figure as plotly's JSON, `/figures` lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from stagescope_service.figures import (
    anatomy,
    density,
    distribution,
    heatmaps,
    operators,
    rounds,
    routing,
    timeline,
)
from stagescope_service.figures.drawing import Shown, drawn
from stagescope_service.http.parameters import AttemptNumber, Deps, RankQueryOf, Run
from stagescope_service.http.requests import pattern
from stagescope_service.views.models import figures as models
from stagescope_service.views.operators.tables import TableFilters, operator_target
from stagescope_service.views.pages import STEP_PATTERN, parse_step
from stagescope_service.views.reading.target import Target

if TYPE_CHECKING:
    import plotly.graph_objects as go

router = APIRouter(tags=["figures"])

StepName = Annotated[
    str,
    Query(
        description="The trainer's step, or `latest`, `measured` or `captured`, as in paths.",
        examples=["5", "latest"],
        json_schema_extra=pattern(STEP_PATTERN),
    ),
]
TokenProperty = Annotated[anatomy.By, Query(description="The property that groups the tokens.")]


def figure_target(
    deps: Deps, step: StepName = "latest", run: Run = None, attempt: AttemptNumber = None
) -> Target:
    """Return the step of a query."""
    return deps.finder.named(run, attempt, parse_step(step))


def dumped_target(
    deps: Deps, step: StepName = "latest", run: Run = None, attempt: AttemptNumber = None
) -> Target:
    """Return the step of a query; `latest` is the newest with operators."""
    return operator_target(deps, step, run, attempt)


FigureTarget = Annotated[Target, Depends(figure_target)]
DumpedTarget = Annotated[Target, Depends(dumped_target)]


class FigureAnswer(Response):
    """A figure; see `figures.drawing.drawn`."""

    media_type = "application/json"

    def __init__(self, name: str, figure: go.Figure, found: Shown) -> None:
        super().__init__(drawn(name, figure, found))


@router.get("/figures/rounds", response_model=models.Figure)
def rounds_figure(
    deps: Deps,
    target: FigureTarget,
    compare: Annotated[
        int, Query(ge=0, le=rounds.MAX_BEFORE, description="Number of steps before, drawn faded.")
    ] = 3,
) -> FigureAnswer:
    """Draw |d| by round of a step with its quantiles, and the number of tokens."""
    found = rounds.info(deps, target, compare=compare)
    return FigureAnswer("rounds", rounds.figure(found), found)


@router.get("/figures/rank-rounds", response_model=models.Figure)
def rank_rounds_figure(
    deps: Deps,
    target: FigureTarget,
    metric: Annotated[
        heatmaps.Metric, Query(description="The number that is drawn.")
    ] = heatmaps.DEFAULT,
) -> FigureAnswer:
    """Draw a number by rank and round of a step; many ranks are folded, the odd one out on top."""
    found = heatmaps.rounds_info(deps, target, metric)
    return FigureAnswer("rank-rounds", heatmaps.figure(found), found)


@router.get("/figures/distribution", response_model=models.Figure)
def distribution_figure(
    deps: Deps,
    target: FigureTarget,
    of: Annotated[
        distribution.Of,
        Query(description="`abs`: |p - q| in nats; `ratio`: e^(p - q), of the probabilities."),
    ] = "abs",
    round: Annotated[
        int | None, Query(ge=0, lt=1 << 31, description="Only this round, from 0.")
    ] = None,
) -> FigureAnswer:
    """Draw how many tokens of a step have which |d|, or which ratio of probabilities."""
    found = distribution.info(deps, target, of=of, round=round)
    return FigureAnswer("distribution", distribution.figure(found), found)


@router.get("/figures/density", response_model=models.Figure)
async def density_figure(deps: Deps, target: FigureTarget) -> FigureAnswer:
    """Draw the trainer's log-probs against the rollout's, with the verdict on both.

    The cloud is counted from the tensors while they exist. Without them the figure has its ellipse,
    its line of regression and the worst tokens, which are stored for every step.
    """
    found = await deps.computations.run(density.info, deps, target)
    return FigureAnswer("density", density.figure(found), found)


@router.get("/figures/anatomy", response_model=models.Figure)
def anatomy_figure(deps: Deps, target: FigureTarget, by: TokenProperty = "place") -> FigureAnswer:
    """Draw |d| and d of a step by where its tokens are, or how probable or stale they are."""
    found = anatomy.info(deps, target, by)
    return FigureAnswer("anatomy", anatomy.figure(found), anatomy.doubted(found))


@router.get("/figures/routing", response_model=models.Figure)
def routing_figure(deps: Deps, target: FigureTarget) -> FigureAnswer:
    """Draw how many tokens of a step have other experts in the trainer, by layer and round."""
    found = routing.info(deps, target)
    return FigureAnswer("routing", routing.figure(found), found)


@router.get("/figures/timeline", response_model=models.Figure)
def timeline_figure(deps: Deps, target: FigureTarget) -> FigureAnswer:
    """Draw the stages of a step: a lane for each rank, waits, and what failed or did not end."""
    found = timeline.info(deps, target)
    return FigureAnswer("timeline", timeline.figure(found), found)


@router.get("/figures/operators", response_model=models.Figure)
async def operators_figure(deps: Deps, target: DumpedTarget, ranks: RankQueryOf) -> FigureAnswer:
    """Draw the results of a dump's operators in execution order, the first non-finite one marked.

    With several dumps, it draws the one with the earliest non-finite result, else the first.
    """
    filters: TableFilters = {**ranks, "part": None, "capture_id": None}
    found = await deps.computations.run(operators.info, deps, target, filters)
    return FigureAnswer("operators", operators.figure(found), found)
