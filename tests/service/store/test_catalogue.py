"""The reading side: what the API asks."""

from __future__ import annotations

import gc
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from tests.support.stores import ON_SQLITE, stage_row, training, url_of, write

from stagescope_service.store import connect
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Delete, Put
from stagescope_service.store.copying import make_empty
from stagescope_service.store.queries.overview import ListedAttempt
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables import TABLES
from stagescope_wire.errors import CatalogueUnavailable


@pytest.fixture
def two_runs(store: SqlStore) -> SqlStore:
    """Run r with attempts 1 (ended) and 2, run other with attempt 3, and a run without any."""
    write(
        store,
        *training(1, number=1),
        *training(2, number=2),
        *training(3, run="other"),
        Put("runs", {"run": "empty", "created_wall": 0.5}),
        Put("attempts", {"attempt_id": 1, "ended_wall": 19.0}),
        Put("processes", {"incarnation": "incarnation-3-0", "last_wall": 50.0}),
        *(
            Put("steps", {"attempt_id": 1, "step": step, "step_summary": b"w"})
            for step in range(1, 6)
        ),
        *(Put("steps", {"attempt_id": 2, "step": step}) for step in range(4, 8)),
        stage_row(0, 5, attempt_id=1, begin_wall=100.0, end_wall=101.0),
        stage_row(1, 5, attempt_id=1, begin_wall=99.0, superseded=True),
        stage_row(2, 5, attempt_id=2, begin_wall=300.0),
        stage_row(3, 5, attempt_id=3, begin_wall=200.0, superseded=False),
        stage_row(4, 5, attempt_id=3, begin_wall=900.0, stage="rollout_generate"),
    )
    return store


def test_a_question_that_is_not_read_to_its_end_disturbs_no_other(
    store: SqlStore, catalogue: Catalogue
) -> None:
    steps = range(1, 501)
    write(store, *training(1), *(Put("steps", {"attempt_id": 1, "step": n}) for n in steps))
    gc.disable()  # what is left of the first question is freed amid the second
    try:
        for _ in range(3):
            left = catalogue.step_metrics([1], version=1, numbers=None)
            next(left)
            del left
        found = catalogue.step_metrics([1], version=1, numbers=None)
        read = [next(found)]
        gc.collect()
        read += found
    finally:
        gc.enable()
    assert [row["step"] for row in read] == [*reversed(steps)]


def test_runs_say_who_lives(two_runs: SqlStore, catalogue: Catalogue) -> None:
    found = catalogue.runs()
    assert [(row["run"], row["attempts"], row["attempt"], row["live"]) for row in found] == [
        ("other", 1, 1, True),
        ("r", 2, 2, True),
        ("empty", 0, None, False),
    ]
    assert [row["last_wall"] for row in found] == [50.0, 25.0, 0.5]
    write(two_runs, Put("processes", {"incarnation": "incarnation-2-0", "finished_wall": 26.0}))
    assert [row["run"] for row in catalogue.live_runs()] == ["other"]
    assert [row["run"] for row in catalogue.runs(limit=1, offset=1)] == ["r"]
    one = catalogue.run("r")
    assert one is not None
    assert one["attempt_key"] == "key-2"
    assert catalogue.run("nobody") is None


@pytest.mark.usefixtures("two_runs")
def test_attempts(catalogue: Catalogue) -> None:
    assert [row["attempt_id"] for row in catalogue.attempts("r")] == [2, 1]
    assert [row["live"] for row in catalogue.attempts("r")] == [True, False]

    def number(row: ListedAttempt | None) -> object:
        return row and row["attempt_id"]

    assert number(catalogue.find_attempt("r")) == 2
    assert number(catalogue.find_attempt("r", 1)) == 1
    assert catalogue.find_attempt("r", 9) is None
    assert number(catalogue.attempt(3)) == 3
    assert number(catalogue.attempt_of_step("r", 3)) == 1
    assert number(catalogue.attempt_of_step("r", 5)) == 2
    assert catalogue.attempt_of_step("r", 99) is None


@pytest.mark.usefixtures("two_runs")
def test_the_training_stage_that_began_last_is_not_a_rollout(catalogue: Catalogue) -> None:
    row = catalogue.training_attempt()
    assert row is not None
    assert (row["run"], row["attempt_id"], row["begin_wall"]) == ("r", 2, 300.0)


@pytest.mark.usefixtures("two_runs")
def test_a_sender_whose_clock_is_ahead_keeps_no_default_run(
    store: SqlStore, catalogue: Catalogue
) -> None:
    write(store, stage_row(5, 6, attempt_id=3, begin_wall=1e12, begun_wall=299.0))
    row = catalogue.training_attempt()
    assert row is not None
    assert row["run"] == "r"


