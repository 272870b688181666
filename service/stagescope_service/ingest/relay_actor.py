"""The actor of a relay: one a node, if a service has many ranks.

Every rank looks it up, and so imports this file, which imports nothing of the service but `Relay`.
It is not part of the ingestor, so the ingestor cannot hold up the calls of ranks, neither by
computing nor by running out of memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stagescope_service.ingest.relay import Answer, Batch, Relay, RelayAnswer, RelayedPoll
from stagescope_wire.discovery import COORDINATOR_NAME, NAMESPACE, relay_name
from stagescope_wire.errors import Unreachable


class CoordinatorActor:
    """The coordinator as a `Relay` calls it: whichever actor has its name."""

    def __init__(self) -> None:
        self._handle: Any = None

    async def record_together(self, batches: Sequence[Batch]) -> RelayAnswer:
        """Call the coordinator's method."""
        return await self._call("record_together", batches=batches)

    async def poll_together(self, polls: Sequence[RelayedPoll], wait: float) -> RelayAnswer:
        """Call the coordinator's method."""
        return await self._call("poll_together", polls=polls, wait=wait)

    async def _call(self, method: str, **arguments: object) -> RelayAnswer:
        try:
            if self._handle is None:  # in a thread: the lookup waits for the GCS
                self._handle = await asyncio.to_thread(
                    ray.get_actor, COORDINATOR_NAME, namespace=NAMESPACE
                )
            return await getattr(self._handle, method).remote(**arguments)  # type: ignore[no-any-return]
        except (ValueError, exceptions.RayActorError) as error:
            self._handle = None
            raise Unreachable(
                f"the coordinator does not answer its relay ({type(error).__name__})",
                advice="the rank calls again",
            ) from error


class RelayActor:
    """Receives the calls of a node's ranks under the names of the coordinator's methods."""

    def __init__(self) -> None:
        self._relay = Relay(CoordinatorActor())

    async def record_events(
        self,
        *,
        sender: object,
        events: Sequence[object],
        payloads: Mapping[int, object] | None = None,
    ) -> Answer:
        """Relay a rank's batch."""
        return await self._relay.record(sender, events, payloads)

    async def poll(
        self, *, sender: object, revision: int, unreceipted: Sequence[object], wait: float
    ) -> Answer:
        """Relay a rank's poll."""
        return await self._relay.poll(sender, revision, unreceipted, wait)

    async def pid(self) -> int:
        """Return the process id; a rank whose call takes long asks for it."""
        return os.getpid()


def start_relays(nodes: Iterable[str]) -> None:
    """Create the relays of these nodes that do not exist yet."""
    for node in nodes:
        ray.remote(RelayActor).options(
            name=relay_name(node),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=4000,  # some calls of each rank of the node
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote()
