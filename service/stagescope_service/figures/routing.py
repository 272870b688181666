"""The agreement of routes by layer and round of a step."""

from __future__ import annotations

import dataclasses

import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.statistics.routing_checks import faults
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_service.views.steps.routing import layer_rows, recorded
from stagescope_wire.errors import NotFound

_TITLE = "Tokens with another expert, by layer and round"


@dataclasses.dataclass(frozen=True)
class RoutingInfo:
    """The data of the figure: `differing` has a row for each layer, a column for each round."""

    run: str
    attempt: int
    step: int
    layers: tuple[int, ...]
    rounds: tuple[int, ...]
    differing: tuple[tuple[float | None, ...], ...]
    """Share of the tokens with another expert, 0 to 1; None: no token is compared."""
    note: str | None


def info(deps: Dependencies, target: Target) -> RoutingInfo:
    """Read the agreement of a step's routes."""
    heading = (target.run, target.number, target.step_number)
    try:
        measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
        summary = measured.summary.summary
        found = recorded(summary, f"step {target.step_number}")
    except NotFound as error:
        return RoutingInfo(*heading, (), (), (), error.wrong)
    problems = [f"{each.headline}." for each in faults(found, len(summary.sequences))]
    return RoutingInfo(
        *heading,
        layers=tuple(range(found.layers)),
        rounds=tuple(found.tokens[:, 0].tolist()),
        differing=tuple(
            tuple(None if share is None else 1.0 - share for share in row["by_round"])
            for row in layer_rows(found)
        ),
        note=" ".join(problems) or None,
    )


def figure(found: RoutingInfo) -> go.Figure:
    """Draw a cell for each layer and round; the first layer is on top."""
    title = f"{_TITLE}, step {found.step}"
    if not found.layers:
        return style.empty(title, found.note or "", x="round", y="layer")
    texts = [
        [_hover(found, layer, at) for at in range(len(found.rounds))] for layer in found.layers
    ]
    bar = {
        "tickformat": ".1%", "orientation": "h", "thickness": 10, "x": 0.5, "len": 1.0,
        "yref": "container", "y": 0.985, "yanchor": "top", "ypad": 0, "tickfont": {"size": 10},
        "nticks": 5, "outlinewidth": 0,
    }  # fmt: skip
    drawn = go.Figure(
        go.Heatmap(
            z=[list(row) for row in found.differing], x=list(found.rounds), y=list(found.layers),
            colorscale=style.SCALE, colorbar=bar, zmin=0.0, xgap=1, ygap=1, hoverongaps=True,
            hoverinfo="text", text=texts,
        )
    )  # fmt: skip
    few = len(found.rounds) <= 10
    drawn.update_xaxes(title={"text": "round"}, tickformat="d", dtick=1 if few else None)
    drawn.update_yaxes(
        title={"text": "layer"}, autorange="reversed", tickformat="d",
        dtick=1 if len(found.layers) <= 24 else None,
    )  # fmt: skip
    height = min(max(len(found.layers) * 16, 60), 800) + 150
    drawn = style.finished(drawn, title, height)
    return drawn.update_layout(showlegend=False, margin={"t": 50}, yaxis={"showgrid": False})


def _hover(found: RoutingInfo, layer: int, at: int) -> str:
    share = found.differing[layer][at]
    text = f"layer {layer}, round {found.rounds[at]}<br>"
    if share is None:
        return f"{text}not compared: one side has no route here"
    return f"{text}{share:.2%} of the tokens have another expert"
