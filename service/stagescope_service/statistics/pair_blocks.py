"""Statistics of one block of pairs of values: short loops over buffers in the L1 cache.

A cell of pairs holds the statistics of a set of pairs as one mergeable float64 vector. Values are
float64. Blocks whose squares would overflow or underflow are scaled by a power of two, which the
cell stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from stagescope_service.statistics.blocks import kind_of_non_finite, larger, smaller
from stagescope_service.statistics.cell import Float32, Float64, Int64
from stagescope_service.statistics.jit import exact, reduction
from stagescope_service.statistics.pair_fields import AT, WIDTH

NO_EXPONENT: Final = -100_000.0
"""The exponent of zeros, which fit any scale."""
_EXPONENT: Final = int(AT.EXPONENT)
_SQUARES: Final = int(AT.D_SQUARES)
_MIN: Final = int(AT.X_MIN)


@exact
def empty(cell: Float64) -> None:
    """Reset a cell to one without values."""
    for i in range(WIDTH):
        cell[i] = 0.0
    cell[AT.EXPONENT] = NO_EXPONENT
    cell[AT.X_MIN] = cell[AT.Y_MIN] = math.inf
    cell[AT.X_MAX] = cell[AT.Y_MAX] = -math.inf
    cell[AT.D_ABS_MAX] = cell[AT.D_ABS_MAX_AT] = -1.0
    cell[AT.UNEQUAL_AT] = cell[AT.OVER_AT] = -1.0


@exact
def _rescale(cell: Float64, exponent: float) -> None:
    factor = math.ldexp(1.0, int(cell[AT.EXPONENT] - exponent))
    for i in range(_EXPONENT + 1, _SQUARES):
        cell[i] *= factor
    for i in range(_SQUARES, _MIN):
        cell[i] = cell[i] * factor * factor
    cell[AT.EXPONENT] = exponent


@exact
def merge_into(cell: Float64, other: Float64) -> None:
    """Merge `other` into `cell` by Chan's formula; equal extremes keep the lowest coordinate.

    `other` may be rescaled in place.
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


Word = TypeVar("Word", np.int32, np.int64)

_LARGE: Final = 1e100
_SMALL: Final = 1e-100
_MAGNITUDE: Final = np.int64(0x7FFF_FFFF_FFFF_FFFF)


@exact
def _separate_non_finite(
    x: Float64, y: Float64, d: Float64, at: Int64, n: int, base: int, cell: Float64
) -> int:
    """Count the pairs with a non-finite side, and keep the others."""
    kept = 0
    for i in range(n):
        if math.isfinite(x[i]) and math.isfinite(y[i]):
            x[kept], y[kept], d[kept], at[kept] = x[i], y[i], d[i], at[i]
            kept += 1
            continue
        x_bad, y_bad = not math.isfinite(x[i]), not math.isfinite(y[i])
        x_kind, y_kind = kind_of_non_finite(x[i]), kind_of_non_finite(y[i])
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


# Each loop has few sums: one loop over all of them does not vectorize.


def _range_of_bits(word: type[Word]) -> Callable[[npt.NDArray[Word], int], tuple[Word, Word]]:
    """Make a function (bits of floats, n) -> bits of the lowest and of the highest.

    Bits of floats sort as integers once those of negative ones are inverted; NaN sorts beyond the
    infinities, so it is detected. Such loops vectorize for integers, not for floats.
    """
    sign, magnitude = word(np.dtype(word).itemsize * 8 - 1), np.iinfo(word).max

    def found(bits: npt.NDArray[Word], n: int) -> tuple[Word, Word]:
        low, high = word(magnitude), word(~magnitude)
        for i in range(n):
            key = word(bits[i] ^ ((bits[i] >> sign) & word(magnitude)))
            low = key if key < low else low
            high = key if key > high else high
        return (
            word(low ^ ((low >> sign) & word(magnitude))),
            word(high ^ ((high >> sign) & word(magnitude))),
        )

    return exact(found)


