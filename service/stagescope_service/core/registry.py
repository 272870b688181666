"""Runs, attempts and processes: assigns each process to the attempt of a run.

An unknown attempt key opens the next attempt; a known key always selects its own, however late.
A restart under a known key also opens one; see `restarts`.
"""

from __future__ import annotations

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
from stagescope_service.core.restarts import Restarts
from stagescope_wire.names import display_name as as_display_name
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import Event, Sender

UNKEYED: Final = "unkeyed"
RESTART_MARK: Final = "~"
"""Joins a key and a count where one key covers several starts."""

REFRESH: Final = 5.0
"""Seconds after which a process's row says again when it was last heard."""


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
        self.restarts = Restarts(self.attempts)

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

    def remove(self, run: str) -> list[int]:
        """Forget a run; return the ids of its attempts, which no other attempt ever gets."""
        ids = [each.attempt_id for each in self.attempts.values() if each.run == run]
        for attempt_id in ids:
            attempt = self.attempts.pop(attempt_id)
            del self._by_key[(run, attempt.key)]
            for incarnation in attempt.processes:
                del self.processes[incarnation]
        self._newest.pop(run, None)
        self._gone = {name: of for name, of in self._gone.items() if of in self.attempts}
        return ids

    @property
    def last_id(self) -> int:
        """Return the highest id of an attempt so far."""
        return self._next_id - 1

    def reserve(self, next_id: int) -> None:
        """Use ids from `next_id` on for new attempts."""
        self._next_id = max(self._next_id, next_id)

    # --- opening ------------------------------------------------------------------------
    def open_attempt(
        self,
        run: str,
        key: str,
        wall: float,
        *,
        unkeyed: bool = False,
        display_name: str | None = None,
    ) -> tuple[Attempt, list[Instruction]]:
        """Open the next attempt of a run; its first one stores the run, with `display_name`."""
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
            shown = None if display_name is None else as_display_name(display_name)
            out.append(Put("runs", {"run": run, "created_wall": wall, "display_name": shown}))
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
            return self.open_attempt(
                sender.run, UNKEYED, wall, unkeyed=True, display_name=sender.display_name
            )
        key = given_key(sender.attempt_key)
        latest = self._latest_of_key(sender.run, key)
        if latest is not None:
            return latest, []
        return self.open_attempt(sender.run, key, wall, display_name=sender.display_name)

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
        raw: bool,
        late: bool,
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
        if sender is process.sender and event.wall < process.last_wall + REFRESH:
            return process, []
        process.sender = sender
        clock = (sender.clock_offset, sender.clock_error)
        node_came = process.node_id is None and sender.node_id is not None
        if clock == process.clock and not node_came and event.wall < process.last_wall + REFRESH:
            return process, []
        process.clock, process.node_id = clock, process.node_id or sender.node_id
        process.last_wall = max(process.last_wall, event.wall)
        row = {"incarnation": process.incarnation, **_last_report_columns(process, ours)}
        if node_came:
            row["node_id"] = process.node_id
        return process, [Put("processes", row)]

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
        return came_later or self.restarts.older_of(attempt, process) is not None

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
        older = self.restarts.restarted(attempt, process, step)
        if older is None:
            if self.restarts.older_of(attempt, process) is not None:
                attempt.stayed = process.incarnation
            return None, [*(self._adopt(attempt, process) if was_open else ())]
        opened, out = self.open_restart(attempt, min(process.started, ours))
        # Processes of the same start that reported before any of them began a step move as well.
        moved = [
            each for each in attempt.processes.values()
            if each is process or self.restarts.came_with(each, process, older)
        ]  # fmt: skip
        attempt.remove(moved)
        for other in moved:
            other.attempt_id = opened.attempt_id
            opened.add(other)
            opened.opened_wall = min(opened.opened_wall, other.started)
            out.append(process_row(other))
        return attempt, [*out, *self._adopt_again(attempt), *self._adopt_again(opened)]

    def open_restart(self, attempt: Attempt, wall: float) -> tuple[Attempt, list[Instruction]]:
        """Open the attempt of a restart under the key of `attempt`."""
        base, count = base_key(attempt.key), 2
        while (attempt.run, f"{base}{RESTART_MARK}{count}") in self._by_key:
            count += 1
        key = f"{base}{RESTART_MARK}{count}"
        return self.open_attempt(attempt.run, key, wall, unkeyed=attempt.unkeyed)

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


def _last_report_columns(process: Process, ours: float) -> dict[str, Json]:
    """Return the columns of a process's last report and clock; `ours`: on the service's clock.

    If the sender's offset is unknown, the stored time is at most the time of arrival. In memory the
    time stays on the sender's clock, because it is compared with `started`.
    """
    offset, error = process.clock
    last = process.last_wall if offset is not None else min(process.last_wall, ours)
    return {"last_wall": last, "clock_offset": offset, "clock_error": error}
