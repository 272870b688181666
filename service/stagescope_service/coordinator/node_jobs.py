"""Work that a node's ingestor does on request: operator tables of dumps, and watchdogs' files."""

from __future__ import annotations

import logging

from stagescope_service.coordinator.hangs.watch import HangWatch
from stagescope_service.coordinator.retries import RetriedWork
from stagescope_service.coordinator.runner import Clock, Runner
from stagescope_service.core.findings import describe
from stagescope_service.core.instructions import BuildOperatorTable, DumpKey, ReadWatchdogs
from stagescope_service.core.operators import refusal
from stagescope_service.ingest.ingestors import IngestorClient, IngestorDied
from stagescope_wire.errors import StoreError, Unreachable

logger = logging.getLogger(__name__)


class NodeJobs:
    """Has ingestors read dumps and watchdogs' files; used from one event loop.

    Args:
        runner: carries out the resulting instructions.
        ingestors: the ingestors of all nodes.
        hangs: judges the file of a watchdog.
        clock: the service's clock.
    """

    def __init__(
        self, runner: Runner, ingestors: IngestorClient, hangs: HangWatch, clock: Clock
    ) -> None:
        self._runner = runner
        self._ingestors = ingestors
        self._hangs = hangs
        self._wall = clock.wall
        self._building = RetriedWork[DumpKey, BuildOperatorTable](
            "the operator table of",
            self._build,
            self._building_failed,
            # A dump that takes more memory than there is ends the ingestor that reads it, and
            # with it the reading of payloads.
            costly=(IngestorDied,),
        )

    def start_building(self, instruction: BuildOperatorTable) -> None:
        """Make a dump's operator table; if that is under way, make it again afterwards."""
        if self._building.takes(instruction.key, instruction):
            self._runner.run(self._building.carry_out(instruction.key, instruction))

    async def _build(self, instruction: BuildOperatorTable) -> None:
        node_id, job = instruction.node_id, instruction.job
        await self._runner.write(await self._ingestors.build_operator_table(node_id, job))

    async def _building_failed(
        self, instruction: BuildOperatorTable, error: Exception, tries: int
    ) -> None:
        reason = f"the service failed to read it ({tries} tries): {describe(error)}"
        await self._runner.write(refusal(instruction.job, StoreError(reason)))

    def start_reading(self, instruction: ReadWatchdogs) -> None:
        """Read the files of a node's watchdogs."""
        self._runner.run(self._read_watchdogs(instruction))

    async def _read_watchdogs(self, instruction: ReadWatchdogs) -> None:
        try:
            found = await self._ingestors.read_watchdogs(instruction.node_id, instruction.paths)
            for incarnation, fields in found.items():
                await self._runner.carry_out(
                    self._hangs.watchdog(incarnation, fields, self._wall())
                )
        except Unreachable:
            return  # the next check of processes asks again
        except Exception:
            logger.exception("watchdogs of node %s could not be read", instruction.node_id)
