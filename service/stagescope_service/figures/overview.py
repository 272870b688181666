"""Metrics over the steps of a run: attempts, noise floor, stalenesses, and what happened when."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.figures.drawing import drawn
from stagescope_service.figures.lines import (
    KINDS,
    ROW,
    Line,
    LineStyle,
    Mark,
    array_of,
    axis_of,
    draw_line,
    draw_marks,
    draw_not_finite,
    trace_id,
)
from stagescope_service.figures.run_curves import CurveReader, CurveRequest, Panel
from stagescope_service.statistics.step_metrics import STALENESSES
from stagescope_service.views.reading.changes import change_key
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.rows import Lineage
from stagescope_service.views.series import REWARD, check_known, newest_metrics
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import format_value

MISMATCH: Final = (
    "logprob_abs_diff/mean", "rollout_corr/k3_kl", "logprob_abs_diff/p99",
    "training/rollout_actor_probs_pearson_corr",
)  # fmt: skip
"""The metrics of a mismatch; the first stands for all where a training logs its own numbers."""
LOGGED: Final[Mapping[str, Sequence[str]]] = {
    "reward": REWARD,
    "loss": ("loss", "*pg_loss*", "*policy_loss*", "*actor_loss*", "*/loss", "*loss*"),
    "gradient norm": ("grad_norm", "*grad_norm*", "*gradient_norm*"),
    "entropy": ("entropy", "*entropy", "*entropy*"),
    "response length": (
        "response_length/mean", "*response_length*mean*", "*completion*length*mean*",
        "*completion*mean_length*", "*response_len*",
    ),
}  # fmt: skip
"""The first questions about a training -> patterns of the scalar; the first match counts."""
_USUAL: Final = 4
"""Panels that are drawn at least, as far as there are numbers."""
MAX_METRICS: Final = 12
TITLE: Final = "Over the steps"


class Boundary(NamedTuple):
    """The first step of an attempt other than the first."""

    attempt: int
    step: int
    text: str


@dataclasses.dataclass(frozen=True)
class OverviewInfo:
    """The data of the figure."""

    run: str
    attempt: int | None
    """The requested attempt; None: the current ones."""
    panels: tuple[Panel, ...]
    attempts: int
    """Number of attempts, whether they have steps or not."""
    boundaries: tuple[Boundary, ...]
    marks: tuple[Mark, ...]
    steps: int
    """Number of steps."""
    first: int
    last: int
    """The range of the steps; both 0 if there is none."""
    note: str | None
    smooth: float | None = None
    """Steps of the moving average that is drawn over the values; None: no average."""
    step: None = None


def answer(deps: Dependencies, run: str | None, request: CurveRequest) -> bytes:
    """Return the figure as `drawing.drawn` writes it; see `info`."""
    target = deps.finder.attempt(run, request.attempt)

    def make() -> bytes:
        found = info(deps, target.run, request)
        return drawn("overview", figure(found), found)

    return deps.answers.of(change_key(deps, "overview", target.run, request), make)


def info(deps: Dependencies, run: str | None, request: CurveRequest) -> OverviewInfo:
    """Read the numbers of a run's steps.

    Raises:
        NotFound: no such run, attempt, metric or scalar.
        InvalidInput: more than `MAX_METRICS` names.
    """
    if len(request.metrics) > MAX_METRICS:
        raise InvalidInput(
            f"{len(request.metrics)} metrics in one figure", expected=f"at most {MAX_METRICS}"
        )
    target = deps.finder.attempt(run, request.attempt)
    attempts = deps.catalogue.attempts(target.run)
    chosen = [row for row in attempts if request.attempt in (None, row["number"])]
    ids = [int(row["attempt_id"]) for row in chosen]
    reader = CurveReader(deps, target.run, ids, request.window, Lineage(attempts), request)
    published = newest_metrics(deps, ids)
    scalars = deps.catalogue.scalar_names(ids)
    names = list(request.metrics) or _default(published, scalars)
    metrics = [name for name in names if name not in scalars or name in published]
    by_name = reader.metric_panels(metrics)
    by_name |= {name: reader.scalar_panels(name) for name in names if name not in by_name}
    for name in names:
        if not any(panel.has_values or panel.not_finite for panel in by_name[name]):
            check_known(target, name, published, scalars)
    panels = tuple(panel for name in names for panel in by_name[name])
    marks = [*reader.gaps(metrics), *reader.weight_syncs(), *reader.captures(), *reader.findings()]
    return OverviewInfo(
        run=target.run,
        attempt=request.attempt,
        panels=panels,
        attempts=len(chosen),
        boundaries=tuple(_boundaries(chosen)) if request.attempt is None else (),
        marks=tuple(marks),
        steps=len(reader.states),
        first=next((step for _, step in reader.states), 0),
        last=next((step for _, step in reversed(reader.states)), 0),
        note=_note(reader, panels),
        smooth=request.smooth,
    )


def _default(published: Collection[str], scalars: Collection[str]) -> list[str]:
    """Return the names that are drawn if none is requested: the first questions about a run."""
    names = sorted(scalars)
    logged = [
        next((name for each in patterns for name in fnmatch.filter(names, each)), None)
        for patterns in LOGGED.values()
    ]
    mismatch = [name for name in MISMATCH if name in published]
    found = dict.fromkeys([*mismatch[:1], *(name for name in logged if name), *mismatch, *names])
    return list(found)[: max(_USUAL, len(LOGGED) + 1 - logged.count(None))] or list(MISMATCH)


def _note(reader: CurveReader, panels: Sequence[Panel]) -> str | None:
    if not reader.states:
        return f"run {reader.run} has no step in this range yet"
    if not any(panel.has_values or panel.not_finite for panel in panels):
        reasons = {mark.text for mark in reader.gaps([p.name for p in panels])}
        return f"no step has a value: {'; '.join(sorted(reasons))}" if reasons else None
    notes = []
    if len(reader.states) > 2 * style.WIDTH:
        notes.append(
            f"of {len(reader.states)} steps the smallest and the largest value of every "
            f"{-(-len(reader.states) // style.WIDTH)} are drawn: no spike is left out"
        )
    if any(k == STALENESSES[-1] for panel in panels for k, _ in panel.stalenesses):
        notes.append(f"stalenesses above {STALENESSES[-1]} are not drawn")
    return "; ".join(notes) or None


def _boundaries(attempts: Sequence[JsonObject]) -> Iterable[Boundary]:
    """Yield where each attempt but the first began, ascending."""
    ordered = sorted(attempts, key=lambda row: int(row["number"]))
    for before, row in itertools.pairwise(ordered):
        resumed, first = row["resumed_from_step"], row["first_step"]
        step = first if first is not None else None if resumed is None else resumed + 1
        if step is None:
            continue
        texts = [f"attempt {row['number']} began"]
        if row["opened_wall"] is not None:
            texts[0] += f" {format_value(row['opened_wall'], 'unix')}"
        if resumed is not None:
            texts.append(f"resumed after step {resumed}")
        if before["end_reason"]:
            texts.append(f"attempt {before['number']} ended: {before['end_reason']:.100}")
        yield Boundary(int(row["number"]), int(step), ", ".join(texts))


# --- drawing --------------------------------------------------------------------------------
_PANEL: Final = 150
_GAP: Final = 34
_MAX_LABELS: Final = 12
"""Most attempts whose boundaries are labelled; further lines have no label."""
_MAX_BOUNDARIES: Final = 200
_FEW_STEPS: Final = 10
"""Range of steps in which each has a tick: a longer one has whole steps at its ticks anyway."""
_DISTANCES: Final = (
    "rollout_corr/k", "rollout_corr/chi2", "rollout_corr/log_ppl", "logprob_abs_diff/", "tail/",
    "training/rollout_probs_diff_", "train_rollout_logprob_abs_diff",
)  # fmt: skip
"""Metrics that are 0 if both streams are equal: their noise floor is a band from 0."""


def figure(found: OverviewInfo) -> go.Figure:
    """Draw the panels below each other over the same steps, and what happened below them."""
    title = f"{TITLE} of {found.run}"
    drawn = go.Figure()
    if not found.steps:
        return style.empty(title, found.note or "no step yet", x="step", y="value")
    heights = [*([_PANEL] * len(found.panels)), ROW * len(KINDS)]
    domains = style.panels(heights, gap=_GAP)
    total = sum(heights) + _GAP * (len(heights) - 1)
    for at, panel in enumerate(found.panels):
        axis = f"y{at + 1}" if at else "y"
        _draw_panel(drawn, panel, found, axis=axis, first=at == 0)
        bottom, top = domains[at]
        layout = axis_of(panel.unit, panel.lines, (bottom, top))
        drawn.update_layout({f"yaxis{at + 1}" if at else "yaxis": layout})
        style.heading(drawn, panel.name, top)
        if not panel.has_values:
            style.say(drawn, "no value in these steps", y=(bottom + top) / 2)
    last = f"y{len(heights)}"
    draw_marks(drawn, found.marks, axis=last)
    # A row for each kind, also for those without a mark: new steps may bring the first.
    drawn.update_layout({f"yaxis{len(heights)}": {
        "domain": domains[-1], "tickvals": list(range(len(KINDS))), "ticktext": KINDS,
        "range": [len(KINDS) - 0.4, -0.6], "title": {"text": ""}, "fixedrange": True,
    }})  # fmt: skip
    drawn.update_xaxes(title={"text": "step"}, anchor=last, tickformat="d", range=_range(found),
                        dtick=1 if found.last - found.first < _FEW_STEPS else None)  # fmt: skip
    _draw_boundaries(drawn, found.boundaries)
    drawn = style.legend_below(style.finished(drawn, title, total + 110))
    return drawn.update_layout({"margin": {"t": 50}, f"yaxis{len(heights)}": {"showgrid": False}})


def _range(found: OverviewInfo) -> list[float]:
    low, high = found.first, found.last
    room = max((high - low) * 0.015, 0.6)
    return [low - room, high + room]


def _draw_panel(
    drawn: go.Figure, panel: Panel, found: OverviewInfo, *, axis: str, first: bool
) -> None:
    is_distance = panel.name.startswith(_DISTANCES)
    for line in panel.floor:
        if line.superseded:
            continue
        values = np.abs(array_of(line.values)) if is_distance else array_of(line.values)
        kept = style.thinned(values)
        drawn.add_scatter(
            uid=trace_id(axis, "noise floor", line.attempt), x=np.array(line.steps)[kept],
            y=values[kept], yaxis=axis, mode="lines",
            line={"width": 1, "color": style.GREY}, fill="tozeroy" if is_distance else "none",
            fillcolor="rgba(118,124,132,0.25)", name="noise floor", legendgroup="noise floor",
            showlegend=first and "noise floor" not in {each.name for each in style.traces(drawn)},
            hovertemplate="step %{x}: noise floor %{y:.4g}<extra></extra>",
        )  # fmt: skip
    shown: set[str] = set()
    for line, name, colour, dash in _looks(panel, found):
        legend = first and name not in shown and line.has_values
        draw_line(drawn, line, axis, panel.unit, LineStyle(name, colour, dash, legend))
        shown |= {name} if line.has_values else set()
    draw_not_finite(drawn, panel.not_finite, panel.lines, axis, first=first)


def _looks(panel: Panel, found: OverviewInfo) -> Iterator[tuple[Line, str, str, str]]:
    """Yield a panel's lines with their names, colours and dashes: a colour for each attempt."""
    several, smooth = found.attempts > 1, found.smooth
    for line in panel.lines:
        name = f"attempt {line.attempt}" if several else "value"
        if line.superseded:
            name += ", repeated later"
        dash = "dot" if line.superseded else "solid"
        yield line, name, style.GREY if smooth else _colour_of(line), dash
    current = [line for line in panel.lines if line.has_values and not line.superseded]
    if smooth:
        name = f"moving average over {smooth:g} steps"
        for line in current:
            of = f"{name} of attempt {line.attempt}" if several else name
            yield line.smoothed(smooth), of, _colour_of(line), "solid"
    for at, (staleness, lines) in enumerate(panel.stalenesses):
        colour = style.SERIES[1 + at % (len(style.SERIES) - 1)]
        dash = style.DASHES[1 + at % (len(style.DASHES) - 1)]
        for line in lines:
            if line.has_values and not line.superseded:
                yield line, f"staleness {staleness}", colour, dash


def _colour_of(line: Line) -> str:
    return style.SERIES[(line.attempt - 1) % len(style.SERIES)]


def _draw_boundaries(drawn: go.Figure, boundaries: Sequence[Boundary]) -> None:
    labelled = boundaries[:: -(-len(boundaries) // _MAX_LABELS) or 1]
    for each in boundaries[:_MAX_BOUNDARIES]:
        drawn.add_shape(
            type="line", x0=each.step - 0.5, x1=each.step - 0.5, y0=0, y1=1, yref="paper",
            line={"color": style.GREY, "width": 1, "dash": "dash"}, layer="below",
        )  # fmt: skip
    for each in labelled:
        drawn.add_annotation(
            x=each.step - 0.5, y=1, yref="paper", yanchor="bottom", xanchor="left",
            text=f"attempt {each.attempt}", showarrow=False, font={"size": 11},
            hovertext=style.wrapped(each.text), captureevents=True, yshift=16,
        )  # fmt: skip
