"""The operators of a dump in execution order, and two dumps against each other along it."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.compare.operators import comparison_process
from stagescope_service.dumps.msprobe.operator_query import CodedText, load_columns
from stagescope_service.views.models.bodies import SideFields
from stagescope_service.views.operators.comparisons import (
    TableSide,
    device_kind,
    find_sides,
    rank_tables,
    thresholds_of,
)
from stagescope_service.views.operators.tables import (
    OperatorTable,
    TableFilters,
    TableKey,
    table_key,
    tables_of,
)
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_wire.errors import StagescopeError
from stagescope_wire.render import counted

_TEXTS: Final = ("name", "direction", "dtype", "non_finite")
_RESULTS: Final = ("output", "grad")
FORWARD: Final = "forward"
_HEIGHT: Final = 420
_INNER_PIXELS: Final = 280
"""The least height between the axes, of a narrow page."""
_LINE_PIXELS: Final = 15
_MAX_POWER: Final = 307.0
"""The highest power of ten that an axis can have."""


class OperatorPoint(NamedTuple):
    """A result of an operator."""

    order: int
    """Index of the call in the dump."""
    name: str
    direction: str
    dtype: str | None
    largest: float | None
    """The largest magnitude of its finite extremes; None: not known."""
    non_finite: str | None
    """Which of its values are not finite; None: every value is finite."""


@dataclasses.dataclass(frozen=True)
class OperatorsInfo:
    """The data of the figure."""

    run: str
    attempt: int
    step: int
    table: TableKey | None
    points: tuple[OperatorPoint, ...]
    """In execution order; many are thinned to the extreme magnitudes and the non-finite ones."""
    results: int
    """Number of results in the dump."""
    non_finite: int
    first: OperatorPoint | None
    """The first operator whose result is not finite, masks excluded."""
    certain: bool
    """Whether it is certainly no mask."""
    truncated_at: int | None
    note: str | None


def info(deps: Dependencies, target: Target, filters: TableFilters) -> OperatorsInfo:
    """Read the results of the most informative dump.

    It is the one with the earliest non-finite result, else the largest of a forward or backward
    pass: a weight sync also has operators, but they say little.
    """
    heading = (target.run, target.number, target.step_number)
    nothing = OperatorsInfo(*heading, None, (), 0, 0, None, False, None, None)
    try:
        tables = tables_of(deps, target, **filters)
    except StagescopeError as error:
        return dataclasses.replace(nothing, note=error.wrong)
    table = _chosen(tables)
    try:
        path = deps.operator_files.path(table)
        results = _Results.read(path)
    except StagescopeError as error:
        return dataclasses.replace(nothing, table=table_key(table), note=error.wrong)
    notes = []
    if len(tables) > 1:
        notes.append(f"one of {counted(len(tables), 'dump')} of the step: name stage and rank")
    if table["truncated"]:
        notes.append(f"the dump is cut off at byte {table['truncated_at']}")
    kept = results.shown()
    if len(kept) < len(results):
        notes.append(f"{len(kept)} of {len(results)} results are drawn, every extreme among them")
    first, certain = _first(table, results)
    return OperatorsInfo(
        *heading,
        table_key(table),
        tuple(map(results.point, kept)),
        len(results),
        len(results.bad),
        first,
        certain,
        table["truncated_at"] if table["truncated"] else None,
        "; ".join(notes) or None if len(results) else "the dump holds no result of an operator",
    )


def _chosen(tables: Sequence[OperatorTable]) -> OperatorTable:
    bad = [row for row in tables if row["first_non_finite"] is not None]
    if bad:
        return min(bad, key=lambda row: (row["first_non_finite"] or {})["order"])
    return max(tables, key=lambda row: (row["stage"] != "weight_sync", row["rows"] or 0))


class _Results:
    """The results of a dump as columns, in execution order."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        # As `load_columns` returns them: arrays, and `CodedText` of texts.
        self._texts: dict[str, CodedText] = {name: columns[name] for name in _TEXTS}
        extremes = np.abs(np.stack([columns["min"], columns["max"]]).astype(np.float64))
        extremes[~np.isfinite(extremes)] = np.nan
        self.order = columns["order"]
        self.largest = np.fmax(extremes[0], extremes[1])
        """The largest finite magnitude of each result; NaN: not known."""
        self.bad = np.flatnonzero(self._texts["non_finite"].codes >= 0).tolist()
        """Indexes of those that are not finite."""

    @classmethod
    def read(cls, path: Path) -> _Results:
        """Read the outputs and gradients of an operator table."""
        columns = load_columns(path, ("order", "section", "min", "max", *_TEXTS))
        section: CodedText = columns["section"]
        codes = [at for at, name in enumerate(section.values) if name in _RESULTS]
        chosen = np.isin(section.codes, codes)
        kept: dict[str, Any] = {}
        for name in ("order", "min", "max", *_TEXTS):
            column = columns[name]
            is_text = isinstance(column, CodedText)
            kept[name] = column._replace(codes=column.codes[chosen]) if is_text else column[chosen]
        return cls(kept)

    def __len__(self) -> int:
        return len(self.order)

    def point(self, at: int) -> OperatorPoint:
        """Return a result by its index."""
        name, direction, dtype, bad = (self._texts[column].text(at) for column in _TEXTS)
        largest = float(self.largest[at])
        return OperatorPoint(
            int(self.order[at]), name or "", direction or FORWARD, dtype,
            None if math.isnan(largest) else largest, bad,
        )  # fmt: skip

    def shown(self) -> list[int]:
        """Return the indexes that are drawn."""
        bad = self.bad[: 2 * style.WIDTH]
        return sorted({*style.thinned(self.largest).tolist(), *bad})


