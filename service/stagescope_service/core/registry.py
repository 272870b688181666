"""Runs, attempts and processes: assigns each process to the attempt of a run.

An unknown attempt key opens the next attempt; a known key always selects its own, however late.
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
from collections.abc import Iterable
from typing import Final

from stagescope_service.core.catalogue_rows import (
    attempt_row,
    process_row,
)
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.handshakes import (
    ReportedValues,
    adopt_handshake,
    columns_to_carry,
    fingerprint_column,
    forget_handshakes,
    read_hello,
)
from stagescope_service.core.instructions import Instruction, Put
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import Event, Sender

UNKEYED: Final = "unkeyed"
ROLLOUT: Final = "rollout"
"""The role whose processes may serve several starts, and whose steps overlap."""
LEADING: Final = "actor"
"""The role whose start is the training's start; other roles may restart beside it."""
RESTART_MARK: Final = "~"
"""Joins a key and a count where one key covers several starts."""

SILENT_SECONDS: Final = 30.0
"""Live processes poll more often than this, as long as the service keeps up."""
REFRESH: Final = 5.0
"""Seconds after which a process's row says again when it was last heard."""

OVERLAP_SECONDS: Final = 5.0
"""Seconds that the processes of one start may live on beside the next start's."""

GONE_REMEMBERED: Final = 100_000
"""Number of processes of earlier attempts whose attempt id stays in memory."""


def given_key(key: str) -> str:
    """Return a sender's attempt key without the restart mark, which only the service sets."""
    return key.replace(RESTART_MARK, "-")


def base_key(key: str) -> str:
    """Return the key that an attempt's processes gave, without the restart count."""
    return key.partition(RESTART_MARK)[0]


