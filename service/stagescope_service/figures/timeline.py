"""The stages of a step: one lane for each rank, and which rank waits for which.

Times are on the service's clock if a rank's offset is known; durations are on the rank's own
monotonic clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.core.completeness import NOT_BEGUN
from stagescope_service.store.tables import StageRow
from stagescope_service.views.models.common import Missing
from stagescope_service.views.reading.completeness import ROWS_REMOVED, began
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_service.views.steps.listing import progress_of
from stagescope_wire.render import counted
from stagescope_wire.schema import STAGES, Part, RankKey

MAX_LANES: Final = 64
_SHOWN_ALONE: Final = 24
"""Most ranks of a folded figure that have lanes of their own."""
_GROUPS: Final = 36
_MIN_WAIT: Final = 0.01
"""Seconds; a shorter wait is noise of the clocks."""
_MIN_SHARE: Final = 0.005
"""...and so much of the step."""
_MAX_SLICES: Final = 4000
"""Slices of a figure, beyond which the parts of a stage on a rank are drawn as one."""


class StageSlice(NamedTuple):
    """A stage's part on a rank; in a folded lane, the stage on all of its ranks."""

    stage: str
    part: str
    """occurrence.epoch.minibatch.microbatch; "" if there are several."""
    begin: float
    """Seconds since the step began."""
    seconds: float
    """Until its end, or until now or the last known time of the step."""
    status: str
    """ok, failed, unfinished or open."""
    error: str | None = None
    policy_version: int | None = None
    all_in: tuple[float, float] | None = None
    """When all ranks of a folded lane were in it, from and to; None: never."""


class Wait(NamedTuple):
    """A rank that ended a stage and began no other before the last rank had ended it."""

    begin: float
    seconds: float
    stage: str
    by: RankKey
    """The rank that it waited for."""


class Lane(NamedTuple):
    """A rank, or several folded ones."""

    label: str
    ranks: tuple[RankKey, ...]
    slices: tuple[StageSlice, ...]
    waits: tuple[Wait, ...] = ()
    not_begun: tuple[str, ...] = ()
    """Stages in which the rank is expected and has not begun."""


class HeldUp(NamedTuple):
    """A rank that others waited for."""

    role: str
    rank: int
    stage: str
    ranks: int
    """Number of ranks that waited."""
    longest: float
    """Seconds."""


@dataclasses.dataclass(frozen=True)
class TimelineInfo:
    """The data of the figure."""

    run: str
    attempt: int
    step: int
    begin_wall: float | None
    """Unix seconds of the service's clock; None: nothing has begun."""
    seconds: float
    stages: tuple[str, ...]
    """In the order of their begin."""
    lanes: tuple[Lane, ...]
    ranks: int
    held_up: tuple[HeldUp, ...]
    """The longest wait first."""
    clock_error: float | None
    """The largest error of a rank's clock, seconds."""
    note: str | None


def info(deps: Dependencies, target: Target) -> TimelineInfo:
    """Read the stages of a step; with more than `MAX_LANES` ranks, most are folded."""
    found = read(deps, target)
    if len(found.lanes) <= MAX_LANES:
        return _merged_parts(found)
    lanes = _folded(found)
    several = len(lanes) - sum(len(lane.ranks) == 1 for lane in lanes)
    text = (
        f"of {len(found.lanes)} ranks {counted(several, 'lane')} hold several: a thin bar is a "
        "stage on any of them, a thick one on all"
    )
    notes = [each for each in (found.note, text) if each]
    return _merged_parts(dataclasses.replace(found, lanes=lanes, note="; ".join(notes)))


