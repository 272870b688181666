"""Pictures of a comparison: plain values in (`report.as_json`), plotly figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go

COLOURS: Final = {
    "same": "#2a9d4e", "within noise": "#8ab17d", "not comparable": "#9a9a9a",
    "different": "#c0392b",
}  # fmt: skip
MOST_BARS: Final = 200
_NOTHING: Final = 1e-17
"""Where a difference of 0 is drawn on an axis of powers of ten."""

_Said = Mapping[str, Any]


def pictures(pair: _Said) -> list[go.Figure]:
    """Return the figures of two sides: the flow, then each tensor that differs."""
    tensors = _tensors(pair)
    figures = [flow_figure(tensors)] if tensors else []
    for tensor in tensors:
        if tensor["verdict"] != "different":
            continue
        if len(tensor["places"]) > 1:
            figures.append(places_figure(tensor))
        if tensor["differing_samples"]:
            figures.append(samples_figure(tensor))
    return figures


def flow_figure(tensors: Sequence[_Said]) -> go.Figure:
    """Return the largest and mean |d| of each tensor, in the order in which data flows."""
    figure = go.Figure()
    for verdict, colour in COLOURS.items():
        these = [tensor for tensor in tensors if tensor["verdict"] == verdict]
        if these:
            figure.add_bar(
                name=verdict, marker_color=colour, x=[_title(tensor) for tensor in these],
                y=[_drawn(tensor["statistics"]["max_abs"]) for tensor in these],
                customdata=[[tensor["reason"] or "equal", tensor["station"]] for tensor in these],
                hovertemplate="%{x}<br>%{customdata[1]}<br>max |d| %{y}<br>%{customdata[0]}",
            )  # fmt: skip
    figure.add_scatter(
        name="mean |d|", mode="markers", marker={"color": "#222222", "symbol": "line-ew-open"},
        x=[_title(tensor) for tensor in tensors],
        y=[_drawn(tensor["statistics"]["mean_abs"]) for tensor in tensors],
    )  # fmt: skip
    order = [_title(tensor) for tensor in tensors]
    figure.update_xaxes(categoryorder="array", categoryarray=order, tickangle=-40)
    return _finished(figure, "Differences in the order in which data flows", "|d|")


def places_figure(tensor: _Said) -> go.Figure:
    """Return the largest |d| of a tensor by rank and part."""
    places = tensor["places"]
    ranks = sorted({_rank(each["a"]) for each in places})
    parts = sorted({_part(each["a"]) for each in places})
    cells: list[list[float | None]] = [[None] * len(ranks) for _ in parts]
    for each in places:
        found = each["statistics"]
        row, column = parts.index(_part(each["a"])), ranks.index(_rank(each["a"]))
        before = cells[row][column]
        value = float(found["max_abs"]) if found["finite"] else None
        cells[row][column] = max((v for v in (before, value) if v is not None), default=None)
    figure = go.Figure(
        go.Heatmap(
            z=cells, x=[f"rank {rank}" for rank in ranks], y=[f"part {part}" for part in parts],
            colorscale="Reds", colorbar={"title": "max |d|"},
            hovertemplate="%{x}, %{y}: max |d| %{z}<extra></extra>",
        )
    )  # fmt: skip
    return _finished(figure, f"{_title(tensor)}: max |d| by rank and part", "")


def samples_figure(tensor: _Said) -> go.Figure:
    """Return the largest and mean |d| of the samples in which a tensor differs."""
    worst = tensor["differing_samples"][:MOST_BARS]
    names = [each["sample"] for each in worst]
    figure = go.Figure()
    figure.add_bar(name="max |d|", x=names, y=[each["max_abs"] for each in worst],
                   marker_color=COLOURS["different"])  # fmt: skip
    figure.add_scatter(name="mean |d|", x=names, y=[each["mean_abs"] for each in worst],
                       mode="markers", marker={"color": "#222222"})  # fmt: skip
    figure.update_xaxes(type="category")
    return _finished(figure, f"{_title(tensor)}: samples that differ, the worst first", "|d|")


def _finished(figure: go.Figure, title: str, axis: str) -> go.Figure:
    figure.update_layout(
        title={"text": title, "font": {"size": 15}}, template="plotly_white", height=420,
        margin={"l": 60, "r": 20, "t": 50, "b": 60}, legend={"orientation": "h", "y": 1.1},
    )  # fmt: skip
    if axis:
        figure.update_yaxes(title=axis, type="log", exponentformat="power")
    return figure


def _tensors(pair: _Said) -> Sequence[_Said]:
    """Return the tensors in the order of the flow, as many as a picture holds."""
    named = [{**t, "section": s["section"]} for s in pair["sections"] for t in s["tensors"]]
    return sorted(named, key=lambda tensor: tensor["order"])[:MOST_BARS]


def _title(tensor: _Said) -> str:
    return f"{tensor['section']}/{tensor['name']}"


def _drawn(value: Any) -> float | None:
    if not isinstance(value, int | float) or value != value:
        return None
    return max(float(value), _NOTHING)


def _rank(place: _Said) -> int:
    return -1 if place["rank"] is None else int(place["rank"])


def _part(place: _Said) -> str:
    names = ("occurrence", "epoch", "minibatch", "microbatch")
    return ".".join(str(place[name]) for name in names)
