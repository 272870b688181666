"""Processes whose death Ray recorded: which ranks died on their own, and not with their driver.

When one rank dies, its driver ends with an exception, and Ray ends the other ranks with it. All of
them stop reporting within a second. Only Ray's record of each actor says which one died first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stagescope_service.coordinator.runner import Clock, Runner
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.findings import PROCESS_DIED, describe, finding, of_process
from stagescope_service.core.instructions import Put
from stagescope_service.core.state import State
from stagescope_service.ingest.cluster_state import ActorDeath
from stagescope_service.ingest.ingestors import IngestorClient
from stagescope_service.store.catalogue import Catalogue

logger = logging.getLogger(__name__)

RECENT_SECONDS: Final = 120.0
"""Ray is not asked about a process that left longer ago, such as before a restart."""


class DeathWatch:
    """Asks Ray once how the processes of a broken attempt ended; used from one event loop.

    Args:
        runner: writes the findings.
        state: the coordinator's state.
        ingestors: know the Ray cluster.
        catalogue: knows the process ids.
        clock: the service's clock.
    """

    def __init__(
        self,
        runner: Runner,
        state: State,
        ingestors: IngestorClient,
        catalogue: Catalogue,
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._state = state
        self._ingestors = ingestors
        self._catalogue = catalogue
        self._wall = clock.wall
        self._asked: set[str] = set()

    def check(self, wall: float) -> None:
        """Ask about the processes that left without a report; call it often."""
        for attempt in self._state.registry.attempts.values():
            cut_off = attempt.cut_off
            new = [
                process
                for process in attempt.processes.values()
                if _is_unclear(process, cut_off, wall) and process.incarnation not in self._asked
            ]
            if new:
                self._asked |= {each.incarnation for each in new}
                self._runner.run(self._ask(attempt, new))

    async def _ask(self, attempt: Attempt, processes: Sequence[Process]) -> None:
        try:
            deaths = await self._ingestors.actor_deaths()
            if deaths:
                pids = await self._pids(attempt)
                await self._runner.write(self._findings(attempt, processes, deaths, pids))
        except Exception as error:
            logger.warning("Ray does not say how processes ended: %s", describe(error))

    async def _pids(self, attempt: Attempt) -> Mapping[str, int | None]:
        rows = await asyncio.to_thread(self._catalogue.processes, attempt.attempt_id)
        return {row["incarnation"]: row["pid"] for row in rows}

    def _findings(
        self,
        attempt: Attempt,
        processes: Iterable[Process],
        deaths: Mapping[tuple[str, int], ActorDeath],
        pids: Mapping[str, int | None],
    ) -> list[Put]:
        out: list[Put] = []
        for process in processes:
            node, pid = process.node_id, pids.get(process.incarnation)
            death = None if node is None or pid is None else deaths.get((node, pid))
            # The system may have given the id of an earlier process again.
            if death is not None and death.wall >= process.started:
                out.append(_finding(attempt, process, pid, death, self._wall()))
        return out


def _is_unclear(process: Process, cut_off: bool, wall: float) -> bool:
    """Return whether a process left lately, and not because it was done."""
    left = process.left_wall
    is_gone = process.lapsed or (process.finished and cut_off)
    return is_gone and not process.raw and left is not None and wall - left < RECENT_SECONDS


def _finding(
    attempt: Attempt, process: Process, pid: int | None, death: ActorDeath, wall: float
) -> Put:
    reached = "before any step" if process.max_step is None else f"in step {process.max_step}"
    return finding(
        PROCESS_DIED,
        f"the process of {process.role} rank {process.rank} (pid {pid}) died {reached}; Ray did "
        f"not end it with its driver. Ray says: {death.reason}",
        **of_process(attempt, process, wall),
        severity="error",
        step=process.max_step,
        evidence={
            "pid": pid,
            "node_id": process.node_id,
            "died_wall": death.wall,
            "reason": death.reason,
        },
        advice="its log says why; where it was killed, the log of its node's kernel (dmesg) may",
    )
