"""The writer: receipts, order, poison, the snapshot."""

from __future__ import annotations

import inspect
import math
import sqlite3
import threading
from pathlib import Path

import pytest
from tests.support.stores import ON_SQLITE, eventually, rows_of, stage_row, training, url_of, write

from stagescope_service.store import connect
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Put
from stagescope_service.store.sql import SqlStore
from stagescope_wire.errors import CatalogueUnavailable, StoreError


@ON_SQLITE
def test_a_receipt_means_that_another_process_sees_the_row(store: SqlStore, tmp_path: Path) -> None:
    store.submit(training()).result(30)
    other = sqlite3.connect(tmp_path / "catalogue.db")
    assert other.execute("SELECT run, number, unkeyed FROM attempts").fetchall() == [("r", 1, 0)]
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


def test_commits_are_flushed(tmp_path: Path) -> None:
    flushed = inspect.unwrap(connect.writer_engine)  # in tests nothing waits for the disk
    engine = flushed(url_of(tmp_path))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
    engine.dispose()


def test_submissions_from_many_threads_stay_in_order(store: SqlStore) -> None:
    def count(name: str) -> None:
        puts = [Put("meta", {"key": name, "value": number}) for number in range(200)]
        for future in [store.submit([put]) for put in puts]:
            future.result(30)

    threads = [threading.Thread(target=count, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row["value"] for row in rows_of(store, "meta")} == {199}


def test_a_poison_row_fails_its_own_submission_alone(store: SqlStore) -> None:
    write(store, *training())
    scalar = {"incarnation": "i", "work_key": "w", "name": "n"}
    submissions = {
        "good before": [Put("runs", {"run": "a"})],
        "wrong type": [Put("runs", {"run": "half"}), stage_row("x", 1)],
        "not a number": [Put("scalars", {**scalar, "value": "much"})],
        "not JSON": [Put("runs", {"run": "half", "settings": object()})],
        "too long an int": [Put("processes", {"incarnation": "p", "pid": 2**70})],
        "unique": [Put("attempts", {"attempt_id": 2, "run": "r", "number": 1, "key": "other"})],
        "no such column": [Put("runs", {"run": "half", "color": 1})],
        "good after": [Put("runs", {"run": "b"})],
    }  # fmt: skip
    futures = {name: store.submit(puts) for name, puts in submissions.items()}
    for name, future in futures.items():
        error = future.exception(30)
        if name.startswith("good"):
            assert error is None
        else:
            assert type(error) is StoreError, name
    assert {row["run"] for row in rows_of(store, "runs")} == {"r", "a", "b"}
    assert store.health().healthy


def test_audit_rows_are_numbered(store: SqlStore) -> None:
    write(store, Put("audit", {"action": "a"}), Put("audit", {"action": "b", "detail": {"x": 1}}))
    write(store, Put("audit", {"action": "c"}))
    found = [(row["audit_id"], row["action"]) for row in rows_of(store, "audit")]
    assert found == [(1, "a"), (2, "b"), (3, "c")]


def test_submissions_wait_for_open_and_open_again_changes_nothing(tmp_path: Path) -> None:
    store = SqlStore(url_of(tmp_path))
    waiting = store.submit([Put("runs", {"run": "early"})])
    assert not store.health().healthy
    with pytest.raises(CatalogueUnavailable):
        store.snapshot()
    store.open()
    waiting.result(30)
    store.open()
    assert store.health().healthy
    store.close()


@ON_SQLITE
def test_close_writes_what_is_queued_and_refuses_later_ones(store: SqlStore) -> None:
    futures = [store.submit([stage_row(rank, 1)]) for rank in range(500)]
    store.close()
    assert all(future.exception(0) is None for future in futures)
    assert isinstance(store.submit([stage_row(0, 2)]).exception(0), CatalogueUnavailable)
    store.open()
    assert len(rows_of(store, "stages")) == 500
    write(store, stage_row(0, 2))


def test_an_asker_that_went_away_does_not_stop_the_writer(store: SqlStore) -> None:
    future = store.submit([Put("runs", {"run": "a"})])
    assert not future.cancel()
    write(store, Put("runs", {"run": "b"}))
    assert len(rows_of(store, "runs")) == 2


@pytest.mark.parametrize("value", [0.0, -1.5, math.nan, math.inf, -math.inf, None, 7])
def test_scalars_round_trip(store: SqlStore, catalogue: Catalogue, value: float | None) -> None:
    key = {"incarnation": "i", "work_key": "w", "name": "loss", "attempt_id": 1, "step": 3}
    for before in (math.nan, 1.0):  # an earlier value leaves nothing of itself
        write(store, Put("scalars", {**key, "value": before}))
        write(store, Put("scalars", {**key, "value": value}))
        (row,) = catalogue.scalars(1, 3)
        if value is not None and math.isnan(value):
            assert math.isnan(row["value"])
        else:
            assert row["value"] == value


def test_snapshot_holds_what_a_coordinator_goes_on_with(store: SqlStore) -> None:
    write(store, *training(1, number=1), *training(2, number=2), *training(3, run="other"))
    write(
        store,
        Put("attempts", {"attempt_id": 1, "ended_wall": 19.0}),
        Put("processes", {"incarnation": "gone-old", "attempt_id": 1, "finished_wall": 1.0}),
        Put("processes", {"incarnation": "gone-new", "attempt_id": 2, "lapsed_wall": 1.0}),
        *(
            Put(
                "steps",
                {"attempt_id": attempt, "step": step, "closed_wall": 1.0, "step_summary": b"x"},
            )
            for attempt in (1, 2)
            for step in range(10)
        ),
        Put("steps", {"attempt_id": 2, "step": 10, "missing": [1]}),
        *(stage_row(0, step, attempt_id=2, end_wall=1.0, status="ok") for step in range(11)),
        *(stage_row(1, step, attempt_id=1, end_wall=1.0, status="ok") for step in range(10)),
        stage_row(2, 0, attempt_id=2),
        stage_row(3, 0, attempt_id=2, status="unfinished"),
        stage_row(4, 9, attempt_id=1),
        Put("payloads", {"incarnation": "i", "seq": 1, "state": "announced"}),
        Put("payloads", {"incarnation": "i", "seq": 2, "state": "ingested"}),
        Put("captures", {"capture_id": "c", "revision": 7, "spec": {"steps": [1]}}),
        Put("findings", {"finding_id": "f1", "attempt_id": 1}),
        Put("findings", {"finding_id": "f2", "attempt_id": 2}),
        Put("meta", {"key": "plan", "value": {"revision": 9}}),
        Put("steps", {"attempt_id": 1, "step": 3, "parts_mark": 5, "summary_mark": 4}),
        Put("steps", {"attempt_id": 2, "step": 3, "parts_mark": 5, "summary_mark": 5}),
        Put("steps", {"attempt_id": 2, "step": 4, "parts_mark": 6}),
        Put("steps", {"attempt_id": 2, "step": 10, "parts_mark": 7}),  # not closed
    )
    snapshot = store.snapshot(closed_steps=3)
    assert [row["run"] for row in snapshot.runs] == ["r", "other"]
    assert [row["attempt_id"] for row in snapshot.attempts] == [1, 2, 3]
    assert {row["incarnation"] for row in snapshot.processes} == {
        "incarnation-1-0", "incarnation-2-0", "incarnation-3-0", "gone-new",
    }  # fmt: skip
    assert sorted((row["attempt_id"], row["step"]) for row in snapshot.steps) == [
        (1, 7), (1, 8), (1, 9), (2, 7), (2, 8), (2, 9), (2, 10),
    ]  # fmt: skip
    assert all("step_summary" not in row for row in snapshot.steps)
    assert sorted((row["rank"], row["step"]) for row in snapshot.stages) == [
        (0, 7), (0, 8), (0, 9), (0, 10), (2, 0), (4, 9),
    ]  # fmt: skip
    assert [row["seq"] for row in snapshot.payloads] == [1]
    assert (snapshot.last_attempt_id, snapshot.last_revision) == (3, 7)
    assert snapshot.captures[0]["spec"]["steps"] == [1]
    assert [row["finding_id"] for row in snapshot.findings] == ["f2"]
    assert snapshot.meta == {"plan": {"revision": 9}}
    assert sorted(snapshot.unaggregated) == [(1, 3), (2, 4)]


def test_snapshot_of_an_empty_catalogue(store: SqlStore) -> None:
    snapshot = store.snapshot()
    assert (snapshot.runs, snapshot.last_attempt_id, snapshot.last_revision) == ([], 0, 0)


def test_readers_see_whole_submissions_while_the_writer_writes(
    store: SqlStore, catalogue: Catalogue
) -> None:
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            seen.append(len(catalogue.stages(1, limit=100_000)))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(60):
        store.submit([stage_row(rank, step) for rank in range(10)]).result(30)
    eventually(lambda: seen and seen[-1] == 600)
    done.set()
    reader.join()
    assert all(count % 10 == 0 for count in seen)
    assert seen == sorted(seen)


@ON_SQLITE
def test_a_wal_that_grew_under_a_reader_gets_small_again(store: SqlStore, tmp_path: Path) -> None:
    wal = tmp_path / "catalogue.db-wal"

    def put(name: str) -> None:
        rows = [Put("meta", {"key": f"{name}-{n}", "value": "x" * 5000}) for n in range(250)]
        store.submit(rows).result(10)

    reader = connect.reader_engine(store.url)
    with reader.connect() as connection:
        connection.exec_driver_sql("SELECT count(*) FROM meta").scalar()
        for number in range(80):
            put(f"held-{number}")
        grown = wal.stat().st_size
        assert grown > 80 << 20
    reader.dispose()
    for number in range(5):
        put(f"free-{number}")
    assert wal.stat().st_size <= 64 << 20
