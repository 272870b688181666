"""One pass over the model's tokens: cells, histograms, worst tokens, rows.

Tokens are taken in blocks of at most 256 out of one segment: widened to float64 into buffers that
stay in the first-level cache, exponentials by polynomial in vector lanes, sums in several short
loops, then one Chan merge into the segment's cell. Inside a block the second moments are taken
around the block's own first value: an element of the block, so that cancellation costs at most a
factor of the block's length in rounding.

The text of `cell.Field` is compiled in: after a change there, change `_LAYOUT` here too.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np

from stagescope_service.statistics import cell as _cell
from stagescope_service.statistics.cell import Field
from stagescope_service.statistics.jit import entry, exact, fused, reduction

_LAYOUT: Final = _cell.VERSION
BLOCK: Final = 256
FLOAT64: Final = 0
FLOAT32: Final = 1
BFLOAT16: Final = 2
FLOAT16: Final = 3

HISTOGRAM_SCALE: Final = 3
HISTOGRAM_HALF: Final = 512
"""Buckets kept on either side of 1: |d| beyond 2^±64 counts in the outermost one."""

ROW: Final = (
    "tokens", "p_sum", "q_sum", "d_sum", "d_abs_sum", "d_abs_max", "over_0", "over_1", "over_2",
    "over_3", "ratio_0", "ratio_1", "raw_sum", "w_sum", "non_finite",
)  # fmt: skip
"""Columns of a row's vector; `raw_sum` and `w_sum` are of weight minus 1."""

_WIDTH: Final = _cell.WIDTH
_FIRST_MIN: Final = int(Field.D_MIN)
_FIRST_MAX: Final = int(Field.D_MAX)
_FIRST_SECOND: Final = int(Field.D_M2)
_MOMENTS: Final = np.array(_cell.MOMENTS, np.int64)
_N: Final = int(Field.TOKENS)
_CLAMP: Final = _cell.CLAMP
_CLAMP_HIGH: Final = math.expm1(_CLAMP)
_CLAMP_LOW: Final = math.expm1(-_CLAMP)
_A0, _A1, _A2, _A3 = _cell.ABS_TAILS
(_L0, _H0), (_L1, _H1) = _cell.RATIO_TAILS


def _sub_buckets() -> tuple[Any, Any]:
    """Bucket of a mantissa by its top 4 bits, and the one boundary that may lie among them."""
    bounds = [math.ceil((2 ** (j / 8) - 1) * 2**52) - 1 for j in range(1, 8)]
    first = np.array([sum(bound <= (k << 48) for bound in bounds) for k in range(16)], np.int64)
    above = [[bound for bound in bounds if k << 48 < bound < (k + 1) << 48] for k in range(16)]
    return first, np.array([next(iter(found), 1 << 60) for found in above], np.int64)


_SUB_FIRST, _SUB_BOUND = _sub_buckets()


@exact
def _load(raw: Any, kind: int, start: int, out: Any, n: int) -> None:
    """Widen n values from token `start` on to float64."""
    if kind == FLOAT32:
        single = raw.view(np.float32)[start : start + n]
        for i in range(n):
            out[i] = single[i]
    elif kind == FLOAT64:
        double = raw.view(np.float64)[start : start + n]
        for i in range(n):
            out[i] = double[i]
    else:
        half = raw.view(np.uint16)[start : start + n]
        for i in range(n):
            bits = np.uint32(half[i])
            if kind == BFLOAT16:
                out[i] = np.uint32(bits << np.uint32(16)).view(np.float32)
            else:
                # 2^112 carries the exponent from bias 15 to 127, subnormals included; the
                # largest exponent means inf or NaN and is set to float32's own largest.
                sign = np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))
                rest = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
                finite = rest.view(np.float32) * np.float32(2.0**112)
                special = np.uint32(rest | np.uint32(0x7F800000)).view(np.float32)
                value = special if rest >= np.uint32(0x0F800000) else finite
                out[i] = -value if sign else value


