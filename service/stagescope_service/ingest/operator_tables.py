"""Builds the operator table of an announced dump.

No Ray in here. The table is written next to the dump, in its own directory. A problem of the dump
itself becomes a row with the reason and a finding; only transient problems (a full disk) raise an
error. Idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from stagescope_service.compare.operators.non_finite import (
    NonFiniteRow,
    RankNonFinite,
    non_finite_of_rank,
)
from stagescope_service.core.findings import finding, of_job
from stagescope_service.core.instructions import AnnouncedDump
from stagescope_service.core.operators import TABLE_WRITTEN, UNREACHABLE, outcome, refusal
from stagescope_service.dumps.msprobe.json_window import STRUCTURE
from stagescope_service.dumps.msprobe.operator_table import OperatorSummary, write_operator_table
from stagescope_service.dumps.records import IMPORTED_CAPTURE
from stagescope_service.store.artifacts import confine, file_checksum
from stagescope_service.store.contract import Put
from stagescope_wire.errors import NotFound, StagescopeError, StoreError
from stagescope_wire.links import Link
from stagescope_wire.schema import Part

TABLE: Final = "operators.parquet"
_READ: Final = ("dump.json", "debug.json", "stack.json", "construct.json", "DONE.json")


def build_operator_table(job: AnnouncedDump, roots: Iterable[Path], node_id: str) -> list[Put]:
    """Write the operator table of a dump; return its row and findings.

    Args:
        job: the announcement.
        roots: directories that may contain dumps.
        node_id: the node on which this runs.

    Raises:
        StoreError: the disk refused the file; a retry may succeed.
    """
    try:
        directory = _directory(job, roots)
        summary = write_operator_table(directory, directory / TABLE)
        found = non_finite_of_rank(directory / TABLE)
    except NotFound as error:
        if job["node_id"] not in (None, node_id):
            reason = f"node {job['node_id']} is gone, and with it the dump"
            return [outcome(job, UNREACHABLE, reason)]
        return refusal(job, error)
    except StoreError:
        raise
    except StagescopeError as error:
        return refusal(job, error)
    rows = [_table_row(job, directory / TABLE, summary, found, node_id)]
    is_cut = bool(job["truncated"]) or summary.truncated_at is not None
    if not summary.calls and summary.task != STRUCTURE and not is_cut:
        rows += _empty(job)
    if found.first is not None and found.certain:
        rows.append(_non_finite(job, found, found.first))
    return rows


def _directory(job: AnnouncedDump, roots: Iterable[Path]) -> Path:
    """Return the dump's directory; neither it nor a file in it may link to another place."""
    directory = confine(job["dump_path"], roots)
    for name in _READ:
        confine(directory / name, [directory])
    return directory


def _table_row(
    job: AnnouncedDump, table: Path, summary: OperatorSummary, found: RankNonFinite, node_id: str
) -> Put:
    cut = summary.truncated_at is not None or summary.done is False
    first = None if found.first is None else {**found.first, "bad_inputs": found.bad_inputs}
    return outcome(
        job,
        TABLE_WRITTEN,
        None,
        node_id=node_id,
        path=str(table),
        bytes=table.stat().st_size,
        checksum=file_checksum(table),
        task=summary.task,
        level=summary.level,
        calls=summary.calls,
        rows=summary.rows,
        non_finite_rows=summary.non_finite_rows,
        truncated=bool(job["truncated"]) or cut,
        truncated_at=summary.truncated_at,
        done=summary.done,
        certain=found.certain,
        first_non_finite=first,
        summary={**summary.fields(), "culprits": found.culprits, "masks": found.masks,
                 "first_masks": found.first_masks, "not_read": found.not_read},
        wall=job["announced_wall"],
    )  # fmt: skip


def _empty(job: AnnouncedDump) -> list[Put]:
    """Return the finding of a capture without a call; an import says so itself."""
    if job["capture_id"] == IMPORTED_CAPTURE:
        return []
    found = finding(
        "empty_dump",
        f"msprobe recorded no call of {job['stage']} on rank {job['rank']} in step {job['step']}",
        **of_job(job, job["announced_wall"]),
        advice="check the capture's list and scope, and that the stage computes on this rank",
        evidence={"capture_id": job["capture_id"], "part": str(Part.of_columns(job))},
    )
    return [found]


def _non_finite(job: AnnouncedDump, found: RankNonFinite, first: NonFiniteRow) -> Put:
    inputs = ", ".join(f"{row['section']} {row['index']}" for row in found.bad_inputs)
    finite = "a saved value" if first["direction"] == "debug" else "its inputs were finite"
    module = f" in {first['parent']}" if first["parent"] else ""
    where = f", called at {first['source']}" if first["source"] else ""
    return finding(
        "non_finite_operator",
        f"{first['name']}{module} gave {first['non_finite']} in {first['section']} "
        f"{first['index']}, the first of rank {job['rank']} in {job['stage']}{where}; "
        + (f"not finite before it: {inputs}" if inputs else finite),
        **of_job(job, job["announced_wall"]),
        severity="error",
        see=(Link.to_step("operators", job["step"], shows="what followed"),),
        evidence={
            **{name: first[name] for name in ("name", "operator", "module_class", "parent",
               "direction", "section", "index", "non_finite", "source", "order", "dtype")},
            "bad_inputs": found.bad_inputs,
            "capture_id": job["capture_id"],
            "part": str(Part.of_columns(job)),
        },
    )  # fmt: skip
