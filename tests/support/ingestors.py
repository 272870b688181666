"""The ingestors of all nodes in the test's own process: no cluster."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import TypeVar

from stagescope_service.core.instructions import IngestJob, PayloadJob, PayloadKey
from stagescope_service.ingest.ingestors import IngestorClient, IngestWorker
from stagescope_service.ingest.reader import Outcome
from stagescope_service.ingest.recompute import JoinAnswer, Source
from stagescope_service.ingest.rollout_join import RolloutRows

T = TypeVar("T")


class LocalIngestors(IngestorClient):
    """The ingestors of all nodes in this process.

    Args:
        worker_of: returns the worker of a node, the same one each time.
        home: the node of the coordinator.
    """

    def __init__(self, worker_of: Callable[[str], IngestWorker], *, home: str = "local") -> None:
        self.home = home
        self._worker_of = worker_of
        self._workers: dict[str, IngestWorker] = {}
        # One thread, as in an ingestor: two payloads at once would hold twice the memory.
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def worker(self, node_id: str | None) -> IngestWorker:
        """Return the worker of a node."""
        node = self.node_of(node_id)
        if node not in self._workers:
            self._workers[node] = self._worker_of(node)
        return self._workers[node]

    def node_of(self, node_id: str | None) -> str:
        """Return the node itself: every node is in this process."""
        return self.home if node_id is None else node_id

    async def ingest(
        self, node_id: str | None, key: PayloadKey, job: IngestJob, payload: object
    ) -> Outcome:
        """Read a payload."""
        return await self._run(self.worker(node_id).ingest, key, job, payload)

    async def join(
        self, node_id: str | None, key: PayloadKey, job: PayloadJob, sources: Sequence[Source]
    ) -> JoinAnswer | None:
        """Join a trainer's payload with rollouts."""
        worker = self.worker(node_id)

        def work() -> JoinAnswer | None:
            sample_ids = worker.samples(key, job)
            if sample_ids is None:
                return None
            found: list[RolloutRows] = []
            for source in sources:
                found += self.worker(source.node_id).rollouts([source], sample_ids)
            return worker.join(key, job, found)

        return await self._run(work)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    async def _call(self, node_id: str | None, method: str, *arguments: object) -> object:
        return await self._run(getattr(self.worker(node_id), method), *arguments)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
