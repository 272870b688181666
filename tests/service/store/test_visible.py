"""A catalogue with some runs alone: the database hides the others from every query."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from sqlalchemy.exc import DBAPIError
from tests.support.stores import database, stage_row, training, write

from stagescope.wire.errors import CatalogueUnavailable
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Put
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables.declare import metadata, views
from stagescope_service.store.visible import hiding_views

RUNS = ("qwen3-a", "qwen3-b", "Qwen3-c", "qwen30", "x.y")


@pytest.fixture
def filled(store: SqlStore) -> SqlStore:
    for number, run in enumerate(RUNS, 1):
        write(
            store,
            *training(number, run),
            stage_row(number, 5, attempt_id=number),
            Put("steps", {"attempt_id": number, "step": 5, "opened_wall": 1.0, "pinned": True}),
            Put("captures", {"capture_id": f"c-{run}", "run": run, "spec": {}, "state": "asked"}),
            Put("engines", {"name": f"e-{run}", "url": "http://e", "run": run}),
            Put("findings", _finding(f"of-run-{number}", run, None)),
            Put("findings", _finding(f"of-attempt-{number}", None, number)),
        )
    write(
        store,
        Put("findings", _finding("of-none", None, None)),
        Put("engines", {"name": "e-none", "url": "http://e"}),
        Put("captures", {"capture_id": "c-none", "spec": {}, "state": "asked"}),
        Put("audit", {"wall": 1.0, "by": "me", "action": "pin", "detail": {"run": "qwen3-a"}}),
        Put("meta", {"key": "k", "value": {"run": "qwen3-a"}}),
    )
    return store


def _finding(finding_id: str, run: str | None, attempt_id: int | None) -> dict[str, object]:
    return {
        "finding_id": finding_id, "run": run, "attempt_id": attempt_id, "kind": "k",
        "severity": "error", "message": "m", "first_wall": 1.0, "last_wall": 1.0,
    }  # fmt: skip


@pytest.fixture
def seen(filled: SqlStore) -> Iterator[Catalogue]:
    whole = Catalogue(filled.url)
    found = whole.of_runs(("qwen3-*", "x.?"))
    yield found
    found.close()
    whole.close()


def test_has_the_rows_of_these_runs_alone(seen: Catalogue) -> None:
    assert {row["run"] for row in seen.runs()} == {"qwen3-a", "qwen3-b", "x.y"}
    assert {row["attempt_id"] for row in seen.attempts()} == {1, 2, 5}
    assert seen.attempt(3) is None
    assert not seen.has_run("Qwen3-c")
    assert {row["run"] for row in seen.pinned_steps()} == {"qwen3-a", "qwen3-b", "x.y"}
    assert [len(seen.stages(number, 5)) for number in range(1, 6)] == [1, 1, 0, 0, 1]
    assert {row["capture_id"] for row in seen.captures()} == {"c-qwen3-a", "c-qwen3-b", "c-x.y"}
    assert {row["name"] for row in seen.engines()} == {"e-qwen3-a", "e-qwen3-b", "e-x.y"}
    assert {row["finding_id"] for row in seen.findings()} == {
        f"of-{what}-{number}" for what in ("run", "attempt") for number in (1, 2, 5)
    }
    assert {row["run"] for row in seen.counts()["attempts"]} == {"qwen3-a", "qwen3-b", "x.y"}
    assert {row["run"] for row in seen.recent(0.0).attempts} == {"qwen3-a", "qwen3-b", "x.y"}


def test_has_nothing_that_is_of_no_run(seen: Catalogue) -> None:
    assert seen.audit() == []
    assert seen.meta("k") is None


def test_follows_what_comes_later(seen: Catalogue, filled: SqlStore) -> None:
    assert not seen.has_run("qwen3-new")
    write(filled, *training(9, "qwen3-new"))
    assert seen.has_run("qwen3-new")


def test_answers_every_query_about_its_runs_as_a_whole_catalogue_does(
    seen: Catalogue, filled: SqlStore
) -> None:
    whole, asked = Catalogue(filled.url), 0
    values = {"attempt_id": 1, "attempts": [1], "step": 5, "run": "qwen3-a", "limit": 10}
    values |= {"version": 1, "names": ["x"], "capture_id": "c-qwen3-a", "since": 0.0, "stage": "x"}
    for name, method in inspect.getmembers(Catalogue, inspect.isfunction):
        parameters = inspect.signature(method).parameters
        needed = [n for n, each in parameters.items() if each.default is each.empty]
        if name.startswith("_") or name in ("of_runs", "close") or not needed[1:]:
            continue
        if {*needed[1:]} <= {*values, "filters"}:
            given = {each: values[each] for each in needed[1:] if each in values}
            whole_answer, seen_answer = (
                [*found] if isinstance(found, Iterator) else found
                for found in (getattr(each, name)(**given) for each in (whole, seen))
            )
            if "attempt_id" in given or "run" in given:
                assert whole_answer == seen_answer, name
            asked += 1
    whole.close()
    assert asked > 25
    seen.check()


def test_does_not_fall_back_to_the_tables(store: SqlStore) -> None:
    """Such as where a pooler between the two gives it a connection of somebody else."""
    found = Catalogue(store.url).of_runs(("a",))
    engine = found._engine
    plain = Catalogue(store.url)
    found._engine = plain._engine.execution_options(**engine.get_execution_options())
    with pytest.raises((CatalogueUnavailable, DBAPIError)):
        found.runs()
    engine.dispose()
    plain.close()


def test_of_a_schema_of_its_own(server: str) -> None:
    with database(server) as url:
        own = f"{url}&options=-csearch_path%3Dof_team"
        store = SqlStore(own)
        store.open()
        write(store, *training(1, "a"), *training(2, "b"))
        whole = Catalogue(own)
        seen = whole.of_runs(("a",))
        assert {row["run"] for row in whole.runs()} == {"a", "b"}
        assert {row["run"] for row in seen.runs()} == {"a"}
        for each in (seen, whole, store):
            each.close()


def test_cannot_be_asked_for_more(seen: Catalogue) -> None:
    with seen._connect() as connection, pytest.raises(DBAPIError):
        connection.exec_driver_sql("DROP VIEW runs")


@pytest.mark.parametrize("pattern", ["x' OR '1'='1", "", "a" * 101, "[a-z]", "é"])
def test_a_pattern_is_no_sql(pattern: str) -> None:
    with pytest.raises(ValueError, match="no pattern"):
        list(hiding_views([pattern], schema="main", is_sqlite=True))


def test_no_pattern_sees_no_run(filled: SqlStore) -> None:
    whole = Catalogue(filled.url)
    none = whole.of_runs(())
    assert none.runs() == []
    none.close()
    whole.close()


def test_every_table_is_hidden_or_named() -> None:
    made = [each.split()[3] for each in hiding_views(["a"], schema="s", is_sqlite=True)]
    assert sorted(made) == sorted([*metadata.tables, *views.tables, "alembic_version"])
    open_ones = [
        each.split()[3]
        for each in hiding_views(["a"], schema="s", is_sqlite=True)
        if each.endswith("1 = 1")
    ]
    assert sorted(open_ones) == ["clocks", "texts", "trigger_rules", "weight_manifests"]


def test_a_catalogue_that_is_not_there_yet_says_so(tmp_path: object) -> None:
    found = Catalogue(f"sqlite:///{tmp_path}/none.db").of_runs(("a",))
    with pytest.raises(CatalogueUnavailable):
        found.runs()
