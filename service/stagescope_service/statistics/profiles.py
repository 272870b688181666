"""Profiles: sums of d by where a token stands, how probable it is, and how coarse its d is.

d = p - q. The bins of every dimension add up to all tokens under the mask, and profiles of disjoint
tokens add. Indexes count in powers of two, so that a bin is a contiguous stretch of tokens. Most
blocks lie inside one bin, whose sums the block's cell already has.

* `place`, `end`, `position`: tokens since the first one of the round, tokens until its last one,
  position in the sample. Bin 0 is index 0, bin b > 0 the indexes 2^(b-1) to 2^b - 1. `LAST` of
  `end` is the last token of the sample; `UNKNOWN` are the tokens of a round that may begin or end
  in another piece of the sample.
* `probability`: e^q by `CHANCES`; a bin holds its lower bound.
* `lattice`: the largest power of two that d is a multiple of. Values that were rounded to a
  narrow dtype differ by a small multiple of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from stagescope_service.statistics.cell import AT, Float64, Int64
from stagescope_service.statistics.jit import exact, reduction

Dimension = Literal["place", "end", "position", "probability", "lattice"]
Edge = Literal["first", "last"]
"""The first or last tokens of rounds."""
DIMENSIONS: Final[tuple[Dimension, ...]] = ("place", "end", "position", "probability", "lattice")
BINS: Final = 66
LAST: Final = 64
UNKNOWN: Final = 65

CHANCES: Final = (1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
"""Bounds of the bins of probabilities, ascending."""
OVER_ONE: Final = len(CHANCES) + 1
"""Bin of `probability`: q is above 0, so it is no log-prob."""
NOT_FINITE: Final = UNKNOWN
"""Bin of `probability` if q is not finite, and of `lattice` if d is not."""

FINEST: Final = -12
ZERO: Final = 0
FINER: Final = 1
"""Bin of `lattice`: d is no multiple of 2^FINEST; bin 2 + k has d of the lattice 2^(FINEST + k)."""
COARSEST: Final = FINER + 1 - FINEST
"""Bin of `lattice`: d is a multiple of 1."""

COLUMNS: Final = ("tokens", "nonfinite", "d_sum", "d_abs_sum", "d_square_sum")
WIDTH: Final = len(COLUMNS)
ROWS: Final = len(DIMENSIONS) * BINS


def exponent(key: int) -> int:
    """Return k of a bin of `lattice` whose d are multiples of 2^k."""
    return FINEST + key - FINER - 1


class Bin(NamedTuple):
    """The sums of one bin; sums of d are in nats over `tokens`, whose p and q are finite."""

    key: int
    tokens: int
    nonfinite: int
    d_sum: float
    d_abs_sum: float
    d_square_sum: float

    @classmethod
    def of(cls, key: int, values: Float64) -> Bin:
        """Return a bin of `COLUMNS`."""
        tokens, nonfinite, *sums = values.tolist()
        return cls(key, int(tokens), int(nonfinite), *sums)

    @property
    def carrying(self) -> float:
        """(sum |d|)^2 / sum d^2: the number of tokens of one size with these sums."""
        if self.d_square_sum == 0.0:
            return 0.0
        return self.d_abs_sum * (self.d_abs_sum / self.d_square_sum)


@dataclasses.dataclass(frozen=True)
class Profiles:
    """`keys` int64 [n], ascending: dimension * BINS + bin; `values` float64 [n, WIDTH]."""

    keys: Int64
    values: Float64

    @classmethod
    def of_table(cls, table: Float64) -> Profiles:
        """Return the bins of a table [ROWS, WIDTH] that hold a token."""
        keys = np.flatnonzero(table[:, 0] + table[:, 1])
        return cls(keys, table[keys])

    @classmethod
    def merge(cls, profiles: Sequence[Profiles]) -> Profiles:
        """Add up profiles of disjoint tokens; the order affects the last bits of sums."""
        table = np.zeros((ROWS, WIDTH))
        for each in profiles:
            table[each.keys] += each.values
        return cls.of_table(table)

    def bins(self, dimension: Dimension) -> tuple[Bin, ...]:
        """Return the bins of a dimension that hold a token, in the order of their keys."""
        base = DIMENSIONS.index(dimension) * BINS
        own = (self.keys >= base) & (self.keys < base + BINS)
        return tuple(
            Bin.of(key - base, row)
            for key, row in zip(self.keys[own].tolist(), self.values[own], strict=True)
        )

    def edge_tokens(self, edge: Edge) -> tuple[Bin, Bin] | None:
        """Return the sums of the first or the last tokens of rounds, and of the others.

        Tokens whose place is unknown are in neither. None: one of the two has no token.
        """
        at_edge, others = [], []
        for each in self.bins("place" if edge == "first" else "end"):
            if each.key in (0, LAST):
                at_edge.append(each)
            elif each.key != UNKNOWN:
                others.append(each)
        if not (sum(each.tokens for each in at_edge) and sum(each.tokens for each in others)):
            return None
        return add_bins(at_edge), add_bins(others)


def add_bins(bins: Sequence[Bin]) -> Bin:
    """Return the sums of several bins under the key of the first."""
    _, tokens, nonfinite, *sums = map(sum, zip(*bins, strict=True))
    return Bin(bins[0].key, int(tokens), int(nonfinite), *sums)


class Placement(NamedTuple):
    """The place of a token in its round and its sample."""

    before: int
    """Tokens of its round before it, negative if that is not known."""
    behind: int
    """Tokens of its round after it, negative if that is not known."""
    last: int
    """The bin of the round's last token in `end`."""
    position: int
    """Its position in its sample."""


