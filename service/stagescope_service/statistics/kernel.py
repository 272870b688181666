"""One pass over the model's tokens: cells, histograms, worst tokens, rows.

Each segment is processed in blocks of at most `BLOCK` tokens. Each block becomes a cell (see
`blocks`), which merges into the segment's cell. That cell merges into those of its round, turn,
staleness and row.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numba
import numpy as np

from stagescope_service.statistics import cell as _cell
from stagescope_service.statistics import profiles
from stagescope_service.statistics.blocks import (
    FAR_BELOW,
    all_finite,
    kind_of_non_finite,
    lag_sums,
    lag_sums_across,
    lagged,
    larger,
    load,
    load_ahead,
    log_prob_sums,
    probability_sums,
    probability_sums_wide,
    ranges,
    ratio_sums,
    rounding,
    smaller,
)
from stagescope_service.statistics.cell import AT, EDGE, Float64, Int32, Int64, UInt8, UInt32
from stagescope_service.statistics.counts import HISTOGRAM_HALF as HISTOGRAM_HALF
from stagescope_service.statistics.counts import histogram, tails, weights
from stagescope_service.statistics.exponentials import (
    NEAR,
    exponentials_near_0,
    exponentials_of_d,
    exponentials_of_d_wide,
    one_more,
)
from stagescope_service.statistics.jit import (
    array_type,
    entry,
    exact,
    inlined,
    input_type,
    tuple_type,
)
from stagescope_service.statistics.kept import At, Kept, keep_first_unequal, keep_least, keep_worst
from stagescope_service.statistics.profiles import Placement

BLOCK: Final = 2048
"""More tokens amortize the merge of a block's cell; the buffers still fit into the L2 cache."""

_SHARES: Final = 6
"""Number of times that a block asks for values ahead."""
_WIDTH: Final = _cell.WIDTH
_FIRST_MIN: Final = int(AT.D_MIN)
_FIRST_MAX: Final = int(AT.D_MAX)
_FIRST_SECOND: Final = int(AT.D_M2)
_MOMENTS: Final = np.array(_cell.MOMENTS, np.int64)
_N: Final = int(AT.TOKENS)
_OWN_SUMS: Final = np.array([_cell.OWN_SUMS.get(field, field) for field in _cell.Field], np.int64)
_SMALL: Final = _cell.SMALL


class Streams(NamedTuple):
    """The bytes of both streams and the kinds of their values."""

    p_raw: UInt8
    p_kind: int
    q_raw: UInt8
    q_kind: int


class Work(NamedTuple):
    """Buffers: one number for each token of a block, its cell and that of the segment."""

    p: Float64
    q: Float64
    d: Float64
    em1: Float64
    exp_d: Float64
    less: Float64
    """e^q - 1."""
    whole: Float64
    """e^q."""
    slots: Int32
    carry: Float64
    """The last tokens of the preceding block, see `blocks.lag_sums_across`."""
    part: Float64
    cell: Float64


class Ahead(NamedTuple):
    """The tokens after a block: their values are asked for in shares, between its loops. The memory
    has a limited number of requests open, so that asking for all at once would wait."""

    streams: Streams
    start: int
    stop: int


class Tables(NamedTuple):
    """What the tokens of a segment are added to, and the rule of their weights."""

    rule: Float64
    histogram: UInt32
    profile: Float64
    worst: Kept
    bad: Kept
    unequal: Kept


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


@inlined
def _pairs(p: Float64, q: Float64, n: int, carry: Float64, part: Float64) -> None:
    """Sum over pairs of tokens at lags 1 and 2, and remember the block's last two tokens."""
    following, preceding = lag_sums(p, q, n, part)
    lagged(p, q, n, following, 0, carry, part)
    lagged(p, q, n, preceding, 1, carry, part)
    lag_sums_across(p, q, n, carry, part)
    if n > 1:
        carry[2], carry[3], carry[4] = 2.0, p[n - 2], q[n - 2]
    else:
        carry[2], carry[3], carry[4] = smaller(carry[2] + 1.0, 2.0), carry[0], carry[1]
    carry[0], carry[1] = p[n - 1], q[n - 1]


