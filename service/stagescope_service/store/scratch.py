"""Arrays on disk for the length of an answer: what is put together there takes no memory."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from stagescope_service.store.tensorfile import disk_errors


class Scratch:
    """Allocates arrays in one file without a name; it is gone with the last of its arrays.

    Usage::

        with Scratch(directory) as scratch:
            array = scratch.allocate((rows, width), dtype)   # may be used after the block

    Args:
        directory: on whose disk; it is made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed by __exit__
        self._end = 0

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # what is mapped stays

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an array of zeros.

        Raises:
            StoreError: there is no room on the disk.
        """
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return np.empty(shape, dtype)
        begin, self._end = self._end, self._end + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with disk_errors(self._directory):
            # Room that is only promised would end the process when it is written.
            os.posix_fallocate(self._file.fileno(), begin, self._end - begin)
            return np.memmap(self._file, dtype, "r+", begin, shape).view(np.ndarray)
