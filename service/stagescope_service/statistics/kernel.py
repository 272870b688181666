"""One pass over the model's tokens: cells, histograms, worst tokens, rows.

Each segment is processed in blocks of at most 256 tokens. Each block becomes a cell (see `blocks`),
which merges into the segment's cell. That cell merges into those of its round, turn, staleness and
row.
"""

from __future__ import annotations

import math
from typing import Final

import numba
import numpy as np

from stagescope_service.statistics import cell as _cell
from stagescope_service.statistics import profiles
from stagescope_service.statistics.blocks import (
    all_finite,
    exponentials_of_d,
    exponentials_of_d_wide,
    exponentials_of_q,
    kind_of_non_finite,
    lag_sums,
    lag_sums_across,
    lagged,
    larger,
    load,
    log_prob_sums,
    probability_sums,
    probability_sums_wide,
    ranges,
    rounding,
    smaller,
)
from stagescope_service.statistics.cell import AT, EDGE, Float64, Int64, UInt8, UInt32
from stagescope_service.statistics.counts import HISTOGRAM_HALF as HISTOGRAM_HALF
from stagescope_service.statistics.counts import histogram, tails, weights
from stagescope_service.statistics.jit import array_type, entry, exact, input_type, tuple_type
from stagescope_service.statistics.profiles import Counts, Placement

BLOCK: Final = 256

_WIDTH: Final = _cell.WIDTH
_FIRST_MIN: Final = int(AT.D_MIN)
_FIRST_MAX: Final = int(AT.D_MAX)
_FIRST_SECOND: Final = int(AT.D_M2)
_MOMENTS: Final = np.array(_cell.MOMENTS, np.int64)
_N: Final = int(AT.TOKENS)
_OWN_SUMS: Final = np.array([_cell.OWN_SUMS.get(field, field) for field in _cell.Field], np.int64)
_SMALL: Final = _cell.SMALL


@exact
def _reset(cell: Float64) -> None:
    for i in range(_WIDTH):
        cell[i] = 0.0
    for i in range(_FIRST_MIN, _FIRST_MAX):
        cell[i] = math.inf
    for i in range(_FIRST_MAX, _FIRST_SECOND):
        cell[i] = -math.inf


@exact
def _merge_into(cell: Float64, other: Float64) -> None:
    """Merge `other` into `cell` by Chan's formula."""
    for i in range(_MOMENTS.shape[0]):
        n, x, y = _MOMENTS[i, 0], _MOMENTS[i, 1], _MOMENTS[i, 2]
        a, b, m = cell[n], other[n], _FIRST_SECOND + i
        cell[m] += other[m]
        if a > 0.0 and b > 0.0:
            own_x, own_y = _OWN_SUMS[x], _OWN_SUMS[y]
            if own_x != x and cell[own_x] + other[own_x] < _SMALL * (a + b):
                x = own_x
            if own_y != y and cell[own_y] + other[own_y] < _SMALL * (a + b):
                y = own_y
            dx = other[x] / b - cell[x] / a
            dy = dx if x == y else other[y] / b - cell[y] / a
            cell[m] += dx * dy * (a * b / (a + b))
    for i in range(_FIRST_MIN):
        cell[i] += other[i]
    for i in range(_FIRST_MIN, _FIRST_MAX):
        cell[i] = other[i] if other[i] < cell[i] else cell[i]
    for i in range(_FIRST_MAX, _FIRST_SECOND):
        cell[i] = other[i] if other[i] > cell[i] else cell[i]


@exact
def _sorts_after(kept: Float64, row: int, key: tuple[float, float, float]) -> bool:
    for j in range(3):
        if kept[row, j] != key[j]:
            return bool(kept[row, j] > key[j])
    return False


@exact
def _keep_least(
    kept: Float64, ids: Int64, used: int, key: tuple[float, float, float], token: int, segment: int
) -> int:
    """Keep (key, token, segment) if it is among the K smallest; the largest is kept at 0.

    `kept` float64 [K, 3] holds the keys (compared left to right), `ids` int64 [K, 2].
    """
    size, place = kept.shape[0], 0
    if used < size:
        place, used = used, used + 1
    elif not _sorts_after(kept, 0, key):
        return used
    kept[place, 0], kept[place, 1], kept[place, 2] = key
    ids[place, 0], ids[place, 1] = token, segment
    if used == size:
        largest = 0
        for i in range(1, size):
            if _sorts_after(kept, i, (kept[largest, 0], kept[largest, 1], kept[largest, 2])):
                largest = i
        for j in range(3):
            kept[0, j], kept[largest, j] = kept[largest, j], kept[0, j]
        for j in range(2):
            ids[0, j], ids[largest, j] = ids[largest, j], ids[0, j]
    return used


