"""Routes of figures: each returns one figure as plotly's JSON, `/figures` lists them."""

from __future__ import annotations

import base64
import dataclasses
import html
import typing
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import orjson
import plotly.graph_objects as go
from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from fastapi.routing import APIRoute

from stagescope_service.api.comparisons import SIDE_PATTERN, compare_sides
from stagescope_service.api.dependencies import (
    STEP_PATTERN,
    AttemptNumber,
    AttemptQueryOf,
    Dependencies,
    Deps,
    RankQueryOf,
    Run,
    StepTarget,
    WindowOf,
    check_window,
)
from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.figures import (
    anatomy,
    comparison,
    density,
    distribution,
    heatmaps,
    offenders,
    operators,
    overview,
    rounds,
    timeline,
)
from stagescope_service.api.figures.trace_events import trace_events
from stagescope_service.api.models import figures as models
from stagescope_service.api.models.bodies import ComparisonRequest, SideFields
from stagescope_service.api.numbers import comparability_fields, doubt
from stagescope_service.api.operators import operator_target
from stagescope_service.api.requests import (
    Answer,
    is_repeatable,
    pattern,
    query_fields,
    step_number,
)
from stagescope_service.api.target import Target
from stagescope_wire.schema import STEP_BOUND, read_target

router = APIRouter(tags=["figures"])

StepName = Annotated[
    str,
    Query(
        description="The trainer's step, or `latest`.",
        examples=["5", "latest"],
        json_schema_extra=pattern(STEP_PATTERN),
    ),
]
Metrics = Annotated[
    list[str] | None,
    Query(description="A published metric or a scalar; may be given several times.", max_length=12),
]
TokenProperty = Annotated[
    anatomy.By, Query(description="The property of the tokens by which they are told apart.")
]
_SIDE: Final = pattern(SIDE_PATTERN)


def figure_target(
    deps: Deps, step: StepName = "latest", run: Run = None, attempt: AttemptNumber = None
) -> Target:
    """Return the step of a query."""
    return deps.finder.step(run, attempt, step_number(step))


def dumped_target(
    deps: Deps, step: StepName = "latest", run: Run = None, attempt: AttemptNumber = None
) -> Target:
    """Return the step of a query; `latest` is the newest with operators."""
    return operator_target(deps, step, run, attempt, None)


FigureTarget = Annotated[Target, Depends(figure_target)]
DumpedTarget = Annotated[Target, Depends(dumped_target)]


class Shown(typing.Protocol):
    """The common fields of all figures' data."""

    @property
    def run(self) -> str:
        """The run's name."""
        ...

    @property
    def attempt(self) -> int | None:
        """The attempt's number; None: the current attempts."""
        ...

    @property
    def step(self) -> int | None:
        """The trainer's step; None: several."""
        ...

    @property
    def note(self) -> str | None:
        """Why the figure is empty, or what it leaves out."""
        ...


class FigureAnswer(Response):
    """The figure `name` as JSON in which every number that is not finite is null."""

    media_type = "application/json"

    def __init__(self, name: str, figure: go.Figure, found: Shown) -> None:
        title, drawing = as_json(figure)
        body = {
            "run": found.run, "attempt": found.attempt, "step": found.step, "name": name,
            "title": title, "note": found.note, "figure": drawing,
        }  # fmt: skip
        super().__init__(orjson.dumps(body, option=_OPTIONS))


_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def as_json(figure: go.Figure) -> tuple[str, JsonObject]:
    """Return the title of a figure as plain text, and its data and layout without it."""
    drawing: dict[str, Any] = figure.to_plotly_json()
    layout = dict(drawing["layout"])
    title = html.unescape(layout.pop("title")["text"])
    layout.pop("template", None)  # an empty one; a page or notebook may have its own
    return title, {"data": [_plain(trace) for trace in drawing["data"]], "layout": _plain(layout)}


def _plain(value: Any) -> object:
    """Return a value of plotly's JSON with its arrays as such, not in base64."""
    if isinstance(value, dict):
        if value.keys() >= {"dtype", "bdata"}:
            array = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
            shape = value.get("shape")
            return array.reshape([int(n) for n in shape.split(",")]) if shape else array
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):  # before plotly 6 numbers are arrays, too
        return value if value.dtype.kind in "iuf" else value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@router.get("/figures", response_model=models.Figures)
async def figures() -> Answer:
    """List the figures with their parameters."""
    routes = [
        route for route in router.routes
        if isinstance(route, APIRoute) and route.path.startswith("/figures/")
    ]  # fmt: skip
    rows = [_row(route) for route in sorted(routes, key=lambda route: route.path)]
    return Answer({"rows": rows, "next": None})


def _row(route: APIRoute) -> JsonObject:
    parameters = []
    for field in query_fields(route.dependant):
        annotation = field.field_info.annotation
        parameters.append(
            {
                "name": field.alias,
                "description": field.field_info.description or "",
                "required": field.field_info.is_required(),
                "repeatable": is_repeatable(field),
                "values": _values(annotation),
            }
        )
    return {
        "name": route.path.removeprefix("/figures/"),
        "path": route.path,
        "description": route.description.partition("\n\n")[0],
        "parameters": parameters,
    }


def _values(annotation: object) -> list[str] | None:
    if typing.get_origin(annotation) is Literal:
        return [str(value) for value in typing.get_args(annotation)]
    for each in typing.get_args(annotation):
        if (values := _values(each)) is not None:
            return values
    return None


