"""Runs, attempts and processes: who speaks, and to which start of which training it belongs.

An unknown attempt key opens the next attempt, a known one always goes to its own, however late. A
trainer's new incarnation of a rank that begins at or before the last closed step opens an attempt
too: ranks that are recreated under one driver keep their job, and so their key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stagescope.schema import LAYOUT_COLUMNS, Event, Sender
from stagescope_service.engine.entities import Attempt, Process
from stagescope_service.engine.instructions import Instruction, Put
from stagescope_service.engine.rows import attempt_row, process_row, sender_columns

UNKEYED: Final = "unkeyed"
RESTART_MARK: Final = "~"
"""Joins a key and a count where one key covers several starts."""


class Registry:
    """Attempts and processes by their identities; mutated by the state machine alone."""

    def __init__(self) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.processes: dict[str, Process] = {}
        self._by_key: dict[tuple[str, str], int] = {}
        self._newest: dict[str, int] = {}
        self._next_id = 1

    # --- looking up ---------------------------------------------------------------------
    def attempt_of(self, process: Process) -> Attempt:
        """Return the attempt that a process belongs to."""
        return self.attempts[process.attempt_id]

    def newest(self, run: str) -> Attempt | None:
        """Return the newest attempt of a run."""
        found = self._newest.get(run)
        return None if found is None else self.attempts[found]

    def adopt(self, attempt: Attempt) -> None:
        """Take in an attempt that was opened or restored."""
        self.attempts[attempt.attempt_id] = attempt
        self._by_key[(attempt.run, attempt.key)] = attempt.attempt_id
        newest = self.newest(attempt.run)
        if newest is None or newest.number <= attempt.number:
            self._newest[attempt.run] = attempt.attempt_id
        self._next_id = max(self._next_id, attempt.attempt_id + 1)

    def reserve(self, next_id: int) -> None:
        """Never give an attempt an id below `next_id`."""
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

    def attempt_for(self, sender: Sender, wall: float) -> tuple[Attempt, list[Instruction]]:
        """Return the attempt of a sender's key, opened if need be."""
        if sender.attempt_key is None:
            newest = self.newest(sender.run)
            if newest is not None:
                return newest, []
            return self.open_attempt(sender.run, UNKEYED, wall, unkeyed=True)
        latest = self._latest_of_key(sender.run, sender.attempt_key)
        if latest is not None:
            return latest, []
        return self.open_attempt(sender.run, sender.attempt_key, wall)

    def _latest_of_key(self, run: str, key: str) -> Attempt | None:
        found = self._by_key.get((run, key))
        count = 2
        while (later := self._by_key.get((run, f"{key}{RESTART_MARK}{count}"))) is not None:
            found, count = later, count + 1
        return None if found is None else self.attempts[found]

    # --- processes ----------------------------------------------------------------------
    def process_for(
        self, sender: Sender, event: Event, lease_until: float, *, raw: bool
    ) -> tuple[Process, list[Instruction]]:
        """Return the process of a sender, made if it is new, with its lease renewed."""
        process = self.processes.get(sender.incarnation)
        if process is not None:
            process.lease_until = max(process.lease_until, lease_until)
            process.node_id = process.node_id or sender.node_id
            return process, []
        attempt, out = self.attempt_for(sender, event.wall)
        process = Process(
            incarnation=sender.incarnation,
            attempt_id=attempt.attempt_id,
            role=sender.role,
            rank=sender.rank,
            started=event.wall if sender.started is None else sender.started,
            raw=raw,
            node_id=sender.node_id,
            lease_until=lease_until,
        )
        self.processes[process.incarnation] = process
        attempt.processes[process.incarnation] = process
        if attempt.ended_wall is not None:
            # Somebody still speaks for it: it had only been quiet.
            attempt.ended_wall = None
            out.append(attempt_row(attempt, end_reason=None))
        row = process_row(process, first_wall=process.started, **sender_columns(sender, event))
        return process, [*out, row]

    def introduce(self, process: Process, fields: Mapping[str, Any]) -> list[Instruction]:
        """Take in what a process says of itself (the fields of a HELLO)."""
        process.world_size = _positive(fields.get("world_size"), process.world_size)
        data_rank = fields.get("data_rank")
        process.data_rank = data_rank if isinstance(data_rank, int) else process.data_rank
        layout = fields.get("layout")
        if isinstance(layout, Mapping):
            process.layout.update({str(name): value for name, value in layout.items()})
        attempt = self.attempt_of(process)
        out: list[Instruction] = [
            process_row(
                process,
                pid=fields.get("pid") if isinstance(fields.get("pid"), int) else None,
                settings=fields.get("settings"),
                hello={
                    name: value
                    for name, value in fields.items()
                    if name not in ("layout", "settings", "fingerprint")
                }
                | {"layout": _unknown_layout(process.layout)},
            )
        ]
        columns: dict[str, Any] = {}
        resumed = fields.get("resumed_from_step")
        if isinstance(resumed, int):
            attempt.resumed_from_step = resumed
            columns["resumed_from_step"] = resumed
        fingerprint = fields.get("fingerprint")
        if isinstance(fingerprint, Mapping) and not attempt.has_fingerprint:
            attempt.has_fingerprint = True
            columns["fingerprint"] = dict(fingerprint)
        if columns:
            out.append(attempt_row(attempt, **columns))
        if isinstance(fields.get("settings"), Mapping):
            out.append(
                Put(
                    "runs",
                    {"run": attempt.run, "settings": dict(fields["settings"])},
                )
            )
        return out

    def bind(self, process: Process, step: int, wall: float) -> list[Instruction]:
        """Settle a process's attempt at the first step that it begins.

        A rank that starts again at a step which its attempt has closed is a new start.
        """
        process.bound = True
        attempt = self.attempt_of(process)
        closed = attempt.last_closed_step
        again = any(
            other is not process and (other.role, other.rank) == (process.role, process.rank)
            for other in attempt.processes.values()
        )
        if process.raw or process.role == "rollout" or closed is None or step > closed or not again:
            return []
        base, _, _ = attempt.key.partition(RESTART_MARK)
        count = 2
        while (attempt.run, f"{base}{RESTART_MARK}{count}") in self._by_key:
            count += 1
        opened, out = self.open_attempt(attempt.run, f"{base}{RESTART_MARK}{count}", wall)
        # Those of the same start that said hello before anyone began a step come along.
        for other in [*attempt.processes.values()]:
            if other is process or (not other.bound and not other.raw and other.live):
                del attempt.processes[other.incarnation]
                other.attempt_id = opened.attempt_id
                opened.processes[other.incarnation] = other
                out.append(process_row(other))
        return out


def _positive(value: object, default: int | None) -> int | None:
    return value if isinstance(value, int) and value > 0 else default


def _unknown_layout(layout: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in layout.items() if name not in LAYOUT_COLUMNS}
