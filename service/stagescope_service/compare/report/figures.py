"""Plotly figures of a comparison, drawn from its report (`report.as_json`)."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import plotly.graph_objects as go

from stagescope_service.compare.report.as_json import (
    PairReport,
    SampleReport,
    ShardLocationReport,
    StatisticsReport,
    TensorReport,
)
from stagescope_service.figure_style import COLOURS, SCALE, finished, ticks_of_powers
from stagescope_wire.comparison_texts import part_text

MAX_BARS: Final = 200
MAX_DETAILED: Final = 6
"""Most differing tensors that have their own figures: the first in the flow."""

_DISTANCE: Final = "|d| = |A - B|"
_WITHOUT_DISTANCE: Final = ("tokens", "masks")
"""Stations whose numbers have no distance: they are equal or not."""
_LONGEST: Final = 30
"""Most characters of a name on an axis; the hover text has the full name."""
_MARKER: Final = {"color": "#ffffff", "line": {"color": "#222222", "width": 1}}
_MAX_WITH_GAPS: Final = 32
"""Most ranks that a narrow window can show with gaps between them."""


_Part = tuple[int, int, int, int]


class _Measure(NamedTuple):
    value: Callable[[StatisticsReport | SampleReport], float]
    name: str
    axis: str


_LARGEST: Final = _Measure(lambda found: found["max_abs"], "max |d|", _DISTANCE)
_COUNT: Final = _Measure(lambda found: found["unequal"], "values that differ", "values that differ")


class _TitledTensor(NamedTuple):
    title: str
    report: TensorReport


def pictures(pair: PairReport) -> list[go.Figure]:
    """Return figures of two sides: the flow, then the first tensors that differ.

    If everything is the same, return none.
    """
    tensors = _tensors(pair)
    if all(tensor.report["verdict"] == "same" for tensor in tensors):
        return []
    figures = [flow_figure(tensors[:MAX_BARS])]
    differing = [tensor for tensor in tensors if tensor.report["verdict"] == "different"]
    for tensor in differing[:MAX_DETAILED]:
        if len(tensor.report["places"]) > 1:
            figures.append(places_figure(tensor))
        if tensor.report["differing_samples"]:
            figures.append(samples_figure(tensor))
    return figures


def flow_figure(tensors: Sequence[_TitledTensor]) -> go.Figure:
    """Return the largest and mean |d| of each tensor, in the order of the data flow.

    The axis shows powers of ten, with a 0 below the smallest difference. Tensors without a
    distance (token ids, masks, values without a finite pair) are drawn at 0, with a cross if they
    differ.
    """
    names = _short([tensor.title for tensor in tensors])
    reports = [tensor.report for tensor in tensors]
    largest = [_distance(report, report["statistics"]["max_abs"]) for report in reports]
    means = [_distance(report, report["statistics"]["mean_abs"]) for report in reports]
    zero, ticks = ticks_of_powers([*largest, *means])
    crossed = [
        at for at, (report, value) in enumerate(zip(reports, largest, strict=True))
        if value is None and report["verdict"] == "different"
    ]  # fmt: skip
    hovers = [
        f"{html.escape(tensor.title)}<br>{tensor.report['station']}<br>max |d| {value}<br>"
        f"{html.escape(tensor.report['reason'] or 'equal')}"
        for tensor, value in zip(tensors, largest, strict=True)
    ]
    figure = go.Figure()
    for verdict, colour in COLOURS.items():
        these = [at for at, report in enumerate(reports) if report["verdict"] == verdict]
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
    return finished(figure, "Differences in the order in which data flows")


def places_figure(tensor: _TitledTensor) -> go.Figure:
    """Return how a tensor differs by rank and part."""
    shards, measure = tensor.report["places"], _measure(tensor.report)
    texts, largest = {}, dict[tuple[_Part, int], float]()
    ranks = sorted({_rank_and_part(each["a"])[0] for each in shards})
    for each in shards:
        rank, part = _rank_and_part(each["a"])
        texts[part] = part_text(each["a"])
        found = each["statistics"]
        if found["finite"] or measure is _COUNT:
            value = float(measure.value(found))
            largest[part, rank] = max(value, largest.get((part, rank), value))
    cells = [[largest.get((part, rank)) for rank in ranks] for part in sorted(texts)]
    gap = 1 if len(ranks) <= _MAX_WITH_GAPS else 0
    figure = go.Figure(
        go.Heatmap(
            z=cells, x=[*map(str, ranks)], y=[texts[part] for part in sorted(texts)],
            zmin=0, zmax=max(largest.values(), default=0.0) or 1, xgap=gap, ygap=gap,
            colorscale=SCALE,
            colorbar={"title": {"text": measure.name, "side": "right"}, "exponentformat": "e"},
            hovertemplate=f"rank %{{x}}, %{{y}}: {measure.name} %{{z}}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_xaxes(title="rank", type="category")
    figure.update_yaxes(title="part", type="category", autorange="reversed")
    title = f"{tensor.title}: {measure.name} by rank and part"
    return finished(figure, title, height=min(180 + 30 * len(texts), 600))


def samples_figure(tensor: _TitledTensor) -> go.Figure:
    """Return how far a tensor differs in each sample, the worst first."""
    measure, samples = _measure(tensor.report), tensor.report["differing_samples"]
    worst = sorted(samples, key=lambda each: -measure.value(each))[:MAX_BARS]
    names = _short([each["sample"] for each in worst])
    figure = go.Figure()
    figure.add_bar(
        name=measure.name, x=names, y=[measure.value(each) for each in worst],
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
    return finished(figure, f"{tensor.title}: samples that differ, the worst first")


def _tensors(pair: PairReport) -> list[_TitledTensor]:
    """Return the tensors with their titles, in the order of the flow."""
    found = [(s["section"], tensor) for s in pair["sections"] for tensor in s["tensors"]]
    several = len({tensor["step"] for _, tensor in found}) > 1
    titled = [
        _TitledTensor(f"{section}/{each['name']}" + f" of step {each['step']}" * several, each)
        for section, each in found
    ]
    return sorted(titled, key=lambda tensor: tensor.report["order"])


def _short(names: Sequence[str]) -> list[str]:
    """Return names for an axis, escaped for plotly: their ends, numbered if they repeat."""
    found: dict[str, None] = {}
    for name in names:
        end = name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
        numbered = itertools.chain([end], (f"{end} ({number})" for number in itertools.count(2)))
        found[next(text for text in numbered if text not in found)] = None
    return [html.escape(name) for name in found]


def _measure(tensor: TensorReport) -> _Measure:
    return _COUNT if _distance(tensor, tensor["statistics"]["max_abs"]) is None else _LARGEST


def _distance(tensor: TensorReport, value: float) -> float | None:
    """Return a number of |d|, None if the tensor has no distance or the number is not finite."""
    if tensor["station"] in _WITHOUT_DISTANCE or not tensor["statistics"]["finite"]:
        return None
    return float(value) if math.isfinite(value) else None


def _rank_and_part(location: ShardLocationReport) -> tuple[int, _Part]:
    part = (
        location["occurrence"],
        location["epoch"],
        location["minibatch"],
        location["microbatch"],
    )
    return -1 if location["rank"] is None else location["rank"], part
