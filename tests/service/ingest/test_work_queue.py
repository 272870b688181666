"""The queue of an ingestor: calls of a coordinator that is gone are dropped."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator

import pytest

from stagescope_service.ingest.work_queue import Superseded, WorkQueue

CALLS = 1500


@pytest.fixture
def thread() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(1) as made:
        yield made


@pytest.mark.parametrize("most_bytes", [1, 1 << 30], ids=["wait for memory", "wait for the thread"])
def test_calls_of_a_dead_coordinator_are_dropped_once_the_next_one_is_there(
    thread: concurrent.futures.ThreadPoolExecutor, most_bytes: int
) -> None:
    began, goes_on = threading.Event(), threading.Event()
    read: list[tuple[str, int]] = []

    def read_payload(coordinator: str, number: int) -> int:
        began.set()
        assert goes_on.wait(30)
        read.append((coordinator, number))
        return number

    async def work() -> None:
        queue = WorkQueue(thread, most_bytes)

        def call(coordinator: str, number: int) -> asyncio.Future[int]:
            work = queue.run(coordinator, read_payload, coordinator, number, size=1)
            return asyncio.ensure_future(work)

        dead = [call("dead", number) for number in range(CALLS)]
        await asyncio.to_thread(began.wait, 30)
        queue.serve("new")
        again = [call("new", number) for number in range(3)]
        late = call("dead", CALLS)
        goes_on.set()
        assert await asyncio.gather(*again) == [0, 1, 2]
        answers = await asyncio.gather(*dead, late, return_exceptions=True)
        # The one that the thread had begun ends; what the next coordinator offers is not doubled.
        assert answers[0] == 0
        assert {type(answer) for answer in answers[1:]} == {Superseded}

    asyncio.run(asyncio.wait_for(work(), 60))
    assert read == [("dead", 0), ("new", 0), ("new", 1), ("new", 2)]


def test_an_ingestor_that_began_anew_serves_whoever_calls_it_first(
    thread: concurrent.futures.ThreadPoolExecutor,
) -> None:
    async def work() -> None:
        queue = WorkQueue(thread, 1)
        assert await queue.run("first", str, 1) == "1"
        with pytest.raises(Superseded, match="coordinator second called, and coordinator first"):
            await queue.run("second", str, 2)
        assert await queue.run(None, str, 3) == "3"  # the API's calls are of no coordinator
        queue.serve("second")
        assert await queue.run("second", str, 4) == "4"

    asyncio.run(work())


def test_payloads_wait_for_memory_and_one_that_is_larger_comes_alone(
    thread: concurrent.futures.ThreadPoolExecutor,
) -> None:
    goes_on = threading.Event()

    async def work() -> None:
        queue = WorkQueue(thread, 10)
        first = asyncio.ensure_future(queue.run("c", goes_on.wait, 30, size=6))
        larger = asyncio.ensure_future(queue.run("c", str, 2, size=100))
        small = asyncio.ensure_future(queue.run("c", str, 3, size=4))
        await asyncio.sleep(0)
        assert queue._used in (6, 10)
        goes_on.set()
        assert await first
        assert (await larger, await small) == ("2", "3")
        assert queue._used == 0

    asyncio.run(asyncio.wait_for(work(), 60))
