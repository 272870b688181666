"""What many ranks cost the coordinator: simulated ranks on a real one, through relays or directly.

Each simulated rank speaks as a probe's background thread does: one batch of events and one long
poll on the way at a time, what comes meanwhile in the next batch, and it heeds `pause`. The ranks
live in a few processes, each of which holds some nodes: a real `Relay` and 64 ranks, whose calls to
the relay are local; the relay's calls to the coordinator are Ray's.

It prints how late events are acknowledged, the coordinator's CPU time, memory and the delay of its
loop, how long it takes until a capture request is known to every rank and agreed on, how long
somebody waits who asks the API meanwhile, and how many findings there are after the ranks fell
silent.

    python -m tests.benchmarks.bench_ranks [RANKS [SECONDS_A_STEP [STEPS [direct]]]]
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import ray
from tests.support.cluster import Service, ray_cluster

import stagescope
from stagescope_service.ingest.relay import Answer, Relay
from stagescope_service.ingest.relay_actor import CoordinatorActor
from stagescope_wire import schema

STAGES = schema.STAGES[:6]
POLL_SECONDS = 20.0
LEASE_SECONDS = 45.0
PATIENCE = 600.0
"""Seconds after which a wait has failed: on two cores 16 000 ranks take minutes to connect."""
RANKS_A_NODE = 64
HOSTS = 2
"""Processes that hold the simulated nodes."""
RUN = "simulated"


def wait_for(condition: Callable[[], Any], pause: float = 0.2, seconds: float = PATIENCE) -> Any:
    """Return the first true value of a condition.

    Args:
        condition: is asked again and again.
        pause: seconds between two questions, which cost the service time.
        seconds: the deadline; after it the benchmark fails.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {condition}"
        time.sleep(pause)
    return found


class Calls(Protocol):
    """What takes a rank's calls: a relay, or the coordinator itself."""

    async def record(self, sender: object, events: Sequence[object], payloads: None) -> Answer: ...
    async def poll(
        self, sender: object, revision: int, unreceipted: Sequence[object], wait: float
    ) -> Answer: ...


class Direct:
    """The coordinator's actor, called by each rank itself."""

    def __init__(self) -> None:
        self._handle: Any = ray.get_actor("DebugCoordinator", namespace="stagescope")

    async def record(self, sender: object, events: Sequence[object], payloads: None) -> Answer:
        answer: Answer = await self._handle.record_events.remote(sender=sender, events=events)
        return answer

    async def poll(
        self, sender: object, revision: int, unreceipted: Sequence[object], wait: float
    ) -> Answer:
        answer: Answer = await self._handle.poll.remote(
            sender=sender, revision=revision, unreceipted=unreceipted, wait=wait
        )
        return answer


@dataclasses.dataclass
class Counts:
    """What the ranks of a process have seen; they are added up."""

    delays: list[float] = dataclasses.field(default_factory=list)
    """Seconds from each event to its acknowledgement."""
    calls: int = 0
    pushed_back: int = 0
    revisions: Counter[int] = dataclasses.field(default_factory=Counter)
    """Revision of the plan -> ranks that have it."""
    waiting: int = 0
    training: int = 0

    def add(self, other: Counts) -> None:
        self.delays += other.delays
        self.calls += other.calls
        self.pushed_back += other.pushed_back
        self.revisions += other.revisions
        self.waiting += other.waiting
        self.training += other.training


