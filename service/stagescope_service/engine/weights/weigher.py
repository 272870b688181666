"""When recorded weights are compared: after each record, and after a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from stagescope_service.engine.findings import finding
from stagescope_service.engine.instructions import Delete, Put, Weigh
from stagescope_service.engine.reasons import describe
from stagescope_service.engine.retries import RetriedWork, retried
from stagescope_service.engine.rows import digest
from stagescope_service.engine.weights.weighing import judge
from stagescope_service.store.catalogue import Catalogue

logger = logging.getLogger(__name__)

Write = Callable[[Sequence[Put | Delete]], Awaitable[None]]

NOT_COMPARED = "weights_not_compared"
"""Of a version of weights: it could not be compared; over with the next try that succeeds."""


class Weigher:
    """Compares the versions of weights of one coordinator, from what is in the catalogue.

    Many ranks record a version at about the same time: while one comparison is under way, all
    that arrives waits for one more.
    """

    def __init__(
        self, catalogue: Catalogue, write: Write, rules: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._catalogue = catalogue
        self._write = write
        self._rules = rules
        self._comparing = RetriedWork[Weigh, Weigh](
            "the comparison of weights", self._compare, self._not_compared
        )

    def takes(self, order: Weigh) -> bool:
        """Note an order; say whether `weigh` is to be called with it."""
        return self._comparing.takes(order, order)

    async def weigh(self, order: Weigh) -> None:
        """Compare a version, again as long as it was asked for meanwhile or where it fails."""
        await self._comparing.carry_out(order, order)

    async def catch_up(self) -> None:
        """Compare what was recorded and, when a coordinator ended, not compared."""
        try:
            await retried(self._catch_up, "reading which weights were not compared")
        except Exception:
            logger.exception("which weights were not compared cannot be read")

    async def _catch_up(self) -> None:
        for place in await asyncio.to_thread(self._catalogue.unweighed):
            if self.takes(order := Weigh(*place)):
                await self.weigh(order)

    async def _compare(self, order: Weigh) -> None:
        rows = await asyncio.to_thread(judge, self._catalogue, order, self._rules)
        await self._write([*rows, Delete("findings", {"finding_id": _finding_id(order)})])

    async def _not_compared(self, order: Weigh, error: Exception, tried: int) -> None:
        attempt = await asyncio.to_thread(self._catalogue.attempt, order.attempt_id)
        reason = describe(error)
        made = finding(
            NOT_COMPARED,
            f"the weights of version {order.version} could not be compared ({tried} tries): "
            f"{reason}",
            run="" if attempt is None else attempt["run"],
            attempt_id=order.attempt_id,
            stage="weight_sync",
            wall=time.time(),
            severity="error",
            evidence={"version": order.version, "error": reason, "tries": tried},
            advice="what was recorded is kept; it is tried again when more of this version is "
            "recorded and when the service starts anew; the coordinator's log has the traceback",
        )
        await self._write([Put("findings", {**made.row, "finding_id": _finding_id(order)})])


def _finding_id(order: Weigh) -> str:
    # Of a version, not of a step: the step may be unknown, or that of several versions.
    return digest(NOT_COMPARED, *order)
