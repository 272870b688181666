"""Two attempts or runs against each other: their metrics over the steps, or their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.compare.report.figures import pictures
from stagescope_service.figures import overview
from stagescope_service.figures.lines import (
    Line,
    LineStyle,
    NotFinite,
    axis_of,
    draw_line,
    draw_not_finite,
)
from stagescope_service.figures.run_curves import CurveRequest
from stagescope_service.views.reading.dependencies import Dependencies, Window
from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_wire.schema import read_target

TITLE: Final = "against"


class SidePanel(NamedTuple):
    """One metric of both sides."""

    name: str
    unit: str
    a: tuple[Line, ...]
    b: tuple[Line, ...]
    not_finite: tuple[NotFinite, ...]


@dataclasses.dataclass(frozen=True)
class ComparisonInfo:
    """The metrics of two sides over the steps."""

    a: str
    b: str
    """`RUN[@ATTEMPT]`."""
    run: str
    attempt: int | None
    panels: tuple[SidePanel, ...]
    note: str | None
    step: int | None = None
    """The step whose tensors are compared; None: metrics are compared."""


def info(
    deps: Dependencies, a: str, b: str, metrics: Sequence[str], window: Window
) -> ComparisonInfo:
    """Read the metrics of two attempts (`RUN@ATTEMPT`) or runs (`RUN`: its current steps).

    Raises:
        NotFound: no such run, attempt or metric.
    """
    sides = []
    for text in (a, b):
        target = read_target(text)
        if target.step is not None:
            raise InvalidInput(f"{text!r} names a step", expected="both sides do, or neither")
        request = CurveRequest(metrics, target.attempt, window, superseded=False)
        sides.append(overview.info(deps, target.run, request))
    one, other = sides
    by_name = {panel.name: panel for panel in other.panels}
    panels = tuple(
        SidePanel(
            panel.name,
            panel.unit,
            panel.lines,
            by_name[panel.name].lines if panel.name in by_name else (),
            (*panel.not_finite, *(by_name[panel.name].not_finite if panel.name in by_name else ())),
        )
        for panel in one.panels
    )
    notes = [f"{text}: {side.note}" for text, side in zip((a, b), sides, strict=True) if side.note]
    return ComparisonInfo(a, b, one.run, one.attempt, panels, "; ".join(notes) or None)


def newest_attempts(deps: Dependencies, run: str | None, step: int | None) -> tuple[str, str]:
    """Return the two newest attempts of a run that have a step, the earlier one first, as texts.

    Raises:
        NotFound: there are fewer than two.
    """
    target = deps.finder.attempt(run)
    numbers = [
        int(row["number"]) for row in deps.catalogue.attempts(target.run)
        if step is None or deps.catalogue.step(int(row["attempt_id"]), step) is not None
    ]  # fmt: skip
    if len(numbers) < 2:
        having = "" if step is None else f" with step {step}"
        raise NotFound(
            f"run {target.run} has {len(numbers)} attempts{having}, which are no two to compare",
            advice="name both sides: a=RUN@ATTEMPT:STEP and b=RUN@ATTEMPT:STEP",
        )
    suffix = "" if step is None else f":{step}"
    newer, older = sorted(numbers, reverse=True)[:2]
    return f"{target.run}@{older}{suffix}", f"{target.run}@{newer}{suffix}"


_PANEL: Final = 170
_DASHED: Final = 30
"""Most steps of a line that is distinguished by its dashes."""
_GAP: Final = 34


def figure(found: ComparisonInfo) -> go.Figure:
    """Draw each metric of both sides over the same steps."""
    title = f"{found.a} {TITLE} {found.b}"
    lines = [line for panel in found.panels for line in (*panel.a, *panel.b) if line.steps]
    if not lines:
        return style.empty(title, found.note or "no step yet", x="step", y="value")
    drawn = go.Figure()
    heights = [_PANEL] * len(found.panels)
    domains = style.panels(heights, gap=_GAP)
    # Dashes make a jagged line of many steps invisible: labels at the ends name the sides.
    is_long = max(len(line.steps) for line in lines) > _DASHED
    width = 1.1 if is_long else 1.6
    names = (f"A: {found.a}", f"B: {found.b}") if is_long else (found.a, found.b)
    looks = ((names[0], style.BLUE, "solid"),
             (names[1], style.VERMILLION, "solid" if is_long else "dash"))  # fmt: skip
    for at, panel in enumerate(found.panels):
        axis = f"y{at + 1}" if at else "y"
        shown: set[str] = set()
        for (name, colour, dash), own in zip(looks, (panel.a, panel.b), strict=True):
            for line in own:
                draw_line(
                    drawn, line, axis, panel.unit,
                    LineStyle(name, colour, dash, not at and name not in shown, width),
                )  # fmt: skip
                shown.add(name)
        if is_long:
            _label_ends(drawn, panel, axis)
        draw_not_finite(drawn, panel.not_finite, [*panel.a, *panel.b], axis, first=not at)
        layout = axis_of(panel.unit, [*panel.a, *panel.b], domains[at])
        drawn.update_layout({f"yaxis{at + 1}" if at else "yaxis": layout})
        style.heading(drawn, panel.name, domains[at][1])
    low, high = min(line.steps[0] for line in lines), max(line.steps[-1] for line in lines)
    last = f"y{len(heights)}" if len(heights) > 1 else "y"
    drawn.update_xaxes(
        title={"text": "step"}, anchor=last, tickformat="d",
        range=[low - 0.6, high + (0.04 * (high - low) if is_long else 0.6)],
    )  # fmt: skip
    height = sum(heights) + _GAP * (len(heights) - 1) + 90
    return style.legend_below(style.finished(drawn, title, height))


def _label_ends(drawn: go.Figure, panel: SidePanel, axis: str) -> None:
    """Write A and B beside the ends of their lines, separated if these are close."""
    ends: list[tuple[float, int, str, str]] = []
    for name, colour, own in (("A", style.BLUE, panel.a), ("B", style.VERMILLION, panel.b)):
        known = [
            (step, value)
            for line in own
            for step, value in zip(line.steps, line.values, strict=True)
            if value is not None
        ]
        if known:
            step, value = max(known)
            ends.append((value, step, name, colour))
    for place, (value, step, name, colour) in zip(
        ("bottom right", "top right"), sorted(ends), strict=False
    ):
        drawn.add_scatter(
            x=[step], y=[value], yaxis=axis, mode="text", text=[f"<b>{name}</b>"],
            textposition=place if len(ends) > 1 else "middle right", name=f"label {name}",
            textfont={"color": colour, "size": 12}, showlegend=False, hoverinfo="skip",
            cliponaxis=False,
        )  # fmt: skip


def tensors_figure(report: Mapping[str, Any], at: int) -> tuple[go.Figure, str | None]:
    """Return one of the figures of a comparison of tensors, and a sentence about them.

    Args:
        report: the answer of `POST /comparisons`.
        at: index of the figure; 0 is the flow of data, then come tensors that differ.
    """
    pair = report["pairs"][0]
    drawn = pictures(pair)
    title = f"{report['sides'][0]['name']} {TITLE} {report['sides'][1]['name']}"
    verdict = f"{pair['verdict']}: {pair['reason']}"
    if not drawn:
        return style.empty(title, verdict, x="tensor", y="|d| = |A - B|"), verdict
    if at >= len(drawn):
        raise NotFound(f"there is no figure {at}", expected=f"from 0 to {len(drawn) - 1}")
    return drawn[at], f"{verdict}; figure {at + 1} of {len(drawn)}"
