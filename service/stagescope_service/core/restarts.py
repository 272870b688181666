"""Restarts under one attempt key: whether a process begins a new attempt.

Processes of several starts may share a key: ranks recreated under one driver keep their job, and a
loop in a shell script keeps its environment. So a new incarnation of a trainer's rank also opens an
attempt if

* it begins at or before the last closed step,
* its launcher started it again, or with another number of ranks, or
* every rank that is live has a new incarnation that has not begun a step yet.

A rank that is replaced alone stays in its attempt. A rank also stays if others go on beside it: its
older incarnation, or another role. It is better to miss a restart than to invent one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Final

from stagescope_service.core.entities import Attempt, Process

ROLLOUT: Final = "rollout"
"""The role whose processes may serve several starts, and whose steps overlap."""
LEADING: Final = "actor"
"""The role whose start is the training's start; other roles may restart beside it."""

SILENT_SECONDS: Final = 30.0
"""Live processes poll more often than this, as long as the service keeps up."""
OVERLAP_SECONDS: Final = 5.0
"""Seconds that the processes of one start may live on beside the next start's."""


class Restarts:
    """Compares a process with those of earlier starts in its attempt.

    Args:
        attempts: by id; the registry changes them.
    """

    def __init__(self, attempts: Mapping[int, Attempt]) -> None:
        self._attempts = attempts
        self.listening_since = 0.0
        """Since when polls are received, by the service's wall clock."""

    def restarted(self, attempt: Attempt, process: Process, step: int) -> Process | None:
        """Return the older incarnation that a process replaces in a new attempt, else None."""
        if process.raw or process.role == ROLLOUT:
            return None
        older = self.older_of(attempt, process)
        if self._has_double(attempt, process):
            return None
        if process.unkeyed and (follows := self._follows(attempt, process, older)) is not None:
            return follows
        before = self._before(attempt, process, older)
        if before is not None and self._is_new_start(attempt, process, before):
            return before
        closed = attempt.last_closed_step
        if closed is None or step > closed or older is None:
            return None
        known = attempt.steps.get(step)
        if known is not None and process.started < (known.closed_wall or process.started):
            return None
        return None if _other_role_goes_on(self._left(process, older), process) else older

    def may_be_of_new_start(self, process: Process, step: int) -> bool:
        """Return whether later reports may show if a process begins an attempt.

        They may for a rank that started again while others seem to be live: those may be silent
        because they were killed as well. The HELLO of their next process shows that they started
        again; an event of theirs shows that they go on.
        """
        attempt = self._attempts[process.attempt_id]
        if process.bound or process.raw or process.role == ROLLOUT:
            return False
        older = self._predecessor(attempt, process)
        if older is None or not older.bound or self._has_double(attempt, process):
            return False
        if self._has_stayed(attempt, process, older):
            return False
        left = self._left(process, older)
        if self.restarted(attempt, process, step) is not None:
            is_overlapping = older.live and older.last_event > process.started
            return is_overlapping or any(each.live for each in left if each.role != process.role)
        return not any(
            _goes_on(each, process) or (each.bound and _is_nearer(each, process, older))
            for each in left
        )

    def will_show(self, process: Process, step: int) -> bool:
        """Return whether time shows which start a process belongs to that may begin an attempt.

        A live process of the start before polls: its next poll shows that it goes on, or the end of
        its lease that it does not. If a process never polled (a spool), its silence shows nothing.
        """
        attempt = self._attempts[process.attempt_id]
        older = self._predecessor(attempt, process)
        if older is None:
            return False
        is_restarted = self.restarted(attempt, process, step) is not None
        before = [older] if is_restarted else [older, *self._left(process, older)]
        return any(each.live and each.last_poll > 0.0 for each in before)

    def _predecessor(self, attempt: Attempt, process: Process) -> Process | None:
        """Return this rank's process of an earlier start, else rank 0 of one of another size."""
        return self.older_of(attempt, process) or self._of_other_size(attempt, process)

    def may_have_other_size(self, attempt: Attempt, role: str, rank: int) -> bool:
        """Return whether a new rank is one that the start before did not have."""
        if attempt.by_rank.get((role, rank)):
            return False
        first = attempt.by_rank.get((role, 0), ())
        sizes = [each.world_size for each in first if each.bound]
        return any(size is not None and rank >= size for size in sizes)

    def _has_double(self, attempt: Attempt, process: Process) -> bool:
        """Return whether another process of the same role and rank lives beside this one.

        Both have the default rank, because `init` was given none. The processes of two starts
        overlap for seconds at most, and the first had begun its work before the second existed.
        """
        others = attempt.by_rank.get((process.role, process.rank), ())
        return any(
            process.started <= each.bound_wall
            or max(each.last_event, each.last_poll) > process.started + OVERLAP_SECONDS
            for each in others
            if each.bound and not each.raw and each is not process
        )

    def _before(self, attempt: Attempt, process: Process, older: Process | None) -> Process | None:
        """Return a process of the previous start in this attempt, if there was one."""
        if older is not None:
            return older if older.bound or attempt.first_step is not None else None
        first = self._of_other_size(attempt, process)
        # Where rank 0 goes on, ranks join it: an elastic training has other ranks without a start.
        return first if first is not None and self._is_over(first, process, first) else None

    def _of_other_size(self, attempt: Attempt, process: Process) -> Process | None:
        """Return rank 0 of an earlier start that had another number of ranks."""
        first = attempt.by_rank.get((process.role, 0), ())
        others = [each for each in first if each.bound and _began_after(process, each)]
        known = [each for each in others if each.world_size not in (None, process.world_size)]
        if process.world_size is None or not known:
            return None
        return max(known, key=lambda each: each.age)

    def _is_new_start(self, attempt: Attempt, process: Process, older: Process) -> bool:
        """Return whether all ranks began again after the start of `older`, not `process` alone."""
        if self._has_stayed(attempt, process, older):
            return False
        left = self._left(process, older)
        if any(each.bound and _is_nearer(each, process, older) for each in left):
            return False  # where the first of this start stayed, the others stay
        if _other_role_goes_on(left, process):
            return False
        if None not in (process.launch, older.launch) and process.launch != older.launch:
            return True
        sizes = (process.world_size, older.world_size)
        if None not in sizes and sizes[0] != sizes[1]:
            first = max(
                (each for each in left if (each.role, each.rank) == (process.role, 0)),
                key=lambda each: each.age,
                default=None,
            )
            if first is None or not first.live:
                return True
        is_size_known = process.unkeyed or process.is_single or process.world_size is not None
        return is_size_known and not any(each.live for each in left)

    def _has_stayed(self, attempt: Attempt, process: Process, older: Process) -> bool:
        """Return whether the last rank that stayed is of the start of `process`: then it stays."""
        stayed = None if attempt.stayed is None else attempt.processes.get(attempt.stayed)
        if stayed is None or (stayed.role, stayed.rank) == (process.role, process.rank):
            return False
        return _is_nearer(stayed, process, older) and not self._next(stayed, process, older)

    def _is_over(self, each: Process, process: Process, older: Process) -> bool:
        return not each.live or self._next(each, process, older)

    def _left(self, process: Process, older: Process) -> list[Process]:
        """Return the processes of other ranks that have none of the start of `process` yet."""
        return [each for each in self._others(process) if not self._next(each, process, older)]

    def _others(self, process: Process) -> list[Process]:
        """Return the processes of other ranks that a start of all of them would replace.

        Rollouts are left out (they may serve several starts), and ranks that the start of
        `process` does not have.
        """
        here = (process.role, process.rank)
        size = math.inf if process.world_size is None else process.world_size
        return [
            each
            for each in self._attempts[process.attempt_id].processes.values()
            if not each.raw and each.role != ROLLOUT and (each.role, each.rank) != here
            if each.role != process.role or each.rank < size
        ]

    def _next(self, each: Process, process: Process, older: Process) -> bool:
        """Return whether the rank of `each` has a process of the start of `process`."""
        ranks = self._attempts[process.attempt_id].by_rank[(each.role, each.rank)]
        return any(
            other.age >= each.age and self.came_with(other, process, older) for other in ranks
        )

    def stays_without_key(self, process: Process) -> bool:
        """Return whether a rank restarted without a key that tells if the whole training did."""
        return (
            process.unkeyed
            and self.older_of(self._attempts[process.attempt_id], process) is not None
        )

    def older_of(self, attempt: Attempt, process: Process) -> Process | None:
        """Return the latest earlier incarnation of a process's rank."""
        others = attempt.by_rank.get((process.role, process.rank), ())
        older = [each for each in others if not each.raw and each.age < process.age]
        return max(older, key=lambda each: each.age, default=None)

    def _follows(self, attempt: Attempt, process: Process, older: Process | None) -> Process | None:
        """Return the incarnation that a process without a key replaces if its attempt is empty.

        No key distinguishes such starts. A process of the attempt counts as gone if it finished,
        lapsed, has not been heard for `SILENT_SECONDS`, or has the rank of this one. This one's
        rank may be missing in the earlier start: it crashed before it reported.
        """
        now = process.last_contact
        # Also those of its own start that said hello after it and began before: they stayed. The
        # one that stayed last is checked first, so that not every rank checks all.
        stayed = None if attempt.stayed is None else attempt.processes.get(attempt.stayed)
        first = () if stayed is None else (stayed,)
        if any(
            (each.role, each.rank) != (process.role, process.rank)
            and _is_recent(each, now - SILENT_SECONDS, self.listening_since)
            for each in itertools.chain(first, attempt.processes.values())
        ):
            return None
        # Ranks of the start before that had not begun a step either.
        if older is not None and any(
            not each.bound
            and each.live
            and each.started <= older.bound_wall
            and now - max(each.last_contact, self.listening_since) < SILENT_SECONDS
            and not self._next(each, process, older)
            for each in self._others(process)
        ):
            return None
        bound = [
            each for each in attempt.processes.values()
            if each.bound and not each.raw and each is not process
        ]  # fmt: skip
        # A process that this one lived beside is of its own start: in a short training one rank may
        # report its end before the first event of another arrives.
        beside = (each for each in bound if process.started <= _last_sign(each))
        if any(older is None or each.started > _last_sign(older) for each in beside):
            return None
        others = [each for each in bound if each.age < process.age]
        of_role = [each for each in others if each.role == process.role]
        if older is not None and (older.bound or of_role):
            return older
        return max(of_role, key=lambda each: each.last_contact, default=None)

    def came_with(self, other: Process, process: Process, older: Process) -> bool:
        """Return whether `other` belongs to the start of `process`, which follows `older`'s."""
        if other.bound or other.raw or other.worked or not other.live:
            return False
        if _began_after(other, older):
            return True
        # The two starts may overlap.
        attempt = self._attempts[process.attempt_id]
        return _is_nearer(other, process, older) or self.older_of(attempt, other) is not None


