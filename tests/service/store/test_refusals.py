"""A row that can never be written is left out; what may succeed later is held back."""

from __future__ import annotations

import contextlib
import random
import string
from collections.abc import Iterator
from typing import Any, Final

import pytest
import sqlalchemy as sa
from tests.support.stores import eventually, keyed, rows_of, stage_row, training, write

from stagescope_service.store.contract import Put
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.statements import KEYS
from stagescope_service.store.tables import TABLES
from stagescope_service.store.tables.declare import Int, Real, Text
from stagescope_wire.errors import CatalogueUnavailable

_RANDOM: Final = random.Random(0)
LONG: Final = "".join(_RANDOM.choices(string.ascii_letters + string.digits, k=9000))
"""No database can compress it into the row of an index."""
ODD_TEXTS: Final = {
    "NUL": "a\0b",
    "surrogate": "a\ud800b",
    "long": LONG,
    "emoji": "\U0001f600" * 900,
}


def test_of_a_submission_only_the_row_that_cannot_be_written_is_left_out(store: SqlStore) -> None:
    write(store, *training())
    odd = [stage_row("x", 1), Put("runs", {"run": "c", "color": 1}), Put("runs", {"run": ["list"]})]
    good = [stage_row(rank, 1) for rank in range(20)]
    writes = [*good[:3], odd[0], *good[3:11], odd[1], *good[11:], odd[2], Put("runs", {"run": "z"})]
    refused = store.submit(writes, isolate=True).result(30)
    assert [each.write for each in refused] == odd
    assert all(each.reason for each in refused)
    assert len(rows_of(store, "stages")) == 20
    assert {row["run"] for row in rows_of(store, "runs")} == {"r", "z"}


def test_rows_of_one_key_keep_their_order_around_one_that_is_left_out(store: SqlStore) -> None:
    writes = [Put("meta", {"key": "k", "value": number}) for number in range(9)]
    odd = Put("meta", {"key": "k", "value": object()})
    assert [each.write for each in store.submit([*writes, odd], isolate=True).result(30)] == [odd]
    # A later value of the same column replaces it before it is written.
    assert store.submit([odd, *writes], isolate=True).result(30) == ()
    assert keyed(rows_of(store, "meta"), "key")["k",]["value"] == 8


def _example(column: sa.Column[Any]) -> object:
    if column.type is Text:
        return "t"
    if column.type is Int:
        return 1
    return 1.0 if column.type is Real else b"b"


@pytest.mark.parametrize("odd", ODD_TEXTS)
def test_no_text_in_any_column_stops_the_writer(store: SqlStore, odd: str) -> None:
    """A text is stored as it is, or its row is refused and no other."""
    texts = [(table, c.name) for table in TABLES.values() for c in table.c if c.type is Text]
    assert len(texts) > 100
    stored = 0
    for table, name in texts:
        row = {key: _example(table.c[key]) for key in KEYS[table.name]}
        if table.name in ("stages", "scalars", "payloads", "artifacts"):
            row |= {each.name: None for each in table.c if each.name not in row}
            row |= {"attempt_id": 1, "role": "actor", "rank": 0, "stage": "s"} | row
        after = Put("meta", {"key": f"{table.name}.{name}", "value": 1})
        refused = store.submit(
            [Put(table.name, {**row, name: ODD_TEXTS[odd]}), after], isolate=True
        )
        stored += not refused.result(30)
    assert store.health().healthy
    written = {row["key"] for row in rows_of(store, "meta")}
    assert {f"{table.name}.{name}" for table, name in texts} <= written
    assert stored > 50 or odd in ("NUL", "surrogate")


def test_metadata_of_any_length_may_be_repeated(store: SqlStore) -> None:
    """Equal metadata is stored once, if it is short enough for an index."""
    row = rows_payload(seq=1) | {"meta": {"prompt": LONG}, "tensors": {"a": [LONG]}}
    store.submit([Put("payloads", {**row, "seq": seq}) for seq in range(4)]).result(30)
    assert [row["meta"] for row in rows_of(store, "payloads")] == [{"prompt": LONG}] * 4


def rows_payload(seq: int) -> dict[str, object]:
    return {
        "incarnation": "i", "seq": seq, "attempt_id": 1, "role": "actor", "rank": 0, "step": 1,
        "policy_version": None, "stage": "s", "occurrence": 0, "epoch": 0, "minibatch": 0,
        "microbatch": 0, "work_key": "1||s|0.0.0.0", "state": "announced",
    }  # fmt: skip