_PLACE, _END, _POSITION, _PROBABILITY, _LATTICE = (BINS * i for i in range(len(DIMENSIONS)))
_LOG_CHANCES: Final = np.log(CHANCES)
_BOUNDS: Final = np.array([-math.inf, *_LOG_CHANCES, math.nextafter(0.0, 1.0), math.inf])
"""Bounds of the bins of `probability`, as log-probs; a bin holds its lower one."""
_SCALE: Final = 2.0**-FINEST


@exact
def _bin_of(index: int) -> int:
    """Return the number of binary digits of an index, 0 for those below 1."""
    if index < 1:
        return 0
    return int(np.float64(index).view(np.int64) >> 52) - 1022


@exact
def _put(table: Float64, row: int, n: float, d: float, size: float, square: float) -> None:
    table[row, 0] += n
    table[row, 2] += d
    table[row, 3] += size
    table[row, 4] += square


@reduction
def _sums(d: Float64, begin: int, end: int) -> tuple[float, float, float]:
    total = size = square = 0.0
    for i in range(begin, end):
        total += d[i]
        size += abs(d[i])
        square += d[i] * d[i]
    return total, size, square


@exact
def _square_of(part: Float64, n: int) -> float:
    """Return the sum of d^2 of a block from its cell."""
    return float(part[AT.D_M2] + part[AT.D_SUM] * (part[AT.D_SUM] / n))


@exact
def _span(
    d: Float64, n: int, index: int, step: int, row: int, zero: int, part: Float64, table: Float64
) -> None:
    """Add n tokens with the indexes index, index + step, ...; index 0 goes to the bin `zero`."""
    i = 0
    while i < n:
        at = index + step * i
        own = _bin_of(at)
        # The first token behind this bin: indexes rise to 2^own, or fall below 2^(own - 1).
        inside = (1 << own) - at if step > 0 else at - ((1 << own) >> 1) + 1
        j = i + inside if 0 < inside < n - i else n
        own = own if at > 0 else zero
        if j - i == n:
            _put(table, row + own, n, part[AT.D_SUM], part[AT.D_ABS_SUM], _square_of(part, n))
        else:
            total, size, square = _sums(d, i, j)
            _put(table, row + own, j - i, total, size, square)
        i = j


@reduction
def _sums_between(
    q: Float64, d: Float64, n: int, low: float, high: float
) -> tuple[float, float, float, float]:
    """Return the number of tokens with low <= q < high, and the sums of their d, |d| and d^2."""
    count = total = size = square = 0.0
    for i in range(n):
        inside, x = (q[i] >= low) & (q[i] < high), d[i]
        count += 1.0 if inside else 0.0
        total += x if inside else 0.0
        size += abs(x) if inside else 0.0
        square += x * x if inside else 0.0
    return count, total, size, square


