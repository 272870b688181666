"""Statistics of one block of tokens: short loops over buffers that fit into the L2 cache.

Tokens are widened to float64. Second moments are taken around the block's first value. It is an
element of the block, so cancellation costs at most a factor of the block's length in rounding.
`out` is always a cell's vector.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from stagescope_service.statistics import cell as _cell
from stagescope_service.statistics.cell import AT, Array, Float64, UInt8
from stagescope_service.statistics.exponentials import exponentials
from stagescope_service.statistics.jit import exact, fused, least, most, prefetch, reduction

FLOAT64: Final = 0
FLOAT32: Final = 1
BFLOAT16: Final = 2
FLOAT16: Final = 3

CLAMP_HIGH: Final = math.expm1(_cell.CLAMP)
CLAMP_LOW: Final = math.expm1(-_cell.CLAMP)
"""e^x - 1 at the bounds of the clamp."""
WEIGHT_HIGH: Final = math.exp(_cell.CLAMP)
WEIGHT_LOW: Final = math.exp(-_cell.CLAMP)
"""e^x there."""
_LINE: Final = 64
"""Bytes of a line of the processor's caches."""
FAR_BELOW: Final = math.log(_cell.SMALL)
"""If no x of a block is larger, e^x has more digits than e^x - 1."""


@exact
def larger(a: float, b: float) -> float:
    """Return the larger number; the builtin `max` would add seconds of compile time."""
    return a if a > b else b


@exact
def smaller(a: float, b: float) -> float:
    """Return the smaller number."""
    return a if a < b else b


@exact
def copy(values: Array, start: int, out: Array, n: int) -> None:
    """Copy n values, beginning at `start`, and convert them to the type of `out`."""
    chosen = values[start : start + n]
    for i in range(n):
        out[i] = chosen[i]


@exact
def load(raw: UInt8, kind: int, start: int, out: Float64, n: int) -> None:
    """Widen n values, beginning at token `start`, to float64."""
    if kind == FLOAT32:
        copy(raw.view(np.float32), start, out, n)
    elif kind == FLOAT64:
        copy(raw.view(np.float64), start, out, n)
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
def load_ahead(raw: UInt8, kind: int, start: int, stop: int) -> None:
    """Ask for the values of tokens that `load` will read: the memory works meanwhile."""
    size = 8 if kind == FLOAT64 else (4 if kind == FLOAT32 else 2)
    for at in range(start * size, stop * size, _LINE):
        prefetch(raw, at)


@exact
def all_finite(p: Float64, q: Float64, n: int) -> bool:
    """Return whether no value of a block is NaN or infinite."""
    bad = 0
    for i in range(n):
        # x - x is 0 for finite values, NaN otherwise.
        bad += (p[i] - p[i]) + (q[i] - q[i]) != 0.0
    return bad == 0


@exact
def kind_of_non_finite(x: float) -> int:
    """Return 0 for NaN, 1 for +inf, 2 for -inf."""
    return 0 if x != x else (1 if x > 0 else 2)


@reduction
def ranges(p: Float64, q: Float64, d: Float64, n: int, out: Float64) -> None:
    """Write d = p - q, and to `out` the minima and maxima of d, p, q and the counts by sign."""
    d_low = d_high = p[0] - q[0]
    p_low = p_high = p[0]
    q_low = q_high = q[0]
    equal = above = 0.0
    for i in range(n):
        x, y = p[i], q[i]
        z = x - y
        d[i] = z
        d_low, d_high = least(d_low, z), most(d_high, z)
        p_low, p_high = least(p_low, x), most(p_high, x)
        q_low, q_high = least(q_low, y), most(q_high, y)
        equal += 1.0 if z == 0.0 else 0.0
        above += 1.0 if z < 0.0 else 0.0
    out[AT.D_MIN], out[AT.D_MAX] = d_low, d_high
    out[AT.P_MIN], out[AT.P_MAX] = p_low, p_high
    out[AT.Q_MIN], out[AT.Q_MAX] = q_low, q_high
    out[AT.EQUAL], out[AT.Q_GREATER] = equal, above
    # There are zeros or positive values only if the maximum allows it.
    if most(p_high, q_high) >= 0.0:
        zeros(p, q, n, out)
    if most(p_high, q_high) > 0.0:
        positives(p, q, n, out)


