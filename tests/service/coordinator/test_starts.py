"""Ranks that are killed and start again within seconds, as their batches come in."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.local import coordinator_of
from tests.support.stores import rows_of, url_of
from tests.support.trainings import Delivery, Rank

from stagescope_service.coordinator import starts
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.store.sql import SqlStore


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
    answer = await coordinator.intake.record(sender.wire(), events)
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
    assert coordinator.intake.events_taken == 20


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
