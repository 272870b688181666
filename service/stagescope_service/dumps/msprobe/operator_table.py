"""The operator table of a dump: Parquet, one row per (operator call, direction, argument).

Rows are in the order of dump.json (APIs when they are called, modules when they end). The file is
written one row group at a time, so that memory does not depend on the size of the dump, and
atomically. Its metadata hold the summary (`stagescope.operators`, JSON) and every stack by its id
(`stagescope.stacks`, JSON).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from stagescope_service.dumps.msprobe.json_window import DumpFile, open_file
from stagescope_service.dumps.msprobe.operators import (
    CallStacks,
    Leaf,
    clean_text,
    leaves,
    parse_name,
    read_done,
    read_parents,
    read_stacks,
)
from stagescope_service.store.tensorfile import disk_errors, sync_directory
from stagescope_wire.errors import NotFound

DUMP_NAMES: Final = ("dump.json", "debug.json")
"""Files with msprobe's records of calls, and of values that a script saved at level debug."""
SCHEMA_VERSION: Final = 1
ROW_GROUP: Final = 16_384
SUMMARY_KEY: Final = b"stagescope.operators"
STACKS_KEY: Final = b"stagescope.stacks"

_CALL_COLUMNS: Final = (
    ("order", pa.int32()), ("name", pa.string()), ("kind", pa.string()), ("operator", pa.string()),
    ("module_class", pa.string()), ("call", pa.int32()), ("direction", pa.string()),
    ("source", pa.string()), ("stack_id", pa.string()), ("parent", pa.string()),
)  # fmt: skip
_LEAF_TYPES: Final = {
    "shape": pa.list_(pa.int64()), "min": pa.float64(), "max": pa.float64(),
    "mean": pa.float64(), "norm": pa.float64(), "requires_grad": pa.bool_(),
}  # fmt: skip
_LEAF_COLUMNS: Final = tuple("index" if name == "path" else name for name in Leaf._fields)
SCHEMA: Final = pa.schema(
    [*_CALL_COLUMNS, *((name, _LEAF_TYPES.get(name, pa.string())) for name in _LEAF_COLUMNS)]
)

_Row: TypeAlias = "tuple[object, ...]"
"""Values in the order of SCHEMA."""


@dataclasses.dataclass(frozen=True, slots=True)
class FirstNonFinite:
    """The first row with a NaN or an infinity, inputs and masks included (see `compare`)."""

    order: int
    name: str
    section: str
    index: str
    non_finite: str