class SimulatedRank:
    """One rank's events, its batch on the way and its poll."""

    def __init__(self, calls: Calls, node: str, rank: int, ranks: int, counts: Counts) -> None:
        self._calls = calls
        self._counts = counts
        self._sender = schema.Sender(
            f"simulated-{rank:027d}", RUN, "key", "actor", rank, node_id=node,
            clock_offset=0.0, clock_error=0.0, started=time.time(),
        )  # fmt: skip
        self.revision = 0
        self.seq = 0
        self.waiting: list[tuple[float, tuple[object, ...]]] = []
        self._estimated: set[str] = set()
        self._has_news = asyncio.Event()
        self.say(schema.HELLO, world_size=ranks, layout=dict.fromkeys(schema.LAYOUT_COLUMNS, 1))

    def say(self, kind: str, **fields: object) -> None:
        self.seq += 1
        event = schema.Event(kind, self.seq, time.time(), time.monotonic(), fields).wire()
        self.waiting.append((time.monotonic(), event))
        self._has_news.set()

    def _wire(self) -> tuple[object, ...]:
        return dataclasses.replace(self._sender, plan_revision=self.revision).wire()

    def _apply(self, answer: Answer) -> None:
        """Take the plan of an answer, where it brings one, and estimate its captures."""
        plan: Any = answer.get("plan")
        if plan is None or plan["revision"] <= self.revision:
            return
        self.revision = plan["revision"]
        for entry in plan["captures"]:
            if entry["phase"] == "asked" and entry["capture_id"] not in self._estimated:
                self._estimated.add(entry["capture_id"])
                told = {"capture_id": entry["capture_id"], "state": "estimated", "estimate": {}}
                self.say(schema.DUMP, stage=STAGES[0], **told)

    async def send(self) -> None:
        """Send what waits, for ever."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            batch = list(self.waiting)
            self._counts.calls += 1
            events = [event for _, event in batch]
            answer: Any = await self._calls.record(self._wire(), events, None)
            self._apply(answer)
            if answer.get("not_ready") is None:
                del self.waiting[: len(batch)]
                now = time.monotonic()
                self._counts.delays += [now - said for said, _ in batch]
            else:
                self._counts.pushed_back += 1
            if self.waiting:
                self._has_news.set()
            pause = answer.get("pause") or (0.5 if answer.get("not_ready") else 0.0)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))

    async def poll(self) -> None:
        """Poll for ever."""
        wait = POLL_SECONDS
        while True:
            answer: Any = await self._calls.poll(self._wire(), self.revision, [], wait)
            wait = answer.get("poll_seconds", wait)
            self._apply(answer)
            if answer.get("not_ready") is not None:
                await asyncio.sleep(random.uniform(0.5, 1.0))

    async def train(self, steps: int, seconds: float) -> None:
        """Go through the stages of each step, each at a moment of its own."""
        for step in range(1, steps + 1):
            for name in STAGES:
                self.say(schema.BEGIN, step=step, stage=name)
                await asyncio.sleep(random.uniform(0.5, 1.5) * seconds / len(STAGES))
                self.say(schema.END, step=step, stage=name, status="ok", scalars={"loss": 1.0})


class Host:
    """Holds the nodes of some of the ranks."""

    async def start(self, ranks: Sequence[int], size: int, direct: bool) -> None:
        self._counts = Counts()
        self._ranks: list[SimulatedRank] = []
        nodes: dict[int, Calls] = {}
        for rank in ranks:
            node = rank // RANKS_A_NODE
            if node not in nodes:
                nodes[node] = Direct() if direct else Relay(CoordinatorActor())
            self._ranks.append(SimulatedRank(nodes[node], f"n{node}", rank, size, self._counts))
        self._calls = [asyncio.create_task(each.send()) for each in self._ranks]
        self._calls += [asyncio.create_task(each.poll()) for each in self._ranks]
        self._training: list[asyncio.Task[None]] = []

    async def train(self, steps: int, seconds: float) -> None:
        # The ranks' first calls, at one moment, are a number of their own.
        self._counts.delays.clear()
        self._training = [asyncio.create_task(each.train(steps, seconds)) for each in self._ranks]

    async def counts(self) -> Counts:
        return dataclasses.replace(
            self._counts,
            delays=[],
            revisions=Counter(each.revision for each in self._ranks),
            waiting=sum(len(each.waiting) for each in self._ranks),
            training=sum(not task.done() for task in self._training),
        )

    async def delays(self) -> list[float]:
        return self._counts.delays

    async def fall_silent(self) -> None:
        for task in self._calls:
            task.cancel()


class Asker:
    """Asks the API from a process of its own."""

    def __init__(self, url: str, token: str) -> None:
        self.session = stagescope.attach(url, token=token, timeout=300.0)

    def ask(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the seconds that each question took, and the coordinator's state."""
        took: dict[str, float] = {}
        said: dict[str, Any] = {}
        questions: dict[str, Callable[[], object]] = {
            "ready": lambda: self.session.get("/readyz"),
            "status": self.session.status,
            "runs": self.session.runs,
            "steps": lambda: self.session.steps(run=RUN, limit=20),
            "stages": lambda: self.session.step(1, run=RUN).stages(rank=0),
            "series": lambda: self.session.series("loss", run=RUN),
        }
        for name, question in questions.items():
            began = time.monotonic()
            with contextlib.suppress(stagescope.NotFound):  # nobody has begun a step yet
                said[name] = question()
            took[name] = time.monotonic() - began
        return took, dict(said["status"])

    def request(self) -> tuple[str, int]:
        """Request a capture; return its id and the plan's revision."""
        made: Any = self.session.capture(stages=[STAGES[0]], run=RUN, steps="next")
        # A coordinator that is short of time does not answer every question for its status.
        revision = wait_for(lambda: self.session.status()["coordinator"].get("revision"), 0.5)
        return made["capture_id"], revision

    def phase(self, capture_id: str) -> str:
        """Return the phase of a capture's agreement."""
        rows = [row for row in self.session.plan() if row["capture_id"] == capture_id]
        return str(rows[0]["state"]) if rows else "ended"

    def withdraw(self, capture_id: str) -> None:
        with contextlib.suppress(stagescope.NotFound):
            self.session.remove_capture(capture_id)

    def findings(self) -> dict[str, int]:
        """Return kind -> number of findings, and of losses."""
        found = Counter(str(row["kind"]) for row in self.session.findings(RUN, limit=100_000))
        return {**found, "(losses)": len(self.session.losses(RUN, limit=100_000))}


