"""The canary over versions: mean |d| of each pair of arms, and where it is too large."""

from __future__ import annotations

import dataclasses
import html
import math
from collections import defaultdict
from typing import Final

import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.core.canary.verdicts import DIFFERS, EQUAL
from stagescope_service.core.canary.versions import PAIR_NAMES
from stagescope_service.views.reading.dependencies import Dependencies

MAX_ROWS: Final = 400
"""Most engine instances of versions that are drawn, the newest."""


@dataclasses.dataclass(frozen=True)
class PairLine:
    """A pair of arms over versions, of the engine instance with the largest difference."""

    pair: str
    versions: tuple[int, ...]
    """Ascending."""
    means: tuple[float, ...]
    """Mean |d|, nats."""
    bounds: tuple[float | None, ...]
    """Mean |d| above which it differs, nats."""
    engines: tuple[str, ...]
    """The instance in each version."""
    wrong: tuple[bool, ...]
    """Whether the pair is not as it should be."""


@dataclasses.dataclass(frozen=True)
class CanaryInfo:
    """The data of the figure."""

    run: str
    attempt: int
    rows: tuple[PairLine, ...]
    note: str | None
    step: None = None


def info(deps: Dependencies, run: str | None, attempt: int | None) -> CanaryInfo:
    """Read the newest versions of an attempt, the worst engine instance of each."""
    target = deps.finder.attempt(run, attempt)
    keys = deps.catalogue.judged_engines(target.attempt_id, limit=MAX_ROWS)
    verdicts = deps.catalogue.canary_verdicts(target.attempt_id, {version for version, _ in keys})
    worst: dict[str, dict[int, tuple[bool, float, float | None, str]]] = defaultdict(dict)
    for row in verdicts:
        if row["mean"] is not None:
            is_wrong = row["verdict"] in (DIFFERS, EQUAL)
            own = (is_wrong, row["mean"], row["bound"], row["source"])
            line = worst[row["pair"]]
            line[row["version"]] = max(line.get(row["version"], own), own, key=lambda it: it[:2])
    lines = tuple(_line(pair, worst[pair]) for pair in PAIR_NAMES if pair in worst)
    note = None if lines else "no canary was scored: probe.canary(engine=...) after each sync"
    return CanaryInfo(target.run, target.number, lines, note)


def _line(pair: str, found: dict[int, tuple[bool, float, float | None, str]]) -> PairLine:
    versions = tuple(sorted(found))
    wrong, means, bounds, engines = zip(*(found[version] for version in versions), strict=True)
    return PairLine(pair, versions, means, bounds, engines, wrong)


# --- drawing --------------------------------------------------------------------------------
def figure(found: CanaryInfo) -> go.Figure:
    """Draw a line for each pair; a cross marks a version in which it is wrong."""
    title, x, y = "The canary after each weight sync", "version", "mean |d|, nat"
    if not found.rows:
        return style.empty(title, found.note or "", x=x, y=y)
    drawn = go.Figure()
    means = [mean for line in found.rows for mean in line.means if math.isfinite(mean)]
    zero, ticks = style.ticks_of_powers(means)
    for line, colour in zip(found.rows, style.SERIES, strict=False):
        drawn.add_scatter(
            x=line.versions, y=[mean or zero for mean in line.means], mode="lines+markers",
            name=line.pair, line={"color": colour, "width": 1.6},
            marker={
                "color": colour,
                "size": [11 if wrong else 4 for wrong in line.wrong],
                "symbol": ["x" if wrong else "circle" for wrong in line.wrong],
            },
            hovertext=_hovers(line), hoverinfo="text",
        )  # fmt: skip
    drawn.update_xaxes(title={"text": x}, tickformat="d")
    drawn.update_yaxes(
        title={"text": y}, type="log", tickvals=list(ticks), ticktext=list(ticks.values())
    )
    return style.legend_below(style.finished(drawn, title, 340))


def _hovers(line: PairLine) -> list[str]:
    rows = zip(line.versions, line.engines, line.means, line.bounds, strict=True)
    return [
        f"{line.pair}, version {version}, {html.escape(engine)}<br>"
        f"mean |d| {style.number(mean, 'nat')}, bound {style.number(bound, 'nat')}"
        for version, engine, mean, bound in rows
    ]
