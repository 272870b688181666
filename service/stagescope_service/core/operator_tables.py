"""Announces the dumps from which operator tables are built: complete and truncated ones.

An announcement is a row of `operators` with a mark, committed with its cause; the outcome carries
the mark of its announcement. Where the two differ after a crash, the table is built again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stagescope.wire.errors import StagescopeError
from stagescope.wire.schema import PART_FIELDS, Event, Work
from stagescope_service.core.catalogue_rows import loss_row
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.findings import finding
from stagescope_service.core.instructions import (
    BuildOperatorTable,
    DumpKey,
    DumpReported,
    Instruction,
    Put,
)

ARMED: Final = "armed"
TRUNCATED: Final = "truncated"
BUILT: Final = ("complete", TRUNCATED)
"""States in which a dump lies on the disk, whole or as far as it came."""

TABLE_WRITTEN, REFUSED, UNREACHABLE = "digested", "refused", "unreachable"
"""How an announced dump ends."""

_KEY: Final = ("incarnation", "work_key", "capture_id")
_PLACE: Final = (
    *_KEY, "attempt_id", "step", "policy_version", "stage",
    "role", "rank", "occurrence", "epoch", "minibatch", "microbatch", "node_id",
)  # fmt: skip

Row = Mapping[str, Any]


def follow(
    attempt: Attempt, process: Process, event: Event, work: Work, row: Row, state: str | None
) -> list[Instruction]:
    """Apply the state that a DUMP event reports of its dump.

    Args:
        attempt, process: of the dump.
        event: the event.
        work: the captured work.
        row: the row of `dumps`.
        state: of the dump; None if a later event has set it already.
    """
    if state is None:
        return []
    key = (work.key, row["capture_id"])
    _, before = process.armed.pop(key, (work, {}))
    if state == ARMED:
        process.armed[key] = (work, {**row, "mark": event.seq})
        return []
    path = row.get("path") or before.get("path")
    if state not in BUILT or path is None:
        return []
    return _announce(attempt, {**row, "path": path}, event.seq, event.wall, state == TRUNCATED)


def cut_off(attempt: Attempt, process: Process, wall: float, why: str) -> list[Instruction]:
    """End the unfinished dumps of a process: what was written of them is read."""
    out: list[Instruction] = []
    for work, row in process.armed.values():
        reason = f"dump {TRUNCATED}: {why} inside the capture"
        key = {name: row[name] for name in _KEY}
        out.append(Put("dumps", {**key, "state": TRUNCATED}))
        out.append(DumpReported({**row, "state": TRUNCATED}))
        columns = {"identity": row["capture_id"], "count": 1, "wall": wall}
        out.append(loss_row(attempt, process, work, "dump", reason, **columns))
        if row.get("path") is not None:
            out += _announce(attempt, row, row["mark"], wall, truncated=True)
    process.armed.clear()
    return out


def again(row: Row, run: str) -> BuildOperatorTable:
    """Return the instruction for an announcement that was not carried out before a restart."""
    key = DumpKey(row["incarnation"], row["work_key"], row["capture_id"])
    return BuildOperatorTable(key, row["node_id"], {**row, "run": run})


def _announce(
    attempt: Attempt, row: Row, mark: int, wall: float, truncated: bool
) -> list[Instruction]:
    announced = {
        **{name: row[name] for name in _PLACE},
        "dump_path": row["path"],
        "announced_wall": wall,
        "mark": mark,
        "truncated": truncated,
    }
    return [Put("operators", announced), again(announced, attempt.run)]


def outcome(job: Row, state: str, reason: str | None, **columns: Any) -> Put:
    """Return the row of an announced dump's outcome."""
    key = {name: job[name] for name in _KEY}
    state_columns = {"digested_mark": job["mark"], "state": state, "reason": reason}
    return Put("operators", {**key, **state_columns, **columns})


def refusal(job: Row, error: StagescopeError) -> list[Put]:
    """Return the row of a dump that cannot be read, and its finding."""
    advice = error.advice or "msprobe's own files stay where they are"
    found = finding(
        "unreadable_dump",
        f"the operators of {job['dump_path']} cannot be shown: {error.wrong}",
        **about(job),
        advice=advice,
        evidence={
            "capture_id": job["capture_id"],
            "part": part_of(job),
            "expected": error.expected,
        },
    )
    return [outcome(job, REFUSED, str(error)[:2000]), found]


def about(job: Row) -> dict[str, Any]:
    """Return the fields of a finding that locate an announced dump."""
    names = ("run", "attempt_id", "step", "stage", "role", "rank")
    return {**{name: job[name] for name in names}, "wall": job["announced_wall"]}


def part_of(job: Row) -> str:
    """Return occurrence.epoch.minibatch.microbatch."""
    return ".".join(str(job[name] or 0) for name in PART_FIELDS)
