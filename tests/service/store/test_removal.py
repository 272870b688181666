"""A run leaves the catalogue with all its rows, and its space is free again."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from tests.support.stores import rows_of_step, training, write

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.connect import free_pages
from stagescope_service.store.contract import Put, RemoveRun
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables.declare import metadata

SHARED = {"texts", "clocks", "alembic_version"}


def _counts(store: SqlStore) -> dict[str, int]:
    """The rows of each table as it is stored."""
    assert store._reader is not None
    with store._reader.begin() as connection:
        return {
            name: connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0
            for name, table in metadata.tables.items()
        }


def _run(attempt_id: int, name: str, steps: int) -> list[Put]:
    rows = [put for step in range(steps) for put in rows_of_step(attempt_id, step)]
    about = {"run": name, "attempt_id": attempt_id, "step": 1}
    of_run = {"r": name}
    return [
        *training(attempt_id, name),
        *(Put(put.table, {**put.row, **({"run": of_run["r"]} if "run" in put.row else {})})
          for put in rows),
        Put("findings", {"finding_id": f"{name}/own", "run": name, "kind": "refused_event"}),
        Put("losses", {"loss_id": f"{name}/1", **about, "kind": "payload"}),
        Put("captures", {"capture_id": f"{name}/c", "run": name}),
        Put("dumps", {"incarnation": f"{attempt_id}-0", "work_key": "1|a", "capture_id": "c",
                      "attempt_id": attempt_id, "step": 1, "role": "actor", "rank": 0,
                      "stage": "actor_update", "path": f"/d/{name}", "files": 3, "bytes": 30}),
        Put("step_metrics", {"attempt_id": attempt_id, "step": 1, "version": 1}),
    ]  # fmt: skip


def test_all_rows_of_a_run_go_and_no_row_of_another(store: SqlStore, catalogue: Catalogue) -> None:
    write(store, *_run(1, "left", 30))
    alone = _counts(store)
    write(store, *_run(2, "gone", 40))
    holdings = catalogue.run_holdings("gone", imported="imported", bundled="attempt_bundled")
    both = _counts(store)
    assert holdings.rows == sum(both[name] - alone[name] for name in both if name not in SHARED)
    assert (holdings.steps, holdings.files, holdings.bytes) == (40, 43, 30)
    rounds = 0
    while catalogue.has_rows_of("gone", holdings.attempt_ids):
        before = sum(_counts(store).values())
        store.submit([RemoveRun("gone", tuple(holdings.attempt_ids), 100)]).result(30)
        assert before - sum(_counts(store).values()) <= 150, "too much in one transaction"
        rounds += 1
    assert rounds > 5
    after = _counts(store)
    assert after.pop("runs") == 2  # the deletion itself takes the run's own row, last
    assert {name: after[name] for name in after if name not in SHARED} == {
        name: alone[name] for name in alone if name not in {*SHARED, "runs"}
    }
    # What its files were called went with it; names that others use stayed.
    assert after["texts"] - alone["texts"] < 10
    # The writer knows no id of a row that is gone.
    write(store, *_run(3, "gone", 2))
    assert [row["incarnation"] for row in catalogue.stages(3, 1)] == ["3-0", "3-1", "3-2"]


def test_the_file_shrinks_by_what_a_run_took(tmp_path: Path) -> None:
    from tests.support.stores import opened

    with opened(tmp_path) as (store, catalogue):
        write(store, *_run(1, "left", 20))
        free_pages(store.url)
        before = catalogue.bytes_on_disk() or 0
        write(store, *_run(2, "gone", 400))
        full = catalogue.bytes_on_disk() or 0
        while catalogue.has_rows_of("gone", [2]):
            store.submit([RemoveRun("gone", (2,), 2000)]).result(30)
        free_pages(store.url)
        after = catalogue.bytes_on_disk() or 0
        assert after - before < 0.1 * (full - before), (before, full, after)
        assert [row["run"] for row in catalogue.attempts()] == ["left"]
        assert len(catalogue.stages(1, 5)) == 3


def test_a_server_uses_the_space_again(store: SqlStore, catalogue: Catalogue) -> None:
    write(store, *_run(1, "gone", 50))
    while catalogue.has_rows_of("gone", [1]):
        store.submit([RemoveRun("gone", (1,), 2000)]).result(30)
    free_pages(store.url)
    write(store, *_run(2, "next", 5))
    assert len(catalogue.stages(2, 1)) == 3
