"""Copies of catalogues: a whole one into another database, or one run into its own file."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from stagescope_service.store import connect
from stagescope_service.store.tables import metadata
from stagescope_service.store.tables.compact import KNOWN_TEXTS
from stagescope_wire.errors import CatalogueUnavailable

MAX_WORKS: Final = 200_000
"""Maximum works (a part of a stage in a step) of a run for a copy of the rows of every step."""
MAX_BLOB_BYTES: Final = 256 << 20
"""Maximum bytes of all step summaries, and of all slices; above it only those near the step."""
NEAR: Final = 25
"""Steps before and after the step whose summaries are always copied."""
_AT_ONCE: Final = 1000

LEFT_OUT: Final[Mapping[str, str]] = {
    "audit": "it names people, and belongs to no run",
    "meta": "it is the service's own",
    "trigger_rules": "they belong to no run, and may contain secrets of webhooks",
}
"""Tables that are not copied -> why."""
OF_STEPS: Final = ("summaries", "samples", "weights", "canaries")
"""Tables with many rows a step, besides those of works."""
_TEXTS: Final[Mapping[str, tuple[str, ...]]] = {
    "stage_rows": ("status_id",),
    "scalar_rows": ("name_id", "nonfinite_id"),
    "payload_rows": ("owner_id", "state_id", "tensors_id", "meta_id", "node"),
    "artifact_rows": ("prefix_id", "owner_id", "kind_id", "node", "path_id"),
}
"""Table -> its columns that refer to `texts`."""

_BLOBS: Final[Mapping[str, tuple[str, str]]] = {
    "steps": ("step_summary", "summaries"), "step_metrics": ("slices", "numbers by rank and round"),
}  # fmt: skip
"""Table -> its large column, and the content of the column."""

Redact = Callable[[Any, str], Any]  # any value of a column
"""Returns a value of a column without secrets, given the column's name."""


@dataclasses.dataclass(frozen=True)
class Omission:
    """Rows that were not copied."""

    what: str
    reason: str


@dataclasses.dataclass(frozen=True)
class CopiedTable:
    """The rows of a table that were copied."""

    table: str
    rows: int


# --- all of a catalogue ---------------------------------------------------------------------
def copy_catalogue(
    source: str, target: str, *, on_rows: Callable[[int, int], None] = lambda done, total: None
) -> list[CopiedTable]:
    """Copy every row of a catalogue into an empty one, all or nothing.

    Both are read again at the end: each table must have as many rows in both.

    Args:
        source: its URL. No other process may write to it meanwhile. SQLite's lock is held, so that
            a running service keeps its writes; for PostgreSQL the lock of its writer is taken.
        target: the URL of a catalogue without rows, or of an empty database; its tables are made.
        on_rows: called with the rows copied so far and those to copy.

    Raises:
        CatalogueUnavailable: one of them cannot be opened, is in use, is of another revision, or
            the target holds rows already.
    """
    where, there = (connect.url_without_password(url) for url in (source, target))
    path = connect.sqlite_path(source)
    if path is not None and not path.exists():
        raise CatalogueUnavailable(f"there is no catalogue {where}", advice="give its directory")
    reading, writing = connect.writer_engine(source), connect.writer_engine(target)
    try:
        with connect.catalogue_errors(where), reading.begin() as old:
            connect.check_revision(old, f"catalogue {where}")
            with connect.catalogue_errors(there), writing.begin() as new:
                connect.make_tables(new)
                _check_empty(new, there)
                copied = _copy_all(old, new, on_rows)
                for each in copied:
                    found = _count(new, metadata.tables[each.table])
                    if found != each.rows:
                        raise CatalogueUnavailable(
                            f"{there} has {found} rows of {each.table}, {where} has {each.rows}"
                        )
        return copied
    finally:
        reading.dispose()
        writing.dispose()


def _check_empty(connection: sa.Connection, where: str) -> None:
    for name, table in metadata.tables.items():
        own = len(KNOWN_TEXTS) if name == "texts" else 0
        if (rows := _count(connection, table)) > own:
            raise CatalogueUnavailable(
                f"catalogue {where} has {rows - own} rows of {name} already",
                expected="an empty one",
                advice="name another database or schema",
            )


def _copy_all(
    old: sa.Connection, new: sa.Connection, on_rows: Callable[[int, int], None]
) -> list[CopiedTable]:
    counts = {name: _count(old, table) for name, table in metadata.tables.items()}
    done, total = 0, sum(counts.values())
    for table in metadata.tables.values():
        for rows in batches(old, _all_rows(table)):
            new.execute(table.insert(), rows)
            done += len(rows)
            on_rows(done, total)
        if new.dialect.name == "postgresql":
            _advance_sequence(new, table)
    return [CopiedTable(name, counts[name]) for name in counts]


