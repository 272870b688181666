"""Announces the dumps that need an operator table: complete and truncated ones.

An announcement is a row of `operators` with a mark, committed with its cause. The outcome carries
the mark of its announcement. If the two differ after a crash, the table is built again.
"""

from __future__ import annotations

from typing import Final, cast

from stagescope_service.core.catalogue_rows import loss_row
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.findings import finding, of_job
from stagescope_service.core.instructions import (
    AnnouncedDump,
    BuildOperatorTable,
    DumpKey,
    DumpReported,
    Instruction,
    Put,
)
from stagescope_wire.errors import StagescopeError
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import Event, Part, Work

ARMED: Final = "armed"
TRUNCATED: Final = "truncated"
BUILT: Final = ("complete", "empty", TRUNCATED)
"""States in which a dump lies on the disk: whole, without a call, or cut off."""

TABLE_WRITTEN, REFUSED, UNREACHABLE = "digested", "refused", "unreachable"
"""How an announced dump ends."""

_KEY: Final = ("incarnation", "work_key", "capture_id")
_PLACE: Final = (
    *_KEY, "attempt_id", "step", "policy_version", "stage",
    "role", "rank", "occurrence", "epoch", "minibatch", "microbatch", "node_id",
)  # fmt: skip


def follow(
    attempt: Attempt, process: Process, event: Event, work: Work, row: JsonObject, state: str | None
) -> list[Instruction]:
    """Apply the state that a DUMP event reports of its dump.

    Args:
        attempt, process: the dump's attempt and process.
        event: the event.
        work: the captured work.
        row: the row of `dumps`.
        state: the dump's state; None if a later event has set it already.
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


def again(row: JsonObject, run: str) -> BuildOperatorTable:
    """Return the instruction for an announcement that was not carried out before a restart."""
    key = DumpKey(row["incarnation"], row["work_key"], row["capture_id"])
    return BuildOperatorTable(key, row["node_id"], cast("AnnouncedDump", {**row, "run": run}))


def _announce(
    attempt: Attempt, row: JsonObject, mark: int, wall: float, truncated: bool
) -> list[Instruction]:
    announced = {
        **{name: row[name] for name in _PLACE},
        "dump_path": row["path"],
        "announced_wall": wall,
        "mark": mark,
        "truncated": truncated,
    }
    return [Put("operators", announced), again(announced, attempt.run)]


def outcome(job: AnnouncedDump, state: str, reason: str | None, **columns: object) -> Put:
    """Return the row of an announced dump's outcome."""
    key = {
        "incarnation": job["incarnation"],
        "work_key": job["work_key"],
        "capture_id": job["capture_id"],
    }
    state_columns = {"digested_mark": job["mark"], "state": state, "reason": reason}
    return Put("operators", {**key, **state_columns, **columns})


def refusal(job: AnnouncedDump, error: StagescopeError) -> list[Put]:
    """Return the row of a dump that cannot be read, and its finding."""
    advice = error.advice or "msprobe's own files stay where they are"
    found = finding(
        "unreadable_dump",
        f"the operators of {job['dump_path']} cannot be shown: {error.wrong}",
        **of_job(job, job["announced_wall"]),
        advice=advice,
        see=error.see,
        evidence={
            "capture_id": job["capture_id"],
            "part": str(Part.of_columns(job)),
            "expected": error.expected,
        },
    )
    return [outcome(job, REFUSED, str(error)[:2000]), found]
