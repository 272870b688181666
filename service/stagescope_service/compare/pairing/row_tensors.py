"""Rows of flat tensors: index arithmetic over whole tensors, no loop over rows or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
"""Values of any dtype of the wire; bfloat16 is uint16."""
Bools = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]


class RowTensor(NamedTuple):
    """A tensor by row.

    Attributes:
        dtype: its dtype tag.
        flat: its values in memory order.
        offsets: int64 [rows + 1]: row r is `flat[offsets[r]:offsets[r + 1]]`.
        width: values a row of a padded tensor, None of a ragged one.
        shape: its original shape.
    """

    dtype: str
    flat: Values
    offsets: Int64
    width: int | None
    shape: tuple[int, ...]

    @property
    def lengths(self) -> Int64:
        """Number of values of each row, int64 [rows]."""
        return np.diff(self.offsets)


def select_values(tensor: RowTensor, keep: Bools | None, rows: Int64) -> tuple[Int64, Int64]:
    """Return flat indexes of the values of `rows` that count, and int64 [rows + 1] bounds of each.

    Args:
        tensor: the tensor.
        keep: which of its values count, None = all.
        rows: the rows, in this order.
    """
    if keep is None:
        kept, bounds = None, tensor.offsets
    else:
        kept = np.flatnonzero(keep)
        bounds = np.searchsorted(kept, tensor.offsets)
    starts, counts = bounds[:-1][rows], np.diff(bounds)[rows]
    edges = cumulative(counts)
    index = np.arange(edges[-1]) + np.repeat(starts - edges[:-1], counts)
    return (index if kept is None else kept[index]), edges


def spans(ones: Bools, offsets: Int64) -> Bools:
    """Return which values lie from the first true one of their row to its last."""
    true = np.flatnonzero(ones)
    bounds = np.searchsorted(true, offsets)
    some = np.flatnonzero(np.diff(bounds))
    change = np.zeros(len(ones) + 1, np.int8)
    change[true[bounds[:-1][some]]] += 1
    change[true[bounds[1:][some] - 1] + 1] -= 1
    return np.cumsum(change[:-1], dtype=np.int8).view(bool)


def count_by_row(keep: Bools, offsets: Int64) -> Int64:
    """Return the number of true values of each row."""
    return np.diff(np.searchsorted(np.flatnonzero(keep), offsets))


def cumulative(counts: Sequence[int] | Int64) -> Int64:
    """Return int64 [n + 1] bounds of slices of these sizes."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def before_first(ones: Bools, offsets: Int64) -> Bools:
    """Return which values lie before the first true one of their row; without one, all do."""
    true = np.flatnonzero(ones)
    bounds = np.searchsorted(true, offsets)
    first = np.append(true, len(ones))[bounds[:-1]]
    first = np.where(np.diff(bounds) > 0, first, offsets[1:])
    lengths = np.diff(offsets)
    position = np.arange(len(ones)) - np.repeat(offsets[:-1], lengths)
    return position < np.repeat(first - offsets[:-1], lengths)


def same_offsets(one: RowTensor, other: RowTensor) -> bool:
    """Return whether two tensors have the same number of values in every row."""
    if one.width is not None and other.width is not None:
        return one.width == other.width and len(one.offsets) == len(other.offsets)
    return np.array_equal(one.offsets, other.offsets)


def shift_right(flat: Values, bounds: Int64) -> Values:
    """Return rows shifted right by one value; the last value of each moves to its front."""
    shifted = np.roll(flat, 1)
    some = np.flatnonzero(np.diff(bounds) > 0)
    shifted[bounds[:-1][some]] = flat[bounds[1:][some] - 1]
    return shifted