@reduction
def positives(p: Float64, q: Float64, n: int, out: Float64) -> None:
    """Count positive values."""
    of_p = of_q = 0.0
    for i in range(n):
        of_p += 1.0 if p[i] > 0.0 else 0.0
        of_q += 1.0 if q[i] > 0.0 else 0.0
    out[AT.P_POSITIVE], out[AT.Q_POSITIVE] = of_p, of_q


@reduction
def _zeros(x: Float64, y: Float64, n: int) -> tuple[float, float]:
    """Count the zeros of x; sum |y| there."""
    count = size = 0.0
    for i in range(n):
        count += 1.0 if x[i] == 0.0 else 0.0
        size += abs(y[i]) if x[i] == 0.0 else 0.0
    return count, size


@reduction
def _both_zero(p: Float64, q: Float64, n: int) -> float:
    both = 0.0
    for i in range(n):
        both += 1.0 if abs(p[i]) + abs(q[i]) == 0.0 else 0.0
    return both


@exact
def zeros(p: Float64, q: Float64, n: int, out: Float64) -> None:
    """Count zeros; sum one stream where the other is 0. `out` has the maxima."""
    p_zero = q_zero = both = p_of_zero = q_of_zero = 0.0
    if out[AT.P_MAX] >= 0.0:
        p_zero, q_of_zero = _zeros(p, q, n)
    if out[AT.Q_MAX] >= 0.0:
        q_zero, p_of_zero = _zeros(q, p, n)
    if p_zero > 0.0 and q_zero > 0.0:
        both = _both_zero(p, q, n)
    out[AT.P_ZERO], out[AT.Q_ZERO], out[AT.BOTH_ZERO] = p_zero, q_zero, both
    out[AT.P_LACKS], out[AT.Q_LACKS] = p_zero - both, q_zero - both
    out[AT.P_LACKS_ABS], out[AT.Q_LACKS_ABS] = q_of_zero, p_of_zero


@reduction
def log_prob_sums(p: Float64, q: Float64, d: Float64, n: int, out: Float64) -> None:
    """Sum d, p and q, and their squares and products."""
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
    count = float(n)
    out[AT.D_ABS_SUM] = absolute
    out[AT.D_SUM], out[AT.D_M2] = sd + count * d0, sdd - sd * sd / count
    out[AT.P_SUM], out[AT.P_M2] = sp + count * p0, spp - sp * sp / count
    out[AT.Q_SUM], out[AT.Q_M2] = sq + count * q0, sqq - sq * sq / count
    out[AT.PQ_C] = spq - sp * sq / count


@exact
def lagged(
    p: Float64, q: Float64, n: int, cross: float, side: int, carry: Float64, out: Float64
) -> None:
    """Add the moments of pairs at lag 1; side 0 is (p, next q), side 1 is (p, previous q).

    The sums over all but the first or last token follow from the sums of the full block. `carry`
    holds the last token of the preceding block, if that block is adjacent to this one.
    """
    p0, q0, count = p[0], q[0], float(n)
    p_mean, q_mean = out[AT.P_SUM] - count * p0, out[AT.Q_SUM] - count * q0
    sp, spp = p_mean, out[AT.P_M2] + p_mean * p_mean / count
    sq, sqq = q_mean, out[AT.Q_M2] + q_mean * q_mean / count
    spq, pairs = cross, count - 1.0
    # The first token is the origin and adds nothing to any sum: only the last one is subtracted.
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
    base = AT.NEXT_N if side == 0 else AT.LAST_N
    second = AT.NEXT_P_M2 if side == 0 else AT.LAST_P_M2
    out[base], out[base + 1], out[base + 2] = pairs, sp + pairs * p0, sq + pairs * q0
    out[second] = larger(spp - sp * sp / pairs, 0.0)
    out[second + 1] = larger(sqq - sq * sq / pairs, 0.0)
    out[second + 2] = spq - sp * sq / pairs


