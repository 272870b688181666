"""A cell of pairs: the statistics of a set of pairs of values as one mergeable float64 vector."""

from __future__ import annotations

import collections
import enum
import math
from typing import Final, cast

from stagescope_service.statistics.blocks import larger, smaller
from stagescope_service.statistics.cell import Float64
from stagescope_service.statistics.jit import exact


class PairField(enum.IntEnum):
    """Index of each number in a cell. d = x - y. Sums and moments are of finite pairs."""

    PAIRS = 0
    FINITE = enum.auto()
    UNEQUAL = enum.auto()
    """d is not 0, or one side is non-finite and the other is not the same."""
    OVER = enum.auto()
    """|d| > atol + rtol * max(|x|, |y|), or non-finite and different."""
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
    """Flat coordinate, -1 for none; the lowest of several."""
    UNEQUAL_AT = enum.auto()
    OVER_AT = enum.auto()


_Index = collections.namedtuple("_Index", PairField.__members__)  # type: ignore[misc]
AT: Final = cast("type[PairField]", _Index(*map(int, PairField)))
"""`PairField` as plain ints, for the compiled loops."""
WIDTH: Final = len(PairField)
NO_EXPONENT: Final = -100_000.0
"""The exponent of zeros, which fit any scale."""
_EXPONENT: Final = int(AT.EXPONENT)
_SQUARES: Final = int(AT.D_SQUARES)
_MIN: Final = int(AT.X_MIN)


@exact
def empty(cell: Float64) -> None:
    """Reset a cell to that of no values."""
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
    """Chan's merge of `other` into `cell`; of equal extremes the lowest coordinate is kept.

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
