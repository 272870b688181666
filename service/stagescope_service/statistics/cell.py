"""A cell: the statistics of a set of tokens as one packed float64 vector.

Cells of disjoint sets of tokens merge into the cell of their union. Counts and sums add, extremes
take the extreme. Second moments follow Chan, Golub and LeVeque (Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances, 1979). The mean of a moment is its sum over `TOKENS`.

d = p - q. Fields `U` and `V` are e^p - 1 and e^q - 1: near certainty (1 - e^p ~ 1e-8) the moments
of e^p itself would be rounding noise. Field `A` is |e^p - e^q|, `W` the applied importance weight
minus 1. Probabilities and weights also have their own sum (`P_EXP_SUM`, `WEIGHT_SUM`, ...). Far
below 1, value - 1 keeps few digits of the value; near 1, the value keeps few of value - 1.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from functools import cached_property
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

VERSION: Final = 5
"""Incremented with every change of `Field`: stored vectors of another version are refused."""

Float64 = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]
Mask = npt.NDArray[np.unsignedinteger[Any]]
"""The bit patterns of a mask of any dtype."""
Array = npt.NDArray[np.generic]
"""An array of one of several dtypes; each function that accepts one documents them."""

ABS_TAILS: Final = (0.1, 0.5, 1.0, 5.0)
"""|d| above which a token counts as a tail."""
RATIO_TAILS: Final = ((0.9, 1.1), (0.5, 2.0))
"""Intervals of e^d outside which a token counts as a tail."""
EDGE: Final = 32
"""Maximum tokens per run of zeros that EDGE_CAPPED counts: bounds one endless repetition."""
UNDERFLOWS: Final = 1e-280
"""Second moment of probabilities below which their squares have few digits, or none."""
CONSTANT: Final = 1e-12
"""Standard deviation of probabilities, over their mean, below which they vary by rounding alone."""
CLAMP: Final = 20.0
"""Bound on d inside weights and chi-square, as verl's SAFETY_BOUND."""


