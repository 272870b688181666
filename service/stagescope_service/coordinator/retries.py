"""Work that a failure which passes must not lose: tried again, and said where it fails for good.

A step's summary, a dump's operator table and the comparison of weights are made in the background
from what is stored. A full disk, a locked catalogue or a dead ingestor is often over in seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

from stagescope.wire.errors import CatalogueUnavailable, NotReady
from stagescope_service.core.findings import describe

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Job = TypeVar("Job")
T = TypeVar("T")

PAUSES: Final = (1.0, 5.0, 20.0)
"""Seconds before each further try of work that failed."""
COSTLY_TRIES: Final = 2
"""How often work is tried whose failures cost others, too."""


async def retried(
    work: Callable[[], Awaitable[T]], what: str, *, costly: tuple[type[Exception], ...] = ()
) -> T:
    """Return what `work` does, tried again where it raises; `what` names it in the log.

    Of errors that are `costly`, as the end of a process that does other work beside it, the second
    is final (`COSTLY_TRIES`). While the catalogue is unavailable nothing could be said of a
    failure: it is tried for as long as that lasts.

    Raises:
        Exception: what the last try raised.
    """
    pauses, cost = iter(PAUSES), 0
    while True:
        try:
            return await work()
        except (CatalogueUnavailable, NotReady) as error:
            pause = PAUSES[-1]
            logger.warning("%s is tried again in %g s: %s", what, pause, describe(error))
        except Exception as error:
            following, cost = next(pauses, None), cost + isinstance(error, costly)
            if following is None or cost == COSTLY_TRIES:
                raise
            pause = following
            logger.warning("%s failed, next try in %g s: %s", what, pause, describe(error))
        await asyncio.sleep(pause)


class RetriedWork(Generic[Key, Job]):
    """Jobs of one kind, one at a time for each key; used from one event loop.

    A job that comes for a key whose work is under way is done once more after, the newest alone.

    Args:
        name: of the kind, for the log.
        work: does a job; doing it twice must change nothing.
        failed: says that a job failed for good, given its last error and how often it was tried.
        costly: errors of which the second is final, see `retried`.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Job], Awaitable[None]],
        failed: Callable[[Job, Exception, int], Awaitable[None]],
        *,
        costly: tuple[type[Exception], ...] = (),
    ) -> None:
        self._name = name
        self._work = work
        self._failed = failed
        self._costly = costly
        self._due: dict[Key, Job | None] = {}

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys whose work is under way."""
        return iter(self._due)

    def takes(self, key: Key, job: Job) -> bool:
        """Note a job; say whether `carry_out` is to be called with it."""
        is_new = key not in self._due
        self._due[key] = None if is_new else job
        return is_new

    async def carry_out(self, key: Key, job: Job) -> None:
        """Do a job that was taken, and what comes for its key meanwhile; never raises."""
        while True:
            await self._carry_out(key, job)
            again = self._due[key]
            if again is None:
                del self._due[key]
                return
            job, self._due[key] = again, None

    async def _carry_out(self, key: Key, job: Job) -> None:
        what, tried = f"{self._name} {key}", 0

        async def work() -> None:
            nonlocal tried
            tried += 1
            await self._work(job)

        try:
            await retried(work, what, costly=self._costly)
        except Exception as error:
            logger.exception("%s failed for good (%d tries)", what, tried)
            try:
                await self._failed(job, error, tried)
            except Exception:
                # Its mark in the catalogue stays behind: the next coordinator does it again.
                logger.exception("that %s failed could not be noted", what)