@reduction
def lag_sums(p: Float64, q: Float64, n: int, out: Float64) -> tuple[float, float]:
    """Sum |p - q| at lags 1 and 2 inside the block; return the cross sums at lag +1 and -1 around
    (p[0], q[0])."""
    p0, q0 = p[0], q[0]
    following = preceding = ahead1 = behind1 = ahead2 = behind2 = 0.0
    p1, q1 = p0, q0
    # The second token has none two before it: a difference of 0 stands for it.
    p2, q2 = (q[1], p[1]) if n > 1 else (0.0, 0.0)
    for i in range(1, n):
        x, y = p[i], q[i]
        following += (p1 - p0) * (y - q0)
        preceding += (x - p0) * (q1 - q0)
        ahead1 += abs(p1 - y)
        behind1 += abs(x - q1)
        ahead2 += abs(p2 - y)
        behind2 += abs(x - q2)
        p1, p2, q1, q2 = x, p1, y, q1
    out[AT.AHEAD_1], out[AT.BEHIND_1] = ahead1, behind1
    out[AT.AHEAD_2], out[AT.BEHIND_2] = ahead2, behind2
    out[AT.LAG2_N] = n - 2.0 if n > 2 else 0.0
    return following, preceding


@exact
def lag_sums_across(p: Float64, q: Float64, n: int, carry: Float64, out: Float64) -> None:
    """Do the same for pairs that span the preceding block. Its `carry` is (p, q of the last token,
    number of tokens in this run: 0, 1 or 2, p, q of the token before the last)."""
    if carry[2] < 1.0:
        return
    out[AT.AHEAD_1] += abs(carry[0] - q[0])
    out[AT.BEHIND_1] += abs(p[0] - carry[1])
    if n > 1:
        out[AT.AHEAD_2] += abs(carry[0] - q[1])
        out[AT.BEHIND_2] += abs(p[1] - carry[1])
        out[AT.LAG2_N] += 1.0
    if carry[2] > 1.0:
        out[AT.AHEAD_2] += abs(carry[3] - q[0])
        out[AT.BEHIND_2] += abs(p[0] - carry[4])
        out[AT.LAG2_N] += 1.0


@reduction
def rounding(p: Float64, q: Float64, n: int, out: Float64) -> None:
    """Count values representable in bfloat16, and tokens that are equal once rounded to it.

    bfloat16 keeps 7 of float64's 52 mantissa bits. Rounding adds half of the last kept bit, one
    less where that bit is even (IEEE 754, ties to even).
    """
    p_held = q_held = same = 0.0
    for i in range(n):
        x = np.float64(p[i]).view(np.int64)
        y = np.float64(q[i]).view(np.int64)
        p_held += 1.0 if (x & 0x1FFFFFFFFFFF) == 0 else 0.0
        q_held += 1.0 if (y & 0x1FFFFFFFFFFF) == 0 else 0.0
        a = x + 0x0FFFFFFFFFFF + ((x >> 45) & 1)
        b = y + 0x0FFFFFFFFFFF + ((y >> 45) & 1)
        same += 1.0 if (a ^ b) >> 45 == 0 or p[i] == q[i] else 0.0
    out[AT.P_BF16], out[AT.Q_BF16], out[AT.SAME_BF16] = p_held, q_held, same


@exact
def _exp_sums(p_sum: float, q_sum: float, p_low: bool, q_low: bool, out: Float64) -> None:
    """Write the sums of e^p - 1 and e^p: the second is known if `p_low`, else the first."""
    n = out[AT.TOKENS]
    out[AT.U_SUM], out[AT.P_EXP_SUM] = p_sum - n if p_low else p_sum, p_sum if p_low else p_sum + n
    out[AT.V_SUM], out[AT.Q_EXP_SUM] = q_sum - n if q_low else q_sum, q_sum if q_low else q_sum + n


@fused
def _above(less: float, whole: float, em1: float, origin: float) -> float:
    """Return e^p - 1 - origin, from e^q - 1, e^q and e^d - 1."""
    return (less - origin) + whole * em1