def _first(table: OperatorTable, results: _Results) -> tuple[OperatorPoint | None, bool]:
    """Return the first non-finite result from the dump's table, which knows masks."""
    first = table["first_non_finite"]
    if first is None:
        return None, False
    point = next((results.point(at) for at in results.bad
                  if int(results.order[at]) == first["order"]), None)  # fmt: skip
    point = point or OperatorPoint(
        first["order"], first["name"], first.get("direction") or FORWARD, first.get("dtype"),
        None, first.get("non_finite"),
    )  # fmt: skip
    return point, bool(table["certain"])


def figure(found: OperatorsInfo) -> go.Figure:
    """Draw the magnitude of each result over the order of calls; non-finite ones on top."""
    where = f" of {found.table.role} {found.table.rank}, {found.table.stage}" if found.table else ""
    title = f"Operators{where}, step {found.step}"
    x, y = "call, in execution order", "largest magnitude"
    if not found.points:
        return style.empty(title, found.note or "", x=x, y=y)
    drawn = go.Figure()
    magnitudes = [point.largest for point in found.points if point.largest]
    zero, ticks = style.ticks_of_powers(magnitudes)
    step = _tick_step(ticks)
    highest = math.log10(max(ticks))
    top = min(highest + step, _MAX_POWER)
    directions = list(dict.fromkeys(point.direction for point in found.points))
    for at, direction in enumerate(directions):
        own = [p for p in found.points if p.direction == direction and p.largest is not None]
        drawn.add_scatter(
            x=[point.order for point in own], y=[point.largest or zero for point in own],
            mode="markers", name=direction, hoverinfo="text",
            marker={
                "size": 6, "color": style.SERIES[at % len(style.SERIES)],
                "symbol": ("circle", "diamond", "square", "cross")[at % 4],
            },
            hovertext=[_hover(point) for point in own],
        )  # fmt: skip
    bad = [point for point in found.points if point.non_finite is not None]
    if bad:
        drawn.add_scatter(
            x=[point.order for point in bad], y=[10.0**top] * len(bad), mode="markers",
            name=style.NOT_FINITE, hoverinfo="text", hovertext=[_hover(point) for point in bad],
            marker={"symbol": "x", "size": 8, "color": style.VERMILLION},
        )  # fmt: skip
    bounds = [math.log10(zero) - 0.5 * step, top + 0.5 * step if bad else highest + 0.4 * step]
    if found.first is not None:
        certainty = "" if found.certain else " (a mask?)"
        what = f"first not finite{certainty}:"
        bounds[0] = _mark(drawn, found.first.order, what, found.first.name, found.points, bounds)
    if bad:  # the label of a tick that is too near would be below it
        ticks = {value: t for value, t in ticks.items() if top - math.log10(value) > 0.5 * step}
        ticks[10.0**top] = style.NOT_FINITE
    drawn.update_xaxes(title={"text": x}, tickformat="d")
    drawn.update_yaxes(
        title={"text": y}, type="log", tickvals=list(ticks), ticktext=list(ticks.values()),
        range=bounds,
    )  # fmt: skip
    return style.finished(drawn, title, _HEIGHT)


