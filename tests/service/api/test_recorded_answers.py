"""Answers of a recorded catalogue, and of the same events reported now, to the last bit."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from tests.support import recorded
from tests.support.api import Service, service

from stagescope_service.settings import Settings

PROSE = frozenset({"text", "detail", "message", "advice", "expected"})


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
        expect_same(recorded.ask(live), answers)


def test_the_same_events_are_answered_as_before(live: Service, answers: dict[str, Any]) -> None:
    # What was recorded was reported to a stand-in, which checked no rules and no streams' dtypes.
    recorded.fill(live)
    measured = ("/steps/", "/series?", "/exact?", "/losses")
    numbers = {path: answer for path, answer in answers.items() if path.startswith(measured)}
    found = recorded.ask(live)
    expect_same({path: found[path] for path in numbers}, numbers, PROSE | {"streams"})


def expect_same(
    found: dict[str, Any], answers: dict[str, Any], apart: frozenset[str] = PROSE
) -> None:
    assert found.keys() == answers.keys()
    assert sum(status == 200 for status, _ in answers.values()) > 150
    for path, answer in answers.items():
        assert without(apart, found[path]) == without(apart, answer), path


def without(apart: frozenset[str], answer: Any) -> Any:
    """Return an answer without some fields: sentences may be worded better."""
    if isinstance(answer, dict):
        return {key: without(apart, each) for key, each in answer.items() if key not in apart}
    return [without(apart, each) for each in answer] if isinstance(answer, list) else answer
