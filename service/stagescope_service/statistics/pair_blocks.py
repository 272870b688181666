"""What is taken of one block of pairs of values: short loops over buffers in the first cache.

Values are widened to float64, of integers the difference is taken before that. Blocks whose
squares would leave the range of float64 are scaled by a power of two, which the cell carries.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from stagescope_service.statistics.blocks import all_finite, larger, load, smaller
from stagescope_service.statistics.jit import exact, reduction
from stagescope_service.statistics.pair_cell import AT, NO_EXPONENT

KINDS: Final = (
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""Dtype tags; the place of one is its kind in the kernel. The first four are those of `blocks`."""

FIRST_INTEGER: Final = 4
_INT64, _INT32, _INT16, _INT8 = 4, 5, 6, 7
_LARGE: Final = 1e100
_SMALL: Final = 1e-100


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
def widen(raw: Any, kind: int, start: int, out: Any, whole: Any, n: int) -> None:
    """Load n values from `start` on as float64, integers also as they are into `whole`."""
    if kind < FIRST_INTEGER:
        load(raw, kind, start, out, n)
    else:
        _load_integers(raw, kind, start, whole, n)
        for i in range(n):
            out[i] = whole[i]


@exact
def integer_differences(x: Any, y: Any, d: Any, n: int) -> None:
    """x - y of int64, rounded once: the difference itself needs 65 bits."""
    for i in range(n):
        if x[i] >= y[i]:
            d[i] = float(np.uint64(x[i]) - np.uint64(y[i]))
        else:
            d[i] = -float(np.uint64(y[i]) - np.uint64(x[i]))


@exact
def select(mask: Any, start: int, n: int, x: Any, y: Any, d: Any, at: Any) -> int:
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


# Each loop has few sums: one that takes them all at once does not run in vector lanes.


@reduction
def _range(x: Any, n: int) -> tuple[float, float]:
    low = high = x[0]
    for i in range(n):
        a = x[i]
        low = a if a < low else low
        high = a if a > high else high
    return low, high


@reduction
def _subtract(x: Any, y: Any, d: Any, n: int) -> None:
    for i in range(n):
        d[i] = x[i] - y[i]


@reduction
def _differences(d: Any, n: int) -> tuple[float, float, float]:
    """Sums of |d|, d and d^2."""
    absolute = signed = squares = 0.0
    for i in range(n):
        z = d[i]
        absolute += abs(z)
        signed += z
        squares += z * z
    return absolute, signed, squares


@reduction
def _count_unequal(d: Any, n: int) -> float:
    count = 0.0
    for i in range(n):
        count += 1.0 if d[i] != 0.0 else 0.0
    return count


@reduction
def _moments(x: Any, n: int) -> tuple[float, float]:
    """Sums of x and x^2 around the first value."""
    first = x[0]
    total = squares = 0.0
    for i in range(n):
        a = x[i] - first
        total += a
        squares += a * a
    return total, squares


@reduction
def _cross(x: Any, y: Any, n: int) -> float:
    """Sum of x y, each around its first value."""
    x0, y0 = x[0], y[0]
    total = 0.0
    for i in range(n):
        total += (x[i] - x0) * (y[i] - y0)
    return total


@exact
def _sums(x: Any, y: Any, d: Any, n: int, unequal: float, cell: Any) -> None:
    """Sums, and second moments around the block's own first values."""
    count = float(n)
    cell[AT.FINITE] = count
    sx, sxx = _moments(x, n)
    cell[AT.X_SUM], cell[AT.X_M2] = sx + count * x[0], larger(sxx - sx * sx / count, 0.0)
    if unequal == 0.0:
        cell[AT.Y_SUM], cell[AT.Y_M2] = cell[AT.X_SUM], cell[AT.X_M2]
        cell[AT.XY_C], cell[AT.D_ABS_MAX] = cell[AT.X_M2], 0.0
        return
    low, high = _range(d, n)
    cell[AT.D_ABS_MAX] = larger(-low, high)
    absolute, signed, squares = _differences(d, n)
    cell[AT.D_ABS_SUM], cell[AT.D_SUM], cell[AT.D_SQUARES] = absolute, signed, squares
    cell[AT.UNEQUAL] += unequal
    sy, syy = _moments(y, n)
    cell[AT.Y_SUM], cell[AT.Y_M2] = sy + count * y[0], larger(syy - sy * sy / count, 0.0)
    cell[AT.XY_C] = _cross(x, y, n) - sx * sy / count


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
def take_block(
    x: Any, y: Any, d: Any, at: Any, n: int, base: int, same: bool, known: bool,
    rule: Any, highest: float, cell: Any,
) -> None:  # fmt: skip
    """Take n pairs into an empty cell.

    `same`: y is x. `known`: d is there already. `highest`: the largest |d| so far.
    """
    cell[AT.PAIRS] = n
    if not all_finite(x, y, n):
        n = _set_apart(x, y, d, at, n, base, cell)
    if n == 0:
        return
    unequal = 0.0
    if not same:
        if not known:
            _subtract(x, y, d, n)
        unequal = _count_unequal(d, n)
    cell[AT.X_MIN], cell[AT.X_MAX] = _range(x, n)
    cell[AT.Y_MIN], cell[AT.Y_MAX] = cell[AT.X_MIN], cell[AT.X_MAX]
    if unequal > 0.0:
        cell[AT.Y_MIN], cell[AT.Y_MAX] = _range(y, n)
    low = smaller(cell[AT.X_MIN], cell[AT.Y_MIN])
    size = larger(-low, larger(cell[AT.X_MAX], cell[AT.Y_MAX]))
    cell[AT.EXPONENT] = 0.0 if size > 0.0 else NO_EXPONENT
    if size >= _LARGE or 0.0 < size <= _SMALL:
        exponent = math.frexp(size)[1]
        cell[AT.EXPONENT] = exponent
        for i in range(n):
            x[i] = math.ldexp(x[i], -exponent)
        if unequal > 0.0:
            for i in range(n):
                y[i] = math.ldexp(y[i], -exponent)
            _subtract(x, y, d, n)
    _sums(x, y, d, n, unequal, cell)
    if cell[AT.D_ABS_MAX] > 0.0:
        _places(d, at, n, base, highest, cell)
        _over(x, y, d, at, n, base, rule, cell)
    elif highest < 0.0:
        cell[AT.D_ABS_MAX_AT] = base + at[0]
    if cell[AT.EXPONENT] != NO_EXPONENT:
        cell[AT.D_ABS_MAX] = math.ldexp(cell[AT.D_ABS_MAX], int(cell[AT.EXPONENT]))
