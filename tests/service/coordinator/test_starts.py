"""Ranks that are killed and start again within seconds, as their batches come in."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.local import coordinator_of
from tests.support.stores import rows_of, url_of
from tests.support.trainings import Delivery, Rank

from stagescope_service.coordinator import starts
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.ingest.relay import Relay
from stagescope_service.store.sql import SqlStore
from stagescope_wire.errors import NotReady
from stagescope_wire.schema import FINISH


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    made = SqlStore(url_of(tmp_path))
    made.open()
    yield made
    made.close()


@pytest.fixture
def coordinator(store: SqlStore, tmp_path: Path) -> Coordinator:
    return coordinator_of(store, tmp_path)


async def send(coordinator: Coordinator, said: list[Delivery], *, after: float = 0.0) -> None:
    await asyncio.sleep(after)
    events = [each.event.wire() for each in said]
    sender = dataclasses.replace(said[0].sender, clock_offset=0.0, clock_error=0.0)
    answer = await coordinator.parts.intake.record(sender.wire(), events)
    assert (answer["received"], answer["refused"]) == (len(events), {})


async def begin_first_start(coordinator: Coordinator, key: str | None) -> list[Rank]:
    ranks = [Rank(rank, key=key) for rank in (0, 1)]
    for rank in ranks:
        work = [event for step in (5, 6) for event in rank.work(step)]
        await send(coordinator, [rank.hello(world_size=2), *work])
    return ranks


def first_batch(rank: Rank) -> list[Delivery]:
    return [rank.hello(world_size=2), *rank.work(7), *rank.work(8)]


def attempts_of(store: SqlStore) -> dict[int, set[tuple[int, int]]]:
    """Return attempt -> (rank, step) of what was done in it."""
    done: dict[int, set[tuple[int, int]]] = {}
    for row in rows_of(store, "stages"):
        done.setdefault(row["attempt_id"], set()).add((row["rank"], row["step"]))
    return done


FIRST = {(rank, step) for rank in (0, 1) for step in (5, 6)}
SECOND = {(rank, step) for rank in (0, 1) for step in (7, 8)}


@pytest.mark.parametrize("key", [None, "job-1"])
def test_whole_steps_of_one_rank_wait_for_the_hello_of_the_other(
    store: SqlStore, coordinator: Coordinator, key: str | None
) -> None:
    async def scenario() -> None:
        await begin_first_start(coordinator, key)
        new = [Rank(rank, key=key, started=1010.0) for rank in (1, 0)]
        sent = (send(coordinator, first_batch(rank), after=i / 2) for i, rank in enumerate(new))
        await asyncio.gather(*sent)

    asyncio.run(scenario())
    assert attempts_of(store) == {1: FIRST, 2: SECOND}
    assert coordinator.parts.intake.events_taken == 20


@pytest.mark.parametrize("says_so", [False, True])
def test_a_rank_that_is_replaced_alone_waits_for_a_sign_of_the_others_or_a_while(
    store: SqlStore,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
    says_so: bool,
) -> None:
    monkeypatch.setattr(starts, "WAIT_SECONDS", 60.0 if says_so else 0.3)

    async def scenario() -> None:
        stays, _ = await begin_first_start(coordinator, None)
        alone = Rank(1, key=None, started=1010.0)
        stays.wall = 1011.0
        sent = [send(coordinator, first_batch(alone))]
        if says_so:
            sent.append(send(coordinator, stays.work(7), after=0.3))
        await asyncio.wait_for(asyncio.gather(*sent), 20)

    asyncio.run(scenario())
    assert attempts_of(store).keys() == {1}
    [found] = rows_of(store, "findings")
    assert found["kind"] == "started_again"


async def send_until_taken_in(coordinator: Coordinator, said: list[Delivery]) -> int:
    """Send a batch as a probe does, again where it is asked to; returns how often it was asked."""
    asked = 0
    while True:
        try:
            await send(coordinator, said)
        except NotReady:  # noqa: PERF203
            asked += 1
            await asyncio.sleep(0.02)
        else:
            return asked


@pytest.mark.parametrize(
    ("shows", "again"),
    [("a hello", {1, 2}), ("the end of a lease", {1, 2}), ("a poll", {1}), ("nothing yet", {1})],
)
def test_a_rank_comes_again_until_the_ranks_before_show_whether_they_go_on(
    store: SqlStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shows: str,
    again: set[int],
) -> None:
    monkeypatch.setattr(starts, "WAIT_SECONDS", 0.1)
    wall, mono = 1009.0, 0.0
    coordinator = coordinator_of(store, tmp_path, wall=lambda: wall, mono=lambda: mono)
    intake = coordinator.parts.intake
    coordinator.parts.leases.begin()

    async def poll(rank: Rank) -> None:
        await intake.poll(rank.sender.wire(), 0, [], 0.0)

    async def scenario() -> int:
        nonlocal wall, mono
        old = await begin_first_start(coordinator, "job-1")
        for rank in old:
            await poll(rank)
        new = [Rank(rank, started=1010.0) for rank in (1, 0)]
        if shows == "nothing yet":  # and it takes leave: it may not come again
            said = [*first_batch(new[0]), new[0].say(FINISH)]
            return await send_until_taken_in(coordinator, said)
        sent = asyncio.create_task(send_until_taken_in(coordinator, first_batch(new[0])))
        await asyncio.sleep(0.4)
        assert not sent.done()
        wall, mono = wall + 30.0, mono + 30.0
        if shows == "a poll":
            await poll(old[0])
        elif shows == "a hello":
            await send(coordinator, first_batch(new[1]))
        else:
            for _ in range(4):  # at the first time it finds that it was held up itself
                wall, mono = wall + 20.0, mono + 20.0
                await poll(new[0])
                await coordinator.parts.leases.expire()
        return await sent

    asked = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert (asked == 0) == (shows == "nothing yet")
    assert attempts_of(store).keys() == again
    assert attempts_of(store)[1] >= FIRST


def test_what_its_launcher_says_needs_no_wait(
    store: SqlStore, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "WAIT_SECONDS", 60.0)

    async def scenario() -> None:
        for restart, started in ((0, 1000.0), (1, 1010.0)):
            rank = Rank(0, key=None, started=started)
            hello = rank.hello(world_size=2, launch=f"torchrun a, restart {restart}")
            await asyncio.wait_for(send(coordinator, [hello, *rank.work(restart + 1)]), 20)

    asyncio.run(scenario())
    assert attempts_of(store) == {1: {(0, 1)}, 2: {(0, 2)}}


def test_the_ranks_of_an_attempt_share_one_wait(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand batches that wait, each would wake up ten times a second."""
    sleeps = 0

    async def sleep(seconds: float) -> None:
        nonlocal sleeps
        sleeps += 1
        await asyncio.sleep(seconds)

    count, said = 40, SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    monkeypatch.setattr(starts, "WAIT_SECONDS", 0.5)
    monkeypatch.setattr(starts, "asyncio", said)

    async def scenario() -> None:
        for number, started in ((1, 1000.0), (2, 1060.0)):
            ranks = [Rank(rank, started=started) for rank in range(count + 2 - number)]
            batches = [[each.hello(world_size=count + 1), *each.work(number)] for each in ranks]
            await asyncio.gather(*(send(coordinator, batch) for batch in batches))

    asyncio.run(scenario())
    assert 0 < sleeps < count


