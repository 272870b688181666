"""The coordinator's calls and two nodes' ingestors without Ray, on the real parts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.parallel import Said

from stagescope.wire.errors import StagescopeError
from stagescope_service.coordinator.aggregation.aggregator import Aggregator
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.core.captures.plan import Plan
from stagescope_service.core.instructions import (
    Aggregate,
    BuildOperatorTable,
    CompareWeights,
    Delete,
    Ingest,
    PayloadKey,
    Put,
    ReadWatchdogs,
)
from stagescope_service.core.state import State
from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.ingest.recompute import Recomputer, Source
from stagescope_service.ingest.rollout_join import RolloutRows
from stagescope_service.store.artifacts import ring_directory
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Store
from stagescope_service.store.ring import Ring


class LocalFloor:
    """What `RayFloor` and the ingestors do, in one process: payloads are read as they arrive."""

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        data_dir: Path,
        ring_bytes: int = 1 << 30,
        *,
        state: State | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._data_dir, self._ring_bytes = data_dir, ring_bytes
        self._intakes: dict[str | None, PayloadReader] = {}
        self._former = Aggregator(catalogue, self, self._write)
        self._orders: list[tuple[Ingest, object] | Aggregate] = []
        self.dead: set[str] = set()
        """Incarnations whose process is gone, and with it what it owned and nobody has read."""
        self.joined: list[PayloadKey] = []
        self.restated: list[PayloadKey] = []
        self.formed: list[Aggregate] = []
        self.reception = Coordinator(
            State() if state is None else state,
            store,
            Plan(),
            self,
            coordinator="c",
            poll_seconds=1.0,
            wall=clock or time.time,
            mono=clock or time.monotonic,
        )

    # --- the floor ------------------------------------------------------------------------
    def ingest(self, order: Ingest, payload: object) -> None:
        self._orders.append((order, payload))

    def aggregate(self, order: Aggregate) -> None:
        self._orders.append(order)

    def read_watchdogs(self, order: ReadWatchdogs) -> None:
        raise AssertionError(f"nobody falls silent here: {order}")

    def build_operator_table(self, order: BuildOperatorTable) -> None:
        raise AssertionError(f"nobody dumps here: {order}")

    def compare_weights(self, order: CompareWeights) -> None:
        raise AssertionError(f"nobody records weights here: {order}")

    async def hear(self, said: Iterable[Said], batch: int = 40) -> None:
        """Take in what was said, in batches of each sender, and do what follows of it."""
        everything = list(said)
        for begin in range(0, len(everything), batch):
            senders: dict[str, list[Said]] = {}
            for each in everything[begin : begin + batch]:
                senders.setdefault(each.sender.incarnation, []).append(each)
            for own in senders.values():
                answer = await self.reception.record(
                    own[0].sender.wire(),
                    [each.event.wire() for each in own],
                    {e.event.seq: e.payload for e in own if e.payload is not None},
                )
                assert not answer["refused"], answer
            await self.work()

    async def work(self, most: float = math.inf) -> None:
        """Carry out what is to do until nothing is, or `most` of it is done."""
        while self._orders and most > 0:
            most -= 1
            order = self._orders.pop(0)
            if isinstance(order, Aggregate):
                attempt = self.reception.state.attempt(order.attempt_id)
                assert attempt is not None
                forgotten = order.step not in attempt.steps
                await self._former.form(order, attempt.run, forgotten=forgotten)
                self.formed.append(order)
                continue
            ingest, payload = order
            if ingest.key.incarnation in self.dead:
                await self.reception.settle(ingest.key, "lost", "its owner died")
                continue
            outcome = self._node(ingest.node_id).take(ingest.key, ingest.job, payload)
            assert outcome.state == "ingested", outcome
            await self.reception.settle(
                ingest.key, outcome.state, outcome.reason, outcome.rows, **outcome.columns
            )
            self._orders += self._former.arrived(ingest.job, outcome.rows)

    # --- the hands ------------------------------------------------------------------------
    async def restate(
        self,
        node_id: str | None,
        key: PayloadKey,
        job: dict[str, Any],
        pair: tuple[str, str],
        skips: Sequence[tuple[int, int, int]],
    ) -> bytes | None:
        self.restated.append(key)
        try:
            return Recomputer(self._node(node_id)).restate(key, job, pair, skips)
        except StagescopeError:
            return None

    async def join(
        self,
        node_id: str | None,
        key: PayloadKey,
        job: dict[str, Any],
        sources: Sequence[tuple[Any, ...]],
    ) -> dict[str, Any] | None:
        self.joined.append(key)
        mine = Recomputer(self._node(node_id))
        found: list[RolloutRows] = []
        try:
            wanted = mine.samples(key, job)
            for source in (Source(*fields) for fields in sources):
                found += Recomputer(self._node(source.node_id)).rollouts([source], wanted)
            return mine.join(key, job, found)
        except StagescopeError:
            return None

    async def _write(self, rows: Sequence[Put | Delete]) -> None:
        await asyncio.sleep(0)
        await self.reception.write(rows)

    def _node(self, node_id: str | None) -> PayloadReader:
        if node_id not in self._intakes:
            ring = Ring(ring_directory(self._data_dir, str(node_id)), self._ring_bytes)
            self._intakes[node_id] = PayloadReader(self._data_dir, str(node_id), ring)
        return self._intakes[node_id]