@exact
def _block(
    p: Float64,
    q: Float64,
    n: int,
    rule: Float64,
    work: tuple[Float64, ...],
    carry: Float64,
    part: Float64,
    cell: Float64,
) -> None:
    """Fill the cell `part` from n finite tokens and merge it into the segment's `cell`."""
    d, em1, v, exp_q, k3, exp_d = work
    _reset(part)
    part[_N] = n
    ranges(p, q, d, n, part)
    following, preceding = log_prob_sums(p, q, d, n, part)
    lagged(p, q, n, following, 0, carry, part)
    lagged(p, q, n, preceding, 1, carry, part)
    lag_sums(p, q, n, part)
    lag_sums_across(p, q, n, carry, part)
    rounding(p, q, n, part)
    if n > 1:
        carry[2], carry[3], carry[4] = 2.0, p[n - 2], q[n - 2]
    else:
        carry[2], carry[3], carry[4] = smaller(carry[2] + 1.0, 2.0), carry[0], carry[1]
    carry[0], carry[1] = p[n - 1], q[n - 1]
    largest = larger(part[AT.D_MAX], -part[AT.D_MIN])
    narrow = largest <= 700.0
    if narrow:
        exponentials_of_d(d, n, em1, k3, exp_d)
    else:
        exponentials_of_d_wide(d, n, em1, k3, exp_d)
    if narrow and part[AT.Q_MIN] >= -700.0 and larger(part[AT.P_MAX], part[AT.Q_MAX]) <= 300.0:
        exponentials_of_q(q, n, v, exp_q)
        probability_sums(em1, k3, exp_d, v, exp_q, n, part)
    else:
        probability_sums_wide(p, q, em1, k3, exp_d, n, part)
    tails(d, em1, n, part)
    weights(em1, exp_d, n, rule, part)
    _merge_into(cell, part)


@exact
def _non_finite(x: float, y: float, cell: Float64) -> None:
    """Count a token with non-finite p = x or q = y."""
    x_bad, y_bad = not math.isfinite(x), not math.isfinite(y)
    if x_bad:
        cell[AT.P_NAN + kind_of_non_finite(x)] += 1.0
    if y_bad:
        cell[AT.Q_NAN + kind_of_non_finite(y)] += 1.0
    if x_bad and not y_bad and y != 0.0:
        cell[AT.P_LACKS] += 1.0
    if y_bad and not x_bad and x != 0.0:
        cell[AT.Q_LACKS] += 1.0


@exact
def _row_add(row: Float64, cell: Float64) -> None:
    row[0] += cell[_N]
    row[1] += cell[AT.P_SUM]
    row[2] += cell[AT.Q_SUM]
    row[3] += cell[AT.D_SUM]
    row[4] += cell[AT.D_ABS_SUM]
    if cell[_N] > 0.0:
        row[5] = larger(row[5], larger(abs(cell[AT.D_MIN]), abs(cell[AT.D_MAX])))
    for i in range(4):
        row[6 + i] += cell[AT.ABS_OVER_0 + i]
    row[10] += cell[AT.RATIO_BELOW_0] + cell[AT.RATIO_ABOVE_0]
    row[11] += cell[AT.RATIO_BELOW_1] + cell[AT.RATIO_ABOVE_1]
    row[12] += cell[AT.RAW_SUM]
    row[13] += cell[AT.W_SUM]
    row[14] += cell[AT.MASKED] - cell[_N]
    row[15] += cell[AT.NEXT_N]
    row[16] += cell[AT.LAG2_N]
    for i in range(4):
        row[17 + i] += cell[AT.AHEAD_1 + i]
    row[21] += cell[AT.WEIGHT_SUM]
    if cell[_N] > 0.0:
        p_mean, q_mean = cell[AT.P_SUM] / cell[_N], cell[AT.Q_SUM] / cell[_N]
        row[22] += cell[AT.P_M2] + p_mean * cell[AT.P_SUM]
        row[23] += cell[AT.Q_M2] + q_mean * cell[AT.Q_SUM]
        row[24] += cell[AT.PQ_C] + p_mean * cell[AT.Q_SUM]


