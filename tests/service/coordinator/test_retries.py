"""Turns of background work: a few at a time, what matters now first."""

from __future__ import annotations

import asyncio

from stagescope_service.coordinator.retries import Turns


def test_jobs_end_one_after_the_other_and_current_ones_before_those_left_over() -> None:
    turns, began, ended = Turns(2), [], []
    goes_on = asyncio.Semaphore(0)

    async def job(name: str, *, left_over: bool) -> None:
        async with turns.turn(left_over=left_over):
            began.append(name)
            await goes_on.acquire()
            ended.append(name)

    async def work() -> None:
        old = [asyncio.ensure_future(job(f"old {n}", left_over=True)) for n in range(4)]
        await asyncio.sleep(0)
        assert began == ["old 0", "old 1"]
        new = [asyncio.ensure_future(job(f"new {n}", left_over=False)) for n in range(2)]
        await asyncio.sleep(0)
        old[2].cancel()
        for _ in range(5):
            goes_on.release()
        await asyncio.gather(*old, *new, return_exceptions=True)
        assert began == ["old 0", "old 1", "new 0", "new 1", "old 3"]
        assert ended == began
        async with turns.turn(left_over=True), turns.turn(left_over=True):
            pass  # every turn was given back

    asyncio.run(asyncio.wait_for(work(), 20))