def read(deps: Dependencies, target: Target) -> TimelineInfo:
    """Read the stages of a step, one lane for each rank."""
    heading = (target.run, target.number, target.step_number)
    rows, progress = progress_of(deps, target)
    begins = [begin for row in rows if (begin := began(row)) is not None]
    if not begins:
        removed = target.step_row["rows_removed"] is not None
        note = ROWS_REMOVED if removed else "no rank has begun a stage of this step"
        return TimelineInfo(*heading, None, 0.0, (), (), 0, (), None, note)
    start = min(begins)
    is_open = target.step_row["closed_wall"] is None
    until = deps.clock() if is_open else _last_known(rows, start)
    by_rank: dict[RankKey, list[StageSlice]] = defaultdict(list)
    for row in rows:
        if (begin := began(row)) is not None:
            by_rank[row["role"], row["rank"]].append(_slice(row, begin - start, until - start))
    not_begun = _not_begun(progress.missing)
    lanes = []
    for rank in sorted({*by_rank, *not_begun}, key=_rank_order):
        slices = tuple(sorted(by_rank[rank], key=lambda each: (each.begin, -each.seconds)))
        lanes.append(
            Lane(f"{rank[0]} {rank[1]}", (rank,), slices, (), tuple(not_begun.get(rank, ())))
        )
    seconds = max(each.begin + each.seconds for lane in lanes for each in lane.slices)
    lanes, held_up = _with_waits(lanes, seconds)
    errors = [row["clock_error"] for row in rows if row["clock_error"] is not None]
    return TimelineInfo(
        *heading,
        start,
        seconds,
        tuple(dict.fromkeys(s.stage for s in sorted(
            (each for lane in lanes for each in lane.slices), key=lambda each: each.begin
        ))),
        tuple(lanes),
        len(lanes),
        held_up,
        max(errors, default=None),
        _note(held_up, max(errors, default=None)),
    )  # fmt: skip


def _slice(row: StageRow, begin: float, until: float) -> StageSlice:
    status = row["status"] or "open"
    if row["begin_mono"] is not None and row["end_mono"] is not None:
        # Raw calls are timed when they arrive: the end may arrive before the begin.
        seconds = max(row["end_mono"] - row["begin_mono"], 0.0)
    elif row["begin_wall"] is not None and row["end_wall"] is not None:
        seconds = max(row["end_wall"] - row["begin_wall"], 0.0)
    else:
        seconds = max(until - begin, 0.0)
    error = ": ".join(text for text in (row["error_type"], row["error_message"]) if text)
    return StageSlice(
        row["stage"],
        str(Part.of_columns(row)),
        begin,
        seconds,
        status,
        error or None,
        row["policy_version"],
    )


def _last_known(rows: Iterable[StageRow], start: float) -> float:
    """Return the last time of a closed step: when a stage ended, or began if its end is unknown."""
    times = [start]
    for row in rows:
        if (begin := began(row)) is not None:
            seconds = 0.0
            if row["end_mono"] is not None and row["begin_mono"] is not None:
                seconds = max(row["end_mono"] - row["begin_mono"], 0.0)
            times.append(begin + seconds)
    return max(times)


def _not_begun(missing: Iterable[Missing]) -> dict[RankKey, list[str]]:
    found: dict[RankKey, list[str]] = defaultdict(list)
    for each in missing:
        if each["status"] == NOT_BEGUN:
            found[each["role"], each["rank"]].append(each["stage"])
    return found


def _rank_order(rank: RankKey) -> tuple[str, int]:
    return rank


def _note(held_up: Sequence[HeldUp], clock_error: float | None) -> str | None:
    notes = []
    if held_up:
        worst = held_up[0]
        notes.append(
            f"{worst.role} {worst.rank} held up {counted(worst.ranks, 'rank')} in {worst.stage}, "
            f"for up to {style.number(worst.longest, 's')}"
        )
    if clock_error is not None and clock_error > _MIN_WAIT:
        notes.append(f"clocks agree within {style.number(clock_error, 's')}")
    return "; ".join(notes) or None


