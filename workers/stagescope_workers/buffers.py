"""A pool of reusable host memory: a copy into pages that exist already costs a tenth.

The system maps a new page for each 4 KB that a new array first touches, which takes longer than
the copy itself. A buffer returns to the pool when the last array in it is freed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
"""An array of any shape and dtype."""

MIN_BYTES: Final = 64 << 10
"""Smaller arrays are not pooled: the allocator is fast for them."""
IDLE_BYTES: Final = 128 << 20
"""The limit on unused bytes in a process."""


class _Lease:
    """Owns a buffer for one array and its views; numpy references it as their base."""

    def __init__(self, pool: BufferPool, buffer: npt.NDArray[np.uint8]) -> None:
        self._pool = pool
        self._buffer = buffer
        self.__array_interface__ = buffer.__array_interface__

    def __del__(self) -> None:
        self._pool.release(self._buffer)


class BufferPool:
    """Buffers by size; the ones used last are reused first. Thread-safe.

    Args:
        idle_bytes: the limit on unused bytes; beyond it the oldest buffers are freed.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self.idle_bytes = idle_bytes
        self.idle = 0
        """Unused bytes."""
        # size -> buffers, the sizes that were used longest ago first
        self._free: OrderedDict[int, list[npt.NDArray[np.uint8]]] = OrderedDict()
        # Reentrant: the garbage collector may release a buffer at any moment, even in here.
        self._lock = threading.RLock()

    def copy(self, array: Array) -> Array:
        """Return a C-contiguous copy of `array` in memory of its own."""
        if array.nbytes < MIN_BYTES:
            return np.array(array, order="C", copy=True)
        lease = _Lease(self, self._acquire(_size_class(array.nbytes)))
        raw: npt.NDArray[np.uint8] = np.asarray(lease)
        copy = raw[: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy

    def _acquire(self, size: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            buffers = self._free.get(size)
            if buffers:
                self.idle -= size
                return buffers.pop()
        return np.empty(size, np.uint8)

    def release(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Return an unused buffer to the pool."""
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
    """Round up to one of four sizes per power of two, so that similar batches share buffers."""
    step = 1 << max(nbytes.bit_length() - 3, 0)
    return -(-nbytes // step) * step


POOL: Final = BufferPool()
"""The pool of this process."""
