"""The differences of two arrays of values: one pass, mergeable summaries.

All statistics are float64 of the stored values: bfloat16 and float16 are widened, differences of
integers are exact. A NaN at the same position on both sides is equal, and so is an infinity of
the same sign; both are counted. The first call imports the compiled loops.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.statistics.cell import Array, Float64, Int64
from stagescope_service.statistics.pair_fields import AT as _AT
from stagescope_service.statistics.pair_fields import KINDS, ROW, WIDTH
from stagescope_wire.errors import InvalidTensor

Number = float | int

_NONE: Final = np.empty(0, np.uint8)


class ElementLocation(NamedTuple):
    """A pair of values and its location.

    Attributes:
        origin: the caller's number of the call.
        at: flat coordinate inside that call's arrays.
        x, y: the values; integers are exact.
    """

    origin: int
    at: int
    x: Number
    y: Number


@dataclasses.dataclass(frozen=True, slots=True)
class Pairwise:
    """The result of `compare_values`; summaries of disjoint values merge into one of their union.

    d = x - y. Means, moments and sums cover the pairs that are finite on both sides, and are NaN if
    there are none.

    Attributes:
        cell: by `PairField`, as Python floats: they are read more often than merged.
        largest: the largest |d|, the first of equal ones; None without a finite pair.
        unequal: the first unequal pair, by origin and coordinate.
        over: the first pair over the tolerance.
    """

    cell: tuple[float, ...]
    largest: ElementLocation | None = None
    unequal: ElementLocation | None = None
    over: ElementLocation | None = None

    @classmethod
    def nothing(cls) -> Pairwise:
        """Return the summary of no values."""
        return cls.union(())

    @classmethod
    def union(cls, parts: Sequence[Pairwise]) -> Pairwise:
        """Return the summary of all values; the order affects only rounding."""
        from stagescope_service.statistics.pairwise_kernel import merge_cells

        cell = np.empty(WIDTH)
        merge_cells(np.array([part.cell for part in parts]).reshape(-1, WIDTH), cell)
        found = [(-part.max_abs, part.largest) for part in parts if part.largest is not None]
        return cls(
            tuple(cell.tolist()),
            largest=min(found)[1] if found else None,
            unequal=min((part.unequal for part in parts if part.unequal), default=None),
            over=min((part.over for part in parts if part.over), default=None),
        )

    def merge(self, other: Pairwise) -> Pairwise:
        """Return the summary of both."""
        return Pairwise.union((self, other))

    @property
    def pairs(self) -> int:
        """Number of pairs, including non-finite ones."""
        return int(self.cell[_AT.PAIRS])

    @property
    def finite(self) -> int:
        """Number of pairs that are finite on both sides."""
        return int(self.cell[_AT.FINITE])

    @property
    def unequal_count(self) -> int:
        """Number of unequal pairs."""
        return int(self.cell[_AT.UNEQUAL])

    @property
    def over_count(self) -> int:
        """Number of pairs over the tolerance, including non-finite ones that disagree."""
        return int(self.cell[_AT.OVER])

    @property
    def agreeing_non_finite(self) -> int:
        """Number of pairs that are the same NaN or infinity."""
        return int(sum(self.cell[_AT.BOTH_NAN : _AT.BOTH_NEGINF + 1]))

    @property
    def disagreeing_non_finite(self) -> int:
        """Number of unequal pairs with a NaN or infinite side."""
        return self.pairs - self.finite - self.agreeing_non_finite

    @property
    def max_abs(self) -> float:
        """The largest |d|."""
        return self.cell[_AT.D_ABS_MAX] if self.finite else math.nan

    @property
    def mean_abs(self) -> float:
        """The mean of |d|."""
        return self._mean(_AT.D_ABS_SUM)

    @property
    def mean_difference(self) -> float:
        """The mean of d: a bias shows here, rounding cancels."""
        return self._mean(_AT.D_SUM)

    @property
    def root_mean_square(self) -> float:
        """The root of the mean of d^2."""
        if not self.finite:
            return math.nan
        spread = math.sqrt(self.cell[_AT.D_SQUARES] / self.finite)
        return math.ldexp(spread, self._exponent)

    @property
    def relative(self) -> float:
        """1 - 2 sum(xy) / sum(x^2 + y^2), which is sum(d^2) / sum(x^2 + y^2): 0 where all are 0.

        Computed in the second form, in which equal values give exactly 0.
        """
        both = self._squares(_AT.X_SUM, _AT.X_M2) + self._squares(_AT.Y_SUM, _AT.Y_M2)
        if not self.finite:
            return math.nan
        return self.cell[_AT.D_SQUARES] / both if both > 0.0 else 0.0

    @property
    def cosine(self) -> float:
        """sum(xy) / sqrt(sum(x^2) sum(y^2)); NaN where a side is all zeros."""
        xx, yy = self._squares(_AT.X_SUM, _AT.X_M2), self._squares(_AT.Y_SUM, _AT.Y_M2)
        if not (xx > 0.0 and yy > 0.0):
            return math.nan
        if not self.cell[_AT.D_SQUARES]:
            return 1.0
        x, y, c = (self.cell[f] for f in (_AT.X_SUM, _AT.Y_SUM, _AT.XY_C))
        return float((c + x * (y / self.finite)) / (math.sqrt(xx) * math.sqrt(yy)))

    @property
    def correlation(self) -> float:
        """Pearson's correlation of x and y; NaN where a side is constant."""
        xx, yy = self.cell[_AT.X_M2], self.cell[_AT.Y_M2]
        if not (xx > 0.0 and yy > 0.0):
            return math.nan
        return float(self.cell[_AT.XY_C] / (math.sqrt(xx) * math.sqrt(yy)))

    def side(self, which: str) -> dict[str, float]:
        """Return min, max, mean and std (divided by n) of side 'x' or 'y' over the finite pairs."""
        low, high, total, second = (
            (_AT.X_MIN, _AT.X_MAX, _AT.X_SUM, _AT.X_M2)
            if which == "x"
            else (_AT.Y_MIN, _AT.Y_MAX, _AT.Y_SUM, _AT.Y_M2)
        )
        if not self.finite:
            return dict.fromkeys(("min", "max", "mean", "std"), math.nan)
        minimum, maximum = self.cell[low], self.cell[high]
        spread = math.ldexp(math.sqrt(self.cell[second] / self.finite), self._exponent)
        constant = minimum == maximum
        return {
            "min": minimum,
            "max": maximum,
            "mean": minimum if constant else self._mean(total),
            "std": 0.0 if constant else spread,
        }

    def non_finite(self, which: str) -> dict[str, int]:
        """Return the number of NaN, +inf and -inf of side 'x' or 'y'."""
        first = _AT.X_NAN if which == "x" else _AT.Y_NAN
        return {name: int(self.cell[first + at]) for at, name in enumerate(("nan", "inf", "-inf"))}

    @property
    def _exponent(self) -> int:
        return int(max(self.cell[_AT.EXPONENT], -5000.0))

    def _mean(self, field: int) -> float:
        if not self.finite:
            return math.nan
        return math.ldexp(self.cell[field] / self.finite, self._exponent)

    def _squares(self, total: int, second: int) -> float:
        """Return sum(v^2) / 2^2e from the mean and the second moment around it."""
        if not self.finite:
            return 0.0
        value = self.cell[total]
        return self.cell[second] + value * (value / self.finite)


