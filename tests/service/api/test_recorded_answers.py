"""Answers of a recorded catalogue, and of the same events reported now."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import recorded
from tests.support.api import Service, service
from tests.support.stores import database, postgresql

from stagescope_service.settings import Settings

PROSE = frozenset({"text", "detail", "message", "advice", "expected"})
"""Sentences may be worded better."""
ADDED = frozenset(
    {
        "cause",
        "comparability",
        "comparable",
        "gap",
        "note",
        "step_cause",
        "step_comparable",
        "units",
    }
)
"""Fields that answers have now, and did not have when they were recorded."""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lzma.decompress(recorded.ANSWERS.read_bytes()))
    return found


def test_a_recorded_catalogue_answers_as_before(tmp_path: Path, answers: dict[str, Any]) -> None:
    home = tmp_path / "home"
    database = Path(Settings(home=home).catalogue_url.partition("///")[2])
    database.parent.mkdir(parents=True)
    database.write_bytes(lzma.decompress(recorded.CATALOGUE.read_bytes()))
    with service(home) as live:
        found = recorded.ask(live)
    assert found.keys() == answers.keys()
    assert sum(status == 200 for status, _ in answers.values()) > 150
    for path, answer in answers.items():
        # The last bit of e^x is another on another processor: glibc and numpy use what it has.
        assert list(differences(found[path], answer, PROSE, relative=1e-15)) == [], path


def test_the_same_events_are_answered_as_before(live: Service, answers: dict[str, Any]) -> None:
    _compare_numbers(live, answers)


def test_the_same_events_are_answered_alike_from_postgresql(
    tmp_path: Path, answers: dict[str, Any]
) -> None:
    with postgresql() as server, database(server) as url:
        with service(tmp_path / "home", database_url=url) as live:
            _compare_numbers(live, answers)
        assert not [*tmp_path.rglob("catalogue.db")]


def _compare_numbers(live: Service, answers: dict[str, Any]) -> None:
    # What was recorded was reported to a stand-in, which checked no rules and no streams' dtypes.
    recorded.fill(live)
    found = recorded.ask(live)
    numbers = [path for path in answers if path.startswith(("/steps/", "/series?", "/exact?"))]
    assert len(numbers) > 150
    for path in numbers:
        apart = PROSE | {"streams"}
        assert list(differences(found[path], answers[path], apart, relative=1e-12)) == [], path


def differences(
    found: Any, answer: Any, apart: frozenset[str], at: str = "", relative: float = 0.0
) -> Iterator[tuple[str, Any, Any]]:
    """Yield where two answers differ: path in the answer, the value found, the one recorded."""
    if isinstance(found, dict) and isinstance(answer, dict):
        for key in sorted((found.keys() | answer.keys()) - apart):
            if key in ADDED and key not in answer:
                continue
            one, other = found.get(key, "absent"), answer.get(key, "absent")
            yield from differences(one, other, apart, f"{at}.{key}", relative)
    elif isinstance(found, list) and isinstance(answer, list) and len(found) == len(answer):
        for index, (one, other) in enumerate(zip(found, answer, strict=True)):
            yield from differences(one, other, apart, f"{at}[{index}]", relative)
    elif isinstance(found, float) and isinstance(answer, float):
        if not math.isclose(found, answer, rel_tol=relative, abs_tol=relative):
            yield at, found, answer
    elif found != answer:
        yield at, found, answer