@inlined
def _probabilities(p: Float64, q: Float64, n: int, work: Work) -> None:
    """Fill the exponentials of d, and the statistics of probabilities of the block's cell."""
    d, em1, exp_d, part = work.d, work.em1, work.exp_d, work.part
    largest = larger(part[AT.D_MAX], -part[AT.D_MIN])
    if largest <= NEAR:
        exponentials_near_0(d, n, em1, part)
        if part[AT.P_MAX] < FAR_BELOW:
            one_more(em1, n, exp_d)
    else:
        if largest <= 700.0:
            exponentials_of_d(d, n, em1, exp_d, part)
        else:
            exponentials_of_d_wide(d, n, em1, exp_d, part)
        ratio_sums(em1, exp_d, n, part)
    # The applied weights are the raw ones until `weights` changes them.
    part[AT.W_SUM], part[AT.WEIGHT_SUM] = part[AT.RAW_SUM], part[AT.RATIO_SUM]
    part[AT.W_M2] = part[AT.RATIO_M2]
    narrow = largest <= 700.0 and part[AT.Q_MIN] >= -700.0
    if narrow and larger(part[AT.P_MAX], part[AT.Q_MAX]) <= 300.0:
        probability_sums(q, em1, exp_d, n, work.less, work.whole, part)
    else:
        probability_sums_wide(p, q, em1, exp_d, n, part)


@inlined
def _ask(ahead: Ahead, number: int) -> None:
    """Ask for the values of one of `_SHARES` shares of the tokens ahead."""
    (p_raw, p_kind, q_raw, q_kind), start, stop = ahead
    share = (stop - start + _SHARES - 1) // _SHARES
    first = start + number * share
    last = first + share if first + share < stop else stop
    load_ahead(p_raw, p_kind, first, last)
    load_ahead(q_raw, q_kind, first, last)


@inlined
def _block(p: Float64, q: Float64, n: int, rule: Float64, ahead: Ahead, work: Work) -> None:
    """Fill the block's cell from n finite tokens and merge it into the segment's."""
    d, part = work.d, work.part
    _reset(part)
    part[_N] = n
    ranges(p, q, d, n, part)
    _ask(ahead, 0)
    log_prob_sums(p, q, d, n, part)
    _ask(ahead, 1)
    _pairs(p, q, n, work.carry, part)
    _ask(ahead, 2)
    rounding(p, q, n, part)
    _ask(ahead, 3)
    _probabilities(p, q, n, work)
    _ask(ahead, 4)
    tails(d, work.em1, n, part)
    weights(work.em1, work.exp_d, n, rule, part)
    _merge_into(work.cell, part)


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
def _edges(streams: Streams, start: int, stop: int, p: Float64, q: Float64, cell: Float64) -> None:
    """Count the zeros of both streams with which a segment begins and ends."""
    p_raw, p_kind, q_raw, q_kind = streams
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


@inlined
def _moved(head: Placement, by: int) -> Placement:
    """Return the place of a token some tokens after the head of its segment."""
    before, behind, last, position = head
    return Placement(before + by if before >= 0 else before, behind - by, last, position + by)


@inlined
def _at_token(at: At, token: int) -> At:
    """Return the place of another token of the segment."""
    return At(at.order, token, at.position, at.segment)


@inlined
def _add_finite(
    i: int, j: int, at: At, place: Placement, ahead: Ahead, work: Work, tables: Tables
) -> None:
    """Add the tokens i to j of the loaded block, all finite; `at` and `place` are of the first."""
    d, n, part, q = work.d, j - i, work.part, work.q[i:j]
    _block(work.p[i:j], q, n, tables.rule, ahead, work)
    histogram(d, n, int(part[AT.EQUAL]), work.slots, tables.histogram)
    _ask(ahead, 5)
    profiles.add(q, d, n, place, part, tables.profile)
    largest = larger(abs(part[AT.D_MIN]), abs(part[AT.D_MAX]))
    if largest > 0.0:
        keep_first_unequal(d, n, at, tables.unequal)
        keep_worst(d, n, largest, at, tables.worst)