@dataclasses.dataclass(slots=True)
class OperatorSummary:
    """The contents of a dump, and how far it could be read."""

    task: str | None = None
    level: str | None = None
    framework: str | None = None
    done: bool | None = None
    """`ok` of the DONE.json beside it: False after a crash inside the stage, when even a complete
    dump.json may lack the last calls (msprobe writes every 1000). None: there is no DONE.json."""
    calls: int = 0
    rows: int = 0
    bytes: int = 0
    """Bytes read of dump.json and debug.json."""
    truncated_at: int | None = None
    """Byte at which dump.json, else debug.json, is truncated."""
    last_name: str | None = None
    measured: int = 0
    """Tensors with a least and a largest value: only these can show NaN and infinities."""
    unmeasured: int = 0
    """Tensors that may hold NaN and infinities, but have no statistics."""
    non_finite_rows: int = 0
    first_non_finite: FirstNonFinite | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    """Data that the files lack, and why."""

    def fields(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {"schema": SCHEMA_VERSION, **dataclasses.asdict(self)}


def write_operator_table(
    directory: Path, target: Path, *, row_group: int = ROW_GROUP
) -> OperatorSummary:
    """Read the dump of one rank and write its operator table.

    Args:
        directory: msprobe's `step{N}/rank{R}` with dump.json or debug.json, and optionally
            stack.json, construct.json and DONE.json.
        target: the Parquet file; its directory is created, an existing file is replaced.
        row_group: rows that are held in memory.

    Raises:
        NotFound: there is neither dump.json nor debug.json.
        TooLarge, InvalidInput: dump.json is not msprobe's; a truncated file is no error.
        StoreError: the disk reported an error. No partial file remains.
    """
    stacks = read_stacks(directory / "stack.json")
    parents, problems = read_parents(directory / "construct.json")
    done = read_done(directory)
    is_done = None if done is None else done.get("ok") is True
    summary = OperatorSummary(done=is_done, problems=[*stacks.problems, *problems])
    paths = _dump_paths(directory)
    with (
        _atomic_write(target) as temporary,
        pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer,
    ):
        batch: list[_Row] = []
        for path in paths:
            with open_file(path) as file:
                dump = DumpFile(file, str(path))
                for row in _rows(dump, summary, stacks, parents):
                    batch.append(row)
                    if len(batch) >= row_group:
                        _write(writer, batch)
                        batch = []
                _add_file(summary, dump, path.name)
        if batch:
            _write(writer, batch)
        writer.add_key_value_metadata(
            {
                SUMMARY_KEY: json.dumps(summary.fields()),
                STACKS_KEY: json.dumps(stacks.frames),
            }
        )
    return summary


def _rows(
    dump: DumpFile, summary: OperatorSummary, stacks: CallStacks, parents: dict[str, str]
) -> Iterator[_Row]:
    for name, record in dump.records():
        order = summary.calls
        summary.calls += 1
        parsed = parse_name(name)
        source, stack_id = stacks.source_of_call(name)
        names = (name, parsed.kind, parsed.operator, parsed.module_class)
        origins = (parsed.direction, source, stack_id, parents.get(name))
        call = (order, *map(clean_text, names), parsed.call, *map(clean_text, origins))
        for leaf in leaves(name, parsed.direction, record):
            if leaf.non_finite is not None:
                _count_non_finite(summary, order, name, leaf)
            summary.rows += 1
            summary.measured += leaf.is_measured
            summary.unmeasured += leaf.is_unmeasured
            yield call + leaf


def _count_non_finite(summary: OperatorSummary, order: int, name: str, leaf: Leaf) -> None:
    summary.non_finite_rows += 1
    if summary.first_non_finite is None:
        summary.first_non_finite = FirstNonFinite(
            order, name, leaf.section or "", leaf.path or "", leaf.non_finite or ""
        )


def _write(writer: pq.ParquetWriter, rows: list[_Row]) -> None:
    columns = [
        pa.array(values, field.type)
        for values, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)
    ]
    writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), row_group_size=len(rows))


def _add_file(summary: OperatorSummary, dump: DumpFile, name: str) -> None:
    header = dump.header
    summary.task = summary.task or header["task"]
    summary.framework = summary.framework or header["framework"]
    levels = dict.fromkeys(filter(None, (summary.level, header["level"])))
    summary.level = ", ".join(levels) or None
    summary.bytes += dump.bytes_read
    summary.last_name = dump.last_name or summary.last_name
    if dump.truncated_at is None:
        return
    if summary.calls and name != DUMP_NAMES[0]:
        summary.problems.append(f"{name} is cut off at byte {dump.truncated_at}")
    if summary.truncated_at is None:
        summary.truncated_at = dump.truncated_at


def _dump_paths(directory: Path) -> list[Path]:
    found = [path for name in DUMP_NAMES if (path := directory / name).exists()]
    if not found:
        raise NotFound(f"{directory} holds neither {' nor '.join(DUMP_NAMES)}")
    return found


@contextlib.contextmanager
def _atomic_write(target: Path) -> Iterator[str]:
    """Yield the name of a temporary file that then durably replaces `target`, or is removed."""
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=target.parent)
        os.close(descriptor)
    try:
        with disk_errors(target):
            yield temporary
            descriptor = os.open(temporary, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
            sync_directory(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
