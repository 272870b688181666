"""The operator table of a dump: Parquet, one row per (operator call, direction, argument).

Rows stand in the order of dump.json (APIs when they were called, modules when they were done). The
file is written row group by row group, so that a dump of any size takes the same memory, and is
there whole or not at all. Its metadata hold the summary (`stagescope.operators`, JSON) and every
stack by its id (`stagescope.wire.stacks`, JSON).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from stagescope.wire.errors import NotFound
from stagescope_service.dumps.msprobe.json_window import DumpFile, open_file
from stagescope_service.dumps.msprobe.operators import Leaf, clean_text, leaves, parse_name
from stagescope_service.dumps.msprobe.sidecars import Stacks, read_parents, read_stacks
from stagescope_service.store.tensorfile import disk_errors, sync_directory

SCHEMA_VERSION: Final = 1
ROW_GROUP: Final = 16_384
SUMMARY_KEY: Final = b"stagescope.operators"
STACKS_KEY: Final = b"stagescope.wire.stacks"

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


@dataclasses.dataclass(frozen=True, slots=True)
class FirstNonFinite:
    """The first row with a NaN or an infinity, be it an input or a mask (see `compare`)."""

    order: int
    name: str
    section: str
    index: str
    non_finite: str


@dataclasses.dataclass(slots=True)
class OperatorSummary:
    """What a dump holds, and how far it could be read."""

    task: str | None = None
    level: str | None = None
    framework: str | None = None
    done: bool | None = None
    """What DONE.json beside it says: False after a crash inside the stage, when even a dump.json
    that ends well may lack the last calls (msprobe writes every 1000). None: there is none."""
    calls: int = 0
    rows: int = 0
    bytes: int = 0
    """Read of dump.json."""
    truncated_at: int | None = None
    """Byte at which dump.json was cut off."""
    last_name: str | None = None
    non_finite_rows: int = 0
    first_non_finite: FirstNonFinite | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    """What is missing of stack.json and construct.json, and why."""

    def fields(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        return {"schema": SCHEMA_VERSION, **dataclasses.asdict(self)}


def write_operator_table(
    directory: Path, target: Path, *, row_group: int = ROW_GROUP
) -> OperatorSummary:
    """Read the dump of one rank and write its operator table.

    Args:
        directory: msprobe's `step{N}/rank{R}` with dump.json or debug.json, and, where they are,
            stack.json, construct.json and DONE.json.
        target: the Parquet file; its directory is made, a file that is there is replaced.
        row_group: rows that are held in memory.

    Raises:
        NotFound: neither dump.json nor debug.json is there.
        TooLarge, InvalidInput: dump.json is not msprobe's; a file that was cut off is no error.
        StoreError: the disk refused. Nothing is left behind.
    """
    stacks = read_stacks(directory / "stack.json")
    parents, problems = read_parents(directory / "construct.json")
    summary = OperatorSummary(done=_done(directory), problems=[*stacks.problems, *problems])
    path = _dump_path(directory)
    with open_file(path) as file, _written_whole(target) as temporary:
        dump = DumpFile(file, str(path))
        with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
            batch: list[tuple[Any, ...]] = []
            for row in _rows(dump, summary, stacks, parents):
                batch.append(row)
                if len(batch) >= row_group:
                    _write(writer, batch)
                    batch = []
            if batch:
                _write(writer, batch)
            _close_summary(summary, dump)
            writer.add_key_value_metadata(
                {
                    SUMMARY_KEY: json.dumps(summary.fields()),
                    STACKS_KEY: json.dumps(stacks.frames),
                }
            )
    return summary


def _rows(
    dump: DumpFile, summary: OperatorSummary, stacks: Stacks, parents: dict[str, str]
) -> Iterator[tuple[Any, ...]]:
    for name, record in dump.records():
        order = summary.calls
        summary.calls += 1
        said = parse_name(name)
        source, stack_id = stacks.of(name)
        texts = (name, said.kind, said.operator, said.module_class)
        places = (said.direction, source, stack_id, parents.get(name))
        call = (order, *map(clean_text, texts), said.call, *map(clean_text, places))
        for leaf in leaves(name, said.direction, record):
            if leaf.non_finite is not None:
                _count_non_finite(summary, order, name, leaf)
            summary.rows += 1
            yield call + leaf


def _count_non_finite(summary: OperatorSummary, order: int, name: str, leaf: Leaf) -> None:
    summary.non_finite_rows += 1
    if summary.first_non_finite is None:
        summary.first_non_finite = FirstNonFinite(
            order, name, leaf.section or "", leaf.path or "", leaf.non_finite or ""
        )


def _write(writer: pq.ParquetWriter, rows: list[tuple[Any, ...]]) -> None:
    columns = [
        pa.array(values, field.type)
        for values, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)
    ]
    writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), row_group_size=len(rows))


def _close_summary(summary: OperatorSummary, dump: DumpFile) -> None:
    summary.task, summary.level = dump.header["task"], dump.header["level"]
    summary.framework = dump.header["framework"]
    summary.bytes, summary.truncated_at = dump.bytes_read, dump.truncated_at
    summary.last_name = dump.last_name


def _dump_path(directory: Path) -> Path:
    for name in ("dump.json", "debug.json"):
        if (directory / name).exists():
            return directory / name
    raise NotFound(f"{directory} holds neither dump.json nor debug.json")


def _done(directory: Path) -> bool | None:
    try:
        with open_file(directory / "DONE.json") as file:
            said = json.loads(file.read(1 << 20))
        return said.get("ok") is True if isinstance(said, dict) else False
    except NotFound:
        return None
    except (ValueError, RecursionError):
        return False


@contextlib.contextmanager
def _written_whole(target: Path) -> Iterator[str]:
    """Give a temporary file's name; after the body it is `target`, durably, or nothing is left."""
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
