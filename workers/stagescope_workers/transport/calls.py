"""A call on its way to the service, and how long to wait before the next one."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

MOST_BACKOFF: Final = 2.0
"""Seconds; the service may be back any moment, and ranks must not come back all at once."""


class Call:
    """One call on the way: its future, and when it left."""

    def __init__(self, future: Future[dict[str, Any]], wake: Callable[[], None]) -> None:
        self.future = future
        self.wall = time.time()
        self.mono = self.looked = time.monotonic()
        self.answered = 0.0
        self._wake = wake
        future.add_done_callback(self._done)

    def _done(self, _: object) -> None:
        self.answered = time.monotonic()
        self._wake()


class Backoff:
    """Exponential waiting with jitter, so that a thousand ranks do not come back at once."""

    def __init__(self, first: float = 0.05, most: float = MOST_BACKOFF) -> None:
        self._first = first
        self._most = most
        self._failures = 0
        self.until = 0.0

    def fail(self) -> None:
        """Wait longer than last time."""
        delay = min(self._most, self._first * 2.0 ** min(self._failures, 20))
        self._failures += 1
        self.until = time.monotonic() + delay * random.uniform(0.5, 1.0)

    def hold(self, seconds: float) -> None:
        """Wait about so long at least, each sender otherwise."""
        if seconds > 0:
            self.until = max(self.until, time.monotonic() + seconds * random.uniform(0.75, 1.25))

    def succeed(self) -> None:
        """Wait no more."""
        self._failures = 0
        self.until = 0.0


def in_thread(call: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
    """Run `call` in a daemon thread: an executor joins its own at exit, even one that hangs."""
    future: Future[dict[str, Any]] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="stagescope-call", daemon=True).start()
    return future


_RECENT: Final = 32
_MAX_AGE: Final = 600.0  # seconds: clocks drift, so an old sample is no evidence


class Offset(NamedTuple):
    """Service's wall clock minus this process's, in seconds, known to within `error`."""

    offset: float
    error: float


class Clock:
    """Keeps the best of the recent round trips: the shortest says it best."""

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, Offset]] = collections.deque(maxlen=_RECENT)

    def add(self, *, sent: float, took: float, service: float, mono: float) -> None:
        """Take in one round trip.

        Args:
            sent: this process's wall clock when the call left.
            took: seconds until the answer, by the monotonic clock.
            service: the service's wall clock, read at any moment in between.
            mono: this process's monotonic clock now.
        """
        half = took / 2
        self._samples.append((mono, Offset(service - (sent + half), half)))

    def best(self, mono: float) -> Offset | None:
        """Return the offset with the smallest error among recent samples."""
        recent = [offset for at, offset in self._samples if mono - at <= _MAX_AGE]
        return min(recent, key=lambda offset: offset.error, default=None)
