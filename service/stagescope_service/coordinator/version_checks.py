"""Checks the stored records of versions in the background: those of weights and of canaries."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from stagescope_service.coordinator.retries import RetriedWork, retried
from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.findings import FindingFields, describe, finding
from stagescope_service.core.instructions import CompareWeights, Delete, JudgeCanary, Put
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Write, WriteRows

logger = logging.getLogger(__name__)

Order = TypeVar("Order", CompareWeights, JudgeCanary)


class VersionChecks(ABC, Generic[Order]):
    """Carries out one kind of check of one coordinator, from the catalogue.

    Many ranks record a version at about the same time: records that arrive during a check wait for
    one further check.

    Args:
        catalogue: with the records.
        write: commits rows.
        what: is checked, for messages.
        failure: the kind of the finding of a check that failed; the next one that succeeds ends it.
    """

    def __init__(self, catalogue: Catalogue, write: WriteRows, *, what: str, failure: str) -> None:
        self._catalogue = catalogue
        self._write = write
        self._what = what
        self._failure = failure
        self._work: RetriedWork[Order, Order] = RetriedWork(what, self._check, self._failed)

    @abstractmethod
    def rows_of(self, order: Order) -> Sequence[Write]:
        """Return the rows of a check; called in a thread."""

    @abstractmethod
    def left_over(self) -> Sequence[Order]:
        """Return the checks that an earlier coordinator did not make; called in a thread."""

    @abstractmethod
    def failed(self, order: Order, reason: str, tried: int) -> tuple[str, FindingFields]:
        """Return the message and the fields of the finding of a check that failed for good."""

    def takes(self, order: Order) -> bool:
        """Record an order; return whether to call `carry_out` with it."""
        return self._work.takes(order, order)

    async def carry_out(self, order: Order) -> None:
        """Make a check; repeat it if it was ordered meanwhile or failed."""
        await self._work.carry_out(order, order)

    async def catch_up(self) -> None:
        """Make the checks that an earlier coordinator left."""
        try:
            await retried(self._catch_up, f"reading what is left of {self._what}")
        except Exception:
            logger.exception("what is left of %s cannot be read", self._what)

    async def _catch_up(self) -> None:
        for order in await asyncio.to_thread(self.left_over):
            if self.takes(order):
                await self.carry_out(order)

    async def _check(self, order: Order) -> None:
        rows: Sequence[Write] = await asyncio.to_thread(self.rows_of, order)
        await self._write([*rows, Delete("findings", {"finding_id": self._finding_id(order)})])

    async def _failed(self, order: Order, error: Exception, tried: int) -> None:
        message, fields = await asyncio.to_thread(self.failed, order, describe(error), tried)
        made = finding(self._failure, message, **fields)
        await self._write([Put("findings", {**made.row, "finding_id": self._finding_id(order)})])

    def _finding_id(self, order: Order) -> str:
        # For the order, not a step: the step may be unknown, or shared by several versions.
        return row_id(self._failure, *order)


def failure_fields(
    run: str, attempt_id: int | None, reason: str, tried: int, **evidence: object
) -> FindingFields:
    """Return the fields of the finding of a check that failed for good."""
    return {
        "run": run,
        "attempt_id": attempt_id,
        "stage": "weight_sync",
        "wall": time.time(),
        "severity": "error",
        "evidence": {**evidence, "error": reason, "tries": tried},
        "advice": "the records are kept. The service tries again when more of them arrive, and "
        "when it restarts. The coordinator's log has the traceback",
    }