@exact
def _probability(q: Float64, d: Float64, n: int, part: Float64, table: Float64) -> None:
    """Add a block by the probability of q. One pass for each bin that it touches is faster than one
    pass that picks each token's bin: it vectorizes."""
    for own in range(OVER_ONE + 1):
        low, high = _BOUNDS[own], _BOUNDS[own + 1]
        if low <= part[AT.Q_MAX] and part[AT.Q_MIN] < high:
            count, total, size, square = _sums_between(q, d, n, low, high)
            _put(table, _PROBABILITY + own, count, total, size, square)


@reduction
def _on_lattice(d: Float64, n: int) -> int:
    found = 0
    for i in range(n):
        scaled = d[i] * _SCALE
        found += np.floor(scaled) == scaled
    return found


@reduction
def _off_lattice(d: Float64, n: int) -> tuple[float, float, float, float]:
    """Return the number of tokens whose d is finer than the lattice, and the sums of their d, |d|
    and d^2."""
    count = total = size = square = 0.0
    for i in range(n):
        x = d[i]
        scaled = x * _SCALE
        finer = np.floor(scaled) != scaled
        count += 1.0 if finer else 0.0
        total += x if finer else 0.0
        size += abs(x) if finer else 0.0
        square += x * x if finer else 0.0
    return count, total, size, square


@exact
def _lattice(d: Float64, n: int, table: Float64) -> None:
    for i in range(n):
        scaled = abs(d[i]) * _SCALE
        if np.floor(scaled) == scaled and scaled > 0.0:
            own = COARSEST
            if scaled < 9.0e15:
                units = int(scaled)
                own = min(FINER + _bin_of(units & -units), COARSEST)
            _put(table, _LATTICE + own, 1.0, d[i], abs(d[i]), d[i] * d[i])


@exact
def add(
    q: Float64, d: Float64, n: int, placement: Placement, part: Float64, table: Float64
) -> None:
    """Add a block of n tokens with finite p and q to the table [ROWS, WIDTH].

    Args:
        q, d: float64 [n].
        n: the number of tokens.
        placement: the place of the first token.
        part: the block's cell.
        table: added to.
    """
    place, behind, last, position = placement
    total, size, square = part[AT.D_SUM], part[AT.D_ABS_SUM], _square_of(part, n)
    if place >= 0:
        _span(d, n, place, 1, _PLACE, 0, part, table)
    else:
        _put(table, _PLACE + UNKNOWN, n, total, size, square)
    if behind >= 0:
        _span(d, n, behind, -1, _END, last, part, table)
    else:
        _put(table, _END + UNKNOWN, n, total, size, square)
    _span(d, n, position, 1, _POSITION, 0, part, table)
    _probability(q, d, n, part, table)
    equal = part[AT.EQUAL]
    table[_LATTICE + ZERO, 0] += equal
    if _on_lattice(d, n) > equal:
        count, total, size, square = _off_lattice(d, n)
        _put(table, _LATTICE + FINER, count, total, size, square)
        _lattice(d, n, table)
    else:
        _put(table, _LATTICE + FINER, n - equal, total, size, square)


@exact
def add_non_finite(q: float, placement: Placement, table: Float64) -> None:
    """Count a token whose p or q is not finite."""
    place, behind, last, position = placement
    table[_PLACE + (_bin_of(place) if place >= 0 else UNKNOWN), 1] += 1.0
    end = UNKNOWN if behind < 0 else (last if behind == 0 else _bin_of(behind))
    table[_END + end, 1] += 1.0
    table[_POSITION + _bin_of(position), 1] += 1.0
    own = 0
    for k in range(_LOG_CHANCES.size):
        own += int(q >= _LOG_CHANCES[k])
    own += int(q > 0.0)
    table[_PROBABILITY + (own if math.isfinite(q) else NOT_FINITE), 1] += 1.0
    table[_LATTICE + NOT_FINITE, 1] += 1.0