async def send_by_relay(relay: Relay, said: list[Delivery], *, after: float = 0.0) -> int:
    """Send a batch as a probe does, again where it is asked to; returns how often it was asked."""
    await asyncio.sleep(after)
    sender = dataclasses.replace(said[0].sender, clock_offset=0.0, clock_error=0.0)
    asked = 0
    while True:
        answer = await relay.record(sender.wire(), [each.event.wire() for each in said], {})
        if "not_ready" not in answer:
            assert answer["received"] == len(said)
            return asked
        asked += 1
        await asyncio.sleep(float(str(answer["pause"])))


@pytest.mark.parametrize("key", [None, "job-1"])
def test_a_batch_that_waits_holds_up_no_other_of_its_relay(
    store: SqlStore, coordinator: Coordinator, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "WAIT_SECONDS", 60.0)

    async def scenario() -> None:
        await begin_first_start(coordinator, key)
        relay = Relay(coordinator.parts.intake)
        new = [Rank(rank, key=key, started=1010.0) for rank in (1, 0)]
        sent = (send_by_relay(relay, first_batch(each), after=i) for i, each in enumerate(new))
        asked = await asyncio.wait_for(asyncio.gather(*sent), 20)
        assert asked[0] > 0

    asyncio.run(scenario())
    assert attempts_of(store) == {1: FIRST, 2: SECOND}
    assert coordinator.parts.intake.events_taken == 20


def test_a_relayed_rank_that_is_replaced_alone_is_taken_in_after_a_while(
    store: SqlStore, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "WAIT_SECONDS", 0.5)

    async def scenario() -> None:
        await begin_first_start(coordinator, "job-1")
        alone = Rank(1, started=1010.0)
        sent = send_by_relay(Relay(coordinator.parts.intake), first_batch(alone))
        assert 1 <= await asyncio.wait_for(sent, 20) <= 4

    asyncio.run(scenario())
    assert attempts_of(store).keys() == {1}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_ranks_with_another_world_size_wait_for_rank_0(
    store: SqlStore,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
    all_of_them: bool,
    size: int,
) -> None:
    monkeypatch.setattr(starts, "WAIT_SECONDS", 60.0 if all_of_them else 0.3)

    async def scenario() -> None:
        await begin_first_start(coordinator, "job-1")
        new = [Rank(rank, started=1010.0) for rank in reversed(range(size))]
        if not all_of_them:
            new = [Rank(2, started=1010.0)]
        batches = [[each.hello(world_size=size), *each.work(7)] for each in new]
        sent = (send(coordinator, batch, after=i / 2) for i, batch in enumerate(batches))
        await asyncio.wait_for(asyncio.gather(*sent), 20)

    asyncio.run(scenario())
    assert attempts_of(store).keys() == ({1, 2} if all_of_them else {1})
    assert attempts_of(store)[1] >= FIRST


def test_a_process_is_given_the_key_of_no_attempt_that_it_may_leave(
    coordinator: Coordinator,
) -> None:
    """Its dumps lie below that key."""

    async def key_of(said: list[Delivery]) -> object:
        sender = dataclasses.replace(said[0].sender, clock_offset=0.0, clock_error=0.0)
        events = [each.event.wire() for each in said]
        answer = await coordinator.parts.intake.record(sender.wire(), events)
        return answer.get("attempt_key")

    async def scenario() -> None:
        first, second = (Rank(key=None, started=started) for started in (1000.0, 1100.0))
        assert await key_of([first.hello(single=True)]) == "unkeyed"
        assert await key_of(first.work(5)) == "unkeyed"
        assert await key_of([second.hello(single=True)]) is None
        assert "attempt_key" not in await coordinator.parts.intake.poll(
            second.sender.wire(), 0, [], 0.0
        )
        assert await key_of(second.work(5)) == "unkeyed~2"

    asyncio.run(scenario())
