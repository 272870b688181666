"""What the state machine remembers of an attempt, as `stuck` judges it: role by role."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping

from stagescope_service.engine.entities import FAILED, OK, Attempt, Process, Span
from stagescope_service.engine.stuck import (
    GONE,
    LIVE,
    SILENT,
    UNHEARD,
    History,
    Pace,
    Place,
    Role,
    Standing,
    history,
)


def roles(attempt: Attempt, silent: Collection[str] = ()) -> Iterator[tuple[str, Role]]:
    """Yield the roles of an attempt that work on its open steps.

    `silent` are the incarnations of which nothing is heard though their lease holds.
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
        paces = _open_paces(attempt, role)
        if paces:
            expected = range(attempt.world_size(role) or 0)
            absent = {*expected} - processes.keys() - left.get(role, set())
            standings = {
                rank: _standing(paces, each, each.incarnation in silent)
                for rank, each in processes.items()
            }
            standings |= dict.fromkeys(absent, Standing(UNHEARD))
            yield role, _role(attempt, role, standings, paces)


def _open_paces(attempt: Attempt, role: str) -> dict[Place, Pace]:
    found: dict[Place, Pace] = {}
    for number in attempt.open:
        found.update(_paces_of(attempt, number, role))
    return found


def _paces_of(attempt: Attempt, number: int, role: str) -> dict[Place, Pace]:
    paces = attempt.steps[number].paces.get(role, {})
    return {pace.place: pace for pace in paces.values()}


def _standing(paces: Mapping[Place, Pace], process: Process, silent: bool) -> Standing:
    gone = not process.live
    spans = process.unfinished if gone else process.open_spans
    inside = _innermost(paces, process, [*spans.values()])
    frontier = -math.inf if process.reached is None else process.reached[2].first
    status = GONE if gone else SILENT if silent else LIVE
    return Standing(status, process.said or None, inside, frontier)


def _innermost(paces: Mapping[Place, Pace], process: Process, spans: list[Span]) -> Place | None:
    """Return the part that was entered last, unless its end was lost: then it went further."""
    for span in reversed(spans):
        step = span.work.step
        if step is None or span.superseded or step != process.max_step:
            continue
        place = Place(step, span.work.stage or "", span.work.part)
        if place in paces:
            return place
    return None


def _role(
    attempt: Attempt, role: str, standings: Mapping[int, Standing], paces: Mapping[Place, Pace]
) -> Role:
    def spans_at(place: Place) -> dict[int, list[Span]]:
        ranks = attempt.steps[place.step].ranks.get((role, place.stage), {})
        found = {
            rank: [span for span in spans if span.work.part == place.part]
            for rank, spans in ranks.items()
        }
        return {rank: spans for rank, spans in found.items() if spans}

    def ended(place: Place) -> set[int]:
        at = spans_at(place)
        return {r for r, spans in at.items() if any(s.status in (OK, FAILED) for s in spans)}

    @functools.cache
    def earlier() -> Mapping[str, History]:
        closed = sorted(number for number in attempt.steps if number not in attempt.open)
        ranks = {
            stage: found.keys()
            for number in closed
            for (its_role, stage), found in attempt.steps[number].ranks.items()
            if its_role == role
        }
        # One that all but a few have left says as much of how long its stages take.
        left = [number for number in attempt.steps if number < max(attempt.open)]
        return history([_paces_of(attempt, number, role) for number in left], ranks)

    return Role(
        standings,
        paces,
        begun=lambda place: spans_at(place).keys(),
        ended=ended,
        history=lambda stage: earlier().get(stage, History()),
    )