# --- waits ----------------------------------------------------------------------------------
def _with_waits(lanes: Sequence[Lane], seconds: float) -> tuple[list[Lane], tuple[HeldUp, ...]]:
    """Add to the lanes of single ranks which rank waited for which."""
    least = max(_MIN_WAIT, _MIN_SHARE * seconds)
    ends: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    """(role, stage) -> index of the lane -> when its last part ended."""
    for at, lane in enumerate(lanes):
        for each in lane.slices:
            own = ends[lane.ranks[0][0], each.stage]
            own[at] = max(own.get(at, -math.inf), each.begin + each.seconds)
    waits: dict[int, list[Wait]] = defaultdict(list)
    waited: dict[tuple[int, str], list[float]] = defaultdict(list)
    for (_, stage), own in ends.items():
        last = max(own, key=lambda at: (own[at], -at))
        for at, end in own.items():
            after = [s for s in lanes[at].slices if s.begin + s.seconds > end]
            next_begin = min((each.begin for each in after), default=math.inf)
            # A rank that was in something else, or began it meanwhile, did not wait.
            if own[last] - end >= least and next_begin >= own[last] - least:
                length = min(own[last], next_begin) - end
                waits[at].append(Wait(end, length, stage, lanes[last].ranks[0]))
                waited[last, stage].append(length)
    with_waits = [
        lane._replace(waits=tuple(sorted(waits[at]))) if at in waits else lane
        for at, lane in enumerate(lanes)
    ]
    held_up = [
        HeldUp(*lanes[at].ranks[0], stage, len(lengths), max(lengths))
        for (at, stage), lengths in waited.items()
    ]
    return with_waits, tuple(sorted(held_up, key=lambda each: (-each.longest, each.rank)))


