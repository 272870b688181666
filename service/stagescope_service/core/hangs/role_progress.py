"""How far the ranks of each role are, of an attempt in memory: what hang detection judges.

The API derives the same `Role` from the catalogue's rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping

from stagescope_service.core.entities import (
    FAILED,
    OK,
    Attempt,
    Process,
    Span,
    StageKey,
    StageTiming,
)
from stagescope_service.core.hangs.detection import (
    GONE,
    LIVE,
    SILENT,
    UNHEARD,
    RankPosition,
    Role,
    StageHistory,
    history,
)


def roles(attempt: Attempt, silent: Collection[str] = ()) -> Iterator[tuple[str, Role]]:
    """Yield the roles of an attempt that work on its open steps.

    Args:
        silent: incarnations without contact whose lease has not expired.
    """
    by_role: dict[str, dict[int, Process]] = {}
    left: dict[str, set[int]] = {}
    for process in attempt.processes.values():
        if process.finished:
            left.setdefault(process.role, set()).add(process.rank)
        elif not process.replaced:
            ranks = by_role.setdefault(process.role, {})
            other = ranks.get(process.rank)
            if other is None or (other.live, other.age) < (process.live, process.age):
                ranks[process.rank] = process
    for role, processes in by_role.items():
        timings = _open_timings(attempt, role)
        if timings:
            expected = range(attempt.world_size(role) or 0)
            absent = {*expected} - processes.keys() - left.get(role, set())
            positions = {
                rank: _position(timings, each, each.incarnation in silent)
                for rank, each in processes.items()
            }
            positions |= dict.fromkeys(absent, RankPosition(UNHEARD))
            yield role, _role(attempt, role, positions, timings)


def _open_timings(attempt: Attempt, role: str) -> dict[StageKey, StageTiming]:
    found: dict[StageKey, StageTiming] = {}
    for number in attempt.open:
        found.update(_timings_of(attempt, number, role))
    return found


def _timings_of(attempt: Attempt, number: int, role: str) -> dict[StageKey, StageTiming]:
    timings = attempt.steps[number].timings.get(role, {})
    return {timing.key: timing for timing in timings.values()}


def _position(
    timings: Mapping[StageKey, StageTiming], process: Process, silent: bool
) -> RankPosition:
    gone = not process.live
    spans = process.unfinished if gone else process.open_spans
    inside = _innermost(timings, process, [*spans.values()])
    frontier = -math.inf if process.reached is None else process.reached[2].first
    status = GONE if gone else SILENT if silent else LIVE
    return RankPosition(status, process.last_event or None, inside, frontier)


def _innermost(
    timings: Mapping[StageKey, StageTiming], process: Process, spans: list[Span]
) -> StageKey | None:
    """Return the part of its highest step that was entered last; None if it is inside none."""
    for span in reversed(spans):
        step = span.work.step
        if step is None or span.superseded or step != process.max_step:
            continue
        place = StageKey(step, span.work.stage or "", span.work.part)
        if place in timings:
            return place
    return None


def _role(
    attempt: Attempt,
    role: str,
    positions: Mapping[int, RankPosition],
    timings: Mapping[StageKey, StageTiming],
) -> Role:
    def spans_at(place: StageKey) -> dict[int, list[Span]]:
        step = attempt.stepless if place.step is None else attempt.steps[place.step]
        ranks = step.ranks.get((role, place.stage), {})
        found = {
            rank: [span for span in spans if span.work.part == place.part]
            for rank, spans in ranks.items()
        }
        return {rank: spans for rank, spans in found.items() if spans}

    def ended(place: StageKey) -> set[int]:
        at = spans_at(place)
        return {r for r, spans in at.items() if any(s.status in (OK, FAILED) for s in spans)}

    @functools.cache
    def earlier() -> Mapping[str, StageHistory]:
        closed = sorted(number for number in attempt.steps if number not in attempt.open)
        ranks = [
            {
                stage: found.keys()
                for (its_role, stage), found in attempt.steps[number].ranks.items()
                if its_role == role
            }
            for number in closed
        ]
        # A step that all but a few ranks have left shows the durations of its stages just as well.
        left = [number for number in attempt.steps if number < max(attempt.open)]
        return history([_timings_of(attempt, number, role) for number in left], ranks)

    return Role(
        positions,
        timings,
        begun=lambda place: spans_at(place).keys(),
        ended=ended,
        history=lambda stage: earlier().get(stage, StageHistory()),
    )
