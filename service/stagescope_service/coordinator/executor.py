"""Where instructions are carried out: rows are committed, then what rests on them is done."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from stagescope.wire.errors import NotReady
from stagescope.wire.keep import read_keep, wanted_by
from stagescope_service.core.captures.plan import Plan
from stagescope_service.core.instructions import (
    Aggregate,
    Ask,
    BuildOperatorTable,
    CompareWeights,
    Delete,
    Effects,
    Ingest,
    Instruction,
    PayloadKey,
    Put,
    ReadWatchdogs,
    Settled,
)
from stagescope_service.core.state import State
from stagescope_service.store.contract import Store

logger = logging.getLogger(__name__)


class Executor:
    """Carries out instructions, and lets those go on who wait for what came of them."""

    def __init__(self, state: State, store: Store, plan: Plan, floor: Effects) -> None:
        self.state = state
        self.store = store
        self.plan = plan
        self.effects = floor
        self._payloads: dict[PayloadKey, object] = {}
        self.uncommitted: Counter[PayloadKey] = Counter()
        """Settled in memory and not yet on disk: whoever heard of it would let the payload go."""
        self.due: Counter[Aggregate] = Counter()
        """Step summaries that are to be aggregated as soon as what makes them due is on disk."""
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    def check_ready(self) -> None:
        """Raise `NotReady` while the catalogue cannot be written."""
        health = self.store.health()
        if not health.healthy:
            raise NotReady(
                f"the catalogue cannot be written: {health.reason}",
                advice="nothing was taken in; the same call may be made again",
            )

    def hold(self, instructions: Sequence[Instruction], payload: object) -> None:
        """Keep refs for as long as an ingestor reads them, and no longer."""
        for order in instructions:
            if isinstance(order, Ingest):
                self._payloads[order.key] = payload

    def release(self, key: PayloadKey) -> None:
        """Let go of the refs of a payload: nobody reads it any more."""
        self._payloads.pop(key, None)

    async def carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Commit the rows, and only then do what the rest says."""
        due = [order for order in instructions if isinstance(order, Aggregate)]
        if not due:
            await self._carry_out(instructions)
            return
        self.due.update(due)
        try:
            await self._carry_out(instructions)
        finally:
            self.due -= Counter(due)

    async def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        rows = [order for order in instructions if isinstance(order, Put | Delete)]
        if rows:
            keys = [order.key for order in instructions if isinstance(order, Settled)]
            self.uncommitted.update(keys)
            try:
                await asyncio.wrap_future(self.store.submit(rows))
            finally:
                self.uncommitted.subtract(keys)
                for key in keys:
                    if self.uncommitted[key] <= 0:
                        del self.uncommitted[key]
        settled: set[str] = set()
        for order in instructions:
            if isinstance(order, Ingest):
                self._ingest(order)
            elif isinstance(order, Aggregate):
                self.effects.aggregate(order)
            elif isinstance(order, BuildOperatorTable):
                self.effects.build_operator_table(order)
            elif isinstance(order, CompareWeights):
                self.effects.compare_weights(order)
            elif isinstance(order, ReadWatchdogs):
                self.effects.read_watchdogs(order)
            elif isinstance(order, Ask):
                settled.add(order.incarnation)
            elif isinstance(order, Settled):
                settled.add(order.key.incarnation)
        self.notify(settled)

    def _ingest(self, order: Ingest) -> None:
        payload = self._payloads.get(order.key)
        if payload is None:
            logger.error("payload %s has no refs; its process may offer it again", order.key)
            self.state.unread(order.key)
            return
        process = self.state.registry.processes[order.key.incarnation]
        place = {"stage": order.job["stage"], "step": order.job["step"]}
        place |= {"role": process.role, "rank": process.rank}
        words = self.plan.keeps(run=order.job["run"], **place)
        said = read_keep(process.settings.get("keep"))
        order.job["keep"] = [*words, *(() if said is None else wanted_by(said, **place))]
        self.effects.ingest(order, payload)

    # --- who waits ------------------------------------------------------------------------
    def receipts(self, incarnation: str, seqs: Iterable[int]) -> dict[int, str]:
        """Return seq -> state of those payloads whose outcome is on disk."""
        process = self.state.registry.processes.get(incarnation)
        if process is None:
            return {}
        return {
            seq: process.settled[seq]
            for seq in seqs
            if seq in process.settled and PayloadKey(incarnation, seq) not in self.uncommitted
        }

    async def wait(self, name: str, seconds: float) -> None:
        """Wait until `name`, an incarnation or an order, is notified, `seconds` at most."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[name].add(future)
        try:
            await asyncio.wait({future}, timeout=seconds)
        finally:
            waiting = self._waiting[name]
            waiting.discard(future)
            if not waiting:
                del self._waiting[name]

    def notify(self, names: Iterable[str]) -> None:
        """Let go on who waits for one of these."""
        for name in names:
            for future in self._waiting.get(name, ()):
                if not future.done():
                    future.set_result(None)

    def notify_all(self) -> None:
        """Let everybody go on."""
        self.notify(list(self._waiting))
