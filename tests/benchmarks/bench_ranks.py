"""What a rank costs the coordinator: many simulated ranks on a real one.

Each simulated rank speaks as a probe's background thread does: one batch of events and one long
poll on the way at a time, what comes meanwhile in the next batch, and it heeds `pause`. It prints
the coordinator's memory and CPU time a rank, the delay from an event to its acknowledgement, how
long somebody waits who asks the API meanwhile (for the coordinator's state, for stored numbers, and
for a capture to be requested), and how long such a request takes to reach each rank.

    python -m tests.benchmarks.bench_ranks [RANKS [SECONDS_A_STEP [STEPS]]]
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from tests.support.cluster import Service, ray_cluster

import stagescope
from stagescope.wire import schema
from stagescope_service.coordinator.load import TRIM_SECONDS

STAGES = schema.STAGES[:6]
POLL_SECONDS = 20.0


class RequestDelays:
    """How many seconds after a capture was requested each rank knew of it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.given = 0.0
        self.heard: set[int] | None = None
        self.delays: list[float] = []
        self.missed = 0

    def give(self) -> None:
        """Note that a request begins; ranks that do not know the one before count as missed."""
        if self.heard is not None:
            self.missed += self.ranks - len(self.heard)
        self.given, self.heard = time.monotonic(), set()

    def reach(self, rank: int) -> None:
        """Note that a rank has another plan than before."""
        if self.heard is not None and rank not in self.heard:
            self.heard.add(rank)
            self.delays.append(time.monotonic() - self.given)


class SimulatedRank:
    """One rank's events, its batch on the way and its poll."""

    def __init__(
        self, coordinator: Any, rank: int, ranks: int, delays: list[float], requests: RequestDelays
    ) -> None:
        self.coordinator = coordinator
        self.rank = rank
        self.requests = requests
        self._sender = schema.Sender(
            f"simulated-{rank:027d}", "simulated", "key", "actor", rank,
            clock_offset=0.0, clock_error=0.0, started=time.time(),
        )  # fmt: skip
        self.revision = 0
        self.seq = 0
        self.waiting: list[tuple[float, tuple[object, ...]]] = []
        self.delays = delays
        self.pushed_back = 0
        self.calls = 0
        self.has_news = asyncio.Event()
        self.say(schema.HELLO, world_size=ranks, layout=dict.fromkeys(schema.LAYOUT_COLUMNS, 1))

    def say(self, kind: str, **fields: object) -> None:
        self.seq += 1
        event = schema.Event(kind, self.seq, time.time(), time.monotonic(), fields).wire()
        self.waiting.append((time.monotonic(), event))
        self.has_news.set()

    def sender(self) -> tuple[object, ...]:
        """Return the sender's tuple, with the revision of the plan that this rank has."""
        return dataclasses.replace(self._sender, plan_revision=self.revision).wire()

    def apply(self, answer: dict[str, Any]) -> None:
        """Take the plan of an answer, where it brings one."""
        if (plan := answer.get("plan")) is not None and plan["revision"] > self.revision:
            self.revision = plan["revision"]
            self.requests.reach(self.rank)

    async def send(self) -> None:
        """Send what waits, for ever."""
        while True:
            await self.has_news.wait()
            self.has_news.clear()
            batch = list(self.waiting)
            self.calls += 1
            answer = await self.coordinator.record_events.remote(
                sender=self.sender(), events=[event for _, event in batch]
            )
            self.apply(answer)
            if answer.get("not_ready") is None:
                del self.waiting[: len(batch)]
                now = time.monotonic()
                self.delays += [now - said for said, _ in batch]
            else:
                self.pushed_back += 1
            if self.waiting:
                self.has_news.set()
            pause = answer.get("pause") or (0.5 if answer.get("not_ready") else 0.0)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))

    async def poll(self) -> None:
        """Poll for ever."""
        wait = POLL_SECONDS
        while True:
            answer = await self.coordinator.poll.remote(
                sender=self.sender(), revision=self.revision, unreceipted=[], wait=wait
            )
            wait = answer.get("poll_seconds", wait)
            self.apply(answer)

    async def train(self, steps: int, seconds: float) -> None:
        """Go through the stages of each step, each at a moment of its own."""
        for step in range(1, steps + 1):
            for name in STAGES:
                self.say(schema.BEGIN, step=step, stage=name)
                await asyncio.sleep(random.uniform(0.5, 1.5) * seconds / len(STAGES))
                self.say(schema.END, step=step, stage=name, status="ok", scalars={"loss": 1.0})