@pytest.fixture
def privileges(store: SqlStore) -> Iterator[tuple[SqlStore, sa.Connection]]:
    """A store whose user is no superuser, and a connection that may take its privileges."""
    store.close()
    engine = sa.create_engine(store.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as admin:
        admin.exec_driver_sql("DROP ROLE IF EXISTS plain")
        admin.exec_driver_sql("CREATE ROLE plain LOGIN")
        admin.exec_driver_sql("GRANT ALL ON SCHEMA public TO plain")
        admin.exec_driver_sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO plain")
        plain = SqlStore(store.url.replace("tester@", "plain@"))
        plain.open()
        yield plain, admin
        plain.close()
        admin.exec_driver_sql("DROP OWNED BY plain")
        admin.exec_driver_sql("DROP ROLE plain")
    engine.dispose()


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    ("take", "give"),
    [
        ("REVOKE ALL ON ALL TABLES IN SCHEMA public FROM plain",
         "GRANT ALL ON ALL TABLES IN SCHEMA public TO plain"),
        ("REVOKE INSERT ON stage_rows FROM plain", "GRANT INSERT ON stage_rows TO plain"),
        ("ALTER TABLE stage_rows RENAME TO gone", "ALTER TABLE gone RENAME TO stage_rows"),
        ("ALTER TABLE texts DROP COLUMN text CASCADE", None),
    ],
)  # fmt: skip
def test_a_server_that_refuses_for_a_while_gets_every_row(
    privileges: tuple[SqlStore, sa.Connection], take: str, give: str | None
) -> None:
    store, admin = privileges
    write(store, stage_row(0, 1))
    admin.exec_driver_sql(take)
    futures = [store.submit([stage_row(0, step)], isolate=True) for step in range(2, 40)]
    eventually(lambda: not store.health().healthy)
    assert not any(future.done() for future in futures)
    if give is None:  # it does not come back: nothing was acknowledged
        store.close(timeout=0.1)
        assert all(future.exception(30) for future in futures)
        return
    admin.exec_driver_sql(give)
    assert [future.result(60) for future in futures] == [()] * len(futures)
    assert {row["step"] for row in rows_of(store, "stages")} == set(range(1, 40))
    assert store.health().healthy


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_a_table_that_is_away_for_a_while_gets_every_row(store: SqlStore) -> None:
    write(store, stage_row(0, 1))
    engine = sa.create_engine(store.url)
    with engine.begin() as other:
        other.exec_driver_sql("PRAGMA legacy_alter_table=ON")
        other.exec_driver_sql("ALTER TABLE losses RENAME TO gone")
    future = store.submit([Put("losses", {"loss_id": "l"}), stage_row(0, 2)], isolate=True)
    eventually(lambda: not store.health().healthy)
    with engine.begin() as other:
        other.exec_driver_sql("ALTER TABLE gone RENAME TO losses")
    assert future.result(60) == ()
    assert len(rows_of(store, "losses")) == 1
    engine.dispose()


@contextlib.contextmanager
def encoded(server: str, encoding: str) -> Iterator[str]:
    """The URL of a new database with an encoding."""
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    name = f"encoded_{encoding.lower()}"
    with engine.connect() as admin:
        locale = "TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
        admin.exec_driver_sql(f"CREATE DATABASE {name} ENCODING '{encoding}' {locale}")
        yield server.replace("/postgres?", f"/{name}?")
        admin.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    engine.dispose()


@pytest.mark.parametrize("encoding", ["UTF8", "SQL_ASCII"])
@pytest.mark.parametrize("variable", ["", "LATIN1"])
def test_texts_of_every_language_are_stored(
    server: str, encoding: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", variable)
    with encoded(server, encoding) as url:
        store = SqlStore(url)
        store.open()
        rows = [*training(), Put("meta", {"key": "\u5b9e\u9a8c", "value": {"a": "\u00e9\u5b9e"}})]
        assert store.submit(rows, isolate=True).result(30) == ()
        assert keyed(rows_of(store, "meta"), "key")["\u5b9e\u9a8c",]["value"] == {
            "a": "\u00e9\u5b9e"
        }
        store.close()


def test_a_database_that_lacks_characters_is_refused_when_it_is_opened(server: str) -> None:
    with encoded(server, "LATIN1") as url:
        store = SqlStore(url)
        with pytest.raises(CatalogueUnavailable, match="has the encoding LATIN1") as raised:
            store.open()
        assert "createdb --encoding=UTF8" in str(raised.value)
        store.close()
