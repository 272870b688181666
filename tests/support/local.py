"""The real coordinator and two nodes' ingestors in the test's process, step by step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.ingestors import LocalIngestors
from tests.support.parallel import Reported

from stagescope_service.coordinator.composition import Parts
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.coordinator.runner import Clock
from stagescope_service.core.captures.active_plan import Plan
from stagescope_service.core.instructions import (
    Aggregate,
    AnnouncedDump,
    IngestJob,
    Instruction,
    PayloadJob,
    PayloadKey,
    StepJob,
)
from stagescope_service.core.state import State
from stagescope_service.ingest.ingestors import IngestWorker, TokenRange
from stagescope_service.ingest.reader import Outcome
from stagescope_service.ingest.recompute import JoinAnswer, Source
from stagescope_service.settings import Settings
from stagescope_service.store.contract import Put
from stagescope_service.store.sql import SqlStore


class WorkQueue:
    """Holds the work of a coordinator's instructions until the test starts it."""

    def __init__(self, parts: Parts) -> None:
        self.queue: list[Instruction] = []
        self.aggregated: list[Aggregate] = []
        """Steps whose rules would be checked now."""
        self.checks_rules = False
        self._start = parts.runner.start
        self._check_rules = parts.steps._check_rules
        parts.runner.start = self.queue.append  # type: ignore[method-assign, assignment]
        parts.steps._check_rules = self._note  # type: ignore[method-assign]

    def start_now(self, instruction: Instruction) -> None:
        self._start(instruction)

    def _note(self, step: Aggregate) -> None:
        if self.checks_rules:
            self._check_rules(step)
        else:
            self.aggregated.append(step)


class NodeIngestors(LocalIngestors):
    """The ingestors of nodes, whose processes and payloads the test may lose."""

    def __init__(self, worker_of: Callable[[str], IngestWorker]) -> None:
        super().__init__(worker_of, home="None")
        self.dead: set[str] = set()
        """Incarnations whose process is gone, and with it what it owned and nobody has read."""
        self.joined: list[PayloadKey] = []
        self.recomputed: list[PayloadKey] = []
        self.before_building: list[Callable[[], object]] = []
        """What happens before each of the next tries to make an operator table."""

    def restart(self) -> None:
        """Let new processes take the place of the ingestors."""
        self._workers.clear()

    async def ingest(
        self, node_id: str | None, key: PayloadKey, job: IngestJob, payload: object
    ) -> Outcome:
        if key.incarnation in self.dead:
            return Outcome("lost", "its owner died", [], {})
        outcome = await super().ingest(node_id, key, job, payload)
        assert outcome.state == "ingested", outcome
        return outcome

    async def build_operator_table(self, node_id: str | None, job: AnnouncedDump) -> list[Put]:
        if self.before_building:
            self.before_building.pop(0)()
        return await super().build_operator_table(node_id, job)

    async def recompute(
        self,
        node_id: str | None,
        key: PayloadKey,
        job: StepJob,
        pair: tuple[str, str],
        skips: Sequence[TokenRange],
    ) -> bytes | None:
        self.recomputed.append(key)
        return await super().recompute(node_id, key, job, pair, skips)

    async def join(
        self, node_id: str | None, key: PayloadKey, job: PayloadJob, sources: Sequence[Source]
    ) -> JoinAnswer | None:
        self.joined.append(key)
        return await super().join(node_id, key, job, sources)


class QueuedCoordinator(Coordinator):
    """A coordinator whose work waits in a queue."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.work = WorkQueue(parts)


def coordinator_of(
    store: SqlStore,
    data_dir: Path,
    *,
    ingestors: LocalIngestors | None = None,
    state: State | None = None,
    wall: Callable[[], float] = time.time,
    mono: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> QueuedCoordinator:
    """A coordinator whose work waits in a queue."""

    def worker_of(node: str) -> IngestWorker:
        return IngestWorker(node, data_dir, [data_dir], ring_bytes=1 << 24)

    made = Settings(home=data_dir, data_dir=data_dir, database_url=store.url, **settings)
    parts = Parts(
        made,
        store,
        ingestors or NodeIngestors(worker_of),
        state or State(lease_seconds=made.lease_seconds),
        Plan(),
        name="c",
        clock=Clock(wall, mono),
    )
    return QueuedCoordinator(parts)


class LocalCoordinator:
    """A coordinator that carries out what follows of events when the test says so."""

    def __init__(
        self,
        store: SqlStore,
        data_dir: Path,
        ring_bytes: int = 1 << 30,
        *,
        state: State | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        def worker_of(node: str) -> IngestWorker:
            return IngestWorker(node, data_dir, [data_dir], ring_bytes=ring_bytes)

        self.ingestors = NodeIngestors(worker_of)
        self.coordinator = coordinator_of(
            store,
            data_dir,
            ingestors=self.ingestors,
            state=state,
            wall=clock or time.time,
            mono=clock or time.monotonic,
            poll_seconds=1.0,
        )
        self.parts = self.coordinator.parts
        self.queue = self.coordinator.work

    async def record(self, reported: Iterable[Reported], batch: int = 40) -> None:
        """Take in events, in batches of each sender, and carry out what follows of them."""
        everything = list(reported)
        for begin in range(0, len(everything), batch):
            senders: dict[str, list[Reported]] = {}
            for each in everything[begin : begin + batch]:
                senders.setdefault(each.sender.incarnation, []).append(each)
            for own in senders.values():
                answer = await self.coordinator.parts.intake.record(
                    own[0].sender.wire(),
                    [each.event.wire() for each in own],
                    {e.event.seq: e.payload for e in own if e.payload is not None},
                )
                assert not answer["refused"], answer
            await self.work()

    async def work(self, most: float = math.inf) -> None:
        """Carry out what is queued until nothing is, or `most` of it is done."""
        queue = self.queue.queue
        while queue and most > 0:
            most -= 1
            self.queue.start_now(queue.pop(0))
            await self.parts.runner.settled()
