"""Background work that is retried after transient failures, and reported after final ones.

Step summaries, operator tables and comparisons of weights are computed in the background from
stored data. A full disk, a locked catalogue or a dead ingestor often recovers in seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

from stagescope_service.core.findings import describe
from stagescope_wire.errors import CatalogueUnavailable, NotReady

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Job = TypeVar("Job")
T = TypeVar("T")

PAUSES: Final = (1.0, 5.0, 20.0)
"""Seconds before each retry."""
COSTLY_TRIES: Final = 2
"""Number of tries of work whose failures affect other work."""


async def retried(
    work: Callable[[], Awaitable[T]], what: str, *, costly: tuple[type[Exception], ...] = ()
) -> T:
    """Return the result of `work`, retried after errors; `what` names it in the log.

    The second `costly` error, such as the end of a process that does other work as well, is final
    (`COSTLY_TRIES`). While the catalogue is unavailable, a failure could not be reported: then the
    work is retried until the catalogue is back.

    Raises:
        Exception: the error of the last try.
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

    A job for a key whose work is under way runs after it; only the newest such job does.

    Args:
        name: the kind's name, for the log.
        work: runs a job; idempotent.
        failed: reports a final failure; called with the job, its last error and number of tries.
        costly: errors that are final the second time, see `retried`.
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
        """Record a job; return whether to call `carry_out` with it."""
        is_new = key not in self._due
        self._due[key] = None if is_new else job
        return is_new

    async def carry_out(self, key: Key, job: Job) -> None:
        """Run a recorded job, and those that arrive for its key meanwhile; never raises."""
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
                # Its mark in the catalogue stays older: the next coordinator repeats the work.
                logger.exception("that %s failed could not be noted", what)
