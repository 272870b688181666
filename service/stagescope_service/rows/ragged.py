"""Rows of tensors, flat with offsets or padded: index arithmetic without loops over rows."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensorfile import WireTensor

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


class RowBlock(NamedTuple):
    """Rows of one tensor, side by side: `[rows]`, `[rows, width]` or `[rows, width, ...]`.

    Attributes:
        dtype: its dtype tag.
        values: its rows, padded with 0.
        lengths: int64 [rows], number of tokens of each row that was ragged; None if none was.
    """

    dtype: str
    values: Values
    lengths: Int64 | None

    @property
    def width(self) -> int:
        """Tokens of the widest row; 1 where a row is one value."""
        return int(self.values.shape[1]) if self.values.ndim > 1 else 1

    def take(self, rows: Int64 | Bools) -> RowBlock:
        """Return some of the rows."""
        lengths = None if self.lengths is None else self.lengths[rows]
        return RowBlock(self.dtype, self.values[rows], lengths)


CU_SEQLENS = "cu_seqlens"
"""Name of the offsets of the rows of a packed payload."""


def unpack(tensors: Mapping[str, WireTensor]) -> dict[str, WireTensor]:
    """Return the tensors of a payload; `cu_seqlens` becomes the row offsets of the packed ones.

    Packed are [tokens], [1, tokens] and [tokens, ...] without offsets of their own; names with a
    slash, as parameters have, are not.
    """
    found = dict(tensors)
    packed = found.pop(CU_SEQLENS, None)
    if packed is None or packed[2].size == 0:
        return found
    offsets = packed[2].reshape(-1).astype(np.int64)
    tokens = int(offsets[-1])
    for name, (tag, shape, values, own) in found.items():
        if "/" in name:
            continue
        if own is None and len(shape) == 2 and shape == (1, tokens):
            found[name] = (tag, (tokens,), values.reshape(-1), offsets)
        elif own is None and shape[:1] == (tokens,):
            found[name] = (tag, shape, values, offsets)
    return found


def row_tensor(wire: WireTensor, rows: int, label: str) -> RowTensor | None:
    """Return a tensor as flat rows; None if it has another number of rows.

    Args:
        wire: the tensor; ragged ones have one value a token.
        rows: number of rows.
        label: what messages call its rows.

    Raises:
        InvalidTensor: the rows of a ragged tensor overlap, or are not all of its values.
    """
    tag, shape, values, offsets = wire
    flat = np.ascontiguousarray(values).reshape(-1)
    if offsets is not None:
        bounds = np.asarray(offsets, np.int64)
        if len(bounds) != rows + 1:
            return None
        if bounds[0] != 0 or bounds[-1] != len(flat) or (np.diff(bounds) < 0).any():
            raise InvalidTensor(f"{label} overlap or lack")
        return RowTensor(tag, flat, bounds, None, shape)
    if not shape or shape[0] != rows:
        return None
    width = math.prod(shape[1:])
    return RowTensor(tag, flat, np.arange(rows + 1, dtype=np.int64) * width, width, shape)


def row_block(wire: WireTensor, rows: int, side: str) -> RowBlock | None:
    """Return a tensor as padded rows; None if it has another number of rows.

    Args:
        wire: the tensor; ragged ones may have several values a token.
        rows: number of rows.
        side: on which ragged rows are padded, 'left' or 'right'.
    """
    tag, shape, values, offsets = wire
    if offsets is not None:
        if len(offsets) != rows + 1:
            return None
        return RowBlock(tag, padded(values, offsets, side), np.diff(offsets).astype(np.int64))
    if not shape or shape[0] != rows:
        return None
    return RowBlock(tag, values.reshape(shape), None)


def padded(values: Values, offsets: Int64, side: str) -> Values:
    """Return ragged rows [tokens, ...] as [rows, width, ...], padded with 0 on `side`."""
    lengths = np.diff(offsets)
    width = int(lengths.max(initial=0))
    out = np.zeros((len(lengths), width, *values.shape[1:]), values.dtype)
    out[is_in_row(lengths, width, side)] = values[offsets[0] : offsets[-1]]
    return out


def unpadded(values: Values, lengths: Int64, side: str) -> tuple[Values, Int64]:
    """Return padded rows [rows, width, ...] as [tokens, ...] without padding, and offsets."""
    return values[is_in_row(lengths, values.shape[1], side)], cumulative(lengths)


def is_in_row(lengths: Int64, width: int, side: str) -> Bools:
    """Return which values of rows that are padded on `side` are no padding, bool [rows, width]."""
    token = np.arange(width)
    inside: Bools = (token[::-1] if side == "left" else token) < lengths[:, None]
    return inside


def cumulative(counts: Sequence[int] | Int64) -> Int64:
    """Return int64 [n + 1] bounds of slices of these sizes."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def row_of_each(offsets: Int64) -> Int64:
    """Return the row of each value, int64 [values]."""
    return np.repeat(np.arange(len(offsets) - 1, dtype=np.int64), np.diff(offsets))


def slice_indexes(starts: Int64, counts: Int64) -> Int64:
    """Return the indexes of `counts[i]` values from `starts[i]` on, one slice after the other."""
    edges = cumulative(counts)
    indexes: Int64 = np.arange(edges[-1]) + np.repeat(starts - edges[:-1], counts)
    return indexes


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
    counts = np.diff(bounds)[rows]
    index = slice_indexes(bounds[:-1][rows], counts)
    return (index if kept is None else kept[index]), cumulative(counts)


def spans(ones: Bools, offsets: Int64) -> Bools:
    """Return which values lie from the first true one of their row to its last."""
    true = np.flatnonzero(ones)
    bounds = np.searchsorted(true, offsets)
    some = np.flatnonzero(np.diff(bounds))
    change = np.zeros(len(ones) + 1, np.int8)
    change[true[bounds[:-1][some]]] += 1
    change[true[bounds[1:][some] - 1] + 1] -= 1
    return np.cumsum(change[:-1], dtype=np.int8).view(bool)


def before_first(ones: Bools, offsets: Int64) -> Bools:
    """Return which values lie before the first true one of their row; without one, all do."""
    true = np.flatnonzero(ones)
    bounds = np.searchsorted(true, offsets)
    first = np.append(true, len(ones))[bounds[:-1]]
    first = np.where(np.diff(bounds) > 0, first, offsets[1:])
    before: Bools = np.arange(len(ones)) < np.repeat(first, np.diff(offsets))
    return before


def count_by_row(keep: Bools, offsets: Int64) -> Int64:
    """Return the number of true values of each row."""
    return np.diff(np.searchsorted(np.flatnonzero(keep), offsets))


def hash_rows(flat: Values, offsets: Int64, keep: Bools | None) -> list[str]:
    """Return a hash of each row's bytes, of the values that count; equal rows have equal hashes.

    Args:
        flat: the values, contiguous.
        offsets: int64 [rows + 1].
        keep: which of the values count, None = all.
    """
    if keep is not None:
        flat, offsets = flat[keep], np.searchsorted(np.flatnonzero(keep), offsets)
    data, bounds = flat.view(np.uint8), (offsets * flat.dtype.itemsize).tolist()
    return [
        hashlib.blake2b(data[start:stop].data, digest_size=12).hexdigest()
        for start, stop in itertools.pairwise(bounds)
    ]


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
