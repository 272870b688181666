from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.local import coordinator_of
from tests.support.stores import rows_of, url_of

from stagescope_service.coordinator.load import (
    BEHIND_SECONDS,
    GROWN_BYTES,
    KIND,
    MIN_CALLS,
    TRIM_SECONDS,
    WINDOW_SECONDS,
    Load,
    Memory,
    resident_bytes,
)
from stagescope_service.core.instructions import Put
from stagescope_service.core.state import State
from stagescope_service.store.contract import Submitted
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables import FindingRow
from stagescope_wire.errors import NotReady
from stagescope_wire.schema import BEGIN, HELLO, Event, Sender

RANKS = 1000


@pytest.fixture
def state() -> State:
    """An attempt with a thousand ranks."""
    state = State()
    for rank in range(RANKS):
        sender = Sender(f"i{rank}", "r", "k", "actor", rank, clock_offset=0.0, started=1.0)
        state.handle(sender, Event(HELLO, 1, 1.0, 1.0, {"world_size": RANKS}), 0.0)
    return state


class Clock:
    """Looks of a coordinator, a window apart."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.now = 100.0
        self.load.check(self.now, self.now)

    def window(self, calls: int, age: float) -> list[dict[str, Any]]:
        """Let batches of this age arrive, and return the findings of the look after them."""
        for _ in range(calls):
            self.load.arrived(age)
        self.now += WINDOW_SECONDS
        found = self.load.check(self.now, self.now)
        return [dict(put.row) for put in found if isinstance(put, Put)]


def test_events_that_stay_late_are_a_finding_until_they_are_not(state: State) -> None:
    clock = Clock(Load(state))
    late = 2 * BEHIND_SECONDS
    assert clock.load.pause == 0.0
    assert clock.window(MIN_CALLS, late) == []
    assert clock.load.pause == RANKS / 250.0
    assert clock.window(MIN_CALLS, late) == []
    (found,) = clock.window(MIN_CALLS, late)
    assert found["kind"] == KIND
    assert found["message"] == "the service is 10 s behind: 20 calls/s of 1000 ranks"
    assert found["evidence"]["lag_seconds"] == late
    assert found["advice"].startswith("no data is lost")
    (again,) = clock.window(MIN_CALLS, 3 * late)
    assert again["finding_id"] == found["finding_id"]
    (over,) = clock.window(MIN_CALLS, 0.1)
    assert over == {"finding_id": found["finding_id"], "over_wall": clock.now}
    assert clock.load.pause == 0.0
    assert clock.window(MIN_CALLS, 0.1) == []


def test_ranks_that_come_back_after_an_outage_are_no_load(state: State) -> None:
    clock = Clock(Load(state))
    assert clock.window(RANKS, 120.0) == []
    assert clock.window(RANKS, 0.1) == []
    for _ in range(5):  # some slow ranks alone
        assert clock.window(MIN_CALLS - 1, 120.0) == []
    assert clock.load.pause == 0.0


def test_a_new_coordinator_ends_the_finding_of_its_predecessor(state: State) -> None:
    clock = Clock(Load(state))
    known = {"kind": KIND, "over_wall": None, "attempt_id": 1, "finding_id": "f"}
    clock.load.adopt([cast("FindingRow", known)])
    assert clock.window(0, 0.0) == [{"finding_id": "f", "over_wall": clock.now}]


def begins(first: int, count: int) -> list[object]:
    fields = {"step": 1, "stage": "actor_update"}
    return [
        Event(BEGIN, seq, 1.0, 1.0, {**fields, "microbatch": seq}).wire()
        for seq in range(first, first + count)
    ]


class HeldStore(SqlStore):
    """A store that begins to write when it is told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        super().open()
        self.held: list[Any] = []
        self.holds = False

    def submit(self, writes: Any, *, isolate: bool = False) -> Submitted:
        if self.holds and writes:
            future: Submitted = Future()
            self.held.append((writes, future))
            return future
        return super().submit(writes, isolate=isolate)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HeldStore]:
    made = HeldStore(url_of(tmp_path))
    yield made
    made.close()


def test_what_waits_is_bounded_and_what_is_pushed_back_is_taken_later(
    store: HeldStore, tmp_path: Path
) -> None:
    coordinator = coordinator_of(store, tmp_path, poll_seconds=0.001)
    coordinator.parts.load._most = 100
    sender = Sender("i", "r", "k", "actor", 0, clock_offset=0.0, started=1.0).wire()

    async def flood() -> None:
        store.holds = True
        taken = asyncio.create_task(coordinator.parts.intake.record(sender, begins(1, 80)))
        while not store.held:  # noqa: ASYNC110 - the store knows no loop
            await asyncio.sleep(0)
        with pytest.raises(NotReady, match="80 events wait to be written") as caught:
            await coordinator.parts.intake.record(sender, begins(81, 30))
        assert "sends it again" in caught.value.advice
        assert coordinator.parts.load.status()["pushed_back"] == 1
        assert coordinator.parts.load.pause == 0.5
        store.holds = False
        for puts, future in store.held:
            future.set_result(store.submit(puts).result(30))
        assert (await taken)["received"] == 80
        assert coordinator.parts.load.status()["waiting_events"] == 0
        answer = await coordinator.parts.intake.record(sender, begins(81, 30))
        assert answer["received"] == 30
        assert "pause" not in answer

    asyncio.run(flood())
    assert len(rows_of(store, "stages")) == 110


def test_polls_wait_longer_while_the_service_is_behind(store: HeldStore, tmp_path: Path) -> None:
    coordinator = coordinator_of(store, tmp_path, poll_seconds=20.0)
    clock = Clock(coordinator.parts.load)
    sender = Sender("i", "r", "k", "actor", 0).wire()

    def told() -> float:
        return float(asyncio.run(coordinator.parts.intake.poll(sender, 0, [], 0.0))["poll_seconds"])

    assert told() == 20.0
    clock.window(MIN_CALLS, 2 * BEHIND_SECONDS)
    assert told() == 20.0 + coordinator.parts.load.pause > 20.0
    clock.window(MIN_CALLS, 0.1)
    assert told() == 20.0


def test_one_batch_is_taken_however_large_it_is(store: HeldStore, tmp_path: Path) -> None:
    coordinator = coordinator_of(store, tmp_path, poll_seconds=0.001)
    coordinator.parts.load._most = 10
    sender = Sender("i", "r", "k", "actor", 0).wire()
    assert asyncio.run(coordinator.parts.intake.record(sender, begins(1, 50)))["received"] == 50


def test_memory_that_is_free_again_goes_back_to_the_system() -> None:
    memory = Memory()
    memory.check(0.0)
    before = resident_bytes()
    assert before is not None
    taken = [bytes(60_000) for _ in range(8 * GROWN_BYTES // 60_000)]
    above = taken[-1]  # what is still held at the heap's end keeps all below it
    del taken
    held = resident_bytes()
    assert held is not None
    assert held - before > 6 * GROWN_BYTES
    memory.check(TRIM_SECONDS)
    after = resident_bytes()
    assert after is not None
    assert after - before < GROWN_BYTES
    assert len(above) == 60_000