def _tick_step(ticks: Mapping[float, str]) -> float:
    """Return how many powers of ten lie between the two highest ticks."""
    highest, next_one = sorted(map(math.log10, ticks), reverse=True)[:2]
    return max(highest - next_one, 1.0)


def _mark(
    drawn: go.Figure,
    order: int,
    what: str,
    name: str,
    points: Sequence[OperatorPoint | DifferencePoint],
    bounds: Sequence[float],
) -> float:
    """Draw a line at a call, and its name in a band below all points.

    Args:
        drawn: the figure.
        order: of the call.
        what: what it is, on a line of its own.
        name: the name.
        points: of the figure, in execution order.
        bounds: of the axis of powers of ten, without the band.

    Returns:
        the lower bound of the axis with the band.
    """
    lines = [what, *_lines(name, 34)]
    band = (len(lines) * _LINE_PIXELS + 12) / _INNER_PIXELS
    drawn.add_shape(
        type="line", x0=order, x1=order, y0=band, y1=1, yref="paper",
        line={"color": style.VERMILLION, "width": 1.5, "dash": "dash"},
    )  # fmt: skip
    first, last = points[0].order, points[-1].order
    share = (order - first) / max(last - first, 1)
    drawn.add_annotation(
        x=order, y=band, yref="paper", text="<br>".join(map(html.escape, lines)),
        showarrow=False, align="left", yanchor="top", font={"size": 11},
        xanchor="left" if share < 1 / 3 else "right" if share > 2 / 3 else "center",
        bgcolor="rgba(128,128,128,0.2)",
    )  # fmt: skip
    return bounds[0] - (bounds[1] - bounds[0]) * band / (1.0 - band)