@exact
def _all_finite(p: Any, q: Any, n: int) -> bool:
    bad = 0
    for i in range(n):
        # x - x is 0 for finite values, NaN otherwise.
        bad += (p[i] - p[i]) + (q[i] - q[i]) != 0.0
    return bad == 0


@fused
def _exponentials(x: Any, n: int, em1: Any, exp: Any, k3: Any) -> None:
    """e^x - 1, e^x and e^x - 1 - x for |x| <= 700, each to a few units in the last place.

    x = k ln 2 + r with |r| <= 0.3466; e^r - 1 = r + c(r), c the Taylor series from r^2/2 to
    r^12/12! (relative error below 1e-14). k3 is put together so that it does not cancel.
    """
    for i in range(n):
        value = x[i]
        # Adding 1.5 * 2^52 leaves the rounded integer in the low bits.
        shifted = value * 1.4426950408889634 + 6755399441055744.0
        k = shifted - 6755399441055744.0
        r = (value - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
        bits = np.float64(shifted).view(np.int64)
        scale = np.int64((bits << 52) + np.int64(0x3FF0000000000000)).view(np.float64)
        c = 1.0 / 479001600.0
        c = c * r + 1.0 / 39916800.0
        c = c * r + 1.0 / 3628800.0
        c = c * r + 1.0 / 362880.0
        c = c * r + 1.0 / 40320.0
        c = c * r + 1.0 / 5040.0
        c = c * r + 1.0 / 720.0
        c = c * r + 1.0 / 120.0
        c = c * r + 1.0 / 24.0
        c = c * r + 1.0 / 6.0
        c = c * r + 0.5
        c = c * (r * r)
        exp[i] = scale * (r + c) + scale
        em1[i] = scale * (r + c) + (scale - 1.0)
        k3[i] = scale * c + ((scale * r - value) + (scale - 1.0))


@exact
def _exponentials_wide(x: Any, n: int, em1: Any, exp: Any, k3: Any) -> None:
    """The same for any finite x; rare, so by the C library."""
    for i in range(n):
        em1[i] = math.expm1(x[i])
        exp[i] = math.exp(x[i])
        k3[i] = em1[i] - x[i]


@reduction
def _ranges(p: Any, q: Any, d: Any, n: int, out: Any) -> None:
    """Write d = p - q and put the minima and maxima of d, p, q and the counts by sign in `out`."""
    d_low = d_high = p[0] - q[0]
    p_low = p_high = p[0]
    q_low = q_high = q[0]
    equal = above = p_zero = q_zero = p_positive = q_positive = 0.0
    for i in range(n):
        x, y = p[i], q[i]
        z = x - y
        d[i] = z
        d_low = z if z < d_low else d_low
        d_high = z if z > d_high else d_high
        p_low = x if x < p_low else p_low
        p_high = x if x > p_high else p_high
        q_low = y if y < q_low else q_low
        q_high = y if y > q_high else q_high
    for i in range(n):
        z = d[i]
        equal += 1.0 if z == 0.0 else 0.0
        above += 1.0 if z < 0.0 else 0.0
    # Zeros and positive values can only be there if the maximum says so.
    if p_high >= 0.0:
        for i in range(n):
            p_zero += 1.0 if p[i] == 0.0 else 0.0
            p_positive += 1.0 if p[i] > 0.0 else 0.0
    if q_high >= 0.0:
        for i in range(n):
            q_zero += 1.0 if q[i] == 0.0 else 0.0
            q_positive += 1.0 if q[i] > 0.0 else 0.0
    if p_zero + q_zero > 0.0:
        for i in range(n):
            out[Field.P_LACKS] += 1.0 if p[i] == 0.0 and q[i] != 0.0 else 0.0
            out[Field.Q_LACKS] += 1.0 if q[i] == 0.0 and p[i] != 0.0 else 0.0
    out[Field.D_MIN], out[Field.D_MAX] = d_low, d_high
    out[Field.P_MIN], out[Field.P_MAX] = p_low, p_high
    out[Field.Q_MIN], out[Field.Q_MAX] = q_low, q_high
    out[Field.EQUAL], out[Field.Q_GREATER] = equal, above
    out[Field.P_ZERO], out[Field.Q_ZERO] = p_zero, q_zero
    out[Field.P_POSITIVE], out[Field.Q_POSITIVE] = p_positive, q_positive


@reduction
def _log_prob_sums(p: Any, q: Any, d: Any, n: int, out: Any) -> tuple[float, float]:
    """Sums of d, p and q; returns the cross sums at lag +1 and -1 around (p[0], q[0])."""
    d0, p0, q0 = d[0], p[0], q[0]
    absolute = sd = sdd = sp = spp = sq = sqq = spq = 0.0
    for i in range(n):
        z, x, y = d[i] - d0, p[i] - p0, q[i] - q0
        absolute += abs(d[i])
        sd += z
        sdd += z * z
        sp += x
        spp += x * x
        sq += y
        sqq += y * y
        spq += x * y
    following = preceding = 0.0
    for i in range(n - 1):
        following += (p[i] - p0) * (q[i + 1] - q0)
        preceding += (p[i + 1] - p0) * (q[i] - q0)
    count = float(n)
    out[Field.D_ABS_SUM] = absolute
    out[Field.D_SUM], out[Field.D_M2] = sd + count * d0, sdd - sd * sd / count
    out[Field.P_SUM], out[Field.P_M2] = sp + count * p0, spp - sp * sp / count
    out[Field.Q_SUM], out[Field.Q_M2] = sq + count * q0, sqq - sq * sq / count
    out[Field.PQ_C] = spq - sp * sq / count
    return following, preceding


@exact
def _lagged(p: Any, q: Any, n: int, cross: float, side: int, carry: Any, out: Any) -> None:
    """Moments of the pairs one token apart; side 0 is (p, next q), side 1 is (p, previous q).

    The sums over all but the first or last token follow from the whole block's; `carry` holds the
    last token of the block before, if that one ended right here.
    """
    p0, q0, count = p[0], q[0], float(n)
    p_mean, q_mean = out[Field.P_SUM] - count * p0, out[Field.Q_SUM] - count * q0
    sp, spp = p_mean, out[Field.P_M2] + p_mean * p_mean / count
    sq, sqq = q_mean, out[Field.Q_M2] + q_mean * q_mean / count
    spq, pairs = cross, count - 1.0
    # The first token is the origin: it adds nothing to any sum, so only the last one goes.
    if side == 0:
        x = p[n - 1] - p0
        sp, spp = sp - x, spp - x * x
    else:
        y = q[n - 1] - q0
        sq, sqq = sq - y, sqq - y * y
    if carry[2] > 0.0:
        x, y = carry[0] - p0, carry[1] - q0
        pairs += 1.0
        # The other half of the added pair is this block's first token: the origin.
        if side == 0:
            sp, spp = sp + x, spp + x * x
        else:
            sq, sqq = sq + y, sqq + y * y
    if pairs <= 0.0:
        return
    base = Field.NEXT_N if side == 0 else Field.LAST_N
    second = Field.NEXT_P_M2 if side == 0 else Field.LAST_P_M2
    out[base], out[base + 1], out[base + 2] = pairs, sp + pairs * p0, sq + pairs * q0
    out[second] = max(spp - sp * sp / pairs, 0.0)
    out[second + 1] = max(sqq - sq * sq / pairs, 0.0)
    out[second + 2] = spq - sp * sq / pairs


@reduction
def _probability_sums(em1: Any, k3: Any, v: Any, exp_q: Any, n: int, out: Any) -> None:
    """Sums over e^p, e^q and their ratio; `em1` is e^d - 1, `v` is e^q - 1."""
    u0, v0 = v[0] + exp_q[0] * em1[0], v[0]
    a0 = exp_q[0] * abs(em1[0])
    sa = saa = su = suu = sv = svv = suv = 0.0
    low = high = a0
    for i in range(n):
        a = exp_q[i] * abs(em1[i])
        x, y, z = v[i] + exp_q[i] * em1[i] - u0, v[i] - v0, a - a0
        low = a if a < low else low
        high = a if a > high else high
        sa += z
        saa += z * z
        su += x
        suu += x * x
        sv += y
        svv += y * y
        suv += x * y
    third = chi2 = raw = absolute = 0.0
    for i in range(n):
        e = em1[i]
        # Select, not clamp: the exponential of a clamped d is one of two constants.
        w = _CLAMP_HIGH if e > _CLAMP_HIGH else (_CLAMP_LOW if e < _CLAMP_LOW else e)
        third += k3[i]
        raw += w
        chi2 += w * (w + 2.0)
        ratio = 1.0 + e
        absolute += 1.0 / ratio if e < 0.0 else ratio
    count = float(n)
    out[Field.A_SUM], out[Field.A_M2] = sa + count * a0, saa - sa * sa / count
    out[Field.A_MIN], out[Field.A_MAX] = low, high
    out[Field.U_SUM], out[Field.U_M2] = su + count * u0, suu - su * su / count
    out[Field.V_SUM], out[Field.V_M2] = sv + count * v0, svv - sv * sv / count
    out[Field.UV_C] = suv - su * sv / count
    out[Field.K3_SUM], out[Field.CHI2_SUM], out[Field.RAW_SUM] = third, chi2, raw
    out[Field.EXP_ABS_SUM] = absolute


@reduction
def _tails_and_weights(d: Any, em1: Any, n: int, rule: Any, out: Any) -> None:
    """Tail counts, and the applied weights minus 1. `rule` is `Settings.weight_rule()`."""
    over0 = over1 = over2 = over3 = 0.0
    below0 = above0 = below1 = above1 = 0.0
    for i in range(n):
        x, ratio = abs(d[i]), 1.0 + em1[i]
        over0 += 1.0 if x > _A0 else 0.0
        over1 += 1.0 if x > _A1 else 0.0
        over2 += 1.0 if x > _A2 else 0.0
        over3 += 1.0 if x > _A3 else 0.0
        below0 += 1.0 if ratio < _L0 else 0.0
        above0 += 1.0 if ratio > _H0 else 0.0
        below1 += 1.0 if ratio < _L1 else 0.0
        above1 += 1.0 if ratio > _H1 else 0.0
    out[Field.ABS_OVER_0], out[Field.ABS_OVER_1] = over0, over1
    out[Field.ABS_OVER_2], out[Field.ABS_OVER_3] = over2, over3
    out[Field.RATIO_BELOW_0], out[Field.RATIO_ABOVE_0] = below0, above0
    out[Field.RATIO_BELOW_1], out[Field.RATIO_ABOVE_1] = below1, above1
    upper, lower = rule[0], rule[1]
    high, high_value, low, low_value = rule[2], rule[3], rule[4], rule[5]
    origin, least, most = 0.0, np.inf, -np.inf
    is_high = is_low = sw = sww = 0.0
    for i in range(n):
        e = em1[i]
        w = _CLAMP_HIGH if e > _CLAMP_HIGH else (_CLAMP_LOW if e < _CLAMP_LOW else e)
        is_high += 1.0 if w > upper else 0.0
        is_low += 1.0 if w < lower else 0.0
        w = high_value if w > high else (low_value if w < low else w)
        if i == 0:
            origin = w
        least = w if w < least else least
        most = w if w > most else most
        sw += w - origin
        sww += (w - origin) * (w - origin)
    count = float(n)
    out[Field.IS_HIGH], out[Field.IS_LOW] = is_high, is_low
    out[Field.W_MIN], out[Field.W_MAX] = least, most
    out[Field.W_SUM], out[Field.W_M2] = sw + count * origin, sww - sw * sw / count


@exact
def _histogram(d: Any, n: int, counts: Any) -> None:
    """Count |d| by OpenTelemetry's base-2 exponential buckets: (2^(i/8), 2^((i+1)/8)]."""
    block = d[:n]
    for i in range(block.size):
        x = abs(block[i])
        if x == 0.0:
            continue
        # One less, so that a power of two falls into the bucket that ends with it.
        bits = np.float64(x).view(np.int64) - 1
        mantissa = bits & ((1 << 52) - 1)
        k = mantissa >> 48
        sub = _SUB_FIRST[k] + (1 if mantissa >= _SUB_BOUND[k] else 0)
        slot = ((bits >> 52) - 1023) * 8 + sub + HISTOGRAM_HALF
        slot = 0 if slot < 0 else (2 * HISTOGRAM_HALF - 1 if slot >= 2 * HISTOGRAM_HALF else slot)
        counts[slot] += 1


@exact
def _reset(cell: Any) -> None:
    cell[:] = 0.0
    cell[_FIRST_MIN:_FIRST_MAX] = np.inf
    cell[_FIRST_MAX:_FIRST_SECOND] = -np.inf


@exact
def _merge_into(cell: Any, other: Any) -> None:
    """Chan's merge of `other` into `cell`."""
    for i in range(_MOMENTS.shape[0]):
        n, x, y = _MOMENTS[i, 0], _MOMENTS[i, 1], _MOMENTS[i, 2]
        a, b, m = cell[n], other[n], _FIRST_SECOND + i
        cell[m] += other[m]
        if a > 0.0 and b > 0.0:
            dx = other[x] / b - cell[x] / a
            dy = dx if x == y else other[y] / b - cell[y] / a
            cell[m] += dx * dy * (a * b / (a + b))
    for i in range(_FIRST_MIN):
        cell[i] += other[i]
    for i in range(_FIRST_MIN, _FIRST_MAX):
        cell[i] = min(cell[i], other[i])
    for i in range(_FIRST_MAX, _FIRST_SECOND):
        cell[i] = max(cell[i], other[i])


@exact
def _offer(kept: Any, ids: Any, used: int, key: Any, token: int, segment: int) -> int:
    """Keep (key, token, segment) if it is among the smallest; the largest kept is at 0.

    `kept` float64 [K, 3] holds keys (compared left to right), `ids` int64 [K, 2].
    """
    size = kept.shape[0]
    if used == size:
        if key[0] > kept[0, 0]:
            return used
        if key[0] == kept[0, 0]:
            if key[1] > kept[0, 1]:
                return used
            if key[1] == kept[0, 1] and key[2] >= kept[0, 2]:
                return used
        place = 0
    else:
        place, used = used, used + 1
    kept[place, 0], kept[place, 1], kept[place, 2] = key
    ids[place, 0], ids[place, 1] = token, segment
    if used == size:
        largest = 0
        for i in range(1, size):
            if kept[i, 0] > kept[largest, 0] or (
                kept[i, 0] == kept[largest, 0]
                and (
                    kept[i, 1] > kept[largest, 1]
                    or (kept[i, 1] == kept[largest, 1] and kept[i, 2] > kept[largest, 2])
                )
            ):
                largest = i
        for j in range(3):
            kept[0, j], kept[largest, j] = kept[largest, j], kept[0, j]
        for j in range(2):
            ids[0, j], ids[largest, j] = ids[largest, j], ids[0, j]
    return used


@exact
def _block(p: Any, q: Any, n: int, rule: Any, work: Any, carry: Any, part: Any, cell: Any) -> None:
    """Fill the cell `part` from n finite tokens and merge it into the segment's `cell`."""
    d, em1, v, exp_q, k3, unused = work[0], work[1], work[2], work[3], work[4], work[5]
    _reset(part)
    part[_N] = n
    _ranges(p, q, d, n, part)
    following, preceding = _log_prob_sums(p, q, d, n, part)
    _lagged(p, q, n, following, 0, carry, part)
    _lagged(p, q, n, preceding, 1, carry, part)
    carry[0], carry[1], carry[2] = p[n - 1], q[n - 1], 1.0
    if part[Field.D_MIN] >= -700.0 and part[Field.D_MAX] <= 700.0:
        _exponentials(d, n, em1, unused, k3)
    else:
        _exponentials_wide(d, n, em1, unused, k3)
    if part[Field.Q_MIN] >= -700.0 and part[Field.Q_MAX] <= 700.0:
        _exponentials(q, n, v, exp_q, unused)
    else:
        _exponentials_wide(q, n, v, exp_q, unused)
    if (
        max(part[Field.D_MAX], -part[Field.D_MIN]) <= 700.0
        and part[Field.Q_MIN] >= -700.0
        and max(part[Field.P_MAX], part[Field.Q_MAX]) <= 300.0
    ):
        _probability_sums(em1, k3, v, exp_q, n, part)
    else:
        _probability_sums_wide(p, q, em1, k3, n, part)
    _tails_and_weights(d, em1, n, rule, part)
    _merge_into(cell, part)


@exact
def _probability_sums_wide(p: Any, q: Any, em1: Any, k3: Any, n: int, out: Any) -> None:
    """`_probability_sums` where e^q * e^d is not e^p in float64; rare."""
    su = sv = sa = 0.0
    low, high = np.inf, -np.inf
    third = chi2 = raw = absolute = 0.0
    for i in range(n):
        u, v = math.expm1(p[i]), math.expm1(q[i])
        # Of two infinities (log-probs beyond 709 are none) the difference is unknown.
        a = abs(u - v)
        su, sv, sa = su + u, sv + v, sa + a
        low, high = min(low, a), max(high, a)
        w = min(max(em1[i], _CLAMP_LOW), _CLAMP_HIGH)
        third, raw, chi2 = third + k3[i], raw + w, chi2 + w * (w + 2.0)
        absolute += math.exp(abs(p[i] - q[i]))
    count = float(n)
    suu = svv = suv = saa = 0.0
    for i in range(n):
        u, v = math.expm1(p[i]), math.expm1(q[i])
        x, y, z = u - su / count, v - sv / count, abs(u - v) - sa / count
        suu, svv, suv, saa = suu + x * x, svv + y * y, suv + x * y, saa + z * z
    out[Field.A_SUM], out[Field.A_M2], out[Field.A_MIN], out[Field.A_MAX] = sa, saa, low, high
    out[Field.U_SUM], out[Field.U_M2], out[Field.V_SUM], out[Field.V_M2] = su, suu, sv, svv
    out[Field.UV_C], out[Field.K3_SUM], out[Field.CHI2_SUM] = suv, third, chi2
    out[Field.RAW_SUM], out[Field.EXP_ABS_SUM] = raw, absolute


@exact
def _non_finite(x: float, y: float, cell: Any) -> None:
    """Count a token of which p = x or q = y is not finite."""
    x_bad, y_bad = not math.isfinite(x), not math.isfinite(y)
    if x_bad:
        kind = 0 if x != x else (1 if x > 0 else 2)
        cell[Field.P_NAN + kind] += 1.0
    if y_bad:
        kind = 0 if y != y else (1 if y > 0 else 2)
        cell[Field.Q_NAN + kind] += 1.0
    if x_bad and not y_bad and y != 0.0:
        cell[Field.P_LACKS] += 1.0
    if y_bad and not x_bad and x != 0.0:
        cell[Field.Q_LACKS] += 1.0


@exact
def _row_add(row: Any, cell: Any) -> None:
    row[0] += cell[_N]
    row[1] += cell[Field.P_SUM]
    row[2] += cell[Field.Q_SUM]
    row[3] += cell[Field.D_SUM]
    row[4] += cell[Field.D_ABS_SUM]
    if cell[_N] > 0.0:
        row[5] = max(row[5], max(abs(cell[Field.D_MIN]), abs(cell[Field.D_MAX])))
    for i in range(4):
        row[6 + i] += cell[Field.ABS_OVER_0 + i]
    row[10] += cell[Field.RATIO_BELOW_0] + cell[Field.RATIO_ABOVE_0]
    row[11] += cell[Field.RATIO_BELOW_1] + cell[Field.RATIO_ABOVE_1]
    row[12] += cell[Field.RAW_SUM]
    row[13] += cell[Field.W_SUM]
    row[14] += cell[Field.MASKED] - cell[_N]


def _array(kind: Any, ndim: int) -> Any:
    return numba.types.Array(kind, ndim, "C")


def _input(kind: Any, ndim: int = 1) -> Any:
    return numba.types.Array(kind, ndim, "C", readonly=True)


_Pair: Any = numba.types.UniTuple
_F2, _I2 = _array(numba.float64, 2), _array(numba.int64, 2)


@entry(
    _Pair(numba.int64, 2)(
        _input(numba.uint8), numba.int64, _input(numba.uint8), numba.int64,
        _input(numba.int64, 2), _input(numba.int64, 2), _input(numba.int64, 2),
        _input(numba.float64), _F2, _F2, _F2, _F2, _array(numba.uint32, 2), _F2, _I2, _F2, _I2,
    )
)  # fmt: skip
def accumulate(
    p_raw: Any, p_kind: int, q_raw: Any, q_kind: int, segments: Any, slots: Any, keys: Any,
    rule: Any, rounds: Any, turns: Any, ages: Any, rows: Any, histograms: Any,
    worst: Any, worst_ids: Any, odd: Any, odd_ids: Any,
) -> tuple[int, int]:  # fmt: skip
    """Take the whole table over `segments`.

    Args:
        p_raw, q_raw: uint8 view of the tokens' values, of dtype `p_kind`, `q_kind`.
        segments: int64 [segments, 6], see `segments.SEGMENT`.
        slots: int64 [segments, 3], row in `rounds`, `turns`, `ages` or -1.
        keys: int64 [segments, 2], order of the segment's sample and position of its first token.
        rule: float64 [6], `Settings.weight_rule()`.
        rounds, turns, ages: cells, merged into.
        rows: float64 [rows, len(ROW)], added to.
        histograms: uint32 [rounds, 2 * HISTOGRAM_HALF], added to.
        worst, worst_ids, odd, odd_ids: the K smallest keys (-|d|, order, position), and those of
            the non-finite tokens, with (token, segment).

    Returns:
        How many of `worst` and `odd` are filled.
    """
    p, q = np.empty(BLOCK), np.empty(BLOCK)
    work, carry = np.empty((6, BLOCK)), np.zeros(3)
    part, cell = np.empty(_WIDTH), np.empty(_WIDTH)
    worst_used, odd_used = 0, 0
    for s in range(segments.shape[0]):
        start, stop, row = segments[s, 0], segments[s, 1], segments[s, 2]
        counts, order = histograms[slots[s, 0]], float(keys[s, 0])
        position = keys[s, 1] - start
        _reset(cell)
        carry[2] = 0.0
        base = start
        while base < stop:
            size = min(BLOCK, stop - base)
            _load(p_raw, p_kind, base, p, size)
            _load(q_raw, q_kind, base, q, size)
            clean = _all_finite(p, q, size)
            i = 0
            while i < size:
                j = size
                if not clean:
                    j = i
                    while j < size and math.isfinite(p[j]) and math.isfinite(q[j]):
                        j += 1
                if j > i:
                    _block(p[i:j], q[i:j], j - i, rule, work, carry, part, cell)
                    d = work[0]
                    _histogram(d, j - i, counts)
                    largest = max(abs(part[Field.D_MIN]), abs(part[Field.D_MAX]))
                    bound = -worst[0, 0] if worst_used == worst.shape[0] else 0.0
                    if largest >= bound and largest > 0.0:
                        for k in range(j - i):
                            x = abs(d[k])
                            if x >= bound and x > 0.0:
                                token = base + i + k
                                key = (-x, order, float(position + token))
                                worst_used = _offer(worst, worst_ids, worst_used, key, token, s)
                                if worst_used == worst.shape[0]:
                                    bound = -worst[0, 0]
                if j < size:
                    token = base + j
                    _non_finite(p[j], q[j], cell)
                    carry[2] = 0.0
                    key = (0.0, order, float(position + token))
                    odd_used = _offer(odd, odd_ids, odd_used, key, token, s)
                i = j + 1
            base += size
        cell[Field.MASKED] = stop - start
        _merge_into(rounds[slots[s, 0]], cell)
        if slots[s, 1] >= 0:
            _merge_into(turns[slots[s, 1]], cell)
        if slots[s, 2] >= 0:
            _merge_into(ages[slots[s, 2]], cell)
        _row_add(rows[row], cell)
    return worst_used, odd_used