class Field(enum.IntEnum):
    """Index of each number in the vector. Order: sums, minima, maxima, second moments."""

    TOKENS = 0
    """Tokens that count: mask 1, both streams finite."""
    MASKED = enum.auto()
    """Tokens under the mask, including non-finite ones."""
    P_NAN = enum.auto()
    P_POSINF = enum.auto()
    P_NEGINF = enum.auto()
    Q_NAN = enum.auto()
    Q_POSINF = enum.auto()
    Q_NEGINF = enum.auto()
    P_LACKS = enum.auto()
    """p is non-finite or exactly 0 where q is neither."""
    Q_LACKS = enum.auto()
    P_ZERO = enum.auto()
    Q_ZERO = enum.auto()
    P_POSITIVE = enum.auto()
    Q_POSITIVE = enum.auto()
    BOTH_ZERO = enum.auto()
    """p and q are both exactly 0."""
    P_BF16 = enum.auto()
    """p is representable in bfloat16 (0 is)."""
    Q_BF16 = enum.auto()
    SAME_BF16 = enum.auto()
    """p and q are the same number once both are rounded to bfloat16."""
    EQUAL = enum.auto()
    """p and q are the same number, in whatever dtypes; -0.0 and 0.0 are."""
    Q_GREATER = enum.auto()
    ABS_OVER_0 = enum.auto()
    ABS_OVER_1 = enum.auto()
    ABS_OVER_2 = enum.auto()
    ABS_OVER_3 = enum.auto()
    RATIO_BELOW_0 = enum.auto()
    RATIO_ABOVE_0 = enum.auto()
    RATIO_BELOW_1 = enum.auto()
    RATIO_ABOVE_1 = enum.auto()
    IS_HIGH = enum.auto()
    """Raw weight above the upper threshold of the run's settings."""
    IS_LOW = enum.auto()
    D_SUM = enum.auto()
    D_ABS_SUM = enum.auto()
    A_SUM = enum.auto()
    P_SUM = enum.auto()
    Q_SUM = enum.auto()
    U_SUM = enum.auto()
    V_SUM = enum.auto()
    P_EXP_SUM = enum.auto()
    """Sum of e^p; U_SUM is the sum of e^p - 1."""
    Q_EXP_SUM = enum.auto()
    W_SUM = enum.auto()
    RAW_SUM = enum.auto()
    """Sum of e^clamp(d) - 1: the raw weight minus 1."""
    WEIGHT_SUM = enum.auto()
    """Sum of the applied weight."""
    RATIO_SUM = enum.auto()
    """Sum of e^clamp(d): the raw weight."""
    K3_SUM = enum.auto()
    CHI2_SUM = enum.auto()
    EXP_ABS_SUM = enum.auto()
    P_LACKS_ABS = enum.auto()
    """Sum of |q| where p is exactly 0 and q is not."""
    Q_LACKS_ABS = enum.auto()
    """Sum of |p| where q is exactly 0 and p is not."""
    NEXT_N = enum.auto()
    """Pairs (p of a token, q of the next one in its run), for the shift by one."""
    NEXT_P_SUM = enum.auto()
    NEXT_Q_SUM = enum.auto()
    LAST_N = enum.auto()
    """Pairs (p of a token, q of the preceding one in its run)."""
    LAST_P_SUM = enum.auto()
    LAST_Q_SUM = enum.auto()
    LAG2_N = enum.auto()
    """Pairs of tokens at lag 2 in a run; NEXT_N counts those at lag 1."""
    AHEAD_1 = enum.auto()
    """Sum of |p of a token - q of the next one in its run|, over NEXT_N pairs."""
    BEHIND_1 = enum.auto()
    """Sum of |p of a token - q of the one before|, over NEXT_N pairs."""
    AHEAD_2 = enum.auto()
    """Sum of |p of a token - q of the second next one|, over LAG2_N pairs."""
    BEHIND_2 = enum.auto()
    SEGMENTS = enum.auto()
    """Contiguous stretches of the mask that the tokens come from."""
    EDGE_ZERO = enum.auto()
    """Tokens in the runs of p = q = 0 at the begin and the end of stretches."""
    EDGE_CAPPED = enum.auto()
    """The same with at most EDGE tokens of each such run."""
    TRAIL_CAPPED = enum.auto()
    """The part of EDGE_CAPPED in the runs at the end of stretches."""
    TRAIL_SQUARES = enum.auto()
    """Sum of the squared lengths of those runs, each capped at EDGE: how much they vary."""
    D_MIN = enum.auto()
    A_MIN = enum.auto()
    P_MIN = enum.auto()
    Q_MIN = enum.auto()
    W_MIN = enum.auto()
    D_MAX = enum.auto()
    A_MAX = enum.auto()
    P_MAX = enum.auto()
    Q_MAX = enum.auto()
    W_MAX = enum.auto()
    D_M2 = enum.auto()
    A_M2 = enum.auto()
    P_M2 = enum.auto()
    Q_M2 = enum.auto()
    U_M2 = enum.auto()
    V_M2 = enum.auto()
    W_M2 = enum.auto()
    RATIO_M2 = enum.auto()
    PQ_C = enum.auto()
    UV_C = enum.auto()
    NEXT_P_M2 = enum.auto()
    NEXT_Q_M2 = enum.auto()
    NEXT_C = enum.auto()
    LAST_P_M2 = enum.auto()
    LAST_Q_M2 = enum.auto()
    LAST_C = enum.auto()


# numba up to 0.62 does not accept an enum member as an array index.
_Index = collections.namedtuple("_Index", Field.__members__)  # type: ignore[misc]
AT: Final = cast("type[Field]", _Index(*map(int, Field)))
"""`Field` as plain ints, for the compiled loops."""

WIDTH: Final = len(Field)
MINIMA: Final = slice(Field.D_MIN, Field.D_MAX)
MAXIMA: Final = slice(Field.D_MAX, Field.D_M2)
SUMS: Final = slice(0, Field.D_MIN)

MOMENTS: Final = (
    (Field.TOKENS, Field.D_SUM, Field.D_SUM, Field.D_M2),
    (Field.TOKENS, Field.A_SUM, Field.A_SUM, Field.A_M2),
    (Field.TOKENS, Field.P_SUM, Field.P_SUM, Field.P_M2),
    (Field.TOKENS, Field.Q_SUM, Field.Q_SUM, Field.Q_M2),
    (Field.TOKENS, Field.U_SUM, Field.U_SUM, Field.U_M2),
    (Field.TOKENS, Field.V_SUM, Field.V_SUM, Field.V_M2),
    (Field.TOKENS, Field.W_SUM, Field.W_SUM, Field.W_M2),
    (Field.TOKENS, Field.RAW_SUM, Field.RAW_SUM, Field.RATIO_M2),
    (Field.TOKENS, Field.P_SUM, Field.Q_SUM, Field.PQ_C),
    (Field.TOKENS, Field.U_SUM, Field.V_SUM, Field.UV_C),
    (Field.NEXT_N, Field.NEXT_P_SUM, Field.NEXT_P_SUM, Field.NEXT_P_M2),
    (Field.NEXT_N, Field.NEXT_Q_SUM, Field.NEXT_Q_SUM, Field.NEXT_Q_M2),
    (Field.NEXT_N, Field.NEXT_P_SUM, Field.NEXT_Q_SUM, Field.NEXT_C),
    (Field.LAST_N, Field.LAST_P_SUM, Field.LAST_P_SUM, Field.LAST_P_M2),
    (Field.LAST_N, Field.LAST_Q_SUM, Field.LAST_Q_SUM, Field.LAST_Q_M2),
    (Field.LAST_N, Field.LAST_P_SUM, Field.LAST_Q_SUM, Field.LAST_C),
)
"""(count, sum of x, sum of y, co-moment of x and y) of every second moment, in `Field` order."""