def _lines(text: str, width: int) -> list[str]:
    """Return the lines of a text; names are broken after their dots."""
    lines = [""]
    for part in re.split(r"(?<=[. ])", text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def _hover(point: OperatorPoint) -> str:
    lines = [style.wrapped(f"{point.order}: {point.name}", 60)]
    lines.append(
        f"largest magnitude {style.number(point.largest)}, {point.dtype or 'dtype unknown'}"
    )
    if point.non_finite is not None:
        lines.append(f"not finite: {html.escape(point.non_finite)}")
    return "<br>".join(lines)


# --- two dumps ------------------------------------------------------------------------------
POINTS: Final = 800


class DifferencePoint(NamedTuple):
    """A row that both dumps have."""

    order: int
    name: str
    section: str
    relative: float
    threshold: float
    verdict: str
    """"" is no difference."""


@dataclasses.dataclass(frozen=True)
class DivergenceInfo:
    """The data of the figure."""

    a: str
    b: str
    """The sides, as texts."""
    run: str
    attempt: int
    step: int
    points: tuple[DifferencePoint, ...]
    first: DifferencePoint | None
    compared: int
    differing: int
    note: str | None


def divergence_info(deps: Dependencies, a: SideFields, b: SideFields) -> DivergenceInfo:
    """Compare two dumps; fields that `b` leaves out are the same as in `a`.

    Raises:
        NotFound, InvalidInput: a side names no dump, or several.
    """
    completed = b.completed_by(a)
    assert a.step is not None
    assert completed.step is not None
    one, other = find_sides(deps, (a, a.step), (completed, completed.step))
    devices = [device_kind(deps, side) for side in (one, other)]
    thresholds = thresholds_of(devices, (one, other))
    found = comparison_process.curve(
        rank_tables(deps, one, "a"),
        rank_tables(deps, other, "b"),
        thresholds,
        rows=one.rows + other.rows,
        points=POINTS,
    )
    names = ("order", "name", "section", "relative", "threshold", "verdict")
    points = tuple(
        DifferencePoint(*row) for row in zip(*(found[name] for name in names), strict=True)
    )
    first = None if found["first"] is None else points[found["first"]]
    note = None
    shards = [
        f"rank {each['rank']} of {each['side']} "
        f"({', '.join(f'{axis} {at}' for axis, at in each['coordinates'].items())})"
        for each in found["shards"]
    ]
    if not points:
        note = "the dumps have no row in common"
    elif first is None:
        note = f"no row of {found['compared']} differs beyond its threshold"
    elif shards:
        note = f"the first that differs, {first.name} {first.section}, does so in "
        note += ", ".join(shards)
    elif len(points) < found["compared"]:
        note = f"{len(points)} of {found['compared']} rows are drawn, every largest among them"
    return DivergenceInfo(
        _side_text(one), _side_text(other), one.target.run, one.target.number,
        one.target.step_number, points, first, found["compared"], found["differing"], note,
    )  # fmt: skip


def _side_text(side: TableSide) -> str:
    target, table = side.target, side.table
    ranks = counted(len(side.ranks), "rank") if len(side.ranks) > 1 else table["rank"]
    return (
        f"{target.run}@{target.number}:{target.step_number} {table['role']} {ranks}, "
        f"{table['stage']}"
    )


def divergence_figure(found: DivergenceInfo) -> go.Figure:
    """Draw the relative difference of each row and its threshold over the order of calls."""
    title = f"{found.a} against {found.b}"
    x, y = "call, in execution order of the first", "relative difference"
    if not found.points:
        return style.empty(title, found.note or "", x=x, y=y)
    drawn = go.Figure()
    values = [p.relative for p in found.points] + [p.threshold for p in found.points]
    zero, ticks = style.ticks_of_powers([value for value in values if value > 0.0])
    looks = (
        ("within the threshold", "circle", style.BLUE, [p for p in found.points if not p.verdict]),
        ("differs", "x", style.VERMILLION, [p for p in found.points if p.verdict]),
    )
    for name, symbol, colour, own in looks:
        if own:
            drawn.add_scatter(
                x=[point.order for point in own], y=[point.relative or zero for point in own],
                mode="markers", name=name, hoverinfo="text",
                marker={"symbol": symbol, "size": 6, "color": colour},
                hovertext=[
                    style.wrapped(f"{p.order}: {p.name} {p.section}", 60)
                    + f"<br>relative difference {style.number(p.relative)}, threshold "
                    f"{style.number(p.threshold)}"
                    + (f"<br>{p.verdict.replace('_', ' ')}" if p.verdict else "")
                    for p in own
                ],
            )  # fmt: skip
    drawn.add_scatter(
        x=[point.order for point in found.points],
        y=[point.threshold or None for point in found.points], mode="lines", name="threshold",
        line={"color": style.GREY, "width": 1.2, "shape": "hv", "dash": "dot"}, hoverinfo="skip",
    )  # fmt: skip
    bounds = [math.log10(zero) - 0.5, math.log10(max(ticks)) + 0.4]
    if found.first is not None:
        name = f"{found.first.name} {found.first.section}"
        what = "first that differs:"
        bounds[0] = _mark(drawn, found.first.order, what, name, found.points, bounds)
    drawn.update_xaxes(title={"text": x}, tickformat="d")
    drawn.update_yaxes(
        title={"text": y}, type="log", tickvals=list(ticks), ticktext=list(ticks.values()),
        range=bounds,
    )  # fmt: skip
    return style.finished(drawn, title, _HEIGHT)
