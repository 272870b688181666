"""Rows are what upserts by key leave, one after the other, on SQLite and PostgreSQL."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stores import DATABASES, ON_SQLITE, database, rows_of, url_of, write

from stagescope_service.store import connect
from stagescope_service.store.compact import COMPACT_VIEWS
from stagescope_service.store.contract import Delete, Put, RemoveRows, RemoveRun, Write
from stagescope_service.store.ids import Ids
from stagescope_service.store.snapshot import rows
from stagescope_service.store.sql import SqlStore, WriteBatch
from stagescope_service.store.tables import TABLES
from stagescope_service.store.tables.declare import Flag, StrictJson, split_value
from stagescope_wire.schema import PART_FIELDS

_INTS = st.none() | st.integers(0, 3) | st.just(1 << 61)
_REALS = st.none() | st.floats() | st.just(1.8e9 + 1 / 3)
_TEXTS = st.none() | st.sampled_from(["a", "b", "ingested", "announced", "nan"])
_JSON = st.none() | st.sampled_from([{"a": [1, math.nan]}, {}, "x" * 30]) | st.integers()
_KEYS: dict[str, st.SearchStrategy[object]] = {
    "incarnation": st.sampled_from(["i", "k"]),
    "work_key": st.sampled_from(["1||a|0.0.0.0", "2||a|0.0.0.0"]),
    "revision": st.integers(1, 2),
    "name": st.sampled_from(["loss", "nan"]),
    "seq": st.sampled_from([1, 2, 1 << 62]),
    "run": st.sampled_from("xy"),
    "artifact_id": st.sampled_from(
        ["ring/i/1", "ring/i/2", "ring/a/b/1", "ring/i/01", "odd", f"kept/i/{1 << 62}", "/", "x//1"]
    ),
}
_GROUPS = (
    ("attempt_id", "role", "rank", "step", "policy_version", "stage", *PART_FIELDS),
    ("clock_offset", "clock_error"),
)
_PATHS = st.sampled_from([None, "/d/1~1~i.bin", "/d/1~i", "/d/{payload}/1~i", "/other", "1~i1~i"])


def _values(table: sa.Table) -> dict[str, st.SearchStrategy[object]]:
    found: dict[str, st.SearchStrategy[Any]] = {}
    for column in table.columns:
        if column.primary_key:
            continue
        kind = column.type
        found[column.name] = (
            _JSON if isinstance(kind, StrictJson)
            else st.none() | st.booleans() if isinstance(kind, Flag)
            else _PATHS if column.name == "path"
            else _INTS if isinstance(kind, sa.BigInteger)
            else _REALS if isinstance(kind, sa.Double)
            else _TEXTS
        )  # fmt: skip
    found.pop("nonfinite", None)
    if table.name == "payloads":
        found["work_key"] = _KEYS["work_key"]
    if table.name == "artifacts":
        found["incarnation"] = _KEYS["incarnation"]
    return found


@st.composite
def _put(draw: st.DrawFn, name: str) -> Put:
    table = TABLES[name]
    values = _values(table)
    keys = {column.name: draw(_KEYS[column.name]) for column in table.primary_key}
    chosen = set(draw(st.sets(st.sampled_from(sorted(values)), max_size=6)))
    if draw(st.integers(0, 3)):  # what the service always gives together
        for group in _GROUPS:
            together = {each for each in (*group, "work_key", "incarnation") if each in values}
            chosen = chosen | together if draw(st.booleans()) else chosen - together
    return Put(name, {**keys, **{each: draw(values[each]) for each in sorted(chosen)}})


_NAMES = ("runs", *sorted(COMPACT_VIEWS))
"""The compact tables, and one that is stored as it is."""
_PUT = st.sampled_from(_NAMES).flatmap(_put)
_DELETES: list[Write] = [
    Delete("stages", {"incarnation": "i", "revision": 1}),
    Delete("scalars", {"step": 1}),
    Delete("scalars", {"step": None}),
    Delete("payloads", {"attempt_id": 1, "step": 2}),
    Delete("artifacts", {"artifact_id": "ring/i/1"}),
    Delete("runs", {"run": "x"}),
    RemoveRows(1, 1, 1000),
]
_WRITES = st.lists(st.one_of(*([_PUT] * 9), st.sampled_from(_DELETES)), max_size=25)


def _reference(writes: list[Write]) -> dict[str, list[str]]:
    """The old meaning of rows: upserted by key, one after the other."""
    tables: dict[str, dict[tuple[object, ...], dict[str, object]]] = {name: {} for name in _NAMES}
    for one in writes:
        if isinstance(one, RemoveRows):
            keep = {"artifacts": lambda row: row["deleted_wall"] is None}
            for name, found in tables.items():
                for key, row in [*found.items()]:
                    own = (row.get("attempt_id"), row.get("step")) == (one.attempt_id, one.step)
                    if own and not keep.get(name, lambda _: False)(row):
                        del found[key]
            continue
        assert not isinstance(one, RemoveRun)
        held, table = tables[one.table], TABLES[one.table]
        if isinstance(one, Delete):
            for key in [*held]:
                if all(held[key][name] == value for name, value in one.where.items()):
                    del held[key]
            continue
        row = {name: _stored(table.c[name], value) for name, value in one.row.items()}
        if one.table == "scalars" and "value" in one.row:
            row |= split_value(one.row["value"])
        key = tuple(row[column.name] for column in table.primary_key)
        held[key] = {**dict.fromkeys(table.c.keys()), **held.get(key, {}), **row}
    return {name: _shown(held.values()) for name, held in tables.items()}


def _stored(column: sa.Column[object], value: object) -> object:
    if isinstance(column.type, StrictJson) and value is not None:
        return json.loads(json.dumps(value).replace("NaN", '"nan"'))
    if isinstance(value, float):
        return None if math.isnan(value) else value + 0.0 if value else 0.0
    return value


def _alike(value: object) -> object:
    """SQLite stores NaN as null and -0.0 as 0, PostgreSQL stores both."""
    if isinstance(value, float):
        return None if math.isnan(value) else value + 0.0
    return value


def _shown(found: Any) -> list[str]:
    shown = [{name: _alike(value) for name, value in row.items()} for row in found]
    return sorted(repr(sorted(row.items())) for row in shown)


def _read(connection: sa.Connection) -> dict[str, list[str]]:
    return {name: _shown(rows(dict, connection, TABLES[name].select())) for name in _NAMES}


@pytest.fixture(scope="module", params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        yield url_of(tmp_path_factory.mktemp("compact"))
    else:
        with database(request.getfixturevalue("server")) as found:
            yield found


@pytest.fixture(scope="module")
def engine(url: str) -> Iterator[sa.Engine]:
    engine = connect.writer_engine(url)
    with engine.begin() as connection:
        connect.make_tables(connection)
    yield engine
    engine.dispose()


@settings(max_examples=200, deadline=None)
@given(_WRITES, st.integers(1, 12))
def test_rows_are_what_upserts_by_key_leave(
    engine: sa.Engine, writes: list[Write], size: int
) -> None:
    ids = Ids()
    expected = _reference(writes)
    with engine.connect() as connection, connection.begin() as transaction:
        for start in range(0, len(writes), size):
            WriteBatch(writes[start : start + size]).execute(connection, ids)
        found = _read(connection)
        assert found == expected
        WriteBatch(writes[-size:]).execute(connection, Ids())  # by a writer that knows no ids
        assert _read(connection) == _reference([*writes, *writes[-size:]])
        transaction.rollback()


@ON_SQLITE
def test_a_failed_transaction_leaves_no_ids(store: SqlStore) -> None:
    whole = dict.fromkeys(("attempt_id", "role", "rank", *PART_FIELDS))
    work = {**whole, "incarnation": "i", "work_key": "w", "step": 1, "policy_version": None}
    good = Put("scalars", {**work, "stage": "s", "name": "loss", "value": 1.0})
    bad = Put("scalars", {**work, "stage": "t", "name": "new", "value": 1.0, "wall": "noon"})
    failed = store.submit([bad, good])
    assert failed.exception(30) is not None
    write(store, good)
    (row,) = rows_of(store, "scalars")
    assert (row["stage"], row["name"], row["value"]) == ("s", "loss", 1.0)
