"""What is asked of a step, or of the newest ones, costs the same however long the run is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from tests.support.stores import rows_of_step, url_of

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Put
from stagescope_service.store.sql import SqlStore

FEW: Final = 80
MANY: Final = 600
STEP: Final = 20
IN_RING: Final = 4

QUESTIONS: Final[dict[str, Callable[[Catalogue, int], object]]] = {
    "stages": lambda catalogue, newest: catalogue.stages(1, STEP),
    "scalars": lambda catalogue, newest: catalogue.scalars(1, STEP),
    "payloads": lambda catalogue, newest: catalogue.payloads(1, STEP),
    "payloads of a consumed step": lambda c, newest: c.payloads([1], consumed_step=STEP),
    "payload states": lambda catalogue, newest: catalogue.payload_states([1], [STEP, newest]),
    "summaries": lambda catalogue, newest: catalogue.summaries(1, STEP),
    "samples": lambda catalogue, newest: catalogue.samples(1, STEP),
    "consumed samples": lambda catalogue, newest: catalogue.consumed([1], 1, STEP),
    "artifacts": lambda catalogue, newest: catalogue.artifacts(1, STEP),
    "steps": lambda catalogue, newest: catalogue.steps(1, limit=10),
    "attempts": lambda catalogue, newest: catalogue.attempts("r"),
    "attempt of a step": lambda catalogue, newest: catalogue.attempt_of_step("r", STEP),
    "newest summary": lambda catalogue, newest: catalogue.newest_summary("r"),
    "steps with files": lambda catalogue, newest: catalogue.kept_steps(1),
    "files to delete": lambda catalogue, newest: catalogue.kept_files(attempt_id=1, limit=10),
    "findings of a run": lambda catalogue, newest: catalogue.findings(run="r", limit=10),
    "findings of an attempt": lambda c, newest: c.findings(attempt_id=1, limit=10),
    "findings of a step": lambda catalogue, newest: catalogue.findings(run="r", step=STEP),
    "findings of a kind": lambda catalogue, newest: catalogue.findings(attempt_id=1, kind="rare"),
    "places": lambda catalogue, newest: catalogue.places_of_finding("rare", [1], [STEP, newest]),
    "kinds": lambda catalogue, newest: catalogue.kinds("findings", attempt_id=2),
    "changes": lambda catalogue, newest: catalogue.recent(0.0),
    "open stages": lambda catalogue, newest: catalogue.open_stages(1),
}


def counted(engine: sa.Engine) -> list[int]:
    """Return what SQLite executes from now on, an entry for every 100 instructions."""
    found: list[int] = []

    def count() -> int:
        found.append(1)
        return 0

    def watch(connection: sqlite3.Connection, record: Any) -> None:
        connection.set_progress_handler(count, 100)

    event.listen(engine, "connect", watch)
    return found


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, SqlStore]]:
    """A run of few steps, and one of many, with a finding in each; its next attempt has one."""
    made = {}
    for steps in (FEW, MANY):
        store = SqlStore(url_of(tmp_path_factory.mktemp("catalogue")))
        store.open()
        puts = [Put("runs", {"run": "r"})]
        for number in (1, 2):
            attempt = {"attempt_id": number, "run": "r", "number": number, "key": f"{number}"}
            puts.append(Put("attempts", {**attempt, "opened_wall": 1.0}))
        puts += rows_of_step(2, 1)
        for step in range(1, steps + 1):
            for put in rows_of_step(1, step):
                if put.table == "artifacts" and step <= steps - IN_RING:
                    put = Put("artifacts", {**put.row, "deleted_wall": 3.0})
                elif put.table == "findings":
                    put = Put("findings", {**put.row, "first_wall": step, "last_wall": step})
                puts.append(put)
        store.submit(puts).result(120)
        made[steps] = store
    yield made
    for store in made.values():
        store.close()


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_about_few_steps_reads_few_rows(stores: dict[int, SqlStore], name: str) -> None:
    costs = {}
    for steps, store in stores.items():
        catalogue = Catalogue(store.url)
        cost = counted(catalogue._engine)
        QUESTIONS[name](catalogue, steps)
        costs[steps] = len(cost)
        catalogue.close()
    assert costs[MANY] <= 1.2 * costs[FEW] + 3, costs


def test_a_coordinator_that_starts_reads_the_last_steps_of_a_run(
    stores: dict[int, SqlStore],
) -> None:
    store, plans = stores[MANY], list[str]()
    assert store._reader is not None

    @event.listens_for(store._reader, "before_cursor_execute")
    def explain(
        connection: sa.Connection, _: object, text: str, parameters: Any, *__: object
    ) -> None:
        if text.startswith("SELECT"):
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", parameters)
            plans.extend(row[3] for row in rows)

    snapshot = store.snapshot()
    assert {row["step"] for row in snapshot.stages} == {1, *range(MANY - 7, MANY + 1)}
    assert len(snapshot.payloads) == 9 * 3
    of_works = [line for line in plans if "ix_works_attempt_id_step" in line]
    assert of_works
    assert all("step=?" in line for line in of_works), of_works
    partial = ("ix_stage_rows_open", "ix_payload_rows_announced")
    scans = [line for line in plans if line.startswith(("SCAN w ", "SCAN r "))]
    assert all(any(name in line for name in partial) for line in scans), scans