class Simulation:
    """The processes that simulate ranks, and the one that asks."""

    def __init__(self, service: Service, ranks: int, direct: bool) -> None:
        self.ranks = ranks
        host: Any = ray.remote(Host).options(num_cpus=0, max_concurrency=100_000)
        self.hosts = [host.remote() for _ in range(HOSTS)]
        share = -(-ranks // HOSTS // RANKS_A_NODE) * RANKS_A_NODE
        ray.get(
            [
                each.start.remote(range(at * share, min(ranks, (at + 1) * share)), ranks, direct)
                for at, each in enumerate(self.hosts)
            ]
        )
        asker: Any = ray.remote(num_cpus=0)(Asker)
        self.asker = asker.remote(service.info.url, service.token)

    def counts(self) -> Counts:
        total = Counts()
        for each in ray.get([host.counts.remote() for host in self.hosts]):
            total.add(each)
        return total

    def wait(self, done: Callable[[Counts], bool]) -> float:
        """Return the seconds until the counts are so."""
        began = time.monotonic()
        wait_for(lambda: done(self.counts()))
        return time.monotonic() - began

    def delays(self) -> list[float]:
        return [one for some in ray.get([host.delays.remote() for host in self.hosts])
                for one in some]  # fmt: skip

    def request(self) -> tuple[float, float]:
        """Request a capture; return the seconds until all ranks know it, and until it is agreed."""
        began = time.monotonic()
        capture_id, revision = ray.get(self.asker.request.remote())
        self.wait(lambda counts: sum(counts.revisions[each] for each in counts.revisions
                                     if each >= revision) == self.ranks)  # fmt: skip
        known = time.monotonic() - began
        wait_for(lambda: ray.get(self.asker.phase.remote(capture_id)) != "asked")
        agreed = time.monotonic() - began
        ray.get(self.asker.withdraw.remote(capture_id))
        return known, agreed


def simulate(service: Service, ranks: int, seconds: float, steps: int, direct: bool) -> None:
    process = psutil.Process(service.status()["pid"])
    before = process.memory_info().rss
    began = time.monotonic()
    made = Simulation(service, ranks, direct)
    made.wait(lambda counts: counts.waiting == 0)
    said(f"{ranks} ranks {'directly' if direct else 'through relays'}: "
         f"their first calls are answered after {time.monotonic() - began:.1f} s")  # fmt: skip
    ray.get([host.train.remote(steps, seconds) for host in made.hosts])
    began, cpu = time.monotonic(), sum(process.cpu_times()[:2])
    asked: list[dict[str, float]] = []
    requested: list[tuple[float, float]] = []
    request_at = began + seconds / 3
    while (counts := made.counts()).training:
        answers, status = ray.get(made.asker.ask.remote())
        asked.append(answers)
        if time.monotonic() > request_at:
            request_at += seconds
            requested.append(made.request())
            said(f"{time.monotonic() - began:6.0f} s  {counts.waiting:7d} at the ranks  "
                 f"memory {process.memory_info().rss / 2**20:6.0f} MiB  "
                 f"known {requested[-1][0]:5.2f} s  agreed {requested[-1][1]:5.2f} s  "
                 f"load {status['coordinator'].get('load')}")  # fmt: skip
        time.sleep(0.5)
    made.wait(lambda counts: counts.waiting == 0)
    took, counts, delays = time.monotonic() - began, made.counts(), made.delays()
    used = sum(process.cpu_times()[:2]) - cpu
    grown = process.memory_info().rss - before
    known, agreed = zip(*requested, strict=True)
    said(
        f"{len(delays)} events in {counts.calls} calls of ranks, {took:.0f} s for "
        f"{steps * seconds:.0f} s of training, {counts.pushed_back} calls pushed back\n"
        f"late    {np.median(delays):8.3f} s, p99 {np.quantile(delays, 0.99):.3f} s, "
        f"longest {max(delays):.3f} s\n"
        f"CPU     {used / len(delays) * 1e6:8.0f} us an event, {used / took:.2f} of a core\n"
        f"memory  {grown / ranks / 1024:8.1f} KiB a rank ({grown / 2**20:.0f} MiB)\n"
        f"capture known to all ranks after {max(known):.2f} s, agreed on after {max(agreed):.2f} s "
        f"(longest of {len(known)})"
    )
    for name in asked[0]:
        waits = [answers[name] for answers in asked]
        said(f"{name:8}{np.median(waits):8.3f} s, p99 {np.quantile(waits, 0.99):.3f} s")
    ray.get([host.fall_silent.remote() for host in made.hosts])
    wait_for(lambda: not service.status()["live_processes"], 1.0, 3 * LEASE_SECONDS)
    said(f"once all ranks are silent: findings {ray.get(made.asker.findings.remote())}")


def said(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main() -> None:
    """Print the table."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 4
    with tempfile.TemporaryDirectory() as home, ray_cluster() as address:
        service = Service.start(
            Path(home), address, lease_seconds=LEASE_SECONDS, poll_seconds=POLL_SECONDS
        )
        try:
            simulate(service, ranks, seconds, steps, "direct" in sys.argv[4:])
        finally:
            service.stop()


if __name__ == "__main__":
    main()