def _began_after(process: Process, older: Process) -> bool:
    """Return whether a process started after the last event of another."""
    # `last_wall` is only refreshed now and then.
    return process.started > max(older.last_event, older.last_wall + (older.clock[0] or 0.0))


def _goes_on(each: Process, process: Process) -> bool:
    """Return whether `each`, of an earlier start, certainly lives on beside `process`."""
    # The processes of two starts overlap for seconds.
    return max(each.last_event, each.last_poll - OVERLAP_SECONDS) > process.started


def _is_recent(process: Process, since: float, listening_since: float) -> bool:
    """Return whether a process that did work is live and was heard lately."""
    is_at_work = process.bound and process.live and not process.raw
    return is_at_work and max(process.last_contact, listening_since) > since


def _is_nearer(other: Process, process: Process, older: Process) -> bool:
    """Return whether `other` started nearer to `process` than to `older`."""
    return other.started - older.started > abs(process.started - other.started)


def _other_role_goes_on(left: Iterable[Process], process: Process) -> bool:
    """Return whether a process of another role certainly goes on beside the start of `process`.

    A start tells something about its own role only. A role that helps the leading one may start
    again at any time, so the silence of other roles proves nothing.
    """
    others = [each for each in left if each.live and each.role != process.role]
    return any(process.role != LEADING or each.last_event > process.started for each in others)


def _last_sign(process: Process) -> float:
    """Return until when a process certainly lived; Unix seconds of the service's clock."""
    left = process.left_wall if process.finished else None
    # Its FINISH arrives while it waits for the answer: later than it was made.
    return max(process.last_contact, 0.0 if left is None else left + (process.clock[0] or 0.0))
