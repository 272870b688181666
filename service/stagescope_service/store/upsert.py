"""Execution of many submitted writes with few statements, equivalent to executing them in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, Final

import sqlalchemy as sa

from stagescope.wire.errors import StoreError
from stagescope_service.store import compact, statements
from stagescope_service.store.contract import Delete, Put, RemoveRows, Write
from stagescope_service.store.ids import Ids
from stagescope_service.store.statements import columns_of
from stagescope_service.store.tables import TABLES

_COLUMNS: Final = {name: frozenset(table.columns.keys()) for name, table in TABLES.items()}
_KEYS: Final = {
    name: tuple(column.name for column in table.primary_key) for name, table in TABLES.items()
}
_NUMBERED: Final = frozenset({"audit"})
"""Tables whose keys the database generates: rows are inserted, never merged."""


def _key_getter(name: str) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if name in _NUMBERED:
        return lambda row: (id(row),)
    first, *others = _KEYS[name]
    return itemgetter(first, *others) if others else lambda row: (row[first],)


_GET_KEY: Final = {name: _key_getter(name) for name in TABLES}


def check(write: Write) -> None:
    """Refuse a write that no database would accept.

    Raises:
        StoreError: an unknown table or column, a part of the key missing, an empty `where`.
    """
    columns = _COLUMNS.get(write.table)
    if columns is None:
        raise StoreError(f"no table {write.table!r}", expected=f"one of {', '.join(_COLUMNS)}")
    if isinstance(write, RemoveRows):
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
    for name in _KEYS[write.table]:
        if given.get(name) is None and write.table not in _NUMBERED:
            raise StoreError(
                f"a row of {write.table} without {name}", expected=f"{_KEYS[write.table]}"
            )


class WriteBatch:
    """Writes in the order of their submission, executed with as few statements as possible.

    Rows of one key become one row, later columns replacing earlier ones, as if upserted one after
    the other. A delete separates the writes to its table before it from those after it; tables
    are independent of each other. The removal of a step's rows separates all writes.

    Raises:
        StoreError: a write that no database would accept; also by `execute`.
    """

    def __init__(self, writes: Iterable[Write]) -> None:
        tables: dict[str, list[dict[Any, Mapping[str, Any]] | list[Delete]]] = {}
        merging: dict[str, dict[Any, Mapping[str, Any]]] = {}
        """The rows since the last delete, by table and key."""
        self._parts: list[Any] = [tables]
        for write in writes:
            if type(write) is Put:
                name, row = write
                rows = merging.get(name)
                if rows is None:
                    rows = merging[name] = {}
                    tables.setdefault(name, []).append(rows)
                key = _key_of(write)
                before = rows.get(key)
                rows[key] = row if before is None else {**before, **row}
                continue
            check(write)
            if isinstance(write, RemoveRows):
                tables, merging = {}, {}
                self._parts += [write, tables]
            elif isinstance(write, Delete):
                merging.pop(write.table, None)
                phases = tables.setdefault(write.table, [])
                last = phases[-1] if phases else None
                if isinstance(last, list):
                    last.append(write)
                else:
                    phases.append([write])

    def execute(self, connection: sa.Connection, ids: Ids | None = None) -> None:
        """Run the statements; errors of the database propagate.

        Args:
            connection: in a transaction.
            ids: those that the writer knows; to be cleared where the transaction fails.
        """
        ids = ids or Ids()
        ids.forget_many()
        for part in self._parts:
            if isinstance(part, RemoveRows):
                _remove(connection, ids, part)
                continue
            for name, phases in part.items():
                for phase in phases:
                    if isinstance(phase, list):
                        _delete(connection, name, phase)
                    else:
                        _put(connection, ids, name, phase)


def _key_of(put: Put) -> Any:
    name, row = put
    try:
        key = _GET_KEY[name](row)
    except KeyError:
        check(put)
        raise
    if None in key:
        check(put)
    return key


def _put(
    connection: sa.Connection, ids: Ids, name: str, rows: Mapping[Any, Mapping[str, Any]]
) -> None:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows.values():
        groups.setdefault(tuple(row), []).append(row)
    for names, group in groups.items():
        check(Put(name, group[0]))
        if name in compact.COMPACT_VIEWS:
            compact.write(connection, ids, name, names, group)
            continue
        table, columns = TABLES[name], columns_of(names, group)
        for column in names:
            kind = table.columns[column].type
            columns[column] = statements.stored(connection.dialect, kind, columns[column])
        if name in _NUMBERED:
            statements.insert(connection, table, columns)
        else:
            sets = frozenset(names).difference(_KEYS[name])
            statements.upsert(connection, table, columns, sets)


def _delete(connection: sa.Connection, name: str, deletes: Iterable[Delete]) -> None:
    columns = TABLES[name].columns
    groups: dict[tuple[tuple[str, bool], ...], list[dict[str, Any]]] = {}
    for one in deletes:
        kind = tuple((key, value is None) for key, value in one.where.items())
        values = {f"w_{key}": value for key, value in one.where.items() if value is not None}
        groups.setdefault(kind, []).append(values)
    for kind, rows in groups.items():
        where = [
            columns[key].is_(None) if is_none else columns[key] == sa.bindparam(f"w_{key}")
            for key, is_none in kind
        ]
        if name in compact.COMPACT_VIEWS:
            connection.execute(compact.delete(name, where), rows)
        else:
            connection.execute(sa.delete(TABLES[name]).where(*where), rows)


STEP_ROWS: Final = (
    "stages", "scalars", "payloads", "summaries", "samples", "weights", "artifacts",
)  # fmt: skip
"""The tables whose rows of old steps are removed; of artifacts those whose file is gone."""


def step_rows(name: str, attempt_id: int, step: int) -> list[sa.ColumnElement[bool]]:
    """Return the condition of a step's rows in one of `STEP_ROWS`."""
    columns = TABLES[name].columns
    where = [columns["attempt_id"] == attempt_id, columns["step"] == step]
    return [*where, columns["deleted_wall"].is_not(None)] if name == "artifacts" else where


def _remove(connection: sa.Connection, ids: Ids, one: RemoveRows) -> None:
    left = one.limit
    for name in STEP_ROWS:
        if left <= 0:
            return
        where = step_rows(name, one.attempt_id, one.step)
        if name in compact.COMPACT_VIEWS:
            statement = compact.delete(name, where, left)
        else:
            table = TABLES[name]
            key = list(table.primary_key)
            found = sa.select(*key).where(*where).limit(left)
            # With the condition twice: by the key alone, SQLite searches all of the attempt.
            statement = sa.delete(table).where(*where, sa.tuple_(*key).in_(found))
        left -= connection.execute(statement).rowcount
    if left > 0:
        compact.remove_works(connection, ids, one.attempt_id, one.step)