@reduction
def probability_sums(
    q: Float64, em1: Float64, exp_d: Float64, n: int, less: Float64, whole: Float64, out: Float64
) -> None:
    """Sum over e^p and e^q; `em1` is e^d - 1, and `exp_d` is e^d if all p are far below 0.

    Deviations are taken of e^p - 1, or of e^p if that has more digits. The same holds for q. `less`
    and `whole` become e^q - 1 and e^q. They have a loop of their own, because the registers do not
    suffice for their constants and all sums.
    """
    exponentials(q, n, less, whole)
    p_low, q_low = out[AT.P_MAX] < FAR_BELOW, out[AT.Q_MAX] < FAR_BELOW
    u0 = whole[0] * exp_d[0] if p_low else less[0] + whole[0] * em1[0]
    v0, a0 = whole[0] if q_low else less[0], whole[0] * abs(em1[0])
    sa = saa = su = suu = sv = svv = suv = 0.0
    low = high = a0
    for i in range(n):
        a = whole[i] * abs(em1[i])
        x = whole[i] * exp_d[i] - u0 if p_low else _above(less[i], whole[i], em1[i], u0)
        y, z = (whole[i] if q_low else less[i]) - v0, a - a0
        low, high = least(low, a), most(high, a)
        sa += z
        saa += z * z
        su += x
        suu += x * x
        sv += y
        svv += y * y
        suv += x * y
    count = float(n)
    out[AT.A_SUM], out[AT.A_M2] = sa + count * a0, saa - sa * sa / count
    out[AT.A_MIN], out[AT.A_MAX] = low, high
    _exp_sums(su + count * u0, sv + count * v0, p_low, q_low, out)
    out[AT.U_M2], out[AT.V_M2] = suu - su * su / count, svv - sv * sv / count
    out[AT.UV_C] = suv - su * sv / count


@reduction
def ratio_sums(em1: Float64, exp_d: Float64, n: int, out: Float64) -> None:
    """Sum e^clamp(d), its second moment and chi-square; `em1` is e^d - 1."""
    chi2 = raw = ratio = sw = sww = 0.0
    for i in range(n):
        e = em1[i]
        # Select instead of clamping: the exponential of a clamped d is one of two constants.
        w = CLAMP_HIGH if e > CLAMP_HIGH else (CLAMP_LOW if e < CLAMP_LOW else e)
        raw += w
        chi2 += w * (w + 2.0)
        x = exp_d[i]
        ratio += WEIGHT_HIGH if x > WEIGHT_HIGH else (WEIGHT_LOW if x < WEIGHT_LOW else x)
    if out[AT.D_MAX] < FAR_BELOW:
        x0 = larger(exp_d[0], WEIGHT_LOW)
        for i in range(n):
            z = larger(exp_d[i], WEIGHT_LOW) - x0
            sw += z
            sww += z * z
    else:
        w0 = smaller(larger(em1[0], CLAMP_LOW), CLAMP_HIGH)
        for i in range(n):
            e = em1[i]
            z = (CLAMP_HIGH if e > CLAMP_HIGH else (CLAMP_LOW if e < CLAMP_LOW else e)) - w0
            sw += z
            sww += z * z
    out[AT.RAW_SUM], out[AT.RATIO_SUM] = raw, ratio
    out[AT.CHI2_SUM], out[AT.RATIO_M2] = chi2, sww - sw * sw / float(n)


@exact
def _distance(x: float, y: float) -> float:
    """Return |e^x - e^y|; NaN if both overflow (x and y above 709 are no log-probs)."""
    if abs(x - y) < 1.0:
        return math.exp(y) * abs(math.expm1(x - y))
    return abs(math.exp(x) - math.exp(y))


@exact
def probability_sums_wide(
    p: Float64, q: Float64, em1: Float64, exp_d: Float64, n: int, out: Float64
) -> None:
    """Do `probability_sums` for values where e^q * e^d differs from e^p in float64; rare."""
    p_low, q_low = out[AT.P_MAX] < FAR_BELOW, out[AT.Q_MAX] < FAR_BELOW
    su = sv = sa = 0.0
    low, high = np.inf, -np.inf
    for i in range(n):
        u = math.exp(p[i]) if p_low else math.expm1(p[i])
        v = math.exp(q[i]) if q_low else math.expm1(q[i])
        a = _distance(p[i], q[i])
        su, sv, sa = su + u, sv + v, sa + a
        low, high = smaller(low, a), larger(high, a)
    count = float(n)
    suu = svv = suv = saa = 0.0
    for i in range(n):
        u = math.exp(p[i]) if p_low else math.expm1(p[i])
        v = math.exp(q[i]) if q_low else math.expm1(q[i])
        x, y, z = u - su / count, v - sv / count, _distance(p[i], q[i]) - sa / count
        suu, svv, suv, saa = suu + x * x, svv + y * y, suv + x * y, saa + z * z
    out[AT.A_SUM], out[AT.A_M2], out[AT.A_MIN], out[AT.A_MAX] = sa, saa, low, high
    _exp_sums(su, sv, p_low, q_low, out)
    out[AT.U_M2], out[AT.V_M2] = suu, svv
    out[AT.UV_C] = suv
