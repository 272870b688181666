"""The service's clock against this process's, from round trips."""

from __future__ import annotations

import collections
from typing import Final, NamedTuple

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