_N, _X, _Y, _M = (np.array(column) for column in zip(*MOMENTS, strict=True))

SMALL: Final = 0.5
"""Mean below which moments are merged by the sums of the values, not by those of value - 1."""
SUM_OF_WEIGHTS: Final = {Field.W_SUM: Field.WEIGHT_SUM, Field.RAW_SUM: Field.RATIO_SUM}
OWN_SUMS: Final = {
    **SUM_OF_WEIGHTS,
    Field.U_SUM: Field.P_EXP_SUM,
    Field.V_SUM: Field.Q_EXP_SUM,
}
"""Sum of value - 1 -> the sum of the values."""
_OWN_X, _OWN_Y = (np.array([OWN_SUMS.get(Field(x), x) for x in sums]) for sums in (_X, _Y))


def empty(*shape: int) -> Float64:
    """Return cells `[*shape, WIDTH]` of no token, the neutral element of `merge`."""
    cells = np.zeros((*shape, WIDTH))
    cells[..., MINIMA] = np.inf
    cells[..., MAXIMA] = -np.inf
    return cells


def without_settings(cells: Float64) -> Float64:
    """Return cells `[..., WIDTH]` as a run without settings has them: its weights are the raw ones.

    Every other number is the same whatever the settings are.
    """
    raw = cells.copy()
    has_tokens = cells[..., Field.TOKENS] > 0
    for weight, own in (
        (Field.W_SUM, Field.RAW_SUM),
        (Field.WEIGHT_SUM, Field.RATIO_SUM),
        (Field.W_M2, Field.RATIO_M2),
    ):
        raw[..., weight] = cells[..., own]
    for weight, own in ((Field.W_MIN, Field.D_MIN), (Field.W_MAX, Field.D_MAX)):
        least = np.expm1(np.clip(cells[..., own], -CLAMP, CLAMP))
        raw[..., weight] = np.where(has_tokens, least, cells[..., weight])
    raw[..., [Field.IS_HIGH, Field.IS_LOW]] = 0.0
    return raw


def merge(cells: Float64) -> Float64:
    """Merge cells `[k, WIDTH]` of disjoint tokens into one `[WIDTH]`; empty for k = 0."""
    merged: Float64 = merge_groups(np.zeros(len(cells), np.int64), 1, cells)[0]
    return merged


def merge_groups(groups: Int64, slots: int, cells: Float64) -> Float64:
    """Merge cells `[k, WIDTH]` by slot: cell i goes to row `groups[i]` of `[slots, WIDTH]`.

    The cells of a slot are merged in their order.
    """
    merged = empty(slots)
    if not len(cells):
        return merged
    if (groups[1:] < groups[:-1]).any():
        order = np.argsort(groups, kind="stable")
        groups, cells = groups[order], cells[order]
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    slot, count = groups[first], np.diff(first, append=len(groups))
    # An infinite sum (e^d may overflow) makes the moments NaN, as intended.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        found = np.empty((len(slot), WIDTH))
        found[:, SUMS] = np.add.reduceat(cells[:, SUMS], first)
        found[:, MINIMA] = np.minimum.reduceat(cells[:, MINIMA], first)
        found[:, MAXIMA] = np.maximum.reduceat(cells[:, MAXIMA], first)
        counts, total = cells[:, _N], found[:, _N]
        x, y = (
            _deviations(cells, found, own, usual, (counts, total), count)
            for own, usual in ((_OWN_X, _X), (_OWN_Y, _Y))
        )
        found[:, _M] = np.add.reduceat(cells[:, _M], first) + np.add.reduceat(counts * x * y, first)
    merged[slot] = found
    return merged


