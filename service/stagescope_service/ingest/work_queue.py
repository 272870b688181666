"""The work of an ingestor: one call at a time, within a memory limit, for the newest coordinator.

When a coordinator dies, its calls stay in the queue of the ingestor, which survives. No process
reads their answers, and the next coordinator hands over again what is still to be read. So the
calls of an earlier coordinator are dropped as soon as the next one introduces itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

from stagescope_service.background import BackgroundTasks
from stagescope_wire.errors import StagescopeError

T = TypeVar("T")


class Superseded(StagescopeError):
    """Raised for a call of a coordinator after another one has introduced itself."""

    code = "superseded"


class WorkQueue:
    """Runs calls in one thread; used from one event loop.

    Args:
        thread: has one worker. Two payloads at once would only alternate, with twice the memory.
        most_bytes: most bytes of admitted payloads; a larger payload is admitted alone.
    """

    def __init__(self, thread: concurrent.futures.ThreadPoolExecutor, most_bytes: int) -> None:
        self._thread = thread
        self._most = most_bytes
        self._used = 0
        self._coordinator: str | None = None
        self._changed = asyncio.Condition()
        self._tasks = BackgroundTasks()

    def serve(self, coordinator: str) -> None:
        """Drop the calls of other coordinators, both waiting and later ones."""
        self._coordinator = coordinator
        self._tasks.start(self._notify())

    async def run(
        self, caller: str | None, work: Callable[..., T], *arguments: object, size: int = 0
    ) -> T:
        """Run a call when its turn comes.

        Args:
            caller: the coordinator that waits for the answer; None: it is not one.
            work: runs in the thread.
            arguments: the arguments of `work`.
            size: bytes of the payload that the call reads.

        Raises:
            Superseded: another coordinator is served; the call was not run.
        """
        if self._coordinator is None:  # after a restart: Ray repeats the calls of living callers
            self._coordinator = caller
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_old(caller) or self._has_room(size))
            self._check(caller)
            self._used += size
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._run, caller, work, arguments)
        finally:
            self._used -= size
            if size:
                self._tasks.start(self._notify())

    def _run(self, caller: str | None, work: Callable[..., T], arguments: tuple[object, ...]) -> T:
        self._check(caller)
        return work(*arguments)

    def _has_room(self, size: int) -> bool:
        return not size or not self._used or self._used + size <= self._most

    def _is_old(self, caller: str | None) -> bool:
        return caller is not None and caller != self._coordinator

    def _check(self, caller: str | None) -> None:
        if self._is_old(caller):
            raise Superseded(
                f"coordinator {caller} called, and coordinator {self._coordinator} is served",
                advice="the newest coordinator hands over what is still to be read",
            )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