@pytest.mark.parametrize("offset", [None, -1e12])
def test_a_sender_whose_clock_is_ahead_does_not_lead_the_runs(
    two_runs: SqlStore, catalogue: Catalogue, offset: float | None
) -> None:
    ahead = {"incarnation": "incarnation-3-0", "last_wall": 1e12 + 30.0, "clock_offset": offset}
    write(
        two_runs,
        Put("processes", ahead),
        *(stage_row(4 - at, 5, attempt_id=3, begin_wall=1e12, begun_wall=40.0) for at in (0, 1)),
    )
    assert [row["run"] for row in catalogue.runs()] == ["r", "other", "empty"]


def test_experiments_are_listed_after_trainings(two_runs: SqlStore, catalogue: Catalogue) -> None:
    write(two_runs, Put("runs", {"run": "bisect-r-5", "created_wall": 900.0}))
    assert [row["run"] for row in catalogue.runs()] == ["other", "r", "empty", "bisect-r-5"]


def test_numbers_outside_a_stage_are_of_the_newest_process_that_logged_them(
    store: SqlStore, catalogue: Catalogue
) -> None:
    write(store, *training(1))
    puts = []
    for incarnation, first, named in (
        ("old", 1.0, {"loss": 1.0, "reward": 2.0}), ("new", 2.0, {"loss": 4.0})
    ):  # fmt: skip
        who = {"incarnation": incarnation, "attempt_id": 1, "role": "actor", "rank": 9}
        puts.append(Put("processes", {**who, "first_wall": first}))
        for name, value in named.items():
            puts.append(
                Put("scalars", {**who, "step": 5, "work_key": "5||", "name": name, "value": value})
            )
    write(store, *puts)
    found = {row["name"]: row["value"] for row in catalogue.scalars(1, 5)}
    assert found == {"loss": 4.0, "reward": 2.0}
    (row,) = catalogue.scalar_values([1], "loss", by_rank=False)
    assert (row["mean"], row["count"]) == (4.0, 1)


@ON_SQLITE
def test_usual_queries_read_few_rows(store: SqlStore, catalogue: Catalogue) -> None:
    plans: dict[str, list[str]] = {}

    def explain(
        connection: sa.Connection, _: object, text: str, parameters: Any, *__: object
    ) -> None:
        if not text.startswith("EXPLAIN"):
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", parameters)
            plans[text] = [row[3] for row in rows]

    event.listen(catalogue._engine, "before_cursor_execute", explain)
    catalogue.training_attempt()
    catalogue.runs()
    catalogue.stages(1, 5)
    catalogue.scalars(1, 5)
    catalogue.payloads(1, 5)
    catalogue.artifacts(1, 5)
    catalogue.payload_states([1], [5])
    list(catalogue.scalar_values([1], "loss", by_rank=True))
    catalogue.scalar_names([1])
    catalogue.open_stages(1)
    catalogue.counts()
    read = [line for plan in plans.values() for line in plan]
    assert any("training_begins" in line for line in read)
    for line in read:
        partial = "ix_stage_rows_open" in line or "ix_payload_rows_announced" in line
        partial |= "ix_stage_rows_superseded" in line or "ix_artifact_rows_live" in line
        assert partial or line.split()[:2] not in (["SCAN", "r"], ["SCAN", "w"]), line


@pytest.mark.usefixtures("two_runs")
def test_steps_page_newest_first(catalogue: Catalogue) -> None:
    page = catalogue.steps(1, limit=2)
    assert [row["step"] for row in page] == [5, 4]
    assert [row["step"] for row in catalogue.steps(1, before=page[-1]["step"])] == [3, 2, 1]
    assert [(row["step"], row["attempt"], row["has_summary"]) for row in catalogue.steps(run="r")][
        :4
    ] == [(7, 2, False), (6, 2, False), (5, 2, False), (5, 1, True)]
    step = catalogue.step(1, 5)
    assert step is not None
    assert step["step_summary"] == b"w"
    assert catalogue.step(1, 99) is None


@pytest.mark.usefixtures("two_runs")
def test_stages_filter(catalogue: Catalogue) -> None:
    def ranks(**filters: object) -> list[int]:
        return [row["rank"] for row in catalogue.stages(**filters)]  # type: ignore[arg-type]

    assert ranks(attempt_id=1, step=5) == [0]
    assert ranks(attempt_id=1, step=5, superseded=None) == [1, 0]
    assert ranks(attempt_id=1, step=5, superseded=True) == [1]
    assert ranks(attempt_id=3) == [3, 4]
    assert ranks(attempt_id=3, rank=[4, 5]) == [4]
    assert ranks(attempt_id=3, stage="actor_update", role="actor") == [3]
    assert ranks(attempt_id=3, stage=[]) == []
    assert [row["rank"] for row in catalogue.open_stages()] == [1, 3, 2, 4]


