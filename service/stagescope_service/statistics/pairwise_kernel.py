"""One pass over two arrays of values: their differences, and the first differing location.

Each row is processed in blocks; each block becomes a cell, which merges into the cell of all
values. Values are widened to float64; differences of integers are computed before that.
"""

from __future__ import annotations

import math
from typing import Final

import numba
import numpy as np

from stagescope_service.statistics.blocks import FLOAT32, FLOAT64, copy, larger, load
from stagescope_service.statistics.cell import Array, Float64, Int64, UInt8
from stagescope_service.statistics.jit import array_type, entry, exact, input_type
from stagescope_service.statistics.pair_blocks import (
    add_block,
    add_constant,
    add_equal_float32,
    empty,
    merge_into,
)
from stagescope_service.statistics.pair_fields import AT, WIDTH

BLOCK: Final = 512
_FIRST_INTEGER: Final = 4
_INT64, _INT32, _INT16, _INT8 = 4, 5, 6, 7


@exact
def _same_words(x: Array, y: Array, start: int, n: int) -> bool:
    if x[start] != y[start]:  # most blocks that differ do so here; the loop below never stops early
        return False
    one, other = x[start : start + n], y[start : start + n]
    word = x.dtype.type  # without it the sum is int64, with a half to an eighth of the vector lanes
    differ = word(0)
    for i in range(n):
        differ = word(differ | (one[i] ^ other[i]))
    return bool(differ == 0)


@exact
def _same_bits(x_raw: UInt8, y_raw: UInt8, kind: int, start: int, n: int) -> bool:
    """Return whether n values of one kind, beginning at `start`, have equal bits on both sides."""
    if kind in (FLOAT64, _INT64):
        return _same_words(x_raw.view(np.int64), y_raw.view(np.int64), start, n)
    if kind in (FLOAT32, _INT32):
        return _same_words(x_raw.view(np.int32), y_raw.view(np.int32), start, n)
    size = 2 if kind < _FIRST_INTEGER or kind == _INT16 else 1
    return _same_words(x_raw, y_raw, start * size, n * size)


@exact
def _load_integers(raw: UInt8, kind: int, start: int, out: Int64, n: int) -> None:
    if kind == _INT64:
        copy(raw.view(np.int64), start, out, n)
    elif kind == _INT32:
        copy(raw.view(np.int32), start, out, n)
    elif kind == _INT16:
        copy(raw.view(np.int16), start, out, n)
    elif kind == _INT8:
        copy(raw.view(np.int8), start, out, n)
    else:
        copy(raw, start, out, n)


@exact
def _widen(raw: UInt8, kind: int, start: int, out: Float64, integers: Int64, n: int) -> None:
    """Load n values from `start` as float64, and integers also unconverted into `integers`."""
    if kind < _FIRST_INTEGER:
        load(raw, kind, start, out, n)
    else:
        _load_integers(raw, kind, start, integers, n)
        copy(integers, 0, out, n)


@exact
def _integer_differences(x: Int64, y: Int64, d: Float64, n: int) -> None:
    """Compute x - y of int64, rounded once: the difference itself needs 65 bits."""
    for i in range(n):
        if x[i] >= y[i]:
            d[i] = float(np.uint64(x[i]) - np.uint64(y[i]))
        else:
            d[i] = -float(np.uint64(y[i]) - np.uint64(x[i]))


@exact
def _count_ones(mask: UInt8, start: int, n: int) -> int:
    """Return the number of 1s of a mask's block of 0s and 1s."""
    some, every, chosen = np.uint8(0), np.uint8(1), mask[start : start + n]
    for i in range(n):
        some, every = np.uint8(some | chosen[i]), np.uint8(every & chosen[i])
    if some == every:  # most blocks are constant
        return n if every else 0
    ones = 0
    for i in range(n):
        ones += chosen[i]
    return ones


@exact
def _find_ones(mask: UInt8, start: int, n: int, at: Int64) -> None:
    """Write the indexes of the 1s of a mask's block, in order."""
    kept, chosen = 0, mask[start : start + n]
    for i in range(n):
        at[kept] = i
        kept += chosen[i]


