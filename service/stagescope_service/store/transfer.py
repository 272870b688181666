"""A whole catalogue copied into another database: from SQLite to PostgreSQL, or back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import sqlalchemy as sa

from stagescope.wire.errors import CatalogueUnavailable
from stagescope_service.store import connect, migrate
from stagescope_service.store.extract import batches
from stagescope_service.store.tables import metadata
from stagescope_service.store.tables.compact import KNOWN_TEXTS


@dataclasses.dataclass(frozen=True)
class Copied:
    """The rows of a table that were copied."""

    table: str
    rows: int


def copy_catalogue(
    source: str, target: str, *, on_rows: Callable[[int, int], None] = lambda done, total: None
) -> list[Copied]:
    """Copy every row of a catalogue into an empty one, all or nothing.

    Both are read again in the end: each table has as many rows here as there.

    Args:
        source: its URL. Nobody may write to it meanwhile: of SQLite its lock is held, so that a
            service that runs keeps its writes; of PostgreSQL the lock of its writer is taken.
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
            _check_revision(old, where)
            with connect.catalogue_errors(there), writing.begin() as new:
                migrate.upgrade(new)
                _check_empty(new, there)
                copied = _copy(old, new, on_rows)
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


def _check_revision(connection: sa.Connection, where: str) -> None:
    revision = migrate.current(connection)
    if revision != migrate.HEAD:
        raise CatalogueUnavailable(
            f"catalogue {where} is of revision {revision}",
            expected=f"revision {migrate.HEAD}",
            advice="start this version's service on it once, which converts it",
        )


def _check_empty(connection: sa.Connection, where: str) -> None:
    for name, table in metadata.tables.items():
        own = len(KNOWN_TEXTS) if name == "texts" else 0
        if (rows := _count(connection, table)) > own:
            raise CatalogueUnavailable(
                f"catalogue {where} has {rows - own} rows of {name} already",
                expected="an empty one",
                advice="name another database or schema",
            )


def _copy(
    old: sa.Connection, new: sa.Connection, on_rows: Callable[[int, int], None]
) -> list[Copied]:
    counts = {name: _count(old, table) for name, table in metadata.tables.items()}
    done, total = 0, sum(counts.values())
    for name, table in metadata.tables.items():
        query = sa.select(table)
        if name == "texts":  # the first are in every catalogue
            query = query.where(table.c.text_id >= len(KNOWN_TEXTS))
        for rows in batches(old, query):
            new.execute(table.insert(), rows)
            done += len(rows)
            on_rows(done, total)
        if new.dialect.name == "postgresql":
            _advance_sequence(new, table)
    return [Copied(name, counts[name]) for name in counts]


def _advance_sequence(connection: sa.Connection, table: sa.Table) -> None:
    """Let keys that the database generates go on after those that were copied."""
    for column in table.primary_key:
        if column.autoincrement is True:
            last = sa.select(sa.func.max(column)).scalar_subquery()
            own = sa.func.pg_get_serial_sequence(table.name, column.name)
            connection.execute(sa.select(sa.func.setval(own, last)).where(last.is_not(None)))


def _count(connection: sa.Connection, table: sa.Table) -> int:
    return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0
