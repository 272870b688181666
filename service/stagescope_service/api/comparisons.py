"""Heavy questions: a few at a time, in threads of their own; one more is told to ask again."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from stagescope.errors import NotReady

T = TypeVar("T")

AT_ONCE: Final = 2
KEPT: Final = 8
"""Answers of long questions."""


class Comparisons:
    """Runs questions that read whole operator tables."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._free = threading.BoundedSemaphore(at_once)
        self._at_once = at_once
        self._known: dict[tuple[str, ...], tuple[float, Future[Any]]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(at_once, "api-comparisons")

    async def run(self, question: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Answer a question in a thread.

        Raises:
            NotReady: so many are being answered already.
        """
        return await asyncio.wrap_future(self.start(question, *arguments, **named))

    def start(self, question: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
        """Begin to answer a question; see `run`."""
        if not self._free.acquire(blocking=False):
            raise NotReady(
                f"{self._at_once} comparisons are being computed, no more at a time",
                advice="ask again in a moment",
            )
        future = self._threads.submit(functools.partial(question, *arguments, **named))
        # Not when the asker goes away: the thread is busy until it is done.
        future.add_done_callback(lambda _: self._free.release())
        return future

    def once(
        self, key: tuple[str, ...], question: Callable[..., T], *arguments: Any
    ) -> tuple[float, Future[T]]:
        """Begin a long question, once however often it is asked while it is known.

        Returns:
            When it began (monotonic), and its answer to come; the last few are kept. One that
            failed is begun anew.

        Raises:
            NotReady: see `run`.
        """
        with self._lock:
            known = self._known.pop(key, None)
            if known is None or (known[1].done() and known[1].exception() is not None):
                known = (time.monotonic(), self.start(question, *arguments))
            self._known[key] = known
            done = [key for key, (_, future) in self._known.items() if future.done()]
            for old in done[:-KEPT]:
                del self._known[old]
            return known