@exact
def _select(x: Float64, at: Int64, n: int) -> None:
    """Move the n values at indexes `at` to the front of a buffer, in order."""
    for i in range(n):
        x[i] = x[at[i]]


_BYTES: Final = input_type(numba.uint8)


@entry(
    numba.void(
        _BYTES, numba.int64, _BYTES, numba.int64, _BYTES,
        input_type(numba.int64), input_type(numba.float64),
        array_type(numba.float64, 2), array_type(numba.float64),
    ),
    nogil=True,
)  # fmt: skip
def accumulate_pairs(
    x_raw: UInt8, x_kind: int, y_raw: UInt8, y_kind: int, mask: UInt8, offsets: Int64,
    rule: Float64, rows: Float64, cell: Float64,
) -> None:  # fmt: skip
    """Compare two flat arrays of one length.

    Args:
        x_raw, y_raw: uint8 views of the values, of dtype `KINDS[kind]`.
        mask: uint8, one per value: 1 = counted, 0 = ignored; if empty, all count.
        offsets: int64 [rows + 1]: row r is `offsets[r]:offsets[r + 1]`.
        rule: float64 [2], atol and rtol of `OVER`.
        rows: float64 [rows, len(ROW)], written.
        cell: float64 [WIDTH], written.
    """
    x, y, d = np.empty(BLOCK), np.empty(BLOCK), np.zeros(BLOCK)
    xi, yi, at = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    part = np.empty(WIDTH)
    integers = x_kind >= _FIRST_INTEGER and y_kind >= _FIRST_INTEGER
    masked = mask.shape[0] > 0
    empty(cell)
    for i in range(BLOCK):
        at[i] = i
    for row in range(offsets.shape[0] - 1):
        base, stop = offsets[row], offsets[row + 1]
        rows[row, :] = 0.0
        while base < stop:
            n = BLOCK if stop - base > BLOCK else stop - base
            kept = _count_ones(mask, base, n) if masked else n
            if kept == 0:
                base += n
                continue
            equal = x_kind == y_kind and _same_bits(x_raw, y_raw, x_kind, base, n)
            highest = cell[AT.D_ABS_MAX]
            empty(part)
            taken = False
            if equal and kept == n and x_kind == FLOAT32:
                single = x_raw.view(np.float32)[base : base + n]
                taken = add_equal_float32(single, n, base, highest, part)
            elif equal and kept == n and x_kind == _INT64:
                wide = x_raw.view(np.int64)[base : base + n]
                taken = add_constant(wide, n, base, highest, part)
            if not taken:
                _widen(x_raw, x_kind, base, x, xi, n)
                other = x
                if not equal:
                    other = y
                    _widen(y_raw, y_kind, base, y, yi, n)
                    if integers:
                        _integer_differences(xi, yi, d, n)
                if kept < n:
                    _find_ones(mask, base, n, at)
                    _select(x, at, kept)
                    if not equal:
                        _select(y, at, kept)
                        if integers:
                            _select(d, at, kept)
                add_block(x, other, d, at, kept, base, equal, integers, rule, highest, part)
                if kept < n or part[AT.FINITE] < kept:
                    for i in range(BLOCK):
                        at[i] = i
            rows[row, 0] += part[AT.PAIRS]
            rows[row, 1] += part[AT.UNEQUAL]
            rows[row, 2] += part[AT.OVER]
            rows[row, 3] = larger(rows[row, 3], part[AT.D_ABS_MAX])
            if part[AT.D_ABS_SUM] > 0.0:
                rows[row, 4] += math.ldexp(part[AT.D_ABS_SUM], int(part[AT.EXPONENT]))
            rows[row, 5] += part[AT.FINITE]
            merge_into(cell, part)
            base += n


@entry(numba.void(array_type(numba.float64, 2), array_type(numba.float64)))
def merge_cells(cells: Float64, cell: Float64) -> None:
    """Merge `cells`, float64 [n, WIDTH], into `cell`.

    `cells` may be rescaled in place.
    """
    empty(cell)
    for each in range(cells.shape[0]):
        merge_into(cell, cells[each])