_range_of_32: Final = _range_of_bits(np.int32)
_range_of_64: Final = _range_of_bits(np.int64)


@exact
def _range(x: Float64, n: int) -> tuple[float, float]:
    """Return the lowest and the highest of float64 values; non-finite if any value is."""
    low, high = _range_of_64(x.view(np.int64), n)
    return np.int64(low).view(np.float64), np.int64(high).view(np.float64)


@exact
def _range_of_single(x: Float32, n: int) -> tuple[float, float]:
    """Return the same for float32."""
    low, high = _range_of_32(x.view(np.int32), n)
    return (
        np.float64(np.int32(low).view(np.float32)),
        np.float64(np.int32(high).view(np.float32)),
    )


@exact
def _largest(d: Float64, n: int) -> float:
    """Return the largest |d|, compared by bits."""
    bits, high = d.view(np.int64), np.int64(0)
    for i in range(n):
        size = bits[i] & _MAGNITUDE
        high = size if size > high else high
    return np.int64(high).view(np.float64)


@reduction
def _subtract(x: Float64, y: Float64, d: Float64, n: int) -> None:
    for i in range(n):
        d[i] = x[i] - y[i]


@reduction
def _differences(d: Float64, n: int) -> tuple[float, float, float]:
    """Return the sums of |d|, d and d^2."""
    absolute = signed = squares = 0.0
    for i in range(n):
        z = d[i]
        absolute += abs(z)
        signed += z
        squares += z * z
    return absolute, signed, squares


@reduction
def _count_unequal(d: Float64, n: int) -> float:
    count = 0.0
    for i in range(n):
        count += 1.0 if d[i] != 0.0 else 0.0
    return count


@reduction
def _moments(x: Float32 | Float64, n: int) -> tuple[float, float]:
    """Return the sums of x and x^2 around the first value, in float64."""
    first = np.float64(x[0])
    total = squares = 0.0
    for i in range(n):
        a = np.float64(x[i]) - first
        total += a
        squares += a * a
    return total, squares


@reduction
def _moments_with(x: Float64, y: Float64, n: int) -> tuple[float, float, float]:
    """Return the sums of y, y^2 and x y, each around its first value."""
    x0, y0 = x[0], y[0]
    total = squares = cross = 0.0
    for i in range(n):
        a, b = x[i] - x0, y[i] - y0
        total += b
        squares += b * b
        cross += a * b
    return total, squares, cross


@exact
def _sums(x: Float64, y: Float64, d: Float64, n: int, unequal: float, cell: Float64) -> None:
    """Compute sums, and second moments around the block's own first values."""
    count = float(n)
    cell[AT.FINITE] = count
    sx, sxx = _moments(x, n)
    cell[AT.X_SUM], cell[AT.X_M2] = sx + count * x[0], larger(sxx - sx * sx / count, 0.0)
    if unequal == 0.0:
        cell[AT.Y_SUM], cell[AT.Y_M2] = cell[AT.X_SUM], cell[AT.X_M2]
        cell[AT.XY_C], cell[AT.D_ABS_MAX] = cell[AT.X_M2], 0.0
        return
    cell[AT.D_ABS_MAX] = _largest(d, n)
    absolute, signed, squares = _differences(d, n)
    cell[AT.D_ABS_SUM], cell[AT.D_SUM], cell[AT.D_SQUARES] = absolute, signed, squares
    cell[AT.UNEQUAL] += unequal
    sy, syy, sxy = _moments_with(x, y, n)
    cell[AT.Y_SUM], cell[AT.Y_M2] = sy + count * y[0], larger(syy - sy * sy / count, 0.0)
    cell[AT.XY_C] = sxy - sx * sy / count


@exact
def _is_over(x: float, y: float, d: float, atol: float, rtol: float) -> bool:
    return abs(d) > atol + rtol * larger(abs(x), abs(y))


@reduction
def _count_over(x: Float64, y: Float64, d: Float64, n: int, atol: float, rtol: float) -> float:
    count = 0.0
    for i in range(n):
        count += 1.0 if _is_over(x[i], y[i], d[i], atol, rtol) else 0.0
    return count


