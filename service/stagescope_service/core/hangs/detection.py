"""Detects stuck ranks, which hold up the others of their role, from stage events alone.

A rank is late if it has sent no event for longer than the slowest rank ever took in its present
part of a stage. A late rank is stuck if the other ranks of its role are further, or all are in the
same part. A rank whose process does not respond is stuck in any part. A rank that never reported,
although steps closed without it, is stuck once the others are late in a part that none ended. A
rank's position is the part that it entered last, or the gap after it. Ranks that wait for a stuck
rank inside a stage are not stuck.

Pure functions: the coordinator applies them to its memory, the API to the catalogue. Times are
seconds of one clock, durations seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.core.entities import StageKey, StageTiming

NOT_BEGUN: Final = "not begun"
NOT_ENDED: Final = "not ended"
BETWEEN: Final = "between stages"
LIVE, SILENT, GONE, UNHEARD = "live", "silent", "gone", "unheard"
"""A process polls; it does not, and its lease holds; its lease ran out; it never reported."""

STUCK_KIND: Final = "stage_stuck"
"""The finding of a stuck rank, and the reason why its stacks are requested."""

UNRESPONSIVE_KIND: Final = "process_silent"
"""The finding of a process that does not answer; its evidence says since when."""

STEPS_REMEMBERED: Final = 8
"""Closed steps that make the history of a stage."""


class StageHistory(NamedTuple):
    """Durations of a stage in earlier steps: one a step, of its slowest rank and part."""

    longest: Sequence[float] = ()
    """How long a part took."""
    latest: Sequence[float] = ()
    """How long after the first rank the last one began."""
    ranks: Collection[int] | None = None
    """The ranks that took part when it was last done; None: it is new."""
    ever: Collection[int] = ()
    """The ranks that took part in any of the steps: a step closes without ranks that are gone."""


class RankPosition(NamedTuple):
    """The part of a stage that a rank is in."""

    process: str
    """LIVE, SILENT, GONE or UNHEARD."""
    last_event: float | None = None
    """When it began or ended anything last; None: never."""
    inside: StageKey | None = None
    """The part that it is in; None between two."""
    frontier: float = -math.inf
    """When the first rank began the part that this one began last: it owes no earlier part."""


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """The state of a role of an attempt in its open steps."""

    positions: Mapping[int, RankPosition]
    """The positions of the expected ranks."""
    timings: Mapping[StageKey, StageTiming]
    """The timings of the open steps."""
    begun: Callable[[StageKey], Collection[int]]
    """The ranks that began a part."""
    ended: Callable[[StageKey], Collection[int]]
    """The ranks that ended it."""
    history: Callable[[str], StageHistory]
    """Returns the history of a stage."""


class Limit(NamedTuple):
    """After how many seconds a rank counts as stuck."""

    seconds: float
    usual: float | None
    """The median of the steps before; None: there is no history."""
    steps: int
    """Steps in the history; 0: judged by the lag behind the other ranks of this step."""


class Stuck(NamedTuple):
    """A rank that holds up others."""

    rank: int
    key: StageKey
    status: str
    """NOT_BEGUN or NOT_ENDED."""
    process: str
    since: float
    """Time of its last event, or later: when the first rank began what it has not begun."""
    seconds: float
    """Seconds since then."""
    limit: Limit
    begun: int
    """Ranks that began the part."""
    ended: int
    """Ranks that ended it."""
    whole_role: bool
    """Every rank of the role is inside: none waits for another."""


@dataclasses.dataclass(frozen=True, slots=True)
class StuckRules:
    """Settings that decide when a rank counts as stuck."""

    min_seconds: float = 30.0
    """Least seconds without progress before a rank counts as stuck."""
    factor: float = 3.0
    """Times the median of the earlier steps."""
    longest_factor: float = 1.5
    """Times the longest of them: a step with a checkpoint is slow as well."""
    first_factor: float = 4.0
    """Times `min_seconds` where there is no history."""

    def after(self, earlier: Sequence[float], here: float | None) -> Limit:
        """Return the limit from the durations of earlier steps, else of the other ranks."""
        if not earlier:
            seconds = max(self.first_factor * self.min_seconds, self.factor * (here or 0.0))
            return Limit(seconds, None, 0)
        usual = statistics.median(earlier)
        longest = self.longest_factor * max(earlier)
        return Limit(max(self.min_seconds, self.factor * usual, longest), usual, len(earlier))


def judge(role: Role, now: float, rules: StuckRules) -> list[Stuck]:
    """Return the stuck ranks of a role, by rank.

    A role without a live process has none: the open parts of a lost job are lost, not stuck.
    """
    if not any(position.process in (LIVE, SILENT) for position in role.positions.values()):
        return []
    return _Judgement(role, now, rules).judge() if role.timings else []


class _Judgement:
    """One check of a role; what is the same for all ranks is computed once for each stage part."""

    def __init__(self, role: Role, now: float, rules: StuckRules) -> None:
        self._role, self._now, self._rules = role, now, rules
        self._newest_first = sorted(
            ((timing.first, key) for key, timing in role.timings.items()), reverse=True
        )
        self._limits: dict[tuple[StageKey, str], Limit] = {}
        self._members: dict[StageKey, tuple[Collection[int], Collection[int]]] = {}
        self._all_inside: dict[StageKey, bool] = {}
        self._awaiting_absent: dict[StageKey, bool] = {}
        self._silent = [
            (rank, position)
            for rank, position in role.positions.items()
            if position.process in (SILENT, GONE)
        ]
        self._waiting_for_silent: dict[StageKey, bool] = {}

    def judge(self) -> list[Stuck]:
        found = []
        for rank, position in sorted(self._role.positions.items()):
            if (
                position.last_event is not None
                and self._now - position.last_event <= self._rules.min_seconds
            ):
                continue
            if position.inside is not None:
                stuck = self._inside(rank, position, position.inside)
            else:
                stuck = self._between(rank, position)
            if stuck is None and position.process == UNHEARD:
                stuck = self._absent(rank)
            if stuck is not None:
                found.append(stuck)
        return found

    def _inside(self, rank: int, position: RankPosition, key: StageKey) -> Stuck | None:
        limit = self._limit(key, NOT_ENDED)
        gone = position.process in (SILENT, GONE)
        if not (gone or self._is_over(position, limit)):
            return None
        if not gone and self._waits_for_silent(key):
            return None
        _, ended = self._of(key)
        is_whole_role = not (gone or ended)
        if is_whole_role and not self._is_everyone_inside(key, limit):
            return None  # it waits for ranks that are behind
        since = self._now if position.last_event is None else position.last_event
        return self._stuck(rank, key, NOT_ENDED, since, limit, whole_role=is_whole_role)

    def _between(self, rank: int, position: RankPosition) -> Stuck | None:
        awaited = self._awaited(rank, position)
        if awaited is None:
            return None
        first, key = awaited
        # The others have waited for a rank at most since it ended its last part.
        since = first if position.last_event is None else max(first, position.last_event)
        limit = self._limit(key, NOT_BEGUN)
        unheard = position.process in (SILENT, GONE)
        patience = self._rules.min_seconds if unheard else limit.seconds
        if self._now - since <= patience:
            return None
        return self._stuck(rank, key, NOT_BEGUN, since, limit)

    def _absent(self, rank: int) -> Stuck | None:
        """Return the part that a never-seen rank holds up, though earlier steps closed without it.

        It may be meant not to report, so it is not awaited before the others are late themselves.
        """
        key = self._late_without_absent
        if key is None:
            return None
        since = self._role.timings[key].first
        return self._stuck(rank, key, NOT_BEGUN, since, self._limit(key, NOT_ENDED))

    @functools.cached_property
    def _late_without_absent(self) -> StageKey | None:
        """The first part that a live rank is late in, none ended and absent ranks may take part in.

        None: there is none.
        """
        late = {
            position.inside
            for position in self._role.positions.values()
            if position.process == LIVE and position.inside is not None
            if self._is_over(position, self._limit(position.inside, NOT_ENDED))
        }
        held_up = [key for key in late if not self._of(key)[1] and self._awaits_absent(key)]
        return min(held_up, key=lambda key: self._role.timings[key].first, default=None)

    def _awaits_absent(self, key: StageKey) -> bool:
        """Return whether ranks that never reported may take part: all others of the role do."""
        known = self._awaiting_absent.get(key)
        if known is None:
            known = self._awaiting_absent[key] = all(
                self._takes_part(rank, key)
                for rank, position in self._role.positions.items()
                if position.process != UNHEARD
            )
        return known

    def _awaited(self, rank: int, position: RankPosition) -> tuple[float, StageKey] | None:
        """Return the earliest part that other ranks began after this rank's last one."""
        awaited = None
        for first, key in self._newest_first:
            if first <= position.frontier:
                break
            if self._takes_part(rank, key):
                awaited = (first, key)
        return awaited

    def _limit(self, key: StageKey, status: str) -> Limit:
        known = self._limits.get((key, status))
        if known is not None:
            return known
        earlier = self._role.history(key.stage)
        timing = self._role.timings[key]
        if status == NOT_BEGUN:
            found = self._rules.after(earlier.latest, timing.last - timing.first)
        else:
            alike = [
                other.longest
                for where, other in self._role.timings.items()
                if (where.step, where.stage) == key[:2] and other.longest is not None
            ]
            found = self._rules.after(earlier.longest, max(alike, default=None))
        self._limits[key, status] = found
        return found

    def _is_over(self, position: RankPosition, limit: Limit) -> bool:
        return position.last_event is not None and self._now - position.last_event > limit.seconds

    def _is_everyone_inside(self, key: StageKey, limit: Limit) -> bool:
        """Return whether all expected ranks are inside, and none for longer than usual.

        Without a history the usual time is unknown.
        """
        known = self._all_inside.get(key)
        if known is None:
            known = self._all_inside[key] = limit.steps > 0 and all(
                self._is_over(position, limit)
                if position.inside == key
                else position.frontier > self._role.timings[key].first
                for rank, position in self._role.positions.items()
                if self._takes_part(rank, key)
                or (position.process == UNHEARD and self._awaits_absent(key))
            )
        return known

    def _waits_for_silent(self, key: StageKey) -> bool:
        """Return whether a rank of an unresponsive process has not ended a part."""
        known = self._waiting_for_silent.get(key)
        if known is None:
            known = self._waiting_for_silent[key] = any(
                self._takes_part(rank, key)
                and (position.inside == key or position.frontier < self._role.timings[key].first)
                for rank, position in self._silent
            )
        return known

    def _takes_part(self, rank: int, key: StageKey) -> bool:
        known = self._role.history(key.stage)
        if known.ranks is None or rank in known.ranks:
            return True
        return rank in known.ever and self._role.positions[rank].process in (SILENT, GONE)

    def _of(self, key: StageKey) -> tuple[Collection[int], Collection[int]]:
        found = self._members.get(key)
        if found is None:
            found = self._members[key] = (self._role.begun(key), self._role.ended(key))
        return found

    def _stuck(
        self,
        rank: int,
        key: StageKey,
        status: str,
        since: float,
        limit: Limit,
        *,
        whole_role: bool = False,
    ) -> Stuck:
        begun, ended = self._of(key)
        return Stuck(
            rank,
            key,
            status,
            self._role.positions[rank].process,
            since,
            max(self._now - since, 0.0),
            limit,
            len(begun),
            len(ended),
            whole_role,
        )