@exact
def _keep_first_unequal(
    d: Float64, n: int, at: tuple[float, int, int, int], kept: Float64, ids: Int64, used: int
) -> int:
    """Keep the first token of a block whose d is not 0; later ones of its segment sort after it.

    `at` is the sample's order, the block's first token, the offset from a token to its position,
    and the segment.
    """
    order, first, position, segment = at
    for k in range(n):
        if d[k] != 0.0:
            key = (0.0, order, float(position + first + k))
            return _keep_least(kept, ids, used, key, first + k, segment)
    return used


@exact
def _keep_worst(
    d: Float64, n: int, largest: float, at: tuple[float, int, int, int],
    kept: Float64, ids: Int64, used: int,
) -> int:  # fmt: skip
    """Keep the tokens of a block that are among the worst; `largest` is its largest |d|."""
    order, first, position, segment = at
    bound = -kept[0, 0] if used == kept.shape[0] else 0.0
    if largest < bound:
        return used
    for k in range(n):
        x = abs(d[k])
        if x >= bound and x > 0.0:
            key = (-x, order, float(position + first + k))
            used = _keep_least(kept, ids, used, key, first + k, segment)
            if used == kept.shape[0]:
                bound = -kept[0, 0]
    return used


@exact
def _edges(
    p_raw: UInt8, p_kind: int, q_raw: UInt8, q_kind: int, start: int, stop: int,
    p: Float64, q: Float64, cell: Float64,
) -> None:  # fmt: skip
    """Count the zeros of both streams with which a segment begins and ends."""
    lead, base = 0, start
    while base < stop and lead == base - start:
        size = BLOCK if stop - base > BLOCK else stop - base
        load(p_raw, p_kind, base, p, size)
        load(q_raw, q_kind, base, q, size)
        j = 0
        while j < size and p[j] == 0.0 and q[j] == 0.0:
            j += 1
        lead += j
        base += size
    trail, end, last = 0, stop, start + lead
    while end > last and trail == stop - end:
        size = BLOCK if end - last > BLOCK else end - last
        load(p_raw, p_kind, end - size, p, size)
        load(q_raw, q_kind, end - size, q, size)
        j = size
        while j > 0 and p[j - 1] == 0.0 and q[j - 1] == 0.0:
            j -= 1
        trail += size - j
        end -= size
    cell[AT.EDGE_ZERO] = lead + trail
    last_run = smaller(trail, EDGE)
    cell[AT.EDGE_CAPPED] = smaller(lead, EDGE) + last_run
    cell[AT.TRAIL_CAPPED] = last_run
    cell[AT.TRAIL_SQUARES] = last_run * last_run


@exact
def _moved(head: Placement, by: int) -> Placement:
    """Return the place of a token some tokens after the head of its segment."""
    before, behind, last, position = head
    return Placement(before + by if before >= 0 else before, behind - by, last, position + by)


_F2, _I2 = array_type(numba.float64, 2), array_type(numba.int64, 2)


