"""The loops that fill the profiles of d: see `profile_bins`."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.statistics.cell import AT, Float64
from stagescope_service.statistics.jit import exact, inlined, reduction
from stagescope_service.statistics.profile_bins import (
    BINS,
    CHANCES,
    COARSEST,
    FINER,
    FINEST,
    NOT_FINITE,
    OVER_ONE,
    UNKNOWN,
    ZERO,
)


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


_PLACE, _END, _POSITION, _PROBABILITY, _LATTICE = (BINS * i for i in range(5))
_LOG_CHANCES: Final = np.log(CHANCES)
_BOUNDS: Final = np.array([-math.inf, *_LOG_CHANCES, math.nextafter(0.0, 1.0), math.inf])
"""Bounds of the bins of `probability`, as log-probs; a bin holds its lower one."""
_SCALE: Final = 2.0**-FINEST
_GROUP: Final = 64
"""Tokens that `_lattice` tests at once."""


_Sums = tuple[float, float, float, float]
_Two = tuple[_Sums, _Sums]


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
def _sums(d: Float64) -> tuple[float, float, float]:
    """Return the sums of d, |d| and d^2; a range(i, j) over d would not vectorize."""
    total = size = square = 0.0
    for i in range(d.size):
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
            total, size, square = _sums(d[i:j])
            _put(table, row + own, j - i, total, size, square)
        i = j


@reduction
def _sums_of_two(q: Float64, d: Float64, n: int, low: float, middle: float, high: float) -> _Two:
    """Return the sums of the tokens with low <= q < middle, and of those with middle <= q < high.

    Each are the number of tokens, and the sums of their d, |d| and d^2.
    """
    count = total = size = square = 0.0
    count2 = total2 = size2 = square2 = 0.0
    for i in range(n):
        first, second = low <= q[i] < middle, middle <= q[i] < high
        x, y = d[i] if first else 0.0, d[i] if second else 0.0
        count += 1.0 if first else 0.0
        count2 += 1.0 if second else 0.0
        total, total2 = total + x, total2 + y
        size, size2 = size + abs(x), size2 + abs(y)
        square, square2 = square + x * x, square2 + y * y
    return (count, total, size, square), (count2, total2, size2, square2)


@inlined
def _probability(q: Float64, d: Float64, n: int, part: Float64, table: Float64) -> None:
    """Add a block by the probability of q. One pass for each two bins that it touches is faster
    than one pass that picks each token's bin: it vectorizes."""
    own, low, high = 0, part[AT.Q_MIN], part[AT.Q_MAX]
    while _BOUNDS[own + 1] <= low:
        own += 1
    while own <= OVER_ONE and _BOUNDS[own] <= high:
        # The last bin has none behind it: its upper bound, inf, begins an empty one.
        end = _BOUNDS[own + 2] if own < OVER_ONE else math.inf
        first, second = _sums_of_two(q, d, n, _BOUNDS[own], _BOUNDS[own + 1], end)
        _put(table, _PROBABILITY + own, first[0], first[1], first[2], first[3])
        if own < OVER_ONE:
            _put(table, _PROBABILITY + own + 1, second[0], second[1], second[2], second[3])
        own += 2


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
    """Add the tokens on the lattice; they are few, so groups without one are skipped."""
    for i in range(0, n, _GROUP):
        group = d[i : i + _GROUP] if i + _GROUP < n else d[i:n]
        if _on_lattice(group, group.size) > 0:
            _lattice_of(group, table)


@exact
def _lattice_of(d: Float64, table: Float64) -> None:
    for i in range(d.size):
        scaled = abs(d[i]) * _SCALE
        if np.floor(scaled) == scaled and scaled > 0.0:
            own = COARSEST
            if scaled < 9.0e15:
                units = int(scaled)
                own = min(FINER + _bin_of(units & -units), COARSEST)
            _put(table, _LATTICE + own, 1.0, d[i], abs(d[i]), d[i] * d[i])


@inlined
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
