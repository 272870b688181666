"""Arrays on disk: usable after the file is closed, and no room is an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from stagescope_service.views.samples.batches import Scratch
from stagescope_wire.errors import StoreError


def test_arrays_are_apart_and_outlive_their_file(tmp_path: Path) -> None:
    with Scratch(tmp_path / "new") as scratch:
        first = scratch.allocate((3, 5), np.dtype(np.float32))
        second = scratch.allocate((2000,), np.dtype(np.int64))
        nothing = scratch.allocate((0, 5), np.dtype(np.float32))
    assert not first.any()
    first[...], second[...] = 1.5, 7
    assert first.tolist() == [[1.5] * 5] * 3
    assert second.sum() == 14_000
    assert nothing.shape == (0, 5)
    assert not list((tmp_path / "new").iterdir())


def test_a_disk_without_room_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with Scratch(tmp_path) as scratch, pytest.raises(StoreError, match="free space on its disk"):
        scratch.allocate((10,), np.dtype(np.int64))
