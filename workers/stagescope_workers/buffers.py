"""Host memory that is used again: a copy into pages that are there already costs a tenth.

The system gives a fresh page for each 4 KB that a new array first touches, which takes longer than
the copy itself. A buffer comes back by itself when the last array in it is gone, wherever that is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

LEAST_BYTES: Final = 64 << 10
"""Smaller arrays are what the allocator is quick at."""
IDLE_BYTES: Final = 128 << 20
"""What may lie unused in a process."""


class _Lease:
    """Lends a buffer to one array and those made of it; numpy holds it as their base."""

    def __init__(self, pool: BufferPool, buffer: Array) -> None:
        self._pool = pool
        self._buffer = buffer
        self.__array_interface__ = buffer.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._buffer)


class BufferPool:
    """Buffers of some sizes, those used last first; safe to use from several threads.

    Args:
        idle_bytes: what may lie unused; what comes back beyond that lets the oldest go.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self.idle_bytes = idle_bytes
        self.idle = 0
        """Bytes that lie unused."""
        self._free: OrderedDict[int, list[Array]] = OrderedDict()  # size -> buffers, oldest first
        # Reentrant: the collector may give a buffer back at any moment, here too.
        self._lock = threading.RLock()

    def copy(self, array: Array) -> Array:
        """Return a C-contiguous copy of `array` that nobody else writes."""
        if array.nbytes < LEAST_BYTES:
            return np.array(array, order="C", copy=True)
        lease = _Lease(self, self._take(_size_class(array.nbytes)))
        raw: Array = np.asarray(lease)
        made = raw[: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(made, array)
        return made

    def _take(self, size: int) -> Array:
        with self._lock:
            buffers = self._free.get(size)
            if buffers:
                self.idle -= size
                return buffers.pop()
        return np.empty(size, np.uint8)

    def give_back(self, buffer: Array) -> None:
        """Take a buffer that nobody uses any more."""
        with self._lock:
            size = buffer.nbytes
            self._free.setdefault(size, []).append(buffer)
            self._free.move_to_end(size)
            self.idle += size
            while self.idle > self.idle_bytes:
                oldest, buffers = next(iter(self._free.items()))
                if buffers:
                    buffers.pop()
                    self.idle -= oldest
                else:
                    del self._free[oldest]


def _size_class(nbytes: int) -> int:
    """Round up to one of four sizes an octave, so that batches of about one size share buffers."""
    step = 1 << max(nbytes.bit_length() - 3, 0)
    return -(-nbytes // step) * step


POOL: Final = BufferPool()
"""The pool of this process."""
