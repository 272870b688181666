"""When recorded weights are compared: after each record, and after a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from stagescope_service.engine.instructions import Delete, Put, Weigh
from stagescope_service.engine.weights.weighing import judge
from stagescope_service.store.catalogue import Catalogue

logger = logging.getLogger(__name__)

Write = Callable[[Sequence[Put | Delete]], Awaitable[None]]


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
        self._asked: dict[Weigh, bool] = {}

    def takes(self, order: Weigh) -> bool:
        """Note an order; say whether `weigh` is to be called with it."""
        is_new = order not in self._asked
        self._asked[order] = not is_new
        return is_new

    async def weigh(self, order: Weigh) -> None:
        """Compare a version, again as long as it was asked for meanwhile."""
        while True:
            self._asked[order] = False
            try:
                await self._write(
                    await asyncio.to_thread(judge, self._catalogue, order, self._rules)
                )
            except Exception:
                # It counts as not compared: the next coordinator does it.
                logger.exception("the weights of %s could not be compared", order)
            if not self._asked[order]:
                del self._asked[order]
                return

    async def catch_up(self) -> None:
        """Compare what was recorded and, when a coordinator ended, not compared."""
        try:
            places = await asyncio.to_thread(self._catalogue.unweighed)
        except Exception:
            logger.exception("which weights were not compared cannot be read")
            return
        for order in (Weigh(*place) for place in places):
            if self.takes(order):
                await self.weigh(order)
