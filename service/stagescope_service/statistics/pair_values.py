"""Loading of value blocks of any dtype for the loops over pairs.

Values are widened to float64; differences of integers are computed before that.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stagescope_service.statistics.blocks import FLOAT32, FLOAT64, load
from stagescope_service.statistics.cell import Array, Float64, Int64, UInt8
from stagescope_service.statistics.jit import exact

KINDS: Final = (
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""Dtype tags; a tag's index is its kind in the kernel. The first four are those of `blocks`."""

FIRST_INTEGER: Final = 4
INT64, _INT32, _INT16, _INT8 = 4, 5, 6, 7


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
def same_bits(x_raw: UInt8, y_raw: UInt8, kind: int, start: int, n: int) -> bool:
    """Return whether n values of one kind, beginning at `start`, have equal bits on both sides."""
    if kind in (FLOAT64, INT64):
        return _same_words(x_raw.view(np.int64), y_raw.view(np.int64), start, n)
    if kind in (FLOAT32, _INT32):
        return _same_words(x_raw.view(np.int32), y_raw.view(np.int32), start, n)
    size = 2 if kind < FIRST_INTEGER or kind == _INT16 else 1
    return _same_words(x_raw, y_raw, start * size, n * size)


@exact
def _load_integers(raw: UInt8, kind: int, start: int, out: Int64, n: int) -> None:
    if kind == INT64:
        wide = raw.view(np.int64)[start : start + n]
        for i in range(n):
            out[i] = wide[i]
    elif kind == _INT32:
        narrow = raw.view(np.int32)[start : start + n]
        for i in range(n):
            out[i] = narrow[i]
    elif kind == _INT16:
        short = raw.view(np.int16)[start : start + n]
        for i in range(n):
            out[i] = short[i]
    elif kind == _INT8:
        byte = raw.view(np.int8)[start : start + n]
        for i in range(n):
            out[i] = byte[i]
    else:
        for i in range(n):
            out[i] = raw[start + i]


@exact
def widen(raw: UInt8, kind: int, start: int, out: Float64, integers: Int64, n: int) -> None:
    """Load n values from `start` as float64, and integers also unconverted into `integers`."""
    if kind < FIRST_INTEGER:
        load(raw, kind, start, out, n)
    else:
        _load_integers(raw, kind, start, integers, n)
        for i in range(n):
            out[i] = integers[i]


@exact
def integer_differences(x: Int64, y: Int64, d: Float64, n: int) -> None:
    """x - y of int64, rounded once: the difference itself needs 65 bits."""
    for i in range(n):
        if x[i] >= y[i]:
            d[i] = float(np.uint64(x[i]) - np.uint64(y[i]))
        else:
            d[i] = -float(np.uint64(y[i]) - np.uint64(x[i]))


@exact
def count_ones(mask: UInt8, start: int, n: int) -> int:
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
def find_ones(mask: UInt8, start: int, n: int, at: Int64) -> None:
    """Write the indexes of the 1s of a mask's block, in order."""
    kept, chosen = 0, mask[start : start + n]
    for i in range(n):
        at[kept] = i
        kept += chosen[i]


@exact
def select(x: Float64, at: Int64, n: int) -> None:
    """Move the n values at indexes `at` to the front of a buffer, in order."""
    for i in range(n):
        x[i] = x[at[i]]
