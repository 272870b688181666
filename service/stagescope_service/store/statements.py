"""Checks of writes; INSERTs and upserts, compiled once and executed by the driver on whole columns.

SQLAlchemy's executemany processes every value of every row in Python, which costs as much as
SQLite's work.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from stagescope_service.store.contract import Put, RemoveRows, RemoveRun, Write
from stagescope_service.store.tables import TABLES
from stagescope_service.store.tables.declare import Flag, StrictJson, dump_json
from stagescope_wire.errors import StoreError

Columns: TypeAlias = dict[str, Sequence[Any]]
"""Name -> the value in each row; all of one length, not empty."""

_COLUMNS: Final = {name: frozenset(table.columns.keys()) for name, table in TABLES.items()}
KEYS: Final = {
    name: tuple(column.name for column in table.primary_key) for name, table in TABLES.items()
}
NUMBERED: Final = frozenset({"audit"})
"""Tables whose keys the database generates: rows are inserted, never merged."""


def check(write: Write) -> None:
    """Refuse a write that no database would accept.

    Raises:
        StoreError: an unknown table or column, a part of the key missing, an empty `where`.
    """
    columns = _COLUMNS.get(write.table)
    if columns is None:
        raise StoreError(f"no table {write.table!r}", expected=f"one of {', '.join(_COLUMNS)}")
    if isinstance(write, RemoveRows | RemoveRun):
        return
    given = write.row if isinstance(write, Put) else write.where
    if not given.keys() <= columns:
        raise StoreError(
            f"table {write.table} has no columns {sorted(given.keys() - columns)}",
            expected=f"some of {sorted(columns)}",
        )
    if not isinstance(write, Put):
        if not given:
            raise StoreError(f"a delete of all rows of {write.table}", expected="a condition")
        return
    for name in KEYS[write.table]:
        if given.get(name) is None and write.table not in NUMBERED:
            raise StoreError(
                f"a row of {write.table} without {name}", expected=f"{KEYS[write.table]}"
            )


def columns_of(names: Iterable[str], rows: Iterable[Mapping[str, object]]) -> Columns:
    """Return the columns of rows that all have the same names, in the same order."""
    values = zip(*[row.values() for row in rows], strict=True)
    return dict(zip(names, values, strict=True))


def stored(dialect: sa.Dialect, kind: Any, values: Sequence[Any]) -> Sequence[object]:
    """Return the values of a column in the form for the driver: JSON as text, flags."""
    if isinstance(kind, Flag):
        # SQLite's driver looks for an adapter of each bool, which takes longer than the rest of it.
        flag = int if dialect.name == "sqlite" else bool
        return [None if value is None else flag(bool(value)) for value in values]
    if isinstance(kind, StrictJson):
        return [None if value is None else dump_json(value) for value in values]
    return values


class Conflict(NamedTuple):
    """The action of an upsert if the key exists."""

    sets: frozenset[str]
    """The columns to set."""
    newer: str | None = None
    """Only set them if the value of this column is greater than the stored one."""

    def added_to(self, insert: Any, table: sa.Table) -> Any:
        """Return an INSERT with this action."""
        keys = [column.name for column in table.primary_key]
        if not self.sets:
            return insert.on_conflict_do_nothing(index_elements=keys)
        where = None
        if self.newer is not None:
            stored, given = table.c[self.newer], insert.excluded[self.newer]
            where = sa.or_(stored.is_(None), given > stored)
        chosen = {name: insert.excluded[name] for name in sorted(self.sets)}
        return insert.on_conflict_do_update(index_elements=keys, set_=chosen, where=where)


def insert(
    connection: sa.Connection, table: sa.Table, columns: Columns, conflict: Conflict | None = None
) -> None:
    """Insert rows.

    Args:
        connection: in a transaction.
        table: their table.
        columns: their values.
        conflict: what to do if the key of a row exists; None: it is an error.
    """
    # For None, too, SQLite's driver looks for an adapter: a column without values is a literal.
    nulls = frozenset(
        name
        for name, values in columns.items()
        if values[0] is None and values.count(None) == len(values)
    )
    statement = _statement(connection.dialect, table, tuple(columns), conflict, nulls)
    rows = zip(*(columns[name] for name in statement.order), strict=True)
    if statement.is_positional:
        connection.exec_driver_sql(statement.text, list(rows))
    else:
        named = [dict(zip(statement.order, row, strict=True)) for row in rows]
        connection.exec_driver_sql(statement.text, named)


class _Statement:
    """An INSERT or an upsert in one database's dialect, with the order of its parameters."""

    def __init__(
        self,
        dialect: sa.Dialect,
        table: sa.Table,
        names: tuple[str, ...],
        conflict: Conflict | None,
        nulls: frozenset[str],
    ) -> None:
        # Both have the same methods; each compiles only for its own database.
        made: Any = (postgresql.insert if dialect.name == "postgresql" else sqlite.insert)(table)
        made = made.values({name: sa.null() for name in nulls}) if nulls else made
        made = made if conflict is None else conflict.added_to(made, table)
        given = [name for name in names if name not in nulls]
        compiled = made.compile(dialect=dialect, column_keys=given)
        self.text = str(compiled)
        self.is_positional = bool(compiled.positional)
        self.order = tuple(compiled.positiontup or ()) if compiled.positional else tuple(given)


_statement = functools.lru_cache(maxsize=1024)(_Statement)
