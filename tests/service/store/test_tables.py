"""The tables: their revision, the design's columns, strict types."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_type_hints

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.schema import CreateTable
from tests.support.stores import url_of

from stagescope_service.store import connect, tables
from stagescope_service.store.columns import dump_json
from stagescope_service.store.tables import TABLES, compact, metadata
from stagescope_wire.errors import CatalogueUnavailable
from stagescope_wire.schema import LAYOUT_COLUMNS, PART_FIELDS

PostgreSQL = sa.engine.make_url("postgresql://").get_dialect()()


def test_row_types_have_the_columns_of_their_tables() -> None:
    rows = [value for name, value in vars(tables).items() if name.endswith("Row")]
    rows += [tables.AuditEntry, tables.RegisteredEngine]  # named as the API's document names them
    columns = {frozenset(get_type_hints(row)) for row in rows}
    assert columns == {frozenset(table.columns.keys()) for table in TABLES.values()}
    assert len(rows) == len(TABLES)


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