def _advance_sequence(connection: sa.Connection, table: sa.Table) -> None:
    """Let keys that the database generates continue after the copied ones."""
    for column in table.primary_key:
        if column.autoincrement is True:
            last = sa.select(sa.func.max(column)).scalar_subquery()
            own = sa.func.pg_get_serial_sequence(table.name, column.name)
            connection.execute(sa.select(sa.func.setval(own, last)).where(last.is_not(None)))


def _count(connection: sa.Connection, table: sa.Table) -> int:
    return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


# --- one run --------------------------------------------------------------------------------
def copy_run(
    url: str, target: Path, run: str, *, attempt_id: int, step: int, redact: Redact
) -> list[Omission]:
    """Write a SQLite catalogue with the rows of a run.

    Args:
        url: of the catalogue, which is read in one transaction.
        target: the new file; it must not exist.
        run: its name.
        attempt_id: the attempt of the step.
        step: all its rows are copied; those of other steps if there are not too many.
        redact: is applied to every text and every JSON value.

    Returns:
        The omitted rows of this run.

    Raises:
        CatalogueUnavailable: the catalogue cannot be read at the moment.
    """
    where = connect.url_without_password(url)
    source = connect.reader_engine(url)
    own_url = connect.catalogue_url(target.parent)
    assert connect.sqlite_path(own_url) == target.absolute(), "a catalogue has its usual name"
    try:
        with connect.catalogue_errors(where), source.begin() as reading, _writing(target) as to:
            connect.make_tables(to)
            return _copy_run(reading, to, run, attempt_id, step, redact)
    finally:
        source.dispose()


@contextlib.contextmanager
def _writing(catalogue: Path) -> Iterator[sa.Connection]:
    """Yield a transaction in a SQLite file, which has no log beside it afterwards."""
    engine = connect.writer_engine(connect.catalogue_url(catalogue.parent))
    try:
        with engine.begin() as connection:
            yield connection
        with engine.connect() as connection:
            connection.exec_driver_sql("COMMIT")
            connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
    finally:
        engine.dispose()


def _copy_run(
    reading: sa.Connection, to: sa.Connection, run: str, attempt_id: int, step: int, redact: Redact
) -> list[Omission]:
    omissions = [Omission(f"table {name}", reason) for name, reason in LEFT_OUT.items()]
    tables = metadata.tables
    attempts, works = tables["attempts"].c, tables["works"]
    of_run = sa.select(attempts.attempt_id).where(attempts.run == run)
    count = reading.scalar(
        sa.select(sa.func.count()).select_from(works).where(works.c.attempt_id.in_(of_run))
    )
    all_steps = (count or 0) <= MAX_WORKS
    if not all_steps:
        omissions.append(
            Omission(
                "stages, scalars, payloads, samples, weights and canaries of other steps than "
                f"{step}",
                f"the run has {count} parts of stages, more than {MAX_WORKS}",
            )
        )
    conditions = _conditions(run, attempt_id, step, all_steps=all_steps)
    for name, table in tables.items():
        if name in LEFT_OUT:
            continue
        query = _all_rows(table).where(conditions[name])
        if name in _BLOBS:
            near = (table.c.attempt_id == attempt_id) & table.c.step.between(
                step - NEAR, step + NEAR
            )
            size = _blob_bytes(reading, name, conditions[name])
            if size > MAX_BLOB_BYTES:
                query = _without_blobs(name, near).where(conditions[name])
                what = f"{_BLOBS[name][1]} of steps more than {NEAR} before or after step {step}"
                reason = f"all have {size} bytes, more than {MAX_BLOB_BYTES}"
                omissions.append(Omission(what, reason))
        for rows in batches(reading, query):
            found = [{key: redact(value, key) for key, value in row.items()} for row in rows]
            if name == "steps" and not all_steps:
                for row in found:
                    is_own = (row["attempt_id"], row["step"]) == (attempt_id, step)
                    row["rows_removed"] = row["rows_removed"] if is_own else True
            to.execute(table.insert(), found)
    return omissions


def _blob_bytes(connection: sa.Connection, name: str, condition: sa.ColumnElement[bool]) -> int:
    column = metadata.tables[name].c[_BLOBS[name][0]]
    found = connection.scalar(sa.select(sa.func.sum(sa.func.length(column))).where(condition))
    return int(found or 0)


def _without_blobs(name: str, near: sa.ColumnElement[bool]) -> sa.Select[object]:
    """Select the rows of a table, with their blobs only where `near` is true."""
    blob = _BLOBS[name][0]
    return sa.select(
        *(
            sa.case((near, column), else_=None).label(blob) if column.name == blob else column
            for column in metadata.tables[name].c
        )
    )


