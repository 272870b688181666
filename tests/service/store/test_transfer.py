"""A whole catalogue moved into another database, and several in one PostgreSQL database."""

from __future__ import annotations

import json
import lzma
import multiprocessing
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from pydantic import ValidationError
from tests.support.command_line import invoke
from tests.support.stores import database, rows_of, url_of

from stagescope_service.settings import Settings
from stagescope_service.store import connect
from stagescope_service.store.contract import Put
from stagescope_service.store.copying import copy_catalogue
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables import metadata
from stagescope_wire.errors import CatalogueUnavailable

RECORDED = Path(__file__).parents[1] / "http" / "recorded" / "catalogue.db.xz"
"""Its runs have rows in most tables."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The data directory of a service with history."""
    directory = tmp_path / "old"
    directory.mkdir()
    (directory / "catalogue.db").write_bytes(lzma.decompress(RECORDED.read_bytes()))
    store = SqlStore(url_of(directory))
    store.open()
    store.submit([Put("audit", {"wall": 1.0, "action": "pin", "by": "someone"})]).result(10)
    store.close()
    return directory


@pytest.fixture
def empty(server: str) -> Iterator[str]:
    with database(server) as url:
        yield url


def content(url: str) -> dict[str, list[tuple[object, ...]]]:
    engine = connect.reader_engine(url)
    try:
        with engine.begin() as connection:
            return {
                name: sorted((tuple(row) for row in connection.execute(sa.select(table))), key=repr)
                for name, table in metadata.tables.items()
            }
    finally:
        engine.dispose()


def test_a_catalogue_moves_to_postgresql_and_back(old: Path, empty: str, tmp_path: Path) -> None:
    before = content(url_of(old))
    assert sum(bool(rows) for rows in before.values()) > 15
    done = invoke("migrate-catalogue", str(old), empty, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {name: len(rows) for name, rows in before.items()}
    assert repr(content(empty)) == repr(before)
    store = SqlStore(empty)  # a service goes on with it
    store.open()
    store.submit([Put("audit", {"wall": 2.0, "action": "pin", "by": "someone"})]).result(10)
    assert [row["audit_id"] for row in rows_of(store, "audit")][-1] == len(before["audit"]) + 1
    store.close()
    done = invoke("migrate-catalogue", empty, str(tmp_path / "new"))
    assert done.exit_code == 0, done.output
    assert "rows, all there" in done.stdout
    assert repr(content(url_of(tmp_path / "new"))) == repr(content(empty))


def test_what_cannot_be_moved_is_told_and_changes_nothing(
    old: Path, empty: str, tmp_path: Path
) -> None:
    done = invoke("migrate-catalogue", str(tmp_path / "none"), empty)
    assert done.exit_code != 0
    assert "there is no catalogue" in done.stderr
    assert not (tmp_path / "none").exists()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    with sqlite3.connect(fresh / "catalogue.db") as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('0011')")
    connection.close()
    with pytest.raises(CatalogueUnavailable, match=r"of revision .*stagescope that wrote"):
        copy_catalogue(url_of(fresh), empty)
    store = SqlStore(empty)
    store.open()
    with pytest.raises(CatalogueUnavailable, match="another service writes to catalogue"):
        copy_catalogue(url_of(old), empty)
    store.submit([Put("meta", {"key": "k", "value": 1})]).result(10)
    store.close()
    with pytest.raises(CatalogueUnavailable, match="has 1 rows of meta already"):
        copy_catalogue(url_of(old), empty)
    assert len(content(empty)["runs"]) == 0


def test_services_in_one_database_are_apart_by_schema(empty: str, tmp_path: Path) -> None:
    stores = []
    for name in ("cluster_a", "cluster_b"):
        settings = Settings(
            home=tmp_path, data_dir=tmp_path, database_url=empty, database_schema=name
        )
        stores.append(SqlStore(settings.catalogue_url))
    for number, store in enumerate(stores):
        store.open()
        store.submit([Put("meta", {"key": "own", "value": number})]).result(10)
    for number, store in enumerate(stores):
        assert [row["value"] for row in rows_of(store, "meta") if row["key"] == "own"] == [number]
    second = SqlStore(stores[0].url)
    with pytest.raises(CatalogueUnavailable, match=r"another service.*STAGESCOPE_DATABASE_SCHEMA"):
        second.open()
    stores[0].close()
    second.open()  # its lock is free again
    assert [row["value"] for row in rows_of(second, "meta") if row["key"] == "own"] == [0]
    for store in (second, stores[1]):
        store.close()
    engine = sa.create_engine(empty)
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names(schema="public") == []
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "schema"),
    [
        (None, "a"),
        ("sqlite:////x/catalogue.db", "a"),
        ("postgresql+psycopg://h/d?options=-cx%3D1", "a"),
        ("postgresql+psycopg://h/d", "a; drop table runs"),
        ("postgresql+psycopg://h/d", "A"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(url: str | None, schema: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="schema"):
        Settings(home=tmp_path, database_url=url, database_schema=schema)


def _hold(url: str, ready: str) -> None:
    store = SqlStore(url)
    store.open()
    Path(ready).touch()
    signal.pause()


def test_the_lock_of_a_killed_writer_is_free(empty: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_hold, args=(empty, str(ready)))
    process.start()
    deadline = time.monotonic() + 60
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    store = SqlStore(empty)
    store.open()
    store.submit([Put("meta", {"key": "own", "value": 1})]).result(10)
    store.close()
    process.join()
