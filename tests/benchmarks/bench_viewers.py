"""What many readers of one live run cost: open event streams, and what their pages ask at a step.

    python -m tests.benchmarks.bench_viewers

Each viewer holds an event stream, as an open page does. When a step closes it asks again for what
the run's page shows. The API is a process of its own. The reference is one viewer. It prints the
delay from the commit of a step until the event is there and until every answer is there, the API's
CPU time a step, and its memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
from tests.benchmarks.bench_page import Serving, serving
from tests.support.api import service
from tests.support.runs.crowd import crowd
from tests.support.runs.long import RUN, LongRun, train_long

from stagescope_service.settings import Settings
from stagescope_service.statistics.summarise import warm
from stagescope_service.store.sql import SqlStore

STEPS: Final = 2000
RANKS: Final = 8
RUNS: Final = 500
VIEWERS: Final = (1, 10, 100)
CLOSED: Final = 4
"""Steps that close while the viewers look."""
PAUSE: Final = 5.0
"""Seconds between two steps, or more if the answers take longer."""
PATIENCE: Final = 120.0


class Seen(NamedTuple):
    """What a viewer saw of a step, in seconds since its commit."""

    event: float
    answers: float


class Viewer:
    """An open page of the run."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.is_open = asyncio.Event()
        self.seen: asyncio.Queue[tuple[int, float, float]] = asyncio.Queue()
        """(step, monotonic seconds of the event, and of the last answer)."""

    async def look(self) -> None:
        """Follow the events until cancelled."""
        async with self._client.stream("GET", "/stream", params={"run": RUN}) as stream:
            async for name, event in _events(stream):
                self.is_open.set()
                if name == "step" and event["closed"] and event["measured"]:
                    came = time.monotonic()
                    await asyncio.gather(*map(self._ask, _asked(event["step"])))
                    await self.seen.put((event["step"], came, time.monotonic()))

    async def _ask(self, path: str) -> None:
        answer = await self._client.get(path)
        assert answer.status_code == 200, f"{path}: {answer.text:.200}"


def _asked(step: int) -> Sequence[str]:
    last = f"run={RUN}&superseded=true&from={step - 11}&to={step}"
    return (
        f"/runs/{RUN}/attempts?limit=1",
        f"/runs/{RUN}/diagnosis?limit=200",
        f"/runs/{RUN}/worst",
        f"/steps?run={RUN}&limit=12",
        f"/figures/overview?run={RUN}&from={step - 1}",
        f"/series?metric=logprob_abs_diff%2Fmean&{last}",
        f"/series?metric=rollout_corr%2Fk3_kl&{last}",
    )


async def _events(stream: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in stream.aiter_lines():
        if line.startswith("event:"):
            name = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            yield name, json.loads(line.removeprefix("data:"))


async def watched(
    live: Serving, run: LongRun, store: SqlStore, number: int, first: int
) -> tuple[list[Seen], float]:
    """Return what some viewers saw of the next steps, and the API's milliseconds of CPU a step."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE, limits=limits) as client:
        viewers = [Viewer(client) for _ in range(number)]
        tasks = [asyncio.create_task(viewer.look()) for viewer in viewers]
        await asyncio.gather(*(viewer.is_open.wait() for viewer in viewers))
        seen: list[Seen] = []
        used = live.used()
        for step in range(first, first + CLOSED):
            await asyncio.to_thread(run.extend, store, [step], keep=STEPS)
            began = time.monotonic()
            for viewer in viewers:
                found, came, done = await asyncio.wait_for(viewer.seen.get(), PATIENCE)
                assert found == step
                seen.append(Seen(came - began, done - began))
            await asyncio.sleep(max(0.0, began + PAUSE - time.monotonic()))
        used = (live.used() - used) / CLOSED
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seen, used


def measure(home: Path, run: LongRun) -> None:
    """Print what each number of viewers costs."""
    store = SqlStore(Settings(home=home, port=0).catalogue_url)
    store.open()
    say(f"a step of {RANKS} ranks closes, {STEPS} steps before it, {RUNS} other runs; seconds")
    say(f"{'viewers':>8}{'event':>9}{'longest':>9}{'answers':>9}{'longest':>9}{'CPU ms':>9}"
        f"{'ratio':>7}{'MiB':>7}")  # fmt: skip
    one, first = 0.0, STEPS + 1
    with serving(home) as live:
        for number in VIEWERS:
            seen, used = asyncio.run(watched(live, run, store, number, first))
            first += CLOSED
            one = one or used
            events, answers = np.array(seen).T
            say(
                f"{number:8d}{np.median(events):9.2f}{events.max():9.2f}{np.median(answers):9.2f}"
                f"{answers.max():9.2f}{used:9.0f}{used / one:7.1f}"
                f"{live.process.memory_info().rss / 2**20:7.0f}"
            )
    store.close()


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(place: Path) -> None:
    """Make the data, and measure."""
    warm()
    run = train_long(place, STEPS, ranks=RANKS)
    with service(place, recorded=False, resumes=True) as live:
        crowd(live, RUNS)
    measure(place, run)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        main(Path(own))
