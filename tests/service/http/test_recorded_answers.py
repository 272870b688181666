"""Answers of a recorded catalogue, and of the same events reported now."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.api import Service, service
from tests.support.stores import database, postgresql
from tests.tools import recorded
from tests.tools.recorded import PROSE, differences


@pytest.fixture(scope="module")
def answers() -> dict[str, object]:
    found: dict[str, object] = json.loads(lzma.decompress(recorded.ANSWERS.read_bytes()))
    return found


def test_a_recorded_catalogue_answers_as_before(tmp_path: Path, answers: dict[str, Any]) -> None:
    home = tmp_path / "home"
    recorded.unpack(home)
    with service(home) as live:
        found = recorded.ask(live)
    assert found.keys() == answers.keys()
    assert sum(status == 200 for status, _ in answers.values()) > 150
    for path, answer in answers.items():
        # The last bit of e^x is another on another processor: glibc and numpy use what it has.
        assert list(differences(found[path], answer, PROSE, relative=1e-15)) == [], path


def test_the_same_events_are_answered_as_before(
    live: Service, answers: Mapping[str, object]
) -> None:
    _compare_numbers(live, answers)


def test_the_same_events_are_answered_alike_from_postgresql(
    tmp_path: Path, answers: Mapping[str, object]
) -> None:
    with postgresql() as server, database(server) as url:
        with service(tmp_path / "home", database_url=url) as live:
            _compare_numbers(live, answers)
        assert not [*tmp_path.rglob("catalogue.db")]


def test_a_new_name_of_a_number_is_no_difference() -> None:
    recorded = {"metrics": {"a": 1.0}, "units": {"a": "nat"}, "series": [_series("a", 1.0)]}
    found = {
        "metrics": {"a": 1.0, "b": 2.0},
        "units": {"a": "nat", "b": "1"},
        "series": [_series("b", 2.0), _series("a", 1.0)],
    }
    assert list(differences([found], [recorded], frozenset())) == []
    assert list(differences({"a": 1.0, "b": 2.0}, {"a": 1.0}, frozenset())) == [
        (".b", 2.0, "absent")
    ]


@pytest.mark.parametrize("field", ["metrics", "units"])
def test_a_name_that_vanished_or_changed_is_a_difference(field: str) -> None:
    recorded = {field: {"a": 1.0, "b/c.d": 2.0}}
    found = {field: {"a": 1.5, "new": 2.0}}
    assert list(differences(found, recorded, frozenset())) == [
        (f".{field}.a", 1.5, 1.0),
        (f".{field}.b/c.d", "absent", 2.0),
    ]


def test_a_series_that_vanished_or_changed_is_a_difference() -> None:
    recorded = {"series": [_series("a", 1.0), _series("b", 2.0)]}
    found = {"series": [_series("a", 1.5), _series("new", 2.0)]}
    assert list(differences(found, recorded, frozenset())) == [
        (".series.a.values[0]", 1.5, 1.0),
        (".series.b", "absent", _series("b", 2.0)),
    ]


def _series(name: str, *values: float) -> dict[str, object]:
    return {"name": name, "values": [*values]}


def _compare_numbers(live: Service, answers: Mapping[str, object]) -> None:
    # What was recorded was reported to a stand-in, which checked no rules and no streams' dtypes.
    recorded.fill(live)
    found = recorded.ask(live)
    numbers = [path for path in answers if path.startswith(("/steps/", "/series?", "/exact?"))]
    assert len(numbers) > 150
    for path in numbers:
        apart = PROSE | {"streams"}
        assert list(differences(found[path], answers[path], apart, relative=1e-12)) == [], path