def test_what_was_replaced_no_longer_answers(store: SqlStore, catalogue: Catalogue) -> None:
    work_key = "5||actor_update|0.0.0.0"
    place = {"attempt_id": 1, "step": 5, "rank": 0, "work_key": work_key, "name": "loss"}
    write(
        store,
        stage_row(0, 5, end_seq=7, superseded=True),
        stage_row(1, 5, end_seq=8, superseded=True),
        stage_row(1, 5, end_seq=9, superseded=False, revision=1),
        *(
            Put("scalars", {**place, "incarnation": f"incarnation-{rank}", "value": float(rank)})
            for rank in range(3)  # of the last no stage is known
        ),
    )
    assert [row["value"] for row in catalogue.scalars(1, 5)] == [1.0, 2.0]
    assert catalogue.replaced(1, 5) == {("incarnation-0", 7), ("incarnation-1", 8)}
    assert catalogue.replaced(1, 6) == set()


def test_rows_come_back_as_they_went_in(store: SqlStore, catalogue: Catalogue) -> None:
    place = {"attempt_id": 1, "step": 2, "stage": "actor_update", "role": "actor", "rank": 0}
    work = {"incarnation": "i", "work_key": "w"}
    row: dict[str, dict[str, object]] = {
        "payloads": {"incarnation": "i", "seq": 1, **place, "state": "lost", "tensors": {"a": [1]}},
        "summaries": {"incarnation": "i", "seq": 1, "pair": "p", **place, "summary": b"s"},
        "streams": {
            "attempt_id": 1, "stream": "old", "role": "actor", "stage": "s", "processed": False,
        },
        "samples": {"attempt_id": 1, "clock": "2", "sample_uid": "g/0", "step": 2, "reward": 0.5},
        "findings": {"finding_id": "f", "run": "r", "step": 2, "evidence": {"d": float("nan")}},
        "captures": {"capture_id": "c", "run": "r", "spec": {"steps": [2]}, "state": "active"},
        "dumps": {**work, "capture_id": "c", **place, "state": "complete", "overrides": ["rank"]},
        "artifacts": {"artifact_id": "a", **place, "kind": "kept", "shared": True},
        "losses": {"loss_id": "l", "run": "r", "attempt_id": 1, "step": 2, "kind": "payload"},
        "audit": {"wall": 1.0, "by": "me", "action": "add_capture", "detail": {"x": 1}},
    }  # fmt: skip
    write(store, *(Put(table, columns) for table, columns in row.items()))
    row["findings"]["evidence"] = {"d": "nan"}
    answers: dict[str, Any] = {
        "payloads": catalogue.payloads(1, 2, state="lost"),
        "summaries": catalogue.summaries(1, 2, stage="actor_update", pair="p"),
        "streams": catalogue.streams(1),
        "samples": catalogue.samples(1, 2),
        "findings": catalogue.findings(run="r", step=2),
        "captures": catalogue.captures(),
        "dumps": catalogue.dumps(1, 2, capture_id="c"),
        "artifacts": catalogue.artifacts(1, 2, kind="kept"),
        "losses": catalogue.losses(run="r", kind="payload"),
        "audit": catalogue.audit(),
    }
    for table, found in answers.items():
        (one,) = found
        known = {name: value for name, value in one.items() if value is not None}
        known.pop("audit_id", None)
        assert known == row[table], table
        assert one.keys() == set(TABLES[table].columns.keys())
    assert catalogue.capture("c") == answers["captures"][0]
    assert catalogue.capture("d") is None


def test_deleted_artifacts_are_told_when_asked(store: SqlStore, catalogue: Catalogue) -> None:
    write(
        store,
        Put("artifacts", {"artifact_id": "a", "attempt_id": 1}),
        Put("artifacts", {"artifact_id": "b", "attempt_id": 1, "deleted_wall": 3.0}),
    )
    assert [row["artifact_id"] for row in catalogue.artifacts(1)] == ["a"]
    assert [row["artifact_id"] for row in catalogue.artifacts(1, deleted=True)] == ["b"]
    assert len(catalogue.artifacts(1, deleted=None)) == 2


