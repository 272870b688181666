"""The stages of a step as trace events, which Perfetto opens."""

from __future__ import annotations

from typing import Final

from stagescope_service.figures.timeline import Lane, StageSlice, TimelineInfo
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.figures import TraceEvent

_TRACK: Final = 1_000_000
"""Added to a rank, it numbers the track of its slices that overlap others without nesting."""


def trace(found: TimelineInfo) -> JsonObject:
    """Return the answer of `/steps/{step}/timeline`."""
    names = ("run", "attempt", "step", "begin_wall", "clock_error", "note")
    about = {name: getattr(found, name) for name in names}
    return {"traceEvents": trace_events(found), "displayTimeUnit": "ms", "otherData": about}


def trace_events(found: TimelineInfo) -> list[TraceEvent]:
    """Return the lanes of `read` as trace events: a process for each role, a thread for each rank.

    Times are microseconds since the step began. Slices of a thread must nest: a slice that overlaps
    another without lying inside it is on a further track of its rank.
    """
    roles = list(dict.fromkeys(lane.ranks[0][0] for lane in found.lanes))
    events: list[TraceEvent] = []
    for pid, role in enumerate(roles, 1):
        name = f"{role}, run {found.run}, attempt {found.attempt}, step {found.step}"
        events.append(_metadata("process_name", pid, 0, name=name))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
    for lane in found.lanes:
        role, rank = lane.ranks[0]
        events += _lane_events(lane, roles.index(role) + 1, rank)
    return events


def _metadata(name: str, pid: int, tid: int, /, **args: str | int | float) -> TraceEvent:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _lane_events(lane: Lane, pid: int, rank: int) -> list[TraceEvent]:
    events: list[TraceEvent] = []
    tracks: list[list[float]] = []
    for each in lane.slices:
        track = _free_track(tracks, each)
        args: dict[str, str | int | float] = {"status": each.status, "part": each.part}
        if each.error:
            args["error"] = each.error
        if each.policy_version is not None:
            args["policy_version"] = each.policy_version
        ts, dur = _span(each.begin, each.seconds)
        event: TraceEvent = {
            "name": each.stage, "cat": each.status, "ph": "X", "ts": ts, "dur": dur,
            "pid": pid, "tid": rank + track * _TRACK, "args": args,
        }  # fmt: skip
        if each.status == "failed":
            event["cname"] = "terrible"
        events.append(event)
    for wait in lane.waits:
        ts, dur = _span(wait.begin, wait.seconds)
        events.append(
            {
                "name": f"waits for {wait.by[0]} {wait.by[1]}", "cat": "wait", "ph": "X", "ts": ts,
                "dur": dur, "pid": pid, "tid": rank, "cname": "grey",
                "args": {"status": "waiting", "stage": wait.stage},
            }
        )  # fmt: skip
    for stage in lane.not_begun:
        events.append(  # noqa: PERF401 - a list of typed dicts of two kinds
            {
                "name": f"not begun: {stage}", "cat": "missing", "ph": "i", "s": "t", "ts": 0,
                "pid": pid, "tid": rank, "args": {"status": "not begun"},
            }
        )  # fmt: skip
    names = []
    for track in range(max(len(tracks), 1)):
        tid = rank + track * _TRACK
        label = lane.label if not track else f"{lane.label} (overlapping)"
        names.append(_metadata("thread_name", pid, tid, name=label))
        names.append(_metadata("thread_sort_index", pid, tid, sort_index=2 * rank + (track > 0)))
    return [*names, *events]


def _free_track(tracks: list[list[float]], each: StageSlice) -> int:
    """Return the first track whose open slices contain this one; a track holds its slices' ends."""
    begin, end = each.begin, each.begin + each.seconds
    for at, ends in enumerate(tracks):
        ends[:] = [other for other in ends if other > begin + 1e-9]
        if not ends or ends[-1] >= end - 1e-9:
            ends.append(end)
            return at
    tracks.append([end])
    return len(tracks) - 1


def _span(begin: float, seconds: float) -> tuple[int, int]:
    """Return begin and length in whole microseconds.

    A span that ends where the next begins does so after rounding, too.
    """
    ts = round(begin * 1e6)
    return ts, round((begin + seconds) * 1e6) - ts
