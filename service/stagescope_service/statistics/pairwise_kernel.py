"""One pass over two arrays of values: their differences, and the first differing location.

Each row is processed in blocks; each block becomes a cell, which merges into the cell of all
values.
"""

from __future__ import annotations

import math
from typing import Final

import numba
import numpy as np

from stagescope_service.statistics.blocks import FLOAT32, larger
from stagescope_service.statistics.cell import Float64, Int64, UInt8
from stagescope_service.statistics.jit import array_type, entry, input_type
from stagescope_service.statistics.pair_blocks import (
    add_block,
    add_constant,
    add_equal_float32,
)
from stagescope_service.statistics.pair_cell import AT, WIDTH, empty, merge_into
from stagescope_service.statistics.pair_values import (
    FIRST_INTEGER,
    INT64,
    count_ones,
    find_ones,
    integer_differences,
    same_bits,
    select,
    widen,
)

BLOCK: Final = 512
ROW: Final = ("pairs", "unequal", "over", "d_abs_max", "d_abs_sum", "finite")
"""Columns of a row's vector; `d_abs_*` are of the pairs that are finite on both sides: `finite`."""


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
    integers = x_kind >= FIRST_INTEGER and y_kind >= FIRST_INTEGER
    masked = mask.shape[0] > 0
    empty(cell)
    for i in range(BLOCK):
        at[i] = i
    for row in range(offsets.shape[0] - 1):
        base, stop = offsets[row], offsets[row + 1]
        rows[row, :] = 0.0
        while base < stop:
            n = BLOCK if stop - base > BLOCK else stop - base
            kept = count_ones(mask, base, n) if masked else n
            if kept == 0:
                base += n
                continue
            equal = x_kind == y_kind and same_bits(x_raw, y_raw, x_kind, base, n)
            highest = cell[AT.D_ABS_MAX]
            empty(part)
            taken = False
            if equal and kept == n and x_kind == FLOAT32:
                single = x_raw.view(np.float32)[base : base + n]
                taken = add_equal_float32(single, n, base, highest, part)
            elif equal and kept == n and x_kind == INT64:
                wide = x_raw.view(np.int64)[base : base + n]
                taken = add_constant(wide, n, base, highest, part)
            if not taken:
                widen(x_raw, x_kind, base, x, xi, n)
                other = x
                if not equal:
                    other = y
                    widen(y_raw, y_kind, base, y, yi, n)
                    if integers:
                        integer_differences(xi, yi, d, n)
                if kept < n:
                    find_ones(mask, base, n, at)
                    select(x, at, kept)
                    if not equal:
                        select(y, at, kept)
                        if integers:
                            select(d, at, kept)
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