@exact
def _count_and_find_over(
    x: Float64, y: Float64, d: Float64, at: Int64, n: int, base: int, rule: Float64, cell: Float64
) -> None:
    """Count the pairs over the tolerance and find the first."""
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
def _locate(d: Float64, at: Int64, n: int, base: int, highest: float, cell: Float64) -> None:
    """Find the first unequal pair, and the largest |d| if it may be the largest of all."""
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
def add_block(
    x: Float64, y: Float64, d: Float64, at: Int64, n: int, base: int, same: bool, known: bool,
    rule: Float64, highest: float, cell: Float64,
) -> None:  # fmt: skip
    """Add n pairs to an empty cell.

    `same`: y is x. `known`: d is already computed. `highest`: the largest |d| so far.
    """
    cell[AT.PAIRS] = n
    x_low, x_high = _range(x, n)
    y_low, y_high = (x_low, x_high) if same else _range(y, n)
    if not (math.isfinite(x_high - x_low) and math.isfinite(y_high - y_low)):
        n = _separate_non_finite(x, y, d, at, n, base, cell)
        if n == 0:
            return
        x_low, x_high = _range(x, n)
        y_low, y_high = (x_low, x_high) if same else _range(y, n)
    unequal = 0.0
    if not same:
        if not known:
            _subtract(x, y, d, n)
        unequal = _count_unequal(d, n)
    cell[AT.X_MIN], cell[AT.X_MAX] = x_low, x_high
    cell[AT.Y_MIN], cell[AT.Y_MAX] = y_low, y_high
    size = larger(-smaller(x_low, y_low), larger(x_high, y_high))
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
        _locate(d, at, n, base, highest, cell)
        _count_and_find_over(x, y, d, at, n, base, rule, cell)
    elif highest < 0.0:
        cell[AT.D_ABS_MAX_AT] = base + at[0]
    if cell[AT.EXPONENT] != NO_EXPONENT:
        cell[AT.D_ABS_MAX] = math.ldexp(cell[AT.D_ABS_MAX], int(cell[AT.EXPONENT]))


@exact
def _add_equal(
    low: float, high: float, total: float, second: float, n: int, base: int, highest: float,
    cell: Float64,
) -> None:  # fmt: skip
    cell[AT.PAIRS] = cell[AT.FINITE] = n
    cell[AT.EXPONENT] = 0.0 if low != 0.0 or high != 0.0 else NO_EXPONENT
    cell[AT.X_SUM] = cell[AT.Y_SUM] = total
    cell[AT.X_M2] = cell[AT.Y_M2] = cell[AT.XY_C] = second
    cell[AT.X_MIN], cell[AT.X_MAX] = low, high
    cell[AT.Y_MIN], cell[AT.Y_MAX] = low, high
    cell[AT.D_ABS_MAX] = 0.0
    if highest < 0.0:
        cell[AT.D_ABS_MAX_AT] = base


@exact
def add_equal_float32(x: Float32, n: int, base: int, highest: float, cell: Float64) -> bool:
    """Add n pairs of equal float32 without widening; False if any is not finite."""
    low, high = _range_of_single(x, n)
    if not (math.isfinite(low) and math.isfinite(high)):
        return False
    count, first = float(n), float(x[0])
    total, squares = _moments(x, n)
    second = larger(squares - total * total / count, 0.0)
    _add_equal(low, high, total + count * first, second, n, base, highest, cell)
    return True


@exact
def add_constant(x: Int64, n: int, base: int, highest: float, cell: Float64) -> bool:
    """Add n pairs of equal integers if all are the same value, as in a mask; else False."""
    low = high = x[0]
    for i in range(n):
        low = x[i] if x[i] < low else low
        high = x[i] if x[i] > high else high
    if low == high:
        value = float(low)
        _add_equal(value, value, n * value, 0.0, n, base, highest, cell)
    return bool(low == high)