@entry(
    tuple_type(numba.int64, numba.int64, numba.int64)(
        input_type(numba.uint8), numba.int64, input_type(numba.uint8), numba.int64,
        input_type(numba.int64, 2), input_type(numba.int64, 2), input_type(numba.int64, 2),
        input_type(numba.int64, 2), input_type(numba.float64),
        _F2, _F2, _F2, _F2, array_type(numba.uint32, 2), _F2,
        _F2, _I2, _F2, _I2, _F2, _I2,
    )
)  # fmt: skip
def accumulate(
    p_raw: UInt8, p_kind: int, q_raw: UInt8, q_kind: int,
    segments: Int64, slots: Int64, keys: Int64, placement: Int64, rule: Float64,
    rounds: Float64, turns: Float64, ages: Float64, rows: Float64, histograms: UInt32,
    profile: Float64,
    worst: Float64, worst_ids: Int64, bad: Float64, bad_ids: Int64,
    unequal: Float64, unequal_ids: Int64,
) -> tuple[int, int, int]:  # fmt: skip
    """Compute the full table of statistics over `segments`.

    Args:
        p_raw, q_raw: uint8 view of the tokens' values, of dtype `p_kind`, `q_kind`.
        segments: int64 [segments, 6], see `segments.SEGMENT`.
        slots: int64 [segments, 3], row in `rounds`, `turns`, `ages` or -1.
        keys: int64 [segments, 2], order of the segment's sample and position of its first token.
        placement: int64 [segments, 3], tokens of its round before and after the segment's first
            one, negative where not known, and the bin of the round's last token.
        rule: float64 [7], `StatisticsSettings.weight_rule()`.
        rounds, turns, ages: cells, merged into.
        rows: float64 [rows, len(ROW)], added to.
        histograms: uint32 [rounds, 2 * HISTOGRAM_HALF], added to.
        profile: float64 [profile_bins.ROWS, profile_bins.WIDTH], added to.
        worst, worst_ids, bad, bad_ids: the K smallest keys (-|d|, order, position), and those of
            the non-finite tokens, with (token, segment).
        unequal, unequal_ids: the same for tokens whose p and q are finite and differ.

    Returns:
        The number of filled rows of `worst`, `bad` and `unequal`.
    """
    p, q = np.empty(BLOCK), np.empty(BLOCK)
    d, em1, v, exp_q, k3, exp_d = (
        np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK),
        np.empty(BLOCK),
    )  # fmt: skip
    work, carry, slot = (d, em1, v, exp_q, k3, exp_d), np.zeros(5), np.empty(BLOCK, np.int32)
    part = np.empty(_WIDTH)
    profiled = Counts(
        slot, np.zeros(profiles.SLOTS, np.int64), np.zeros(profiles.SLOTS),
        np.zeros(profiles.SLOTS), profile,
    )  # fmt: skip
    cell = np.empty(_WIDTH)
    worst_used, bad_used, unequal_used = 0, 0, 0
    for s in range(segments.shape[0]):
        start, stop, row = segments[s, 0], segments[s, 1], segments[s, 2]
        counts, order = histograms[slots[s, 0]], float(keys[s, 0])
        position = keys[s, 1] - start
        head = Placement(placement[s, 0], placement[s, 1], placement[s, 2], keys[s, 1])
        _reset(cell)
        carry[2] = 0.0
        base = start
        while base < stop:
            size = BLOCK if stop - base > BLOCK else stop - base
            load(p_raw, p_kind, base, p, size)
            load(q_raw, q_kind, base, q, size)
            clean = all_finite(p, q, size)
            i = 0
            while i < size:
                j = size
                if not clean:
                    j = i
                    while j < size and math.isfinite(p[j]) and math.isfinite(q[j]):
                        j += 1
                if j > i:
                    _block(p[i:j], q[i:j], j - i, rule, work, carry, part, cell)
                    histogram(d, j - i, int(part[AT.EQUAL]), slot, counts)
                    profiles.add(q[i:j], d, j - i, _moved(head, base + i - start), part, profiled)
                    largest = larger(abs(part[AT.D_MIN]), abs(part[AT.D_MAX]))
                    if largest > 0.0:
                        at = (order, base + i, position, s)
                        unequal_used = _keep_first_unequal(
                            d, j - i, at, unequal, unequal_ids, unequal_used
                        )
                        worst_used = _keep_worst(
                            d, j - i, largest, at, worst, worst_ids, worst_used
                        )
                if j < size:
                    token = base + j
                    _non_finite(p[j], q[j], cell)
                    profiles.add_non_finite(q[j], _moved(head, token - start), profile)
                    carry[2] = 0.0
                    key = (0.0, order, float(position + token))
                    bad_used = _keep_least(bad, bad_ids, bad_used, key, token, s)
                i = j + 1
            base += size
        cell[AT.MASKED] = stop - start
        cell[AT.SEGMENTS] = 1.0
        if cell[AT.BOTH_ZERO] > 0.0:
            _edges(p_raw, p_kind, q_raw, q_kind, start, stop, p, q, cell)
        for slices, of in ((rounds, slots[s, 0]), (turns, slots[s, 1]), (ages, slots[s, 2])):
            if of >= 0:
                _merge_into(slices[of], cell)
        _row_add(rows[row], cell)
    profiles.add_chances(profiled)
    return worst_used, bad_used, unequal_used
