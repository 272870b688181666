"""Several runs over each other: the same number of each, aligned by step, a colour for each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.figures.lines import Line, LineStyle, axis_of, draw_line
from stagescope_service.figures.run_curves import CurveReader, CurveRequest
from stagescope_service.views.reading.dependencies import ALL_STEPS, Dependencies
from stagescope_service.views.reading.rows import Lineage
from stagescope_service.views.run_list import ABS_DIFF, compared
from stagescope_service.views.series import newest_metrics, reward_of
from stagescope_wire.names import unit_of_metric

REWARD: Final = "reward"
"""The name of the panel in which each run has its own reward."""


@dataclasses.dataclass(frozen=True)
class ComparedLines:
    """A number of one run."""

    run: str
    """As people see its name."""
    number: int
    """Its place among the runs, from 0: it decides the colour."""
    lines: tuple[Line, ...]
    smoothed: tuple[Line, ...]
    """The moving averages; empty: none is drawn."""


@dataclasses.dataclass(frozen=True)
class ComparedRunsInfo:
    """The data of the figure."""

    run: str
    panels: tuple[tuple[str, str, tuple[ComparedLines, ...]], ...]
    """Name, unit, and the number of each run that has it."""
    note: str | None
    attempt: None = None
    step: None = None


def info(
    deps: Dependencies, runs: Sequence[str], metrics: Sequence[str], smooth: float | None
) -> ComparedRunsInfo:
    """Read numbers of several runs; none named: mean |d| and the reward.

    Raises:
        NotFound: no such run.
        InvalidInput: no run, or too many.
    """
    names = compared(deps, runs)
    wanted = list(metrics) or [ABS_DIFF, REWARD]
    found: dict[str, list[ComparedLines]] = {name: [] for name in wanted}
    lacking: list[str] = []
    for number, run in enumerate(names):
        row = deps.catalogue.run(run)
        shown = run if row is None else row["display_name"]
        for name, lines in _lines(deps, run, wanted):
            if not any(line.has_values for line in lines):
                lacking.append(f"{shown} has no {name}")
                continue
            smoothed = tuple(line.smoothed(smooth) for line in lines) if smooth else ()
            found[name].append(ComparedLines(shown, number, lines, smoothed))
    panels = tuple((name, unit_of_metric(name), tuple(found[name])) for name in wanted)
    return ComparedRunsInfo(names[0], panels, "; ".join(lacking) or None)


def _lines(
    deps: Dependencies, run: str, wanted: Sequence[str]
) -> Iterator[tuple[str, tuple[Line, ...]]]:
    """Yield each number of a run, in its current attempts."""
    attempts = deps.catalogue.attempts(run)
    ids = [int(row["attempt_id"]) for row in attempts]
    request = CurveRequest(superseded=False)
    reader = CurveReader(deps, run, ids, ALL_STEPS, Lineage(attempts), request)
    published = newest_metrics(deps, ids)
    scalars = deps.catalogue.scalar_names(ids)
    metrics = [name for name in wanted if name in published]
    panels = reader.metric_panels(metrics) if metrics else {}
    for name in wanted:
        scalar = reward_of(scalars) if name == REWARD and name not in scalars else name
        if name not in panels and scalar in scalars:
            panels[name] = reader.scalar_panels(scalar)
        yield name, tuple(line for panel in panels.get(name, ())[:1] for line in panel.lines)


# --- drawing --------------------------------------------------------------------------------
_PANEL: Final = 190
_GAP: Final = 34


def figure(found: ComparedRunsInfo) -> go.Figure:
    """Draw a panel for each number, over the same steps."""
    drawn = go.Figure()
    heights = [_PANEL] * len(found.panels)
    domains = style.panels(heights, gap=_GAP)
    total = sum(heights) + _GAP * (len(heights) - 1)
    named: set[str] = set()
    for at, (name, unit, runs) in enumerate(found.panels):
        axis = f"y{at + 1}" if at else "y"
        bottom, top = domains[at]
        lines = [line for each in runs for line in each.lines]
        drawn.update_layout(
            {f"yaxis{at + 1}" if at else "yaxis": axis_of(unit, lines, (bottom, top))}
        )
        style.heading(drawn, name, top)
        if not runs:
            style.say(drawn, "none of these runs has it", y=(bottom + top) / 2)
        for each in runs:
            colour = style.SERIES[each.number % len(style.SERIES)]
            dash = style.DASHES[each.number // len(style.SERIES) % len(style.DASHES)]
            for line in each.smoothed or each.lines:
                looks = LineStyle(each.run, colour, dash, each.run not in named)
                draw_line(drawn, line, axis, unit, looks)
                named.add(each.run)
    last = f"y{len(heights)}" if len(heights) > 1 else "y"
    drawn.update_xaxes(title={"text": "step"}, anchor=last, tickformat="d")
    return style.legend_below(style.finished(drawn, "Runs over each other", total + 90))