def compare_values(
    x: Array,
    y: Array,
    *,
    dtypes: tuple[str, str],
    mask: Array | None = None,
    offsets: Int64 | None = None,
    tolerance: tuple[float, float] = (0.0, 0.0),
    origin: int = 0,
) -> tuple[Pairwise, Float64]:
    """Compare two arrays value by value.

    Args:
        x, y: of the same number of values, in memory order; bfloat16 as uint16.
        dtypes: their dtype tags. If only one of them is an integer, integers over 2^53 are rounded.
        mask: a bool per value; only values at True count.
        offsets: int64 [rows + 1]: the rows of the second result; by default one row.
        tolerance: (atol, rtol): a pair is over it where |d| > atol + rtol * max(|x|, |y|).
        origin: recorded in the locations of the result.

    Returns:
        The summary, and float64 [rows, len(ROW)].

    Raises:
        InvalidTensor: an unsupported dtype, or another number of values.
    """
    from stagescope_service.statistics.pairwise_kernel import accumulate_pairs

    x, y = np.ascontiguousarray(x).reshape(-1), np.ascontiguousarray(y).reshape(-1)
    if unknown := next((tag for tag in dtypes if tag not in KINDS), None):
        raise InvalidTensor(f"values of dtype {unknown} cannot be compared", expected=str(KINDS))
    if len(x) != len(y) or (mask is not None and mask.size != len(x)):
        raise InvalidTensor(f"{len(x)} values against {len(y)}", expected="as many on both sides")
    chosen = _NONE if mask is None else np.ascontiguousarray(mask, bool).reshape(-1).view(np.uint8)
    if offsets is None:
        offsets = np.array([0, len(x)], np.int64)
    rows = np.zeros((max(len(offsets) - 1, 0), len(ROW)))
    cell = np.empty(WIDTH)
    accumulate_pairs(
        x.view(np.uint8), KINDS.index(dtypes[0]), y.view(np.uint8), KINDS.index(dtypes[1]),
        chosen, offsets, np.array(tolerance, np.float64),
        rows, cell,
    )  # fmt: skip
    coordinates = (cell[_AT.D_ABS_MAX_AT], cell[_AT.UNEQUAL_AT], cell[_AT.OVER_AT])
    values = (x, dtypes[0]), (y, dtypes[1])
    locations = (
        ElementLocation(origin, int(at), *(value_of(*side, int(at)) for side in values))
        if at >= 0.0
        else None
        for at in coordinates
    )
    return Pairwise(tuple(cell.tolist()), *locations), rows


def value_of(values: Array, dtype: str, at: int) -> Number:
    """Return one value of a flat array as a Python number."""
    value = values[at]
    if dtype == "bfloat16":
        return float(np.array(int(value) << 16, np.uint32).view(np.float32))
    if dtype in ("float64", "float32", "float16"):
        return float(value)
    return int(value)


def warm(compiling: Callable[[], None]) -> None:
    """Compile the loops, or load them from disk, before several threads call them at once.

    Args:
        compiling: called before compilation, which takes about 20 seconds of CPU time.
    """
    from stagescope_service.statistics.jit import announced

    with announced(compiling):
        Pairwise.nothing()
        compare_values(np.zeros(1), np.zeros(1), dtypes=("float64", "float64"))
