"""Tasks that run in the background of an event loop. Nothing here waits for them.

asyncio keeps no reference to a task, and tells of its exception only when the task is collected.
Every background task of the service is therefore started here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_UNNAMED: Final = "a coroutine"


class BackgroundTasks:
    """Starts tasks, keeps each until it ends, and logs what it raises; used from one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Return the number of tasks that have not ended."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task. Its exception is logged, even if no caller waits for the task."""
        name = getattr(work, "__qualname__", _UNNAMED)
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def settled(self) -> None:
        """Wait until no task is left; raises what one of them raises."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the background task %s failed", task.get_name(), exc_info=error)
