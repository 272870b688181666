"""Routes of figures over the steps of a run, and the list of all figures."""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response
from fastapi.routing import APIRoute

from stagescope_service.figures import canary, compared_runs, heatmaps, offenders, overview
from stagescope_service.figures.run_curves import CurveRequest
from stagescope_service.http.parameters import AttemptQueryOf, ChosenRuns, Deps, Metrics, WindowOf
from stagescope_service.http.requests import Answer, as_json, is_repeatable, query_fields
from stagescope_service.http.routes import compared_figures, figures
from stagescope_service.http.routes.figures import FigureAnswer
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models import figures as models
from stagescope_service.views.reading.dependencies import check_window

router = APIRouter(tags=["figures"])


def _average(description: str) -> Any:
    """Return the parameter of a moving average: over how many steps."""
    return Query(ge=1, le=10_000, allow_inf_nan=False, description=description)


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
        float | None, _average("Also draw an exponential moving average over so many steps.")
    ] = None,
) -> Response:
    """Draw metrics over the steps of a run, with its attempts and what happened when.

    The marks are findings, captures, weight syncs and steps without a value, each with its reason.
    A band is the noise floor where it was recorded. Dashed lines are the first stalenesses.
    """
    check_window(window)
    request = CurveRequest(tuple(metric or ()), chosen.attempt, window, superseded, smooth)
    return as_json(overview.answer(deps, chosen.run, request))


@router.get("/figures/runs", response_model=models.Figure)
def compared_runs_figure(
    deps: Deps,
    run: ChosenRuns,
    metric: Metrics = None,
    smooth: Annotated[
        float | None, _average("Draw an exponential moving average over so many steps instead.")
    ] = None,
) -> FigureAnswer:
    """Draw numbers of several runs over each other, aligned by step, a colour for each run.

    Without `metric` mean |d| and the reward of each run. Steps that a later attempt did again are
    left out. `run` of the answer is the first of them.
    """
    found = compared_runs.info(deps, run, metric or (), smooth)
    return FigureAnswer("runs", compared_runs.figure(found), found)


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


@router.get("/figures/offenders", response_model=models.Figure)
async def offenders_figure(deps: Deps, chosen: AttemptQueryOf, window: WindowOf) -> FigureAnswer:
    """Draw the prompts whose samples differ more than their steps do, over the newest 40 steps.

    `prompt_hashes` of the payloads identify a prompt.
    """
    check_window(window)
    found = await deps.computations.run(offenders.info, deps, *chosen, window)
    return FigureAnswer("offenders", offenders.figure(found), found)


@router.get("/figures/canary", response_model=models.Figure)
def canary_figure(deps: Deps, chosen: AttemptQueryOf) -> FigureAnswer:
    """Draw the canary over the newest versions of an attempt: mean |d| of each pair of arms.

    Each version shows its worst engine instance. A cross marks a pair that is not as it should be.
    """
    found = canary.info(deps, *chosen)
    return FigureAnswer("canary", canary.figure(found), found)


@router.get("/figures", response_model=models.Figures)
async def list_figures() -> Answer:
    """List the figures with their parameters."""
    routes = [
        route for each in (router, figures.router, compared_figures.router) for route in each.routes
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
