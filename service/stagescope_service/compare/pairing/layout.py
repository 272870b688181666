"""Where the values of rows lie in a flat tensor: index arithmetic, no loop over rows or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class Layout(NamedTuple):
    """A tensor by row.

    Attributes:
        dtype: its tag.
        flat: its values in memory order.
        offsets: int64 [rows + 1]: row r is `flat[offsets[r]:offsets[r + 1]]`.
        width: values a row of a padded tensor, None of a ragged one.
        shape: as it was.
    """

    dtype: str
    flat: Array
    offsets: Int64
    width: int | None
    shape: tuple[int, ...]

    @property
    def lengths(self) -> Int64:
        """Values of each row."""
        return np.diff(self.offsets)


def chosen(layout: Layout, keep: Array | None, rows: Int64) -> tuple[Int64, Int64]:
    """Return flat places of the values of `rows` that count, and int64 [rows + 1] bounds of each.

    Args:
        layout: of the tensor.
        keep: which of its values count, None = all.
        rows: which rows, in this order.
    """
    if keep is None:
        places, bounds = None, layout.offsets
    else:
        places = np.flatnonzero(keep)
        bounds = np.searchsorted(places, layout.offsets)
    starts, counts = bounds[:-1][rows], np.diff(bounds)[rows]
    edges = cumulative(counts)
    index = np.arange(edges[-1]) + np.repeat(starts - edges[:-1], counts)
    return (index if places is None else places[index]), edges


def spans(ones: Array, offsets: Int64) -> Array:
    """Return bools: from the first true value of each row to its last."""
    places = np.flatnonzero(ones)
    bounds = np.searchsorted(places, offsets)
    some = np.flatnonzero(np.diff(bounds))
    change = np.zeros(len(ones) + 1, np.int8)
    change[places[bounds[:-1][some]]] += 1
    change[places[bounds[1:][some] - 1] + 1] -= 1
    return np.cumsum(change[:-1], dtype=np.int8).view(bool)


def count_by_row(keep: Array, offsets: Int64) -> Int64:
    """Return how many values of each row hold."""
    return np.diff(np.searchsorted(np.flatnonzero(keep), offsets))


def cumulative(counts: Sequence[int] | Int64) -> Int64:
    """Return int64 [n + 1] bounds of pieces of these sizes."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def before_first(ones: Array, offsets: Int64) -> Array:
    """Return bools: all of each row before its first true value; of a row without one, all."""
    places = np.flatnonzero(ones)
    bounds = np.searchsorted(places, offsets)
    first = np.append(places, len(ones))[bounds[:-1]]
    first = np.where(np.diff(bounds) > 0, first, offsets[1:])
    lengths = np.diff(offsets)
    position = np.arange(len(ones)) - np.repeat(offsets[:-1], lengths)
    return position < np.repeat(first - offsets[:-1], lengths)


def same_offsets(one: Layout, other: Layout) -> bool:
    """Whether two tensors have as many values in every row."""
    if one.width is not None and other.width is not None:
        return one.width == other.width and len(one.offsets) == len(other.offsets)
    return np.array_equal(one.offsets, other.offsets)


def turned(flat: Array, bounds: Int64) -> Array:
    """Return rows moved by one to the right, the last value of each to its front."""
    turned = np.roll(flat, 1)
    some = np.flatnonzero(np.diff(bounds) > 0)
    turned[bounds[:-1][some]] = flat[bounds[1:][some] - 1]
    return turned
