"""Execution of many submitted writes with few statements, equivalent to executing them in order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from stagescope.wire.errors import StoreError
from stagescope_service.store import compact
from stagescope_service.store.columns import Flag, StrictJson, dump_json, nonfinite_name
from stagescope_service.store.contract import Delete, Put, RemoveRows, Write
from stagescope_service.store.ids import Ids
from stagescope_service.store.tables import TABLES

_COLUMNS: Final = {name: frozenset(table.columns.keys()) for name, table in TABLES.items()}
_KEYS: Final = {
    name: tuple(column.name for column in table.primary_key) for name, table in TABLES.items()
}
_GET_KEY: Final = {name: itemgetter(*key) for name, key in _KEYS.items()}
_NUMBERED: Final = frozenset({"audit"})
"""Tables whose keys the database generates: rows are inserted, never merged."""


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


class Batch:
    """Writes in the order of their submission, executed with as few statements as possible.

    Rows of one key become one row, later columns replacing earlier ones, as if upserted one after
    the other. A delete separates the writes to its table before it from those after it; tables
    are independent of each other. The removal of a step's rows separates all writes.
    """

    def __init__(self, writes: Iterable[Write]) -> None:
        tables: dict[str, list[dict[Any, Mapping[str, Any]] | list[Delete]]] = {}
        self._parts: list[Any] = [tables]
        for write in writes:
            if isinstance(write, RemoveRows):
                tables = {}
                self._parts += [write, tables]
                continue
            phases = tables.setdefault(write.table, [])
            if isinstance(write, Put):
                if not phases or not isinstance(phases[-1], dict):
                    phases.append({})
                _merge(phases[-1], write.table, write.row)
            elif phases and isinstance(phases[-1], list):
                phases[-1].append(write)
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


def _merge(rows: Any, name: str, row: Mapping[str, Any]) -> None:
    if name in _NUMBERED:
        rows[len(rows)] = row
        return
    if name == "scalars" and "value" in row:
        row = {**row, **split_value(row["value"])}
    key = _GET_KEY[name](row)
    before = rows.get(key)
    rows[key] = row if before is None else {**before, **row}


def _put(
    connection: sa.Connection, ids: Ids, name: str, rows: Mapping[Any, Mapping[str, Any]]
) -> None:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows.values():
        groups.setdefault(tuple(row), []).append(row)
    for columns, group in groups.items():
        if name in compact.COMPACT_VIEWS:
            compact.write(connection, ids, name, columns, group)
            continue
        statement = _statement(connection.dialect, name, columns)
        connection.exec_driver_sql(statement.text, statement.parameters(group))


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


def split_value(value: float | None) -> dict[str, Any]:
    """Return the columns `value` and `nonfinite` of a scalar."""
    if value is None:
        return {"value": None, "nonfinite": None}
    value = float(value)  # database drivers do not accept numpy scalars as floats
    name = nonfinite_name(value)
    return {"value": None if name else value, "nonfinite": name}


class _Statement:
    """An upsert in one database's dialect, with a fast conversion of rows to parameters.

    SQLAlchemy's executemany processes every value of every row in Python, which costs as much as
    SQLite's work; here only JSON and flags are converted, and STRICT tables check the rest.
    """

    def __init__(self, dialect: sa.Dialect, name: str, columns: tuple[str, ...]) -> None:
        compiled = _upsert(dialect.name, name, columns).compile(
            dialect=dialect, column_keys=list(columns)
        )
        self.text = str(compiled)
        self._names = tuple(compiled.positiontup or ()) if compiled.positional else None
        self._converters = {
            column.name: dump_json if isinstance(column.type, StrictJson) else bool
            for column in TABLES[name].columns
            if column.name in columns and isinstance(column.type, StrictJson | Flag)
        }

    def parameters(self, rows: list[Mapping[str, Any]]) -> list[Any]:
        """Return the parameters for the driver's executemany."""
        if self._converters:
            rows = [self._convert(row) for row in rows]
        if self._names is None:
            return rows
        if len(self._names) == 1:
            return [(row[self._names[0]],) for row in rows]
        return list(map(itemgetter(*self._names), rows))

    def _convert(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        changed = dict(row)
        for name, convert in self._converters.items():
            if changed[name] is not None:
                changed[name] = convert(changed[name])
        return changed


_statement = functools.lru_cache(maxsize=1024)(_Statement)


def _upsert(dialect: str, name: str, columns: Iterable[str]) -> sa.Insert:
    if name in _NUMBERED:
        return sa.insert(TABLES[name])
    # Both have the same methods; each compiles only for its own database.
    insert = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(TABLES[name])
    others = sorted(set(columns) - set(_KEYS[name]))
    if not others:
        return insert.on_conflict_do_nothing(index_elements=_KEYS[name])
    return insert.on_conflict_do_update(
        index_elements=_KEYS[name], set_={other: insert.excluded[other] for other in others}
    )