@exact
def _add_mixed(
    size: int, at: At, place: Placement, ahead: Ahead, work: Work, tables: Tables
) -> None:
    """Add a loaded block in which some tokens have a non-finite value."""
    p, q = work.p, work.q
    i = 0
    while i < size:
        j = i
        while j < size and math.isfinite(p[j]) and math.isfinite(q[j]):
            j += 1
        if j > i:
            _add_finite(i, j, _at_token(at, at.first + i), _moved(place, i), ahead, work, tables)
        if j < size:
            token = at.first + j
            _non_finite(p[j], q[j], work.cell)
            profiles.add_non_finite(q[j], _moved(place, j), tables.profile)
            work.carry[2] = 0.0
            key = (0.0, at.order, float(at.position + token))
            keep_least(tables.bad, key, token, at.segment)
        i = j + 1


@inlined
def _add_segment(
    streams: Streams,
    stop: int,
    following: tuple[int, int],
    at: At,
    head: Placement,
    work: Work,
    tables: Tables,
) -> None:
    """Fill the segment's cell from its tokens, from `at` to `stop`; another one is `following`."""
    p_raw, p_kind, q_raw, q_kind = streams
    p, q, cell, start = work.p, work.q, work.cell, at.first
    _reset(cell)
    work.carry[2] = 0.0
    for base in range(start, stop, BLOCK):
        size = BLOCK if stop - base > BLOCK else stop - base
        load(p_raw, p_kind, base, p, size)
        load(q_raw, q_kind, base, q, size)
        ahead, end = (base + size, stop) if base + size < stop else following
        end = ahead + BLOCK if end > ahead + BLOCK else end
        then = Ahead(streams, ahead, end)
        here, place = _at_token(at, base), _moved(head, base - start)
        if all_finite(p, q, size):
            _add_finite(0, size, here, place, then, work, tables)
        else:
            _add_mixed(size, here, place, Ahead(streams, end, end), work, tables)
    cell[AT.MASKED] = stop - start
    cell[AT.SEGMENTS] = 1.0
    if cell[AT.BOTH_ZERO] > 0.0:
        _edges(streams, start, stop, p, q, cell)


_F2, _I2 = array_type(numba.float64, 2), array_type(numba.int64, 2)


@entry(
    tuple_type(numba.int64, numba.int64, numba.int64)(
        input_type(numba.uint8), numba.int64, input_type(numba.uint8), numba.int64,
        input_type(numba.int64, 2), input_type(numba.int64, 2), input_type(numba.int64, 2),
        input_type(numba.int64, 2), input_type(numba.float64),
        _F2, _F2, _F2, _F2, array_type(numba.uint32, 2), _F2,
        _F2, _I2, _F2, _I2, _F2, _I2,
    ),
    nogil=True,
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
    work = Work(
        np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK),
        np.empty(BLOCK), np.empty(BLOCK),
        np.empty(BLOCK, np.int32),
        np.zeros(5), np.empty(_WIDTH), np.empty(_WIDTH),
    )  # fmt: skip
    used = np.zeros((3, 1), np.int64)
    most_d, non_finite = Kept(worst, worst_ids, used[0]), Kept(bad, bad_ids, used[1])
    first_unequal = Kept(unequal, unequal_ids, used[2])
    streams = Streams(p_raw, p_kind, q_raw, q_kind)
    for s in range(segments.shape[0]):
        start, stop, row = segments[s, 0], segments[s, 1], segments[s, 2]
        counts = histograms[slots[s, 0]]
        tables = Tables(rule, counts, profile, most_d, non_finite, first_unequal)
        at = At(float(keys[s, 0]), start, keys[s, 1] - start, s)
        head = Placement(placement[s, 0], placement[s, 1], placement[s, 2], keys[s, 1])
        behind = s + 1 if s + 1 < segments.shape[0] else s
        following = segments[behind, 0], segments[behind, 1]
        _add_segment(streams, stop, following, at, head, work, tables)
        for slices, of in ((rounds, slots[s, 0]), (turns, slots[s, 1]), (ages, slots[s, 2])):
            if of >= 0:
                _merge_into(slices[of], work.cell)
        _row_add(rows[row], work.cell)
    return used[0, 0], used[1, 0], used[2, 0]
