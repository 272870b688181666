from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.api import Rank, Service, service
from tests.support.local import coordinator_of
from tests.support.stores import url_of

from stagescope_service.coordinator import draining
from stagescope_service.coordinator.actor import DebugCoordinator
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.store.contract import Health
from stagescope_service.store.sql import SqlStore
from stagescope_wire.errors import InvalidInput, NotFound, NotReady

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(1 << 70), 1 << 70)
    | st.floats() | st.text() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)  # fmt: skip
CALLS = (
    "record_events", "poll", "add_capture", "remove_capture", "set_triggers", "pin", "unpin",
    "add_engine", "remove_engine", "ask_stacks", "drain", "note_bundle", "plan",
)  # fmt: skip


class Unwritable(SqlStore):
    """A catalogue that cannot be written."""

    def health(self) -> Health:
        return Health(False, "the disk is full")


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    monkeypatch.setattr(draining, "_LEAVE_SECONDS", 0.0)
    return coordinator_of(Unwritable(url_of(tmp_path)), tmp_path)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path) as running:
        yield running


def call(coordinator: Coordinator, name: str, arguments: Mapping[str, object]) -> Any:
    return asyncio.run(getattr(coordinator, name)(**arguments))


@pytest.mark.parametrize("name", CALLS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_call_is_given_is_taken_or_refused(
    coordinator: Coordinator, name: str, data: st.DataObject
) -> None:
    names = inspect.signature(getattr(coordinator, name)).parameters
    arguments = {each: data.draw(anything) for each in names}
    try:
        answer = call(coordinator, name, arguments)
    except (InvalidInput, NotReady):
        return
    if name != "plan":
        assert not answer["drained"] or not answer["missing"]


@pytest.mark.parametrize(
    ("name", "arguments", "wrong"),
    [
        ("pin", {"attempt_id": 1, "step": 1 << 63, "by": "x"}, "step is 9223372036854775808"),
        ("unpin", {"attempt_id": 1, "step": 10**18, "by": "x"}, "step is 1000000000000000000"),
        ("pin", {"attempt_id": True, "step": 1, "by": "x"}, "attempt_id is True"),
        ("unpin", {"attempt_id": 0, "step": -1, "by": "x"}, "attempt_id is 0; step is -1"),
        ("remove_capture", {"capture_id": {}, "by": "x"}, "capture_id is {}"),
        ("remove_engine", {"name": "a\n", "by": "x"}, "name is 'a"),
        ("drain", {"run": 5, "timeout": float("nan")}, "run is 5; timeout is nan"),
        ("poll", {"sender": (), "revision": "1", "unreceipted": [None]}, "revision is '1'"),
        ("record_events", {"sender": (), "events": 5}, "events is a int"),
        ("record_events", {"sender": (), "events": [], "payloads": [1]}, "payloads is a list"),
        ("ask_stacks", {"attempt_id": 1, "role": None, "ranks": [-1], "seconds": 1, "by": "x"},
         "ranks.0 is -1"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(
    coordinator: Coordinator, name: str, arguments: Mapping[str, object], wrong: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        call(coordinator, name, arguments)
    assert wrong in caught.value.wrong
    assert caught.value.expected


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_there_is_not_is_refused(coordinator: Coordinator, name: str) -> None:
    given: dict[str, object] = {"sender": (), "events": []} if name == "record_events" else {}
    with pytest.raises(InvalidInput):
        call(coordinator, name, {**given, "zzz": 1})


def test_an_argument_that_is_missing_is_named(coordinator: Coordinator) -> None:
    with pytest.raises(InvalidInput, match="events is missing"):
        call(coordinator, "record_events", {"sender": ()})


def test_a_bundle_is_noted_of_an_attempt_that_there_is(live: Service) -> None:
    Rank(live, run="r").stage("actor_update", 1)
    note = live.app.state.deps.commands.note_bundle
    fields = {"step": None, "message": "x", "path": None}
    for run, attempt_id in (("r", (1 << 63) - 1), ("other", 1)):
        with pytest.raises(NotFound):
            asyncio.run(note(run=run, attempt_id=attempt_id, **fields))
    assert live.get("/findings", kind="attempt_bundled")["rows"] == []
    asyncio.run(note(run="r", attempt_id=1, **fields))


def test_calls_stay_what_ray_makes_methods_of() -> None:
    for name in CALLS:
        method = getattr(DebugCoordinator, name)
        assert inspect.iscoroutinefunction(method)
        kinds = [each.kind for each in inspect.signature(method).parameters.values()][1:]
        # Ray adds one by name, where it has made an actor of the class.
        assert {*kinds, inspect.Parameter.KEYWORD_ONLY} == {
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        }


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("pin", {"step": 1}, "attempt_id is missing; by is missing"),
        ("remove_capture", {"capture_id": "c", "run": "r"}, "run is no argument"),
        ("pin", {"step": -1}, "step is -1; attempt_id is missing"),
    ],
)
def test_arguments_that_lack_or_are_unknown_are_named(
    name: str, arguments: Mapping[str, object], message: str, coordinator: Coordinator
) -> None:
    with pytest.raises(InvalidInput) as caught:
        call(coordinator, name, arguments)
    for part in message.split("; "):
        assert part in str(caught.value)
    assert "object at" not in str(caught.value)
    assert caught.value.expected
