"""The real coordinator and two nodes' ingestors in the test's process, step by step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.ingestors import LocalIngestors
from tests.support.parallel import Reported

from stagescope_service.coordinator.coordinator import Coordinator, Restored
from stagescope_service.coordinator.effects import Clock, Effects
from stagescope_service.core.captures.plan import Plan
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


class QueuedEffects(Effects):
    """Leaves what is to be started in a queue until the test carries it out."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.queue: list[Instruction] = []
        self.aggregated: list[Aggregate] = []
        self.checks_rules = False

    def start(self, instruction: Instruction) -> None:
        self.queue.append(instruction)

    def start_now(self, instruction: Instruction) -> None:
        super().start(instruction)

    def _check_rules(self, step: Aggregate) -> None:
        if self.checks_rules:
            super()._check_rules(step)
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
    """A coordinator with such effects."""

    effects_type = QueuedEffects


def coordinator_of(
    store: SqlStore,
    data_dir: Path,
    *,
    ingestors: LocalIngestors | None = None,
    state: State | None = None,
    wall: Callable[[], float] = time.time,
    mono: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> Coordinator:
    """A coordinator whose effects wait in a queue."""

    def worker_of(node: str) -> IngestWorker:
        return IngestWorker(node, data_dir, [data_dir], ring_bytes=1 << 24)

    return QueuedCoordinator(
        Settings(home=data_dir, data_dir=data_dir, database_url=store.url, **settings),
        store,
        ingestors or NodeIngestors(worker_of),
        restored=None if state is None else Restored(state, Plan()),
        name="c",
        clock=Clock(wall, mono),
    )


def effects_of(coordinator: Coordinator) -> QueuedEffects:
    """The effects of such a coordinator."""
    assert isinstance(coordinator.effects, QueuedEffects)
    return coordinator.effects


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
        self.effects = effects_of(self.coordinator)

    async def record(self, reported: Iterable[Reported], batch: int = 40) -> None:
        """Take in events, in batches of each sender, and carry out what follows of them."""
        everything = list(reported)
        for begin in range(0, len(everything), batch):
            senders: dict[str, list[Reported]] = {}
            for each in everything[begin : begin + batch]:
                senders.setdefault(each.sender.incarnation, []).append(each)
            for own in senders.values():
                answer = await self.coordinator.intake.record(
                    own[0].sender.wire(),
                    [each.event.wire() for each in own],
                    {e.event.seq: e.payload for e in own if e.payload is not None},
                )
                assert not answer["refused"], answer
            await self.work()

    async def work(self, most: float = math.inf) -> None:
        """Carry out what is queued until nothing is, or `most` of it is done."""
        queue = self.effects.queue
        while queue and most > 0:
            most -= 1
            self.effects.start_now(queue.pop(0))
            await self.effects.settled()
