"""A wall clock of this process that does not jump: it advances with the monotonic clock.

An operator or a time service may set a node's clock while a training runs. This clock dates the
events. So the offset to the service's clock, which is measured now and then, stays true for all
of them.
"""

from __future__ import annotations

import time
from typing import Final

_WALL: Final = time.time()
_MONO: Final = time.monotonic()


def wall_at(mono: float) -> float:
    """Return the Unix time at a moment of the monotonic clock, seconds."""
    return _WALL + (mono - _MONO)


def now() -> tuple[float, float]:
    """Return the Unix time and the monotonic time of now, seconds."""
    mono = time.monotonic()
    return wall_at(mono), mono
