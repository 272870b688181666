"""The tables: equal to the migrations, with the design's columns, with strict types."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_type_hints

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.schema import CreateTable
from tests.support.stores import url_of

from stagescope.link_text import session_call
from stagescope.wire.errors import CatalogueUnavailable
from stagescope.wire.links import links_from_json, reworded
from stagescope.wire.schema import LAYOUT_COLUMNS, PART_FIELDS
from stagescope_service.api.rows import finding_rows
from stagescope_service.store import connect, migrate, tables
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.columns import dump_json
from stagescope_service.store.tables import TABLES, metadata

PostgreSQL = sa.engine.make_url("postgresql://").get_dialect()()


def test_migrations_from_an_empty_file_make_the_tables(tmp_path: Path) -> None:
    engine = connect.writer_engine(url_of(tmp_path))
    with engine.begin() as connection:
        migrate.upgrade(connection)
        assert migrate.current(connection) == migrate.HEAD
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []
        made = sa.MetaData()
        made.reflect(connection)
    engine.dispose()
    for name, table in metadata.tables.items():
        key = [column.name for column in made.tables[name].primary_key]
        assert key == [column.name for column in table.primary_key]


def test_row_types_have_the_columns_of_their_tables() -> None:
    rows = [value for name, value in vars(tables).items() if name.endswith("Row")]
    columns = {frozenset(get_type_hints(row)) for row in rows}
    assert columns == {frozenset(table.columns.keys()) for table in TABLES.values()}
    assert len(rows) == len(TABLES)


def test_migrated_tables_have_the_options_and_partial_indexes_of_the_metadata(
    tmp_path: Path,
) -> None:
    # compare_metadata looks at neither, so the SQL text is compared.
    texts: list[dict[str, str]] = []
    for make in (migrate.upgrade, metadata.create_all):
        directory = tmp_path / str(len(texts))
        engine = connect.writer_engine(url_of(directory))
        with engine.begin() as connection:
            make(connection)
            query = sa.text("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'alembic%'")
            found = {name: sql for name, sql in connection.execute(query) if sql}
        engine.dispose()
        texts.append({name: "".join(sql.split()) for name, sql in found.items()})
    assert texts[0] == texts[1]
    assert "STRICT" in texts[0]["scalar_rows"]
    assert "WITHOUTROWID" in texts[0]["scalar_rows"]


def test_head_is_the_newest_revision() -> None:
    assert ScriptDirectory(str(migrate._FOLDER)).get_heads() == [migrate.HEAD]


@pytest.mark.parametrize("revision", ["9999", "0003"], ids=["later", "before the first"])
def test_upgrade_is_idempotent_and_refuses_an_unknown_revision(
    tmp_path: Path, revision: str
) -> None:
    engine = connect.writer_engine(url_of(tmp_path))
    with engine.begin() as connection:
        migrate.upgrade(connection)
        migrate.upgrade(connection)
        connection.execute(sa.text(f"UPDATE alembic_version SET version_num = '{revision}'"))
    with engine.begin() as connection, pytest.raises(CatalogueUnavailable, match="does not know"):
        migrate.upgrade(connection)
    engine.dispose()


def test_a_finding_of_before_its_links_were_data_keeps_its_advice(tmp_path: Path) -> None:
    old = "see /steps/5/stages?run=r for who has arrived"
    engine = connect.writer_engine(url_of(tmp_path))
    with engine.begin() as connection:
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(migrate._FOLDER))
        command.upgrade(config, "0009")
        assert "see" not in {
            each["name"] for each in sa.inspect(connection).get_columns("findings")
        }
        columns = {"finding_id": "f", "run": "r", "attempt_id": 1, "advice": old}
        values = ", ".join(f":{name}" for name in columns)
        connection.execute(
            sa.text(f"INSERT INTO findings ({', '.join(columns)}) VALUES ({values})"), columns
        )
    with engine.begin() as connection:
        migrate.upgrade(connection)
    engine.dispose()
    catalogue = Catalogue(url_of(tmp_path))
    (row,) = finding_rows(catalogue.findings(run="r"), {1: 1, 2: 2})
    catalogue.close()
    assert (row["advice"], row["see"]) == (old, [])
    assert reworded(old, links_from_json(row["see"]), session_call) == old


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
