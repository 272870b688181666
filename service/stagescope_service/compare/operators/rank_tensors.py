"""Full tensors of several ranks (msprobe's task `tensor`), read when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.operators.layouts import RankTable
from stagescope_service.dumps.formats.content import read_content
from stagescope_service.dumps.formats.msprobe_directory import TENSOR_FOLDER
from stagescope_service.dumps.msprobe.operator_query import CodedText, load_columns
from stagescope_service.dumps.pickles.torch_file import FileTensor
from stagescope_wire.errors import StagescopeError

Float64 = npt.NDArray[np.float64]


MAX_BYTES: Final = 4 << 30
"""Most bytes that are read of the files of one side: about half a minute."""
MAX_TENSOR_BYTES: Final = 256 << 20
"""Most bytes of one file, which takes up to eight times as much memory."""


class RankTensors:
    """Reads tensors of the ranks of one side."""

    def __init__(self, tables: Sequence[RankTable], *, most_bytes: int = MAX_BYTES) -> None:
        self._tables = tables
        self._most_bytes = self._bytes_left = most_bytes
        self._names: dict[int, CodedText] = {}

    def renew(self) -> None:
        """Allow as many bytes again."""
        self._bytes_left = self._most_bytes

    def read(self, at: int, row: int) -> Float64 | None:
        """Return a tensor in float64; None if there is no such file, or too much was read.

        Args:
            at: index of the rank's table.
            row: row in this table.
        """
        table = self._tables[at]
        if table.tensors is None or row < 0:
            return None
        if at not in self._names:
            self._names[at] = load_columns(table.path, ["data_name"])["data_name"]
        name = self._names[at].text(row)
        if name is None or "/" in name or "\\" in name or name.startswith("."):
            return None
        path = table.tensors / TENSOR_FOLDER / name
        try:
            size = 0 if path.is_symlink() else path.stat().st_size
            if not 0 < size <= min(MAX_TENSOR_BYTES, self._bytes_left):
                return None
            self._bytes_left -= size
            found = read_content(path)
        except (OSError, StagescopeError):
            return None
        return _widened(found) if isinstance(found, FileTensor) else None


def statistics_of(tensor: Float64) -> list[float]:
    """Return min, max, mean and norm."""
    if not tensor.size:
        return [np.nan] * 4
    if tensor.ndim == 0:  # msprobe's norm of a scalar is the scalar
        return [float(tensor)] * 4
    with np.errstate(all="ignore"):
        found = (tensor.min(), tensor.max(), tensor.mean(), np.sqrt(np.square(tensor).sum()))
    return [*map(float, found)]


def _widened(tensor: FileTensor) -> Float64 | None:
    dtype, shape, values, offsets = tensor.wire
    if offsets is not None:
        return None
    if dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if values.dtype.kind not in "fiub":
        return None
    return values.astype(np.float64).reshape(shape)
