"""What a curve reads of every step, on a real catalogue."""

from __future__ import annotations

import math

import pytest
from tests.support.stores import training, write

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Put
from stagescope_service.store.queries.curves import CurveStep, MarkedStep
from stagescope_service.store.sql import SqlStore


def step(number: int, attempt_id: int = 1, **columns: object) -> Put:
    return Put("steps", {"attempt_id": attempt_id, "step": number, **columns})


def numbers(number: int, attempt_id: int = 1, **columns: object) -> Put:
    row = {"attempt_id": attempt_id, "step": number, "version": 1, "summary_wall": 1.0}
    return Put("step_metrics", {**row, **columns})


@pytest.fixture
def filled(store: SqlStore) -> SqlStore:
    write(
        store,
        *training(),
        *training(2, number=2),
        step(1, closed_wall=1.0, completeness="complete"),
        step(2, closed_wall=2.0, superseded_by=2),
        step(2, attempt_id=2),
        step(3, attempt_id=2, closed_wall=3.0, step_summary=b"x", summary_wall=3.0),
        numbers(1, metrics={"a/b": 0.5, "c": math.nan}, suspects=["versions"]),
        numbers(2, metrics={"a/b": math.inf, "c": 2}),
        numbers(3, attempt_id=2, version=0, metrics={"a/b": 9.0}),
    )
    return store


def test_steps_ascend_and_the_newest_are_the_last(filled: SqlStore, catalogue: Catalogue) -> None:
    every = catalogue.step_states([1, 2])
    assert every == [
        CurveStep(1, 1, 1.0, "complete", None),
        CurveStep(1, 2, 2.0, None, 2),
        CurveStep(2, 2, None, None, None),
        CurveStep(2, 3, 3.0, None, None),
    ]
    assert catalogue.step_states([1, 2], limit=2) == every[2:]
    assert catalogue.step_states([1], first=2) == every[1:2]


def test_numbers_come_as_columns(filled: SqlStore, catalogue: Catalogue) -> None:
    found = catalogue.stored_numbers([1, 2], ["a/b", "c", "d", 'e"\\\x00'], version=1)
    assert found.places == [(1, 1), (1, 2)]
    assert found.values == [(0.5, "inf"), ("nan", 2), (None, None), (None, None)]
    assert found.several_versions
    later = catalogue.stored_numbers([1], ["a/b"], version=1, first=2)
    assert (later.places, later.several_versions) == ([(1, 2)], False)
    assert catalogue.stored_numbers([9], ["a/b", "c"], version=1).values == [(), ()]


def test_the_newest_numbers_are_of_the_newest_step(filled: SqlStore, catalogue: Catalogue) -> None:
    assert catalogue.newest_numbers([1, 2], version=1) == {"a/b": "inf", "c": 2}
    assert catalogue.newest_numbers([2], version=1) == {}


def test_steps_without_numbers_say_what_they_have(filled: SqlStore, catalogue: Catalogue) -> None:
    rows = catalogue.unmeasured_steps([1, 2], version=1)
    assert [(row["attempt_id"], row["step"], row["has_summary"]) for row in rows] == [
        (2, 2, 0), (2, 3, 1),
    ]  # fmt: skip


def test_findings_and_dumps_by_step(filled: SqlStore, catalogue: Catalogue) -> None:
    finding = {"run": "r", "attempt_id": 1, "kind": "k", "severity": "error"}
    dump = {"incarnation": "i", "capture_id": "c", "attempt_id": 1, "step": 1, "stage": "s"}
    write(
        filled,
        Put("findings", {**finding, "finding_id": "1", "step": 1, "message": "b"}),
        Put("findings", {**finding, "finding_id": "2", "step": 1, "message": "a", "rank": 2}),
        Put("findings", {**finding, "finding_id": "3", "step": None, "message": "z"}),
        Put("dumps", {**dump, "work_key": "1", "state": "complete"}),
        Put("dumps", {**dump, "work_key": "2", "state": "failed"}),
    )
    assert catalogue.findings_by_step([1, 2]) == [MarkedStep(1, 1, "k", "error", 2, "a")]
    assert {(row.severity, row.times) for row in catalogue.dumps_by_step([1])} == {
        ("complete", 1), ("failed", 1),
    }  # fmt: skip
    assert catalogue.dumps_by_step([1], first=2) == []