# --- folding --------------------------------------------------------------------------------
def _folded(found: TimelineInfo) -> tuple[Lane, ...]:
    """Return lanes of the ranks that matter, and of the others folded by role and number."""
    held = {(each.role, each.rank): at for at, each in enumerate(found.held_up)}

    def importance(lane: Lane) -> tuple[int, int]:
        statuses = {each.status for each in lane.slices}
        trouble = ("failed" in statuses, bool(lane.not_begun), "unfinished" in statuses)
        kind = trouble.index(True) if any(trouble) else len(trouble)
        return kind, held.get(lane.ranks[0], len(held))

    unremarkable = (3, len(held))
    ordered = sorted(found.lanes, key=importance)
    single = [lane for lane in ordered[:_SHOWN_ALONE] if importance(lane) < unremarkable]
    alone = {lane.ranks[0] for lane in single}
    rest = [lane for lane in found.lanes if lane.ranks[0] not in alone]
    by_role: dict[str, list[Lane]] = defaultdict(list)
    for lane in rest:
        by_role[lane.ranks[0][0]].append(lane)
    folded = []
    for role, lanes in by_role.items():
        groups = max(round(_GROUPS * len(lanes) / len(rest)), 1)
        size = -(-len(lanes) // groups)
        folded += [_fold(role, lanes[at : at + size]) for at in range(0, len(lanes), size)]
    return (*single, *folded)


def _fold(role: str, lanes: Sequence[Lane]) -> Lane:
    """Return several ranks as one lane: each stage from its first begin to its last end."""
    if len(lanes) == 1:
        return lanes[0]
    by_stage: dict[str, list[list[StageSlice]]] = defaultdict(list)
    for lane in lanes:
        own: dict[str, list[StageSlice]] = defaultdict(list)
        for each in lane.slices:
            own[each.stage].append(each)
        for stage, slices in own.items():
            by_stage[stage].append(slices)
    slices = []
    for stage, per_rank in by_stage.items():
        spans = [(min(s.begin for s in own), max(s.begin + s.seconds for s in own))
                 for own in per_rank]  # fmt: skip
        first, last = min(a for a, _ in spans), max(b for _, b in spans)
        from_, to = max(a for a, _ in spans), min(b for _, b in spans)
        all_in = (from_, to) if from_ < to and len(spans) == len(lanes) else None
        status = max((s.status for own in per_rank for s in own), key=_severity)
        slices.append(StageSlice(stage, "", first, last - first, status, all_in=all_in))
    ranks = tuple(lane.ranks[0] for lane in lanes)
    label = f"{role} {ranks[0][1]} to {ranks[-1][1]} ({len(ranks)})"
    missing = tuple(dict.fromkeys(stage for lane in lanes for stage in lane.not_begun))
    return Lane(label, ranks, tuple(sorted(slices, key=lambda each: each.begin)), (), missing)


def _severity(status: str) -> int:
    return {"ok": 0, "open": 1, "unfinished": 2, "failed": 3}.get(status, 1)


def _merged_parts(found: TimelineInfo) -> TimelineInfo:
    """Draw the parts of a stage as one if there are too many of them."""
    if sum(len(lane.slices) for lane in found.lanes) <= _MAX_SLICES:
        return found
    lanes = []
    for lane in found.lanes:
        by_stage: dict[str, list[StageSlice]] = defaultdict(list)
        for each in lane.slices:
            by_stage[each.stage].append(each)
        slices = []
        for stage, own in by_stage.items():
            begin, end = min(s.begin for s in own), max(s.begin + s.seconds for s in own)
            status = max((s.status for s in own), key=_severity)
            slices.append(StageSlice(stage, "", begin, end - begin, status, all_in=own[0].all_in))
        lanes.append(lane._replace(slices=tuple(sorted(slices, key=lambda each: each.begin))))
    text = "the parts of a stage on a rank are drawn as one"
    return dataclasses.replace(
        found, lanes=tuple(lanes), note="; ".join(filter(None, (found.note, text)))
    )


# --- drawing --------------------------------------------------------------------------------
_STATUS_SHAPES: Final[Mapping[str, str]] = {"failed": "x", "unfinished": "/", "open": "."}
_STATUS_MARKS: Final[Mapping[str, tuple[str, str]]] = {
    "failed": ("x", style.VERMILLION),
    "unfinished": ("line-ns", style.ORANGE),
    "open": ("triangle-right", style.GREEN),
}
_SPREAD: Final = 0.22
"""Height of the span of a stage on several ranks."""
_NESTED: Final = (0.82, 0.5, 0.3)
"""Heights of slices that lie inside others."""


def figure(found: TimelineInfo) -> go.Figure:
    """Draw a lane for each rank over the seconds of the step."""
    title = f"Stages of step {found.step}"
    if not found.lanes:
        return style.empty(title, found.note or "", x="seconds since the step began", y="rank")
    drawn = go.Figure()
    labels = [lane.label for lane in found.lanes]
    for at, stage in enumerate(found.stages):
        _draw_stage(drawn, found.lanes, stage, colour_of(stage, at))
    _draw_waits(drawn, found.lanes)
    _draw_statuses(drawn, found.lanes)
    room = max(found.seconds * 0.01, 1e-3)
    drawn.update_xaxes(
        title={"text": "seconds since the step began"}, range=[-room, found.seconds + room],
        showgrid=True, exponentformat="none",
    )  # fmt: skip
    drawn.update_yaxes(
        title={"text": "rank"}, type="category", categoryorder="array", categoryarray=labels,
        autorange="reversed", tickfont={"size": 10}, showgrid=False,
        tickmode="array", tickvals=labels[:: -(-len(labels) // 48)],
    )  # fmt: skip
    drawn.update_layout(barmode="overlay")
    drawn = style.finished(drawn, title, max(len(labels) * 16, 60) + 110)
    drawn.update_layout(yaxis={"showgrid": False}, xaxis={"showgrid": True}, margin={"t": 20})
    return style.legend_below(drawn)


def colour_of(stage: str, at: int) -> str:
    """Return the colour of a stage; a stage of the wire has the same one in every step."""
    known = STAGES.index(stage) if stage in STAGES else len(STAGES) + at
    return _STAGE_COLOURS[known % len(_STAGE_COLOURS)]


_STAGE_COLOURS: Final = (
    style.GREEN, style.BLUE, style.SKY, style.PURPLE, style.ORANGE, "#8a6d00", style.VERMILLION,
    "#6b6ecf", "#a05a2c",
)  # fmt: skip


def _draw_stage(drawn: go.Figure, lanes: Sequence[Lane], stage: str, colour: str) -> None:
    bars = [
        (lane, each, depth)
        for lane in lanes
        for each, depth in zip(lane.slices, _depths(lane.slices), strict=True)
        if each.stage == stage
    ]
    # For several ranks, a thin bar is the stage on any of them, a thick one the stage on all.
    widths = [
        _NESTED[min(depth, len(_NESTED) - 1)] if len(lane.ranks) == 1 else _SPREAD
        for lane, _, depth in bars
    ]
    drawn.add_bar(
        orientation="h", name=stage, legendgroup=stage,
        base=np.array([each.begin for _, each, _ in bars]),
        x=np.array([each.seconds for _, each, _ in bars]),
        y=[lane.label for lane, _, _ in bars], width=np.array(widths),
        marker={
            "color": colour,
            "pattern": {
                "shape": [_STATUS_SHAPES.get(each.status, "") for _, each, _ in bars],
                "fgcolor": "#ffffff", "size": 5,
            },
        },
        hoverinfo="text", hovertext=[_hover(lane, each) for lane, each, _ in bars],
    )  # fmt: skip
    inner = [(lane, each.all_in) for lane, each, _ in bars if each.all_in is not None]
    if inner:
        drawn.add_bar(
            orientation="h", name=stage, legendgroup=stage, showlegend=False,
            base=np.array([begin for _, (begin, _) in inner]),
            x=np.array([end - begin for _, (begin, end) in inner]),
            y=[lane.label for lane, _ in inner], width=_NESTED[0],
            marker={"color": colour}, hoverinfo="text",
            hovertext=[
                f"{lane.label}: all were in {stage} from {begin:.3g} s to {end:.3g} s"
                for lane, (begin, end) in inner
            ],
        )  # fmt: skip


def _depths(slices: Sequence[StageSlice]) -> list[int]:
    """Return in how many others each slice lies; they are sorted by begin, the longest first."""
    ends: list[float] = []
    depths = []
    for each in slices:
        ends = [end for end in ends if end > each.begin + 1e-9]
        depths.append(len(ends))
        ends.append(each.begin + each.seconds)
    return depths


def _hover(lane: Lane, each: StageSlice) -> str:
    lines = [
        f"{lane.label}: {each.stage}" + (f" {each.part}" if each.part else ""),
        f"{each.begin:.3f} s to {each.begin + each.seconds:.3f} s: "
        f"{style.number(each.seconds, 's')}",
    ]
    if each.status != "ok":
        lines.append(each.status + (" since then" if each.status == "open" else ""))
    if each.error:
        lines.append(style.wrapped(each.error[:200], 60))
    return "<br>".join(lines)


def _draw_waits(drawn: go.Figure, lanes: Sequence[Lane]) -> None:
    waits = [(lane, wait) for lane in lanes for wait in lane.waits]
    if not waits:
        return
    drawn.add_bar(
        orientation="h", name="waits", base=np.array([wait.begin for _, wait in waits]),
        x=np.array([wait.seconds for _, wait in waits]), y=[lane.label for lane, _ in waits],
        width=0.16, marker={"color": style.GREY}, hoverinfo="text",
        hovertext=[
            f"{lane.label} waits {style.number(wait.seconds, 's')} for {wait.by[0]} {wait.by[1]}, "
            f"which ends {wait.stage} last"
            for lane, wait in waits
        ],
    )  # fmt: skip


def _draw_statuses(drawn: go.Figure, lanes: Sequence[Lane]) -> None:
    """Mark failed or unfinished slices at their end, and ranks that have not begun at the left."""
    for status, (symbol, colour) in _STATUS_MARKS.items():
        here = [(lane, each) for lane in lanes for each in lane.slices if each.status == status]
        if here:
            drawn.add_scatter(
                x=[each.begin + each.seconds for _, each in here],
                y=[lane.label for lane, _ in here],
                mode="markers", name=status, hoverinfo="text",
                marker={"symbol": symbol, "size": 10, "color": colour,
                        "line": {"color": colour, "width": 2}},
                hovertext=[_hover(lane, each) for lane, each in here],
            )  # fmt: skip
    absent = [lane for lane in lanes if lane.not_begun]
    if absent:
        drawn.add_scatter(
            x=[0.0] * len(absent), y=[lane.label for lane in absent], mode="markers",
            name="not begun", hoverinfo="text",
            marker={"symbol": "circle-open", "size": 10, "color": style.VERMILLION,
                    "line": {"width": 2}},
            hovertext=[
                style.wrapped(f"{lane.label} has not begun {', '.join(lane.not_begun)}", 60)
                for lane in absent
            ],
        )  # fmt: skip
