"""One tensor of a whole step, put together from pieces of unlike width. Arrays in and out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope.batch import Padding, Tensor, widened
from stagescope.tensorfile import CODES
from stagescope_service.store.tensorfile import WireTensor

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]
"""Returns an array of this shape and dtype; its values may be anything."""

_NAN: Final = {"bfloat16": 0x7FC0}


class Piece(NamedTuple):
    """Rows of one tensor, side by side: `[rows]`, `[rows, width]` or `[rows, width, ...]`."""

    tag: str
    values: Array
    lengths: Int64 | None
    """Of ragged rows, which are padded here."""

    @property
    def width(self) -> int:
        """Tokens of the widest row; 1 where a row is one value."""
        return int(self.values.shape[1]) if self.values.ndim > 1 else 1


def piece_of(wire: WireTensor, rows: int, side: str) -> Piece | None:
    """Return a tensor as rows, ragged ones padded on `side`; None where it has other rows."""
    tag, shape, values, offsets = wire
    if offsets is not None:
        if len(offsets) != rows + 1:
            return None
        lengths = np.diff(offsets)
        return Piece(tag, _dense(values, offsets, lengths, side), lengths.astype(np.int64))
    if not shape or shape[0] != rows:
        return None
    return Piece(tag, values.reshape(shape), None)


def _dense(values: Array, offsets: Int64, lengths: Int64, side: str) -> Array:
    width = int(lengths.max(initial=0))
    out = np.zeros((len(lengths), width, *values.shape[1:]), values.dtype)
    row = np.repeat(np.arange(len(lengths)), lengths)
    at = np.arange(int(lengths.sum())) - np.repeat(offsets[:-1] - offsets[0], lengths)
    if side == "left":
        at = at + np.repeat(width - lengths, lengths)
    out[row, at] = values[offsets[0] : offsets[-1]]
    return out


class Column:
    """A tensor of all rows; rows are written once, and what comes again is held against them.

    Args:
        tag: dtype tag.
        shape: [rows], or [rows, width, ...] of the widest piece.
        side: on which rows are padded, 'left' or 'right'.
        first: which part it was first seen in, for a reader.
        allocate: where the memory comes from.
    """

    def __init__(
        self, tag: str, shape: tuple[int, ...], side: str, first: str, allocate: Allocate
    ) -> None:
        self.tag = tag
        self.side = side
        self.first = first
        self.values = allocate(shape, np.dtype(CODES[tag][1]))
        self.width = shape[1] if len(shape) > 1 else 1
        self.written: Int64 = np.full(len(self.values), -1, np.int64)
        """How wide each row was written; -1: it never came."""
        self.is_ragged = False
        self._of_pieces = np.zeros(len(self.values), bool)

    def fits(self, piece: Piece) -> bool:
        """Whether a piece is of the same kind: dtype and dimensions."""
        return (
            piece.tag == self.tag
            and piece.values.shape[2:] == self.values.shape[2:]
            and (piece.values.ndim == self.values.ndim)
        )

    def put(self, rows: Int64, piece: Piece, *, of_pieces: bool = False) -> bool:
        """Write rows that have not come yet; return whether the others are the same, bit by bit.

        Only what both hold is compared: a wider piece adds tokens to a narrower row.
        `of_pieces`: rows that were put together; they have lengths, and no padding of their own.
        """
        lengths = piece.lengths
        self.is_ragged |= lengths is not None and not of_pieces
        self._of_pieces[rows] |= of_pieces
        lengths = np.full(len(rows), piece.width, np.int64) if lengths is None else lengths
        before = self.written[rows]
        same = self._agrees(rows, piece, np.minimum(before, lengths))
        chosen = (before < 0) | ((lengths > before) if same else False)
        self._write(rows[chosen], piece.values[chosen])
        self.written[rows[chosen]] = lengths[chosen]
        return same

    def differences(self, rows: Int64, piece: Piece) -> tuple[int, float]:
        """Return how many values of a piece are not the column's, and the largest |d|."""
        common = np.minimum(self.written[rows], piece.width)
        here, there = self._both(rows, piece)
        differ = (bits(here) != bits(there)) & self._within(common, here)
        if not differ.any():
            return 0, 0.0
        a = widened(Tensor(self.tag, here))[differ].astype(np.float64)
        b = widened(Tensor(piece.tag, there))[differ].astype(np.float64)
        with np.errstate(invalid="ignore"):
            largest = np.abs(a - b)
        return int(differ.sum()), float(largest.max())

    def finish(self, mask: Column | None) -> Padding | None:
        """Fill what was not written; return the padding where rows were of unlike width.

        The padding is what the recorded rows hold at their padded end, so that the whole is padded
        as its parts were. A row that never came is NaN, or the padding of whole numbers.
        """
        narrow = self.written < self.width
        if not narrow.any():
            return None
        fill = self._fill(mask) if self.values.ndim > 1 else np.zeros(1, self.values.dtype)[0]
        if self.values.ndim > 1:
            outside = ~self._within(np.maximum(self.written, 0), self.values, flat=True)
            self.values[outside] = fill
        absent = self.written < 0
        floating = self.tag in _NAN or self.values.dtype.kind == "f"
        self.values[absent] = _NAN.get(self.tag, math.nan) if floating else fill
        if self.values.ndim == 1 or not (narrow & ~absent).any():
            return None
        shown = widened(Tensor(self.tag, np.array([fill], self.values.dtype)))[0]
        return Padding(self.side, shown.item())

    # --- how ------------------------------------------------------------------------------------
    def _agrees(self, rows: Int64, piece: Piece, common: Int64) -> bool:
        if not (common > 0).any():
            return True
        here, there = self._both(rows, piece)
        return not ((bits(here) != bits(there)) & self._within(common, here)).any()

    def _both(self, rows: Int64, piece: Piece) -> tuple[Array, Array]:
        """Return the column's values at the piece's place, and the piece's."""
        there = np.ascontiguousarray(piece.values)
        if self.values.ndim == 1:
            return self.values[rows], there
        cut = slice(self.width - piece.width, None) if self._is_left else slice(piece.width)
        return np.ascontiguousarray(self.values[rows, cut]), there

    def _within(self, counts: Int64, values: Array, *, flat: bool = False) -> Array:
        """Return which of `values` are among the first (or last) `counts` tokens of their row."""
        if values.ndim == 1:
            return counts > 0
        at = np.arange(values.shape[1])
        at = at[::-1] if self._is_left else at
        inside = at < counts[:, None]
        return inside if flat else inside.reshape(*inside.shape, *[1] * (values.ndim - 2))

    def _write(self, rows: Int64, values: Array) -> None:
        if self.values.ndim == 1:
            self.values[rows] = values
        elif self._is_left:
            self.values[rows, self.width - values.shape[1] :] = values
        else:
            self.values[rows, : values.shape[1]] = values

    def _fill(self, mask: Column | None) -> Any:
        """Return the value that recorded rows hold at their padded end: of floats, if it is one."""
        none = np.zeros(1, self.values.dtype)[0]
        if mask is None or mask.width != self.width or self.values.ndim != 2 or self.is_ragged:
            return none
        known = (self.written > 0) & (mask.written == self.written) & ~self._of_pieces
        rows = np.flatnonzero(known)
        at = self.width - self.written[rows] if self._is_left else self.written[rows] - 1
        edge = self.values[rows, at][mask.values[rows, at] == 0]
        found, counts = np.unique(edge, return_counts=True)
        if not len(found) or (self.values.dtype.kind == "f" and len(found) > 1):
            return none
        return found[counts.argmax()]

    @property
    def _is_left(self) -> bool:
        return self.side == "left"


def bits(values: Array) -> Array:
    """Return values as whole numbers that are the same where their bits are."""
    return values.view(f"u{values.dtype.itemsize}")
