"""Pictures of a comparison: plain values in (`report.as_json`), plotly figures out.

A figure has no background of its own: it reads on a light and on a dark page.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import plotly.graph_objects as go

from stagescope.compared import part_text

COLOURS: Final = {
    "same": "#2a8048", "within noise": "#5f7d2c", "not comparable": "#6e7278",
    "different": "#c0392b",
}  # fmt: skip
"""Of verdicts: 3:1 against a light and a dark page, 4.5:1 below white text."""
MOST_BARS: Final = 200
MOST_DETAILED: Final = 6
"""Tensors that differ that have figures of their own: the first of them in the flow."""

_Json = Mapping[str, Any]
_DISTANCE: Final = "|d| = |A - B|"
_WITHOUT_DISTANCE: Final = ("tokens", "masks")
"""Stations of numbers that are names: they are equal or not."""
_LONGEST: Final = 30
"""Characters of a name on an axis; the whole of it stands where the pointer is."""
_GRID: Final = "rgba(128,128,128,0.3)"
_MARKER: Final = {"color": "#ffffff", "line": {"color": "#222222", "width": 1}}
_TICKS: Final = 6
_APART: Final = 32
"""Ranks that a narrow window can show with a gap between them."""


class _Measure(NamedTuple):
    field: str
    name: str
    axis: str


_LARGEST: Final = _Measure("max_abs", "max |d|", _DISTANCE)
_COUNT: Final = _Measure("unequal", "values that differ", "values that differ")


def pictures(pair: _Json) -> list[go.Figure]:
    """Return the figures of two sides: the flow, then of the first tensors that differ.

    Where everything is the same there is nothing to draw.
    """
    tensors = _tensors(pair)
    if all(tensor["verdict"] == "same" for tensor in tensors):
        return []
    figures = [flow_figure(tensors[:MOST_BARS])]
    differing = [tensor for tensor in tensors if tensor["verdict"] == "different"]
    for tensor in differing[:MOST_DETAILED]:
        if len(tensor["places"]) > 1:
            figures.append(places_figure(tensor))
        if tensor["differing_samples"]:
            figures.append(samples_figure(tensor))
    return figures


def flow_figure(tensors: Sequence[_Json]) -> go.Figure:
    """Return the largest and mean |d| of each tensor, in the order in which data flows.

    The axis is of powers of ten, with a 0 below the smallest difference. What has no distance
    (token ids, masks, values of which no pair is finite) stands at the 0, with a cross on it
    where it differs.
    """
    names = _short([tensor["title"] for tensor in tensors])
    largest = [_distance(tensor, "max_abs") for tensor in tensors]
    means = [_distance(tensor, "mean_abs") for tensor in tensors]
    zero, ticks = _powers([*largest, *means])
    crossed = [
        at for at, (tensor, value) in enumerate(zip(tensors, largest, strict=True))
        if value is None and tensor["verdict"] == "different"
    ]  # fmt: skip
    hovers = [
        f"{html.escape(tensor['title'])}<br>{tensor['station']}<br>max |d| {value}<br>"
        f"{html.escape(tensor['reason'] or 'equal')}"
        for tensor, value in zip(tensors, largest, strict=True)
    ]
    figure = go.Figure()
    for verdict, colour in COLOURS.items():
        these = [at for at, tensor in enumerate(tensors) if tensor["verdict"] == verdict]
        if these:
            figure.add_bar(
                name=f"max |d|, {verdict}", marker_color=colour, x=[names[at] for at in these],
                y=[largest[at] or zero for at in these],
                hovertext=[hovers[at] for at in these], hoverinfo="text",
            )  # fmt: skip
    figure.add_scatter(
        name="mean |d|", mode="markers", marker=_MARKER, x=names, y=[v or None for v in means],
        hoverinfo="skip",
    )  # fmt: skip
    if crossed:
        figure.add_scatter(
            name="differs, has no distance", mode="markers",
            marker={**_MARKER, "symbol": "x", "size": 10},
            x=[names[at] for at in crossed], y=[zero] * len(crossed), hoverinfo="skip",
        )  # fmt: skip
    figure.update_xaxes(title="tensor", categoryorder="array", categoryarray=names)
    figure.update_yaxes(
        title=_DISTANCE, type="log", range=[math.log10(zero) - 0.5, math.log10(max(ticks)) + 0.2],
        tickvals=list(ticks), ticktext=list(ticks.values()),
    )  # fmt: skip
    return _finished(figure, "Differences in the order in which data flows")


def places_figure(tensor: _Json) -> go.Figure:
    """Return how a tensor differs by rank and part."""
    places, measure = tensor["places"], _measure(tensor)
    ranks = sorted({_rank(each["a"]) for each in places})
    parts = sorted({_part(each["a"]): part_text(each["a"]) for each in places}.items())
    rows = {part: at for at, (part, _) in enumerate(parts)}
    cells: list[list[float | None]] = [[None] * len(ranks) for _ in parts]
    for each in places:
        row, column = rows[_part(each["a"])], ranks.index(_rank(each["a"]))
        found = each["statistics"]
        value = float(found[measure.field]) if found["finite"] or measure is _COUNT else None
        both = (cells[row][column], value)
        cells[row][column] = max((v for v in both if v is not None), default=None)
    most = max((value for row in cells for value in row if value is not None), default=0.0)
    gap = 1 if len(ranks) <= _APART else 0
    figure = go.Figure(
        go.Heatmap(
            z=cells, x=[str(rank) for rank in ranks], y=[text for _, text in parts],
            zmin=0, zmax=most or 1, xgap=gap, ygap=gap, colorscale="Reds",
            colorbar={"title": {"text": measure.name, "side": "right"}, "exponentformat": "e"},
            hovertemplate=f"rank %{{x}}, %{{y}}: {measure.name} %{{z}}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_xaxes(title="rank", type="category")
    figure.update_yaxes(title="part", type="category", autorange="reversed")
    title = f"{tensor['title']}: {measure.name} by rank and part"
    return _finished(figure, title, height=min(180 + 30 * len(parts), 600))


def samples_figure(tensor: _Json) -> go.Figure:
    """Return how far the samples differ in which a tensor differs, the worst first."""
    measure = _measure(tensor)
    worst = sorted(tensor["differing_samples"], key=lambda each: -each[measure.field])[:MOST_BARS]
    names = _short([each["sample"] for each in worst])
    figure = go.Figure()
    figure.add_bar(
        name=measure.name, x=names, y=[each[measure.field] for each in worst],
        marker_color=COLOURS["different"], hoverinfo="text",
        hovertext=[
            f"{html.escape(each['sample'])}<br>{each['unequal']} of {each['pairs']} values differ"
            f"<br>max |d| {each['max_abs']:.6g}, mean |d| {each['mean_abs']:.6g}"
            for each in worst
        ],
    )  # fmt: skip
    if measure is _LARGEST:
        figure.add_scatter(
            name="mean |d|", x=names, y=[each["mean_abs"] for each in worst], mode="markers",
            marker=_MARKER, hoverinfo="skip",
        )  # fmt: skip
    figure.update_xaxes(title="sample", type="category")
    figure.update_yaxes(title=measure.axis, rangemode="tozero", exponentformat="e")
    return _finished(figure, f"{tensor['title']}: samples that differ, the worst first")


def _tensors(pair: _Json) -> list[dict[str, Any]]:
    """Return the tensors in the order of the flow, each with a title."""
    found = [(s["section"], tensor) for s in pair["sections"] for tensor in s["tensors"]]
    several = len({tensor["step"] for _, tensor in found}) > 1
    titled = [
        {**each, "title": f"{section}/{each['name']}" + f" of step {each['step']}" * several}
        for section, each in found
    ]
    return sorted(titled, key=lambda tensor: tensor["order"])


def _finished(figure: go.Figure, title: str, height: int = 420) -> go.Figure:
    clear = "rgba(0,0,0,0)"
    line: dict[str, Any] = {"gridcolor": _GRID, "linecolor": _GRID, "zerolinecolor": _GRID}
    figure.update_traces(marker_line_width=0, selector={"type": "bar"})
    figure.update_layout(
        title={"text": html.escape(title), "font": {"size": 15}}, template="plotly_white",
        height=height, margin={"l": 60, "r": 20, "t": 40, "b": 60}, showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        paper_bgcolor=clear, plot_bgcolor=clear,
    )  # fmt: skip
    figure.update_xaxes(automargin=True, showgrid=False, **line)
    figure.update_yaxes(automargin=True, **line)
    return figure


def _powers(values: Sequence[float | None]) -> tuple[float, dict[float, str]]:
    """Return where a difference of 0 is drawn on an axis of powers of ten, and its ticks."""
    exponents = [math.log10(value) for value in values if value]
    low, high = math.floor(min(exponents, default=0)), math.ceil(max(exponents, default=0))
    every = -(-(high - low + 1) // _TICKS)
    ticks = {10.0**power: f"1e{power}" for power in range(high, low - 1, -every)}
    zero = 10.0 ** (low - 1)
    return zero, {zero: "0", **ticks}


def _short(names: Sequence[str]) -> list[str]:
    """Return names for an axis, as plotly's text: their ends, numbered where these are the same."""
    found: dict[str, None] = {}
    for name in names:
        end = name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
        numbered = itertools.chain([end], (f"{end} ({number})" for number in itertools.count(2)))
        found[next(text for text in numbered if text not in found)] = None
    return [html.escape(name) for name in found]


def _measure(tensor: _Json) -> _Measure:
    return _COUNT if _distance(tensor, "max_abs") is None else _LARGEST


def _distance(tensor: _Json, field: str) -> float | None:
    """Return a number of |d|; None of what has no distance."""
    found = tensor["statistics"]
    if tensor["station"] in _WITHOUT_DISTANCE or not found["finite"]:
        return None
    value = float(found[field])
    return value if math.isfinite(value) else None


def _rank(place: _Json) -> int:
    return -1 if place["rank"] is None else int(place["rank"])


def _part(place: _Json) -> tuple[int, ...]:
    names = ("occurrence", "epoch", "minibatch", "microbatch")
    return tuple(place[name] for name in names)