def test_counts(two_runs: SqlStore, catalogue: Catalogue) -> None:
    work = {"incarnation": "i", "attempt_id": 2}
    found = {"run": "r", "kind": "k", "severity": "error"}
    write(
        two_runs,
        Put("losses", {"loss_id": "1", "run": "r", "kind": "payload", "count": 3}),
        Put("losses", {"loss_id": "2", "run": "r", "kind": "payload"}),
        Put("payloads", {**work, "seq": 1, "state": "announced", "bytes": 7}),
        Put("findings", {"finding_id": "1", **found, "count": 2}),
        Put("dumps", {**work, "work_key": "w", "capture_id": "c", "state": "failed"}),
    )
    counts = catalogue.counts()
    assert counts["losses"] == [{"run": "r", "kind": "payload", "count": 4}]
    assert counts["payloads_announced"] == [{"run": "r", "count": 1, "bytes": 7}]
    assert counts["findings"] == [{**found, "count": 2}]
    assert counts["dumps"] == [{"run": "r", "state": "failed", "count": 1}]
    assert counts["attempts"] == [{"run": "other", "count": 1}, {"run": "r", "count": 2}]
    assert counts["steps_open"] == [{"run": "r", "count": 9}]
    assert {(row["run"], row["role"], row["count"]) for row in counts["processes_live"]} == {
        ("r", "actor", 2),
        ("other", "actor", 1),
    }
    assert {(row["run"], row["stage"], row["count"]) for row in counts["stages_open"]} == {
        ("r", "actor_update", 2),
        ("other", "actor_update", 1),
        ("other", "rollout_generate", 1),
    }


def test_a_catalogue_cannot_write(store: SqlStore, catalogue: Catalogue) -> None:
    refused = pytest.raises(CatalogueUnavailable, match=r"readonly|read-only")
    with refused, catalogue._reading() as connection:
        connection.execute(TABLES["runs"].insert(), {"run": "a"})


def test_no_catalogue_yet_and_then_one(tmp_path: Path) -> None:
    catalogue = Catalogue(url_of(tmp_path))
    for ask in (catalogue.check, catalogue.runs, catalogue.counts):
        with pytest.raises(CatalogueUnavailable):
            ask()
    assert not (tmp_path / "catalogue.db").exists()
    sqlite3.connect(tmp_path / "catalogue.db").close()
    with pytest.raises(CatalogueUnavailable, match="revision None"):
        catalogue.check()
    with pytest.raises(CatalogueUnavailable, match="start the service"):
        catalogue.runs()
    store = SqlStore(url_of(tmp_path))
    store.open()
    catalogue.check()
    assert catalogue.runs() == []
    assert catalogue.meta("plan") is None
    assert (catalogue.bytes_on_disk() or 0) > 10_000
    store.close()
    catalogue.close()


def test_a_replaced_catalogue_is_read_anew(tmp_path: Path) -> None:
    for name in ("a", "b"):
        store = SqlStore(url_of(tmp_path / name))
        store.open()
        write(store, Put("runs", {"run": name}))
        store.close()
    catalogue = Catalogue(url_of(tmp_path / "a"))
    assert [row["run"] for row in catalogue.runs()] == ["a"]
    (tmp_path / "b" / "catalogue.db").replace(tmp_path / "a" / "catalogue.db")
    assert [row["run"] for row in catalogue.runs()] == ["b"]
    catalogue.close()


def test_urls_are_shown_without_their_passwords(tmp_path: Path) -> None:
    assert connect.url_without_password(url_of(tmp_path)) == str(tmp_path / "catalogue.db")
    assert "secret" not in connect.url_without_password("postgresql://me:secret@host/db")


def test_names_of_scalars_are_looked_up_and_not_counted(
    store: SqlStore, catalogue: Catalogue
) -> None:
    logged = [(1, "loss", 3), (1, "loss", 5), (1, "a", None), (2, "loss", 4), (3, "b", 1)]
    for at, (attempt_id, name, step) in enumerate(logged):
        key = {"incarnation": str(at), "work_key": "w", "name": name}
        write(store, Put("scalars", {**key, "attempt_id": attempt_id, "step": step, "value": 1.0}))
    assert catalogue.scalar_names([1, 2]) == {"a": None, "loss": 5}
    assert catalogue.scalar_names([9]) == {}
    store.submit([Delete("scalars", {"incarnation": "1"})]).result(30)
    assert catalogue.scalar_names([1]) == {"a": None, "loss": 3}
    store.submit([Delete("scalars", {"attempt_id": 1})]).result(30)
    assert catalogue.scalar_names([1, 2]) == {"loss": 4}


def test_catalogues_that_are_made_at_once_do_not_meet(tmp_path: Path) -> None:
    """As where the bundle of an attempt that died is packed beside one that a user asked for."""
    paths = [tmp_path / str(at) for at in range(12)]
    for path in paths:
        path.mkdir()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make_empty, paths))


def test_a_snapshot_is_of_one_moment(store: SqlStore, catalogue: Catalogue) -> None:
    write(store, *training(1))
    with catalogue.snapshot() as found:
        before = found.runs()
        write(store, *training(2, run="later"))
        assert [row["run"] for row in found.runs()] == [row["run"] for row in before]
        with found.snapshot() as same:
            assert same.processes(2) == []
    assert "later" in {row["run"] for row in catalogue.runs()}
