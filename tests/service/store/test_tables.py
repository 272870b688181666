"""The tables: their revision, the design's columns, strict types, and what no statement takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.schema import CreateTable
from tests.support.stores import url_of

from stagescope_service.store import connect, statements
from stagescope_service.store.contract import Delete, Put, Write
from stagescope_service.store.tables import TABLES, compact, metadata
from stagescope_service.store.tables.declare import dump_json
from stagescope_wire.errors import CatalogueUnavailable, StoreError
from stagescope_wire.schema import LAYOUT_COLUMNS, PART_FIELDS

PostgreSQL = sa.engine.make_url("postgresql://").get_dialect()()


def test_tables_are_made_once_and_another_revision_is_refused(tmp_path: Path) -> None:
    engine = connect.writer_engine(url_of(tmp_path))
    with engine.begin() as connection:
        assert connect.revision_of(connection) is None
        connect.make_tables(connection)
        connect.make_tables(connection)
        assert connect.revision_of(connection) == connect.REVISION
        query = sa.text("SELECT name, sql FROM sqlite_master")
        texts = {name: sql for name, sql in connection.execute(query) if sql}
        assert {*metadata.tables, *compact.VIEWS} <= texts.keys()
        assert "STRICT" in texts["scalar_rows"]
        assert "WITHOUT ROWID" in texts["scalar_rows"]
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0011'"))
    with engine.begin() as connection, pytest.raises(CatalogueUnavailable, match="does not know"):
        connect.make_tables(connection)
    engine.dispose()


def test_the_columns_of_the_design_are_there() -> None:
    assert set(LAYOUT_COLUMNS) <= set(TABLES["processes"].columns.keys())
    for name in ("stages", "scalars", "payloads", "summaries", "dumps"):
        work = {"attempt_id", "step", "policy_version", "stage", "role", "rank", *PART_FIELDS}
        assert work <= set(TABLES[name].columns.keys())


def test_everything_but_keys_may_be_unknown() -> None:
    for table in TABLES.values():
        for column in table.columns:
            assert column.nullable != column.primary_key, f"{table.name}.{column.name}"


def test_postgresql_would_get_the_same_tables() -> None:
    for table in metadata.tables.values():
        text = str(CreateTable(table).compile(dialect=PostgreSQL))
        assert "STRICT" not in text
    assert "DOUBLE PRECISION" in str(CreateTable(TABLES["weights"]).compile(dialect=PostgreSQL))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def _expected(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_expected(item) for item in value]
    if isinstance(value, dict):
        return {key: _expected(item) for key, item in value.items()}
    return value


@given(_VALUES)
def test_json_is_strict(value: object) -> None:
    text = dump_json(value)
    assert json.loads(text, parse_constant=_refuse) == _expected(value)


def test_json_refuses_what_it_has_no_word_for() -> None:
    with pytest.raises(TypeError):
        dump_json({"a": object(), "b": math.nan})


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (Put("nowhere", {"a": 1}), "no table"),
        (Put("runs", {"run": "a", "color": 1}), "no columns"),
        (Put("runs", {"created_wall": 1.0}), "without run"),
        (Put("scalars", {"incarnation": "a", "work_key": None, "name": "n"}), "without work_key"),
        (Delete("runs", {}), "all rows"),
        (Delete("runs", {"color": 1}), "no columns"),
    ],
)
def test_what_no_database_could_take_is_refused(write: Write, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        statements.check(write)


def test_upserts_compile_for_postgresql() -> None:

    def text(*sets: str, nulls: frozenset[str] = frozenset()) -> str:
        conflict = statements.Conflict(frozenset(sets))
        made = statements._Statement(PostgreSQL, TABLES["runs"], ("run", *sets), conflict, nulls)
        assert {*made.order} == {"run", *sets} - nulls
        return made.text

    assert "ON CONFLICT (run) DO UPDATE SET settings = excluded.settings" in text("settings")
    assert "NULL" in text("settings", nulls=frozenset({"settings"}))
    assert "DO NOTHING" in text()


def test_a_catalogue_needs_no_parent_directory(tmp_path: Path) -> None:
    engine = connect.writer_engine(url_of(tmp_path / "a" / "b c?#%"))
    with engine.begin() as connection:
        connect.make_tables(connection)
    engine.dispose()
    assert (tmp_path / "a" / "b c?#%" / "catalogue.db").exists()