class Registry:
    """Attempts and processes by their identities; only the state machine changes it."""

    def __init__(self) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.processes: dict[str, Process] = {}
        self._by_key: dict[tuple[str, str], int] = {}
        self._newest: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        self._reports = ReportedValues()
        self._next_id = 1
        self.listening_since = 0.0
        """Since when polls are received, by the service's wall clock."""

    # --- looking up ---------------------------------------------------------------------
    def attempt_of(self, process: Process) -> Attempt:
        """Return the attempt of a process."""
        return self.attempts[process.attempt_id]

    def newest(self, run: str) -> Attempt | None:
        """Return the newest attempt of a run."""
        found = self._newest.get(run)
        return None if found is None else self.attempts[found]

    def is_known(self, run: str | None) -> bool:
        """Return whether a run (None: any) has an attempt."""
        return bool(self._newest) if run is None else run in self._newest

    def find(self, run: str, key: str | None) -> Attempt | None:
        """Return the newest attempt of a run, or of an attempt key in it."""
        return self.newest(run) if key is None else self._latest_of_key(run, given_key(key))

    def of_key(self, run: str | None, key: str) -> list[Attempt]:
        """Return the newest attempt of a key in each run, or in one."""
        runs = [name for name in self._newest if run in (None, name)]
        found = [self.find(name, key) for name in runs]
        return [attempt for attempt in found if attempt is not None]

    def adopt(self, attempt: Attempt) -> None:
        """Add an attempt that was opened or restored."""
        self.attempts[attempt.attempt_id] = attempt
        self._by_key[(attempt.run, attempt.key)] = attempt.attempt_id
        newest = self.newest(attempt.run)
        if newest is None or newest.number <= attempt.number:
            self._newest[attempt.run] = attempt.attempt_id
        self._next_id = max(self._next_id, attempt.attempt_id + 1)

    def reserve(self, next_id: int) -> None:
        """Use ids from `next_id` on for new attempts."""
        self._next_id = max(self._next_id, next_id)

    # --- opening ------------------------------------------------------------------------
    def open_attempt(
        self, run: str, key: str, wall: float, *, unkeyed: bool = False
    ) -> tuple[Attempt, list[Instruction]]:
        """Open the next attempt of a run."""
        newest = self.newest(run)
        attempt = Attempt(
            attempt_id=self._next_id,
            run=run,
            number=1 if newest is None else newest.number + 1,
            key=key,
            unkeyed=unkeyed,
            opened_wall=wall,
        )
        out: list[Instruction] = []
        if newest is None:
            out.append(Put("runs", {"run": run, "created_wall": wall}))
        self.adopt(attempt)
        return attempt, [*out, attempt_row(attempt)]

    def known_attempt(self, sender: Sender) -> Attempt | None:
        """Return the attempt in which a sender would go on that is not in memory."""
        before = self.attempts.get(self._gone.get(sender.incarnation, -1))
        return before or self.find(sender.run, sender.attempt_key)

    def attempt_for(self, sender: Sender, wall: float) -> tuple[Attempt, list[Instruction]]:
        """Return the attempt of a sender: the one it was in, else its key's, opened if new."""
        before = self._gone.get(sender.incarnation)
        if before is not None and before in self.attempts:
            return self.attempts[before], []
        if sender.attempt_key is None:
            newest = self.newest(sender.run)
            if newest is not None:
                return newest, []
            return self.open_attempt(sender.run, UNKEYED, wall, unkeyed=True)
        key = given_key(sender.attempt_key)
        latest = self._latest_of_key(sender.run, key)
        if latest is not None:
            return latest, []
        return self.open_attempt(sender.run, key, wall)

    def _latest_of_key(self, run: str, key: str) -> Attempt | None:
        found = self._by_key.get((run, key))
        count = 2
        while (later := self._by_key.get((run, f"{key}{RESTART_MARK}{count}"))) is not None:
            found, count = later, count + 1
        return None if found is None else self.attempts[found]

    # --- processes ----------------------------------------------------------------------
    def process_for(
        self,
        sender: Sender,
        event: Event,
        ours: float,
        lease_until: float,
        *,
        raw: bool,
        late: bool = False,
    ) -> tuple[Process, list[Instruction]]:
        """Return the process of a sender, created if new, with its lease renewed.

        A new process of an attempt that has finished is created as gone. `ours` is the time of the
        event on the service's clock.
        """
        process = self.processes.get(sender.incarnation)
        if process is None:
            return self._new_process(sender, event, ours, lease_until, raw=raw, late=late)
        if lease_until > process.lease_until:
            process.lease_until = lease_until
        clock = (sender.clock_offset, sender.clock_error)
        node_came = process.node_id is None and sender.node_id is not None
        if clock == process.clock and not node_came and event.wall < process.last_wall + REFRESH:
            return process, []
        process.clock, process.node_id = clock, process.node_id or sender.node_id
        process.last_wall = max(process.last_wall, event.wall)
        return process, [process_row(process, **_last_report_columns(process, ours))]

    def _new_process(
        self,
        sender: Sender,
        event: Event,
        ours: float,
        lease_until: float,
        *,
        raw: bool,
        late: bool,
    ) -> tuple[Process, list[Instruction]]:
        attempt, out = self.attempt_for(sender, ours)
        started = event.wall if sender.started is None else sender.started
        process = Process(
            incarnation=sender.incarnation,
            attempt_id=attempt.attempt_id,
            role=sender.role,
            rank=sender.rank,
            started=started + (ours - event.wall),
            raw=raw,
            unkeyed=sender.attempt_key is None,
            node_id=sender.node_id,
            lease_until=lease_until,
            last_wall=event.wall,
            clock=(sender.clock_offset, sender.clock_error),
            returned=sender.incarnation in self._gone,
            finished=late,
            left_wall=event.wall if late else None,
            payloads_through=None if attempt.has_past else -1,
        )
        self.processes[process.incarnation] = process
        attempt.add(process)
        if process.started < attempt.opened_wall:
            attempt.opened_wall = process.started
            out.append(attempt_row(attempt))
        # Its row from before a restart may have `lapsed_wall`.
        columns = {
            "first_wall": process.started,
            "lapsed_wall": None,
            **_last_report_columns(process, ours),
        }
        columns |= {"finished_wall": event.wall} if late else {}
        return process, [*out, process_row(process, **columns)]

    def adopt_handshake(
        self, process: Process, fields: JsonObject, wall: float
    ) -> tuple[bool, list[Instruction]]:
        """Apply the fields of a process's HELLO.

        Its handshake becomes its attempt's once the process is bound to that attempt.

        Returns whether the known size of its role changed, and the instructions.
        """
        attempt = self.attempt_of(process)
        columns = read_hello(process, fields, wall, self._reports)
        attempt.expected_roles |= process.expected_roles
        if self.may_leave(process):
            columns["hello"] |= columns_to_carry(attempt, process)
        out: list[Instruction] = [process_row(process, **columns), *self._adopt(attempt, process)]
        return attempt.believe(process), out

    def may_leave(self, process: Process) -> bool:
        """Return whether a process may still turn out to belong to a later attempt.

        Until it begins a step, its handshake is not applied to the attempt then.
        """
        if process.bound or process.raw:
            return False
        attempt = self.attempt_of(process)
        first = attempt.first_closed_wall
        came_later = first is not None and process.started > first
        return came_later or self._older(attempt, process) is not None

    def _adopt(self, attempt: Attempt, process: Process) -> list[Put]:
        """Apply a process's handshake to its attempt, where it is certainly of that attempt."""
        if self.may_leave(process):
            return []
        return adopt_handshake(attempt, process, is_newest=attempt is self.newest(attempt.run))

    def _adopt_again(self, attempt: Attempt) -> list[Put]:
        """Derive an attempt's fingerprint and resume step from its present processes."""
        forget_handshakes(attempt)
        out: list[Put] = []
        for process in [*attempt.processes.values()]:
            out += [row for row in self._adopt(attempt, process) if row.table == "runs"]
        return [*out, attempt_row(attempt, **fingerprint_column(attempt))]

    def bind(
        self, process: Process, step: int, ours: float
    ) -> tuple[Attempt | None, list[Instruction]]:
        """Bind a process to its attempt at the first step that it begins.

        A rank that restarts at a step which its attempt has closed begins a new attempt; the
        attempt that it left is returned, too. A process that existed when the step closed is only
        late: the others of its start went on in that attempt. `ours` is the time of that step's
        event on the service's clock.
        """
        attempt = self.attempt_of(process)
        was_open = self.may_leave(process)
        process.bound = True
        process.bound_wall = ours
        older = self._restarted(attempt, process, step)
        if older is None:
            if self._older(attempt, process) is not None:
                attempt.stayed = process.incarnation
            return None, [*(self._adopt(attempt, process) if was_open else ())]
        opened, out = self.open_restart(attempt, min(process.started, ours))
        # Processes of the same start that reported before any of them began a step move as well.
        moved = [
            each for each in attempt.processes.values()
            if each is process or self._came_with(each, process, older)
        ]  # fmt: skip
        attempt.remove(moved)
        for other in moved:
            other.attempt_id = opened.attempt_id
            opened.add(other)
            opened.opened_wall = min(opened.opened_wall, other.started)
            out.append(process_row(other))
        return attempt, [*out, *self._adopt_again(attempt), *self._adopt_again(opened)]

    def _restarted(self, attempt: Attempt, process: Process, step: int) -> Process | None:
        """Return the older incarnation that a process replaces in a new attempt, else None."""
        if process.raw or process.role == ROLLOUT:
            return None
        older = self._older(attempt, process)
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
        attempt = self.attempt_of(process)
        if process.bound or process.raw or process.role == ROLLOUT:
            return False
        older = self._predecessor(attempt, process)
        if older is None or not older.bound or self._has_double(attempt, process):
            return False
        if self._has_stayed(attempt, process, older):
            return False
        left = self._left(process, older)
        if self._restarted(attempt, process, step) is not None:
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
        attempt = self.attempt_of(process)
        older = self._predecessor(attempt, process)
        if older is None:
            return False
        is_restarted = self._restarted(attempt, process, step) is not None
        before = [older] if is_restarted else [older, *self._left(process, older)]
        return any(each.live and each.last_poll > 0.0 for each in before)

    def _predecessor(self, attempt: Attempt, process: Process) -> Process | None:
        """Return this rank's process of an earlier start, else rank 0 of one of another size."""
        return self._older(attempt, process) or self._of_other_size(attempt, process)

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
            for each in self.attempt_of(process).processes.values()
            if not each.raw and each.role != ROLLOUT and (each.role, each.rank) != here
            if each.role != process.role or each.rank < size
        ]

    def _next(self, each: Process, process: Process, older: Process) -> bool:
        """Return whether the rank of `each` has a process of the start of `process`."""
        ranks = self.attempt_of(process).by_rank[(each.role, each.rank)]
        return any(
            other.age >= each.age and self._came_with(other, process, older) for other in ranks
        )

    def stays_without_key(self, process: Process) -> bool:
        """Return whether a rank restarted without a key that tells if the whole training did."""
        return process.unkeyed and self._older(self.attempt_of(process), process) is not None

    def open_restart(self, attempt: Attempt, wall: float) -> tuple[Attempt, list[Instruction]]:
        """Open the attempt of a restart under the key of `attempt`."""
        base, count = base_key(attempt.key), 2
        while (attempt.run, f"{base}{RESTART_MARK}{count}") in self._by_key:
            count += 1
        key = f"{base}{RESTART_MARK}{count}"
        return self.open_attempt(attempt.run, key, wall, unkeyed=attempt.unkeyed)

    def _older(self, attempt: Attempt, process: Process) -> Process | None:
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

    def _came_with(self, other: Process, process: Process, older: Process) -> bool:
        """Return whether `other` belongs to the start of `process`, which follows `older`'s."""
        if other.bound or other.raw or other.worked or not other.live:
            return False
        if _began_after(other, older):
            return True
        # The two starts may overlap.
        attempt = self.attempt_of(process)
        return _is_nearer(other, process, older) or self._older(attempt, other) is not None

    def forget(self, attempt: Attempt, now: float) -> None:
        """Remove from memory an attempt that is over and not its run's newest."""
        if not attempt.over or attempt is self.newest(attempt.run) or not attempt.processes:
            return
        held = any(each.payloads or each.lease_until >= now for each in attempt.processes.values())
        if held or attempt.pending:
            return
        for incarnation in attempt.processes:
            del self.processes[incarnation]
            self._gone[incarnation] = attempt.attempt_id
        while len(self._gone) > GONE_REMEMBERED:
            del self._gone[next(iter(self._gone))]
        attempt.has_past = True
        attempt.processes.clear()
        attempt.by_rank.clear()
        attempt.stayed = None
        attempt.forget_steps()


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


def _last_report_columns(process: Process, ours: float) -> dict[str, Json]:
    """Return the columns of a process's last report and clock; `ours`: on the service's clock.

    If the sender's offset is unknown, the stored time is at most the time of arrival. In memory the
    time stays on the sender's clock, because it is compared with `started`.
    """
    offset, error = process.clock
    last = process.last_wall if offset is not None else min(process.last_wall, ours)
    return {"last_wall": last, "clock_offset": offset, "clock_error": error}