class Asker:
    """Asks the API from a process of its own: that of the simulated ranks is busy."""

    def __init__(self, url: str, token: str) -> None:
        self.session = stagescope.attach(url, token=token, timeout=300.0)

    def ask(self) -> tuple[dict[str, float], dict[str, object]]:
        """Return the seconds that each question took, and the coordinator's state."""
        took: dict[str, float] = {}
        said: dict[str, Any] = {}
        questions: dict[str, Callable[[], object]] = {
            "ready": lambda: self.session.get("/readyz"),
            "status": self.session.status,
            "runs": self.session.runs,
            "step": lambda: self.session.step(1, run="simulated").stages(rank=0),
            "series": lambda: self.session.series("loss", run="simulated"),
        }
        for name, question in questions.items():
            began = time.monotonic()
            with contextlib.suppress(stagescope.NotFound):  # nobody has begun a step yet
                said[name] = question()
            took[name] = time.monotonic() - began
        return took, dict(said["status"])

    def order(self) -> float:
        """Return the seconds until a capture is requested and withdrawn."""
        began = time.monotonic()
        ordered = self.session.capture(stages=["actor_update"], run="simulated", steps=10**6)
        self.session.remove_capture(ordered["capture_id"])
        return time.monotonic() - began


async def simulate(service: Service, ranks: int, seconds: float, steps: int) -> None:
    coordinator = service.coordinator
    process = psutil.Process((await coordinator.status.remote())["pid"])
    asker: Any = ray.remote(num_cpus=0)(Asker)
    asker = asker.remote(service.info.url, service.token)
    await asker.ask.remote()
    before = process.memory_info().rss
    delays: list[float] = []
    asked: list[dict[str, float]] = []
    ordered: list[float] = []
    requests = RequestDelays(ranks)
    everyone = [SimulatedRank(coordinator, rank, ranks, delays, requests) for rank in range(ranks)]
    running = [asyncio.create_task(one.send()) for one in everyone]
    running += [asyncio.create_task(one.poll()) for one in everyone]
    training = [asyncio.create_task(one.train(steps, seconds)) for one in everyone]
    began, cpu = time.monotonic(), sum(process.cpu_times()[:2])
    report = time.monotonic()
    while not all(task.done() for task in training):
        await asyncio.sleep(1.0)
        answers, status = await asker.ask.remote()
        asked.append(answers)
        if time.monotonic() > report:
            report += seconds
            held = sum(len(one.waiting) for one in everyone)
            requests.give()
            ordered.append(await asker.order.remote())
            print(  # noqa: T201
                f"{time.monotonic() - began:6.0f} s  {len(delays):8d} acknowledged  "
                f"{held:7d} at the ranks  memory {process.memory_info().rss / 2**20:6.0f} MiB  "
                f"status {answers['status']:5.2f} s  order {ordered[-1]:5.2f} s  "
                f"load {status['coordinator'].get('load')}",
                flush=True,
            )
    while any(one.waiting for one in everyone):  # noqa: ASYNC110 - of a thousand senders
        await asyncio.sleep(0.1)
    took = time.monotonic() - began
    used = sum(process.cpu_times()[:2]) - cpu
    grown = process.memory_info().rss - before
    calls = sum(one.calls for one in everyone)
    print(  # noqa: T201
        f"{ranks} ranks, {len(delays)} events in {calls} calls, {took:.0f} s for "
        f"{steps * seconds:.0f} s of training"
    )
    print(  # noqa: T201
        f"memory  {grown / ranks / 1024:8.1f} KiB a rank ({grown / 2**20:.0f} MiB)\n"
        f"CPU     {used / len(delays) * 1e6:8.0f} us an event ({used / took:.2f} of a core)\n"
        f"delay   {np.median(delays):8.3f} s, p99 {np.quantile(delays, 0.99):.3f} s, "
        f"longest {max(delays):.3f} s\n"
        f"{_waits(asked)}\n"
        f"order   {np.median(ordered):8.3f} s, longest {max(ordered):.3f} s; known to a rank after "
        f"{np.median(requests.delays):.3f} s, p99 {np.quantile(requests.delays, 0.99):.3f} s, "
        f"longest {max(requests.delays):.3f} s, before the next order not to {requests.missed}\n"
        f"pushed back {sum(one.pushed_back for one in everyone)} of {calls} calls"
    )
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    left = time.monotonic() + POLL_SECONDS + 2 * TRIM_SECONDS  # the last polls end, then a trim
    while (  # noqa: ASYNC110 - the coordinator does it by itself
        kept := process.memory_info().rss - before
    ) > grown / 2 and time.monotonic() < left:
        await asyncio.sleep(1.0)
    print(f"kept    {kept / ranks / 1024:8.1f} KiB a rank once all are silent")  # noqa: T201


def _waits(asked: list[dict[str, float]]) -> str:
    waits = {name: [answers[name] for answers in asked] for name in asked[0]}
    return "\n".join(
        f"{name:8}{np.median(took):8.3f} s, longest {max(took):.3f} s"
        for name, took in waits.items()
    )


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 4
    with tempfile.TemporaryDirectory() as home, ray_cluster() as address:
        service = Service.start(Path(home), address, lease_seconds=45.0, poll_seconds=POLL_SECONDS)
        try:
            asyncio.run(simulate(service, ranks, seconds, steps))
        finally:
            service.stop()


if __name__ == "__main__":
    main()