def history(
    steps: Iterable[Mapping[StageKey, StageTiming]],
    ranks: Iterable[Mapping[str, Collection[int]]],
) -> Mapping[str, StageHistory]:
    """Return the history of each stage of a role.

    Args:
        steps: the timings of the role in each earlier step.
        ranks: stage -> participants, of each closed step in order.
    """
    latest_ranks: dict[str, Collection[int]] = {}
    ever: dict[str, set[int]] = {}
    for participants in ranks:
        for stage, found in participants.items():
            latest_ranks[stage] = found
            ever.setdefault(stage, set()).update(found)
    longest: dict[str, list[float]] = {}
    latest: dict[str, list[float]] = {}
    for timings in steps:
        took: dict[str, float] = {}
        late: dict[str, float] = {}
        for key, timing in timings.items():
            if timing.longest is not None:
                took[key.stage] = max(took.get(key.stage, 0.0), timing.longest)
            if timing.last >= timing.first:
                late[key.stage] = max(late.get(key.stage, 0.0), timing.last - timing.first)
        for stage, seconds in took.items():
            longest.setdefault(stage, []).append(seconds)
        for stage, seconds in late.items():
            latest.setdefault(stage, []).append(seconds)
    return {
        stage: StageHistory(
            longest.get(stage, ()),
            latest.get(stage, ()),
            latest_ranks.get(stage),
            ever.get(stage, ()),
        )
        for stage in {*longest, *latest}
    }
