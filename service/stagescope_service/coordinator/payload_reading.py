"""Has payloads read on their nodes: holds their refs meanwhile, and records their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from stagescope_service.coordinator.aggregation.aggregator import Aggregator
from stagescope_service.coordinator.retention import Retention
from stagescope_service.coordinator.runner import Clock, Runner
from stagescope_service.core.captures.active_plan import Plan
from stagescope_service.core.instructions import Ingest, IngestJob, Instruction, PayloadKey, Put
from stagescope_service.core.state import State
from stagescope_service.ingest.ingestors import IngestorClient
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.measurements import SettledPayloads
from stagescope_wire.errors import CatalogueUnavailable, NotReady, StagescopeError, Unreachable
from stagescope_wire.keep import matching_selectors, read_keep

logger = logging.getLogger(__name__)

_ESSENTIAL: Final = frozenset({"payloads", "summaries"})
"""Tables that must have a payload's rows before it counts as ingested."""


class PayloadReading:
    """Has payloads read by ingestors; used from one event loop.

    Args:
        runner: carries out the instructions that follow from a payload.
        state: the coordinator's state.
        catalogue: knows the payloads that the state has forgotten.
        plan: says what is kept of a payload.
        ingestors: the ingestors of all nodes.
        retention: makes room for kept files.
        aggregator: is told of payloads that arrive late.
        clock: the service's clock.
    """

    def __init__(
        self,
        runner: Runner,
        state: State,
        catalogue: Catalogue,
        plan: Plan,
        ingestors: IngestorClient,
        retention: Retention,
        aggregator: Aggregator,
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._state = state
        self._catalogue = catalogue
        self._plan = plan
        self._ingestors = ingestors
        self._retention = retention
        self._aggregator = aggregator
        self._wall = clock.wall
        self._payloads: dict[PayloadKey, object] = {}

    def hold(self, instructions: Iterable[Instruction], payload: object) -> None:
        """Keep a payload's refs for as long as an ingestor reads them, and no longer."""
        for instruction in instructions:
            if isinstance(instruction, Ingest):
                self._payloads[instruction.key] = payload

    def start(self, instruction: Ingest) -> None:
        """Have a held payload read."""
        key = instruction.key
        payload = self._payloads.get(key)
        if payload is None:
            logger.error("payload %s has no refs; its process may offer it again", key)
            self._state.unread(key)
            return
        # Before anything is awaited: the plan and the process's settings may change.
        self._runner.run(self._ingest_or_release(instruction, payload, self._keep(instruction)))

    def _keep(self, instruction: Ingest) -> list[str]:
        """Return the sections and names that the plan and the run's settings keep of a payload."""
        job, process = instruction.job, self._state.registry.processes[instruction.key.incarnation]
        work: dict[str, Any] = {"stage": job["stage"], "step": job["step"]}
        work |= {"role": process.role, "rank": process.rank}
        policy = read_keep(process.settings.get("keep"))
        own = () if policy is None else matching_selectors(policy, **work)
        return [*self._plan.keeps(run=job["run"], **work), *own]

    async def _ingest_or_release(
        self, instruction: Ingest, payload: object, keep: list[str]
    ) -> None:
        try:
            await self._ingest(instruction, payload, keep)
        except Exception:
            # Its refs would pin its bytes until the coordinator ends; it may be offered again.
            self._payloads.pop(instruction.key, None)
            self._state.unread(instruction.key)
            raise

    async def _ingest(self, instruction: Ingest, payload: object, keep: list[str]) -> None:
        key, node_id = instruction.key, instruction.node_id
        job: IngestJob = instruction.job
        reservation = None
        if keep:
            with contextlib.suppress(Unreachable):  # then the home node's has it
                await self._ingestors.learn_nodes([node_id])
            self.adopt_files(self._ingestors.node_of(node_id))
            reservation = await self._retention.make_room(node_id, job)
            job = {**job, "keep": keep, "no_room": reservation.refused}
        outcome = await self._ingestors.ingest(node_id, key, job, payload)
        await self.settle(key, outcome.state, outcome.reason, outcome.rows, **outcome.columns)
        if reservation is not None:
            try:
                await self._retention.settled(reservation, outcome.rows)
            except StagescopeError:
                logger.exception("old kept files could not be deleted")
        for again in self._aggregator.arrived(job, outcome.rows):
            self._runner.start(again)

    def adopt_files(self, node: str) -> None:
        """Take over the kept files of a node, once."""
        if not self._retention.is_adopted(node):
            self._runner.run(self._retention.adopt_once(node))

    async def settle(
        self,
        key: PayloadKey,
        state: str,
        reason: str | None,
        rows: Sequence[Put] = (),
        **columns: object,
    ) -> None:
        """Record the end of a payload, with the resulting rows.

        If the catalogue can never accept its statistics or its end, the payload ends as refused.
        """
        self._payloads.pop(key, None)
        payload = self._state.payload(key)
        settled = self._state.settle(key, state, reason, self._wall(), **columns)
        refused = await self._runner.carry_out([*rows, *settled])
        essential = [each.reason for each in refused if each.write.table in _ESSENTIAL]
        if essential and payload is not None:
            reason = f"the catalogue refused what came of it: {essential[0]}"
            await self._runner.carry_out(self._state.refuse(payload, reason, self._wall()))

    async def stored(self, incarnation: str, seqs: Collection[int]) -> SettledPayloads:
        """Return the catalogue's entries about payloads of a process.

        Raises:
            NotReady: it cannot be read now.
        """
        try:
            return await asyncio.to_thread(self._catalogue.settled_payloads, incarnation, seqs)
        except CatalogueUnavailable as error:
            raise NotReady(
                str(error), advice="nothing was taken in; make the same call again"
            ) from error