@router.get("/figures/overview", response_model=models.Figure)
def overview_figure(
    deps: Deps,
    chosen: AttemptQueryOf,
    window: WindowOf,
    metric: Metrics = None,
    superseded: Annotated[
        bool, Query(description="Also steps that a later attempt did again, faded.")
    ] = True,
    smooth: Annotated[
        float | None,
        Query(
            ge=1,
            le=10_000,
            allow_inf_nan=False,
            description="Also draw an exponential moving average over so many steps.",
        ),
    ] = None,
) -> FigureAnswer:
    """Draw metrics over the steps of a run, with its attempts and what happened when.

    The marks are findings, captures, weight syncs and steps without a value, each with its reason.
    A band is the noise floor where it was recorded. Dashed lines are the first stalenesses.
    """
    check_window(window)
    request = overview.Request(tuple(metric or ()), chosen.attempt, window, superseded, smooth)
    found = overview.info(deps, chosen.run, request)
    return FigureAnswer("overview", overview.figure(found), found)


@router.get("/figures/rounds", response_model=models.Figure)
def rounds_figure(
    deps: Deps,
    target: FigureTarget,
    compare: Annotated[
        int,
        Query(ge=0, le=rounds.MAX_BEFORE, description="Number of steps before, drawn faded."),
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


@router.get("/figures/rank-steps", response_model=models.Figure)
def rank_steps_figure(
    deps: Deps,
    chosen: AttemptQueryOf,
    window: WindowOf,
    metric: Annotated[
        heatmaps.Metric, Query(description="The number that is drawn.")
    ] = heatmaps.DEFAULT,
) -> FigureAnswer:
    """Draw a number by rank and step, by default of the newest 200 steps."""
    check_window(window)
    found = heatmaps.steps_info(deps, *chosen, window, metric)
    return FigureAnswer("rank-steps", heatmaps.figure(found), found)


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
def anatomy_figure(
    deps: Deps,
    target: FigureTarget,
    by: TokenProperty = "place",
) -> FigureAnswer:
    """Draw |d| and d of a step by where its tokens are, or how probable or stale they are."""
    found = anatomy.info(deps, target, by)
    doubted = None if found.comparability is None else doubt(found.comparability)
    notes = (found.note, doubted)
    shown = dataclasses.replace(found, note="; ".join(filter(None, notes)) or None)
    return FigureAnswer("anatomy", anatomy.figure(found), shown)


@router.get("/figures/offenders", response_model=models.Figure)
async def offenders_figure(deps: Deps, chosen: AttemptQueryOf, window: WindowOf) -> FigureAnswer:
    """Draw the prompts whose samples differ more than their steps do, over the newest 40 steps.

    `prompt_hashes` of the payloads identify a prompt.
    """
    check_window(window)
    found = await deps.computations.run(offenders.info, deps, *chosen, window)
    return FigureAnswer("offenders", offenders.figure(found), found)


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
    found = await deps.computations.run(
        operators.info,
        deps,
        target,
        {"stage": ranks["stage"], "role": ranks["role"], "rank": ranks["rank"]},
    )
    return FigureAnswer("operators", operators.figure(found), found)


async def dump_query(
    step: Annotated[int, Query(ge=0, lt=STEP_BOUND, description="The trainer's step.")],
    chosen: AttemptQueryOf,
    ranks: RankQueryOf,
) -> SideFields:
    """Return the dump of a query."""
    return SideFields(run=chosen.run, attempt=chosen.attempt, step=step, **ranks)


async def other_dump_query(
    b_run: Annotated[str | None, Query(max_length=100, description="Another run.")] = None,
    b_attempt: Annotated[
        int | None, Query(ge=1, lt=1 << 31, description="Another attempt's number.")
    ] = None,
    b_step: Annotated[int | None, Query(ge=0, lt=STEP_BOUND, description="Another step.")] = None,
    b_stage: Annotated[str | None, Query(max_length=200, description="Another stage.")] = None,
    b_rank: Annotated[int | None, Query(ge=0, lt=1 << 31, description="Another rank.")] = None,
) -> SideFields:
    """Return how the other dump of a query differs."""
    return SideFields(run=b_run, attempt=b_attempt, step=b_step, stage=b_stage, rank=b_rank)


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


@router.get("/steps/{step}/anatomy", response_model=models.Anatomy, tags=["steps"])
def step_anatomy(deps: Deps, target: StepTarget, by: TokenProperty = "place") -> Answer:
    """Return |d| and d of a step by where its tokens are, or how probable or stale they are."""
    info = anatomy.info(deps, target, by)
    found = dataclasses.asdict(dataclasses.replace(info, comparability=None))
    rows = found.pop("bins")
    return Answer({**found, **comparability_fields(info.comparability), "rows": rows, "next": None})


@router.get("/steps/{step}/timeline", response_model=models.Trace, tags=["steps"])
def trace(deps: Deps, target: StepTarget) -> Answer:
    """Return the stages of a step as trace events, for ui.perfetto.dev and chrome://tracing.

    A role is a process, a rank a thread. Slices have the stage's status; waits name the rank that
    was waited for.
    """
    found = timeline.read(deps, target)
    name = f"{target.run}-{target.number}-step{target.step_number}.trace.json"
    other = {
        "run": found.run, "attempt": found.attempt, "step": found.step,
        "begin_wall": found.begin_wall, "clock_error": found.clock_error, "note": found.note,
    }  # fmt: skip
    return Answer(
        {
            "traceEvents": trace_events(found),
            "displayTimeUnit": "ms",
            "otherData": other,
        },
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )
