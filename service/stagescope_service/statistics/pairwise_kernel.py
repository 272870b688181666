"""One pass over two arrays of values: how far they differ, and where first.

Values are taken in blocks out of one row; each block becomes a cell, which merges into the whole.
Values are widened to float64, of integers the difference is taken before that. Blocks whose
squares would leave the range of float64 are scaled by a power of two, which the cell carries.
"""

from __future__ import annotations

import enum
import math
from typing import Any, Final

import numba
import numpy as np

from stagescope_service.statistics.blocks import all_finite, larger, load, smaller
from stagescope_service.statistics.jit import entry, exact, reduction

BLOCK: Final = 512
KINDS: Final = (
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""Dtype tags; the place of one is its kind in the kernel. The first four are those of `blocks`."""

_FIRST_INTEGER: Final = 4
_INT64, _INT32, _INT16, _INT8 = 4, 5, 6, 7

ROW: Final = ("pairs", "unequal", "over", "d_abs_max", "d_abs_sum")
"""Columns of a row's vector; `d_abs_*` are of the pairs that are finite on both sides."""


class PairField(enum.IntEnum):
    """Where each number lies in a cell. d = x - y. Sums and moments are of finite pairs."""

    PAIRS = 0
    FINITE = enum.auto()
    UNEQUAL = enum.auto()
    """d is not 0, or one side is non-finite and the other is not the same."""
    OVER = enum.auto()
    """|d| > atol + rtol * max(|x|, |y|), or non-finite and not the same."""
    X_NAN = enum.auto()
    X_POSINF = enum.auto()
    X_NEGINF = enum.auto()
    Y_NAN = enum.auto()
    Y_POSINF = enum.auto()
    Y_NEGINF = enum.auto()
    BOTH_NAN = enum.auto()
    BOTH_POSINF = enum.auto()
    BOTH_NEGINF = enum.auto()
    EXPONENT = enum.auto()
    """e: sums are divided by 2^e and squares by 2^2e."""
    D_ABS_SUM = enum.auto()
    D_SUM = enum.auto()
    X_SUM = enum.auto()
    Y_SUM = enum.auto()
    D_SQUARES = enum.auto()
    X_M2 = enum.auto()
    Y_M2 = enum.auto()
    XY_C = enum.auto()
    X_MIN = enum.auto()
    Y_MIN = enum.auto()
    X_MAX = enum.auto()
    Y_MAX = enum.auto()
    D_ABS_MAX = enum.auto()
    D_ABS_MAX_AT = enum.auto()
    """Flat coordinate, -1 where there is none; the lowest of several."""
    UNEQUAL_AT = enum.auto()
    OVER_AT = enum.auto()


AT: Final = PairField
WIDTH: Final = len(PairField)
NO_EXPONENT: Final = -100_000.0
"""That of zeros alone, which fit any scale."""
_LARGE: Final = 1e100
_SMALL: Final = 1e-100
_EXPONENT: Final = int(AT.EXPONENT)
_SQUARES: Final = int(AT.D_SQUARES)
_MIN: Final = int(AT.X_MIN)


@exact
def empty(cell: Any) -> None:
    """Make a cell that of no values."""
    for i in range(WIDTH):
        cell[i] = 0.0
    cell[AT.EXPONENT] = NO_EXPONENT
    cell[AT.X_MIN] = cell[AT.Y_MIN] = math.inf
    cell[AT.X_MAX] = cell[AT.Y_MAX] = -math.inf
    cell[AT.D_ABS_MAX] = cell[AT.D_ABS_MAX_AT] = -1.0
    cell[AT.UNEQUAL_AT] = cell[AT.OVER_AT] = -1.0


@exact
def _rescale(cell: Any, exponent: float) -> None:
    factor = math.ldexp(1.0, int(cell[AT.EXPONENT] - exponent))
    for i in range(_EXPONENT + 1, _SQUARES):
        cell[i] *= factor
    for i in range(_SQUARES, _MIN):
        cell[i] = cell[i] * factor * factor
    cell[AT.EXPONENT] = exponent


@exact
def merge_into(cell: Any, other: Any) -> None:
    """Chan's merge of `other` into `cell`; of extremes the lowest coordinate stays.

    `other` may be rescaled.
    """
    exponent = larger(cell[AT.EXPONENT], other[AT.EXPONENT])
    if cell[AT.EXPONENT] != exponent:
        _rescale(cell, exponent)
    if other[AT.EXPONENT] != exponent:
        _rescale(other, exponent)
    a, b = cell[AT.FINITE], other[AT.FINITE]
    if a > 0.0 and b > 0.0:
        dx = other[AT.X_SUM] / b - cell[AT.X_SUM] / a
        dy = other[AT.Y_SUM] / b - cell[AT.Y_SUM] / a
        weight = a * b / (a + b)
        cell[AT.X_M2] += dx * dx * weight
        cell[AT.Y_M2] += dy * dy * weight
        cell[AT.XY_C] += dx * dy * weight
    for i in range(_EXPONENT):
        cell[i] += other[i]
    for i in range(_EXPONENT + 1, _MIN):
        cell[i] += other[i]
    for i in (AT.X_MIN, AT.Y_MIN):
        cell[i] = smaller(cell[i], other[i])
    for i in (AT.X_MAX, AT.Y_MAX):
        cell[i] = larger(cell[i], other[i])
    if other[AT.D_ABS_MAX] > cell[AT.D_ABS_MAX] or (
        other[AT.D_ABS_MAX] == cell[AT.D_ABS_MAX]
        and 0.0 <= other[AT.D_ABS_MAX_AT] < cell[AT.D_ABS_MAX_AT]
    ):
        cell[AT.D_ABS_MAX], cell[AT.D_ABS_MAX_AT] = other[AT.D_ABS_MAX], other[AT.D_ABS_MAX_AT]
    for i in (AT.UNEQUAL_AT, AT.OVER_AT):
        if other[i] >= 0.0 and (cell[i] < 0.0 or other[i] < cell[i]):
            cell[i] = other[i]


@exact
def _load_integers(raw: Any, kind: int, start: int, out: Any, n: int) -> None:
    if kind == _INT64:
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
def _load(raw: Any, kind: int, start: int, out: Any, whole: Any, n: int) -> None:
    if kind < _FIRST_INTEGER:
        load(raw, kind, start, out, n)
    else:
        _load_integers(raw, kind, start, whole, n)
        for i in range(n):
            out[i] = whole[i]


@exact
def _integer_differences(x: Any, y: Any, d: Any, n: int) -> None:
    """x - y of int64, rounded once: the difference itself needs 65 bits."""
    for i in range(n):
        if x[i] >= y[i]:
            d[i] = float(np.uint64(x[i]) - np.uint64(y[i]))
        else:
            d[i] = -float(np.uint64(y[i]) - np.uint64(x[i]))


@exact
def _select(mask: Any, start: int, n: int, x: Any, y: Any, d: Any, at: Any) -> int:
    """Keep the values under the mask, in order; `at` says where they were."""
    kept = 0
    for i in range(n):
        x[kept], y[kept], d[kept], at[kept] = x[i], y[i], d[i], i
        kept += 1 if mask[start + i] else 0
    return kept


@exact
def _kind_of(x: float) -> int:
    """0 NaN, 1 +inf, 2 -inf."""
    return 0 if x != x else (1 if x > 0 else 2)


@exact
def _set_apart(x: Any, y: Any, d: Any, at: Any, n: int, base: int, cell: Any) -> int:
    """Count the pairs that are not finite on both sides, and keep the others."""
    kept = 0
    for i in range(n):
        if math.isfinite(x[i]) and math.isfinite(y[i]):
            x[kept], y[kept], d[kept], at[kept] = x[i], y[i], d[i], at[i]
            kept += 1
            continue
        x_bad, y_bad = not math.isfinite(x[i]), not math.isfinite(y[i])
        x_kind, y_kind = _kind_of(x[i]), _kind_of(y[i])
        if x_bad:
            cell[AT.X_NAN + x_kind] += 1.0
        if y_bad:
            cell[AT.Y_NAN + y_kind] += 1.0
        if x_bad and y_bad and x_kind == y_kind:
            cell[AT.BOTH_NAN + x_kind] += 1.0
            continue
        cell[AT.UNEQUAL] += 1.0
        cell[AT.OVER] += 1.0
        if cell[AT.UNEQUAL_AT] < 0.0:
            cell[AT.UNEQUAL_AT] = base + at[i]
        if cell[AT.OVER_AT] < 0.0:
            cell[AT.OVER_AT] = base + at[i]
    return kept


@reduction
def _ranges(x: Any, y: Any, n: int, cell: Any) -> None:
    x_low = x_high = x[0]
    y_low = y_high = y[0]
    for i in range(n):
        a, b = x[i], y[i]
        x_low = a if a < x_low else x_low
        x_high = a if a > x_high else x_high
        y_low = b if b < y_low else y_low
        y_high = b if b > y_high else y_high
    cell[AT.X_MIN], cell[AT.X_MAX] = x_low, x_high
    cell[AT.Y_MIN], cell[AT.Y_MAX] = y_low, y_high


@reduction
def _subtract(x: Any, y: Any, d: Any, n: int) -> None:
    for i in range(n):
        d[i] = x[i] - y[i]


@reduction
def _sums(x: Any, y: Any, d: Any, n: int, cell: Any) -> None:
    """Sums, and second moments around the block's own first values."""
    x0, y0 = x[0], y[0]
    absolute = signed = squares = sx = sxx = sy = syy = sxy = unequal = highest = 0.0
    for i in range(n):
        a, b, z = x[i] - x0, y[i] - y0, d[i]
        size = abs(z)
        absolute += size
        signed += z
        squares += z * z
        sx += a
        sxx += a * a
        sy += b
        syy += b * b
        sxy += a * b
        unequal += 1.0 if z != 0.0 else 0.0
        highest = size if size > highest else highest
    count = float(n)
    cell[AT.FINITE] = count
    cell[AT.D_ABS_SUM], cell[AT.D_SUM], cell[AT.D_SQUARES] = absolute, signed, squares
    cell[AT.X_SUM], cell[AT.X_M2] = sx + count * x0, larger(sxx - sx * sx / count, 0.0)
    cell[AT.Y_SUM], cell[AT.Y_M2] = sy + count * y0, larger(syy - sy * sy / count, 0.0)
    cell[AT.XY_C] = sxy - sx * sy / count
    cell[AT.UNEQUAL] += unequal
    cell[AT.D_ABS_MAX] = highest


@exact
def _is_over(x: float, y: float, d: float, atol: float, rtol: float) -> bool:
    return abs(d) > atol + rtol * larger(abs(x), abs(y))


@reduction
def _count_over(x: Any, y: Any, d: Any, n: int, atol: float, rtol: float) -> float:
    count = 0.0
    for i in range(n):
        count += 1.0 if _is_over(x[i], y[i], d[i], atol, rtol) else 0.0
    return count


@exact
def _over(x: Any, y: Any, d: Any, at: Any, n: int, base: int, rule: Any, cell: Any) -> None:
    """Count what is over the tolerance and find the first."""
    atol, rtol = math.ldexp(rule[0], -int(cell[AT.EXPONENT])), rule[1]
    if cell[AT.D_ABS_MAX] <= atol:
        return
    count = _count_over(x, y, d, n, atol, rtol)
    cell[AT.OVER] += count
    if count > 0.0:
        i = 0
        while i < n - 1 and not _is_over(x[i], y[i], d[i], atol, rtol):
            i += 1
        if cell[AT.OVER_AT] < 0.0 or base + at[i] < cell[AT.OVER_AT]:
            cell[AT.OVER_AT] = base + at[i]


@exact
def _places(d: Any, at: Any, n: int, base: int, highest: float, cell: Any) -> None:
    """Find the first unequal pair, and the largest |d| where it may be the largest of all."""
    if cell[AT.D_ABS_MAX] > 0.0:
        i = 0
        while d[i] == 0.0:
            i += 1
        if cell[AT.UNEQUAL_AT] < 0.0 or base + at[i] < cell[AT.UNEQUAL_AT]:
            cell[AT.UNEQUAL_AT] = base + at[i]
    if math.ldexp(cell[AT.D_ABS_MAX], int(cell[AT.EXPONENT])) > highest:
        i = 0
        while abs(d[i]) != cell[AT.D_ABS_MAX]:
            i += 1
        cell[AT.D_ABS_MAX_AT] = base + at[i]


@exact
def _block(
    x: Any, y: Any, d: Any, at: Any, n: int, base: int, whole: bool, rule: Any, highest: float,
    cell: Any,
) -> None:  # fmt: skip
    """Take n pairs into an empty cell that may already count non-finite ones.

    `whole`: both sides are integers and d is there already. `highest`: the largest |d| so far.
    """
    cell[AT.PAIRS] = n
    if not all_finite(x, y, n):
        n = _set_apart(x, y, d, at, n, base, cell)
    if n == 0:
        return
    _ranges(x, y, n, cell)
    low = smaller(cell[AT.X_MIN], cell[AT.Y_MIN])
    size = larger(-low, larger(cell[AT.X_MAX], cell[AT.Y_MAX]))
    cell[AT.EXPONENT] = 0.0 if size > 0.0 else NO_EXPONENT
    if size >= _LARGE or 0.0 < size <= _SMALL:
        exponent = math.frexp(size)[1]
        cell[AT.EXPONENT] = exponent
        for i in range(n):
            x[i] = math.ldexp(x[i], -exponent)
            y[i] = math.ldexp(y[i], -exponent)
    if not whole:
        _subtract(x, y, d, n)
    _sums(x, y, d, n, cell)
    if cell[AT.D_ABS_MAX] > 0.0:
        _places(d, at, n, base, highest, cell)
        _over(x, y, d, at, n, base, rule, cell)
    elif highest < 0.0:
        cell[AT.D_ABS_MAX_AT] = base + at[0]
    if cell[AT.EXPONENT] != NO_EXPONENT:
        cell[AT.D_ABS_MAX] = math.ldexp(cell[AT.D_ABS_MAX], int(cell[AT.EXPONENT]))


def _array(kind: Any, ndim: int, readonly: bool = False) -> Any:
    return numba.types.Array(kind, ndim, "C", readonly=readonly)


_BYTES: Any = _array(numba.uint8, 1, readonly=True)


@entry(
    numba.void(
        _BYTES, numba.int64, _BYTES, numba.int64, _BYTES, _array(numba.int64, 1, readonly=True),
        _array(numba.float64, 1, readonly=True), _array(numba.float64, 2),
        _array(numba.float64, 1),
    ),
    nogil=True,
)  # fmt: skip
def accumulate_pairs(
    x_raw: Any, x_kind: int, y_raw: Any, y_kind: int, mask: Any, offsets: Any, rule: Any,
    rows: Any, cell: Any,
) -> None:  # fmt: skip
    """Compare two flat arrays of one length.

    Args:
        x_raw, y_raw: uint8 views of the values, of dtype `KINDS[kind]`.
        mask: uint8, one a value: not 0 = it counts; of length 0: all count.
        offsets: int64 [rows + 1]: row r is `offsets[r]:offsets[r + 1]`.
        rule: float64 [2], atol and rtol of `OVER`.
        rows: float64 [rows, len(ROW)], written.
        cell: float64 [WIDTH], written.
    """
    x, y, d = np.empty(BLOCK), np.empty(BLOCK), np.zeros(BLOCK)
    xi, yi, at = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    part: Any = np.empty(WIDTH)
    whole = x_kind >= _FIRST_INTEGER and y_kind >= _FIRST_INTEGER
    masked = mask.shape[0] > 0
    empty(cell)
    for i in range(BLOCK):
        at[i] = i
    for row in range(offsets.shape[0] - 1):
        base, stop = offsets[row], offsets[row + 1]
        rows[row, :] = 0.0
        while base < stop:
            n = BLOCK if stop - base > BLOCK else stop - base
            kept = n
            if masked:
                kept = 0
                for i in range(n):
                    kept += 1 if mask[base + i] else 0
            if kept == 0:
                base += n
                continue
            _load(x_raw, x_kind, base, x, xi, n)
            _load(y_raw, y_kind, base, y, yi, n)
            if whole:
                _integer_differences(xi, yi, d, n)
            if kept < n:
                _select(mask, base, n, x, y, d, at)
            empty(part)
            _block(x, y, d, at, kept, base, whole, rule, cell[AT.D_ABS_MAX], part)
            rows[row, 0] += part[AT.PAIRS]
            rows[row, 1] += part[AT.UNEQUAL]
            rows[row, 2] += part[AT.OVER]
            rows[row, 3] = larger(rows[row, 3], part[AT.D_ABS_MAX])
            if part[AT.D_ABS_SUM] > 0.0:
                rows[row, 4] += math.ldexp(part[AT.D_ABS_SUM], int(part[AT.EXPONENT]))
            if kept < n or part[AT.FINITE] < kept:
                for i in range(BLOCK):
                    at[i] = i
            merge_into(cell, part)
            base += n