def _deviations(
    cells: Float64,
    merged: Float64,
    own: Int64,
    usual: Int64,
    counts: tuple[Float64, Float64],
    repeats: Int64,
) -> Float64:
    """Return the means of cells `[k, WIDTH]` less the mean of the merged cell that each is in.

    Args:
        cells: sorted by the merged cell.
        merged: `[n, WIDTH]`, with its sums.
        own: fields of the sums of values, for means below `SMALL`.
        usual: fields of the sums of value - 1, or of the values.
        counts: of the cells, and of the merged ones.
        repeats: number of cells in each merged cell.
    """
    of_cells, of_merged = counts
    is_small = merged[:, own] < SMALL * of_merged
    total = np.where(is_small, merged[:, own], merged[:, usual])
    sums = np.where(np.repeat(is_small, repeats, axis=0), cells[:, own], cells[:, usual])
    means = np.divide(sums, of_cells, out=np.zeros_like(sums), where=of_cells > 0)
    mean = np.divide(total, of_merged, out=np.zeros_like(total), where=of_merged > 0)
    deviations: Float64 = np.where(of_cells > 0, means - np.repeat(mean, repeats, axis=0), 0.0)
    return deviations


@dataclasses.dataclass(frozen=True)
class Cell:
    """A view of a cell's vector as statistics. All are NaN if no token counts."""

    vector: Float64

    @cached_property
    def _numbers(self) -> list[float]:
        numbers: list[float] = self.vector.tolist()
        return numbers

    def __getitem__(self, field: Field) -> float:
        return self._numbers[field]

    @cached_property
    def tokens(self) -> int:
        """Tokens that count."""
        return int(self[Field.TOKENS])

    @cached_property
    def masked(self) -> int:
        """Tokens under the mask."""
        return int(self[Field.MASKED])

    def mean(self, total: Field) -> float:
        """Return the mean over the counted tokens of the quantity whose sum is `total`."""
        return self[total] / self.tokens if self.tokens else math.nan

    def mean_weight(self, above_1: Field) -> float:
        """Return the mean of the weights, given the sum of weight - 1: W_SUM or RAW_SUM."""
        return self.mean(SUM_OF_WEIGHTS[above_1])

    def std(self, second: Field, low: Field, high: Field) -> float:
        """Return the standard deviation with n - 1: NaN below two tokens, as torch.std; 0 if min =
        max; inf if its sum exceeds float64, in either direction."""
        if self.tokens < 2:
            return math.nan
        if self[low] == self[high]:
            return 0.0
        if math.isinf(self[second]):
            return math.inf
        return math.sqrt(max(self[second], 0.0) / (self.tokens - 1))

    def extreme(self, field: Field) -> float:
        """Return a minimum or maximum."""
        return self[field] if self.tokens else math.nan

    @property
    def abs_max(self) -> float:
        """Maximum of |d|."""
        return max(abs(self[Field.D_MIN]), abs(self[Field.D_MAX])) if self.tokens else math.nan

    def carrying(self, size: Field, total: Field, moment: Field) -> float:
        """Return (sum |x|)^2 / (sum x^2): the number of tokens of one size with these sums.

        Noise of a few large tokens is noise of few, however many others exist.

        Args:
            size: the sum of |x|.
            total: the sum of x.
            moment: the sum of squares of x around its mean.
        """
        if not self.tokens:
            return 0.0
        squares = self[moment] + self[total] ** 2 / self.tokens
        return self[size] ** 2 / squares if squares > 0.0 else 0.0

    def correlation(self, x2: Field, y2: Field, xy: Field) -> float:
        """Return Pearson's correlation; NaN if p or q is constant, or a moment exceeds float64. For
        e^p and e^q it is also NaN if one varies only by rounding or its squares underflow.
        """
        if self[Field.P_MIN] >= self[Field.P_MAX] or self[Field.Q_MIN] >= self[Field.Q_MAX]:
            return math.nan
        is_of_probs = x2 is Field.U_M2
        if is_of_probs and (self._is_flat(Field.U_SUM, x2) or self._is_flat(Field.V_SUM, y2)):
            return math.nan
        scale = math.sqrt(max(self[x2], 0.0)) * math.sqrt(max(self[y2], 0.0))
        if not 0.0 < scale < math.inf:
            return math.nan
        correlation = self[xy] / scale
        return math.nan if math.isnan(correlation) else min(1.0, max(-1.0, correlation))

    def _is_flat(self, above_1: Field, second: Field) -> bool:
        """Return whether probabilities vary too little for float64; `above_1`: U_SUM or V_SUM."""
        least = CONSTANT * min(abs(self[above_1]), self[OWN_SUMS[above_1]]) / self.tokens
        return self[second] < max(UNDERFLOWS, self.tokens * (least * least))

    def share(self, *counts: Field) -> float:
        """Share of the counted tokens."""
        return sum(self[field] for field in counts) / self.tokens if self.tokens else math.nan