def _conditions(
    run: str, attempt_id: int, step: int, *, all_steps: bool
) -> dict[str, sa.ColumnElement[bool]]:
    """Return the condition of the rows to copy, by table."""
    tables = metadata.tables
    attempts, works = tables["attempts"].c, tables["works"].c
    of_run = sa.select(attempts.attempt_id).where(attempts.run == run)
    own: sa.ColumnElement[bool] = works.attempt_id.in_(of_run)
    if not all_steps:
        own &= works.step.is_(None) | ((works.attempt_id == attempt_id) & (works.step == step))
    own_works = sa.select(works.work_id).where(own)
    found: dict[str, sa.ColumnElement[bool]] = {"works": own}
    found |= {name: tables[name].c.work_id.in_(own_works) for name in _TEXTS}
    texts = sa.union(
        *(
            sa.select(tables[name].c[column]).where(found[name])
            for name, columns in _TEXTS.items()
            for column in columns
        )
    )
    found["texts"] = tables["texts"].c.text_id.in_(texts)
    stages = tables["stage_rows"].c
    found["clocks"] = tables["clocks"].c.clock_id.in_(
        sa.select(stages.clock_id).where(found["stage_rows"])
    )
    weights = tables["weights"].c
    of_step = (weights.attempt_id == attempt_id) & (weights.step == step)
    own_weights = weights.attempt_id.in_(of_run) & (sa.true() if all_steps else of_step)
    found["weight_manifests"] = tables["weight_manifests"].c.manifest.in_(
        sa.select(weights.manifest).where(own_weights)
    )
    captures, dumps = tables["captures"].c, tables["dumps"].c
    found["captures"] = (captures.run == run) | captures.capture_id.in_(
        sa.select(dumps.capture_id).where(dumps.attempt_id.in_(of_run))
    )
    for name, table in tables.items():
        if name in found or name in LEFT_OUT:
            continue
        if "run" in table.c:
            found[name] = table.c.run == run
        else:
            found[name] = table.c.attempt_id.in_(of_run)
        if name in OF_STEPS and not all_steps:
            found[name] &= (table.c.attempt_id == attempt_id) & (table.c.step == step)
    return found


def _all_rows(table: sa.Table) -> sa.Select[Any]:
    """Select the rows of a table without the texts that every catalogue has."""
    query = sa.select(table)
    return query.where(table.c.text_id >= len(KNOWN_TEXTS)) if table.name == "texts" else query


def batches(connection: sa.Connection, query: sa.Select[Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a query, some at a time."""
    streaming = connection.execution_options(yield_per=_AT_ONCE)
    with streaming.execute(query) as rows:
        for part in rows.mappings().partitions():
            yield [dict(row) for row in part]


# --- paths ----------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class PlacedFile:
    """The path of an artifact's file, or of an operator table's if `key` is its key."""

    path: str
    bytes: int
    checksum: str
    artifact_id: str | None = None
    key: tuple[str, str, str] | None = None
    """incarnation, work_key and capture_id."""


def place_files(catalogue: Path, files: Sequence[PlacedFile]) -> None:
    """Write the paths of files into a catalogue that no other process has open."""
    artifacts = sa.text(
        "UPDATE artifact_rows SET path = :path, path_id = NULL, bytes = :bytes, "
        "checksum = :checksum WHERE (prefix_id, owner_id, number) = (SELECT prefix_id, owner_id, "
        "number FROM artifacts WHERE artifact_id = :artifact_id)"
    )
    tables = sa.text(
        "UPDATE operators SET path = :path, bytes = :bytes, checksum = :checksum WHERE "
        "incarnation = :a AND work_key = :b AND capture_id = :c"
    )
    with _writing(catalogue) as connection:
        for each in files:
            fields = {"path": each.path, "bytes": each.bytes, "checksum": each.checksum}
            if each.artifact_id is not None:
                connection.execute(artifacts, {**fields, "artifact_id": each.artifact_id})
            if each.key is not None:
                connection.execute(tables, {**fields, **dict(zip("abc", each.key, strict=True))})


def schema_of(catalogue: Path) -> list[tuple[str, str, str]]:
    """Return type, name and SQL of everything that a SQLite file declares.

    Raises:
        CatalogueUnavailable: it is no such file.
    """
    engine = connect.reader_engine(connect.catalogue_url(catalogue.parent))
    try:
        with connect.catalogue_errors(str(catalogue)), engine.begin() as connection:
            rows = connection.exec_driver_sql(
                "SELECT type, name, coalesce(sql, '') FROM sqlite_master ORDER BY type, name"
            )
            return [(str(kind), str(name), str(sql)) for kind, name, sql in rows]
    finally:
        engine.dispose()


def make_empty(directory: Path) -> Path:
    """Create an empty catalogue of this version; return its file."""
    path = connect.sqlite_path(connect.catalogue_url(directory))
    assert path is not None
    with _writing(path) as connection:
        connect.make_tables(connection)
    return path
