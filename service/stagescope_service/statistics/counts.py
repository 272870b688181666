"""Counts over one block of tokens: tails, applied weights, the histogram of |d|.

`out` is always a cell's vector, already filled by `blocks`.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from stagescope_service.statistics import cell as _cell
from stagescope_service.statistics.blocks import (
    CLAMP_HIGH,
    CLAMP_LOW,
    FAR_BELOW,
    WEIGHT_HIGH,
    WEIGHT_LOW,
    larger,
    smaller,
)
from stagescope_service.statistics.cell import AT, Float64, Int32, UInt32
from stagescope_service.statistics.exponentials import NEAR, one_more
from stagescope_service.statistics.jit import exact, reduction

HISTOGRAM_HALF: Final = 512
"""Buckets on either side of 1: |d| beyond 2^±64 counts in the outermost one."""

_A0, _A1, _A2, _A3 = _cell.ABS_TAILS
(_L0, _H0), (_L1, _H1) = _cell.RATIO_TAILS
_ROUNDED: Final = 1.0 - 602 * 2.0**-52
_SLOT_0: Final = (1023 - HISTOGRAM_HALF << 52) - 9628
"""The exponent of |d|^8 is the bucket of |d|. Three squares round, but never fall where |d| rises:
a bound only moves. This factor of d and this offset move all bounds back between the same two
numbers."""


@reduction
def tails(d: Float64, em1: Float64, n: int, out: Float64) -> None:
    """Count the tails; a block whose extremes reach no bound is skipped."""
    largest = larger(out[AT.D_MAX], -out[AT.D_MIN])
    # 0.095 is below |ln| of the innermost bounds of the ratio, 0.9 and 1.1.
    if largest < 0.095:
        return
    over0 = over1 = over2 = over3 = 0.0
    below0 = above0 = below1 = above1 = 0.0
    for i in range(n):
        x, ratio = abs(d[i]), 1.0 + em1[i]
        over0 += 1.0 if x > _A0 else 0.0
        below0 += 1.0 if ratio < _L0 else 0.0
        above0 += 1.0 if ratio > _H0 else 0.0
    if largest > _A1:
        for i in range(n):
            x, ratio = abs(d[i]), 1.0 + em1[i]
            over1 += 1.0 if x > _A1 else 0.0
            over2 += 1.0 if x > _A2 else 0.0
            over3 += 1.0 if x > _A3 else 0.0
            below1 += 1.0 if ratio < _L1 else 0.0
            above1 += 1.0 if ratio > _H1 else 0.0
    out[AT.ABS_OVER_0], out[AT.ABS_OVER_1] = over0, over1
    out[AT.ABS_OVER_2], out[AT.ABS_OVER_3] = over2, over3
    out[AT.RATIO_BELOW_0], out[AT.RATIO_ABOVE_0] = below0, above0
    out[AT.RATIO_BELOW_1], out[AT.RATIO_ABOVE_1] = below1, above1


@exact
def clamped(x: float) -> float:
    """Return e^x - 1 with x clamped."""
    return smaller(larger(math.expm1(x), CLAMP_LOW), CLAMP_HIGH)


@reduction
def weights(em1: Float64, exp_d: Float64, n: int, rule: Float64, out: Float64) -> None:
    """Sum the applied weights, and weight - 1. `rule` is `StatisticsSettings.weight_rule()`."""
    least, most = clamped(out[AT.D_MIN]), clamped(out[AT.D_MAX])
    out[AT.W_MIN], out[AT.W_MAX] = least, most
    upper, lower = rule[0], rule[1]
    high, high_value, low, low_value = rule[2], rule[3], rule[4], rule[5]
    high_weight, is_far_below = rule[6], out[AT.D_MAX] < FAR_BELOW
    # The extremes of e^d - 1 and em1 come from different routines: allow for their rounding.
    slack = 1e-12 * (1.0 + abs(most))
    if most + slack <= smaller(upper, high) and least - slack >= larger(lower, low):
        return
    if larger(out[AT.D_MAX], -out[AT.D_MIN]) <= NEAR:
        one_more(em1, n, exp_d)
    origin, least, most = 0.0, math.inf, -math.inf
    is_high = is_low = total = applied = sw = sww = 0.0
    for i in range(n):
        e, x = em1[i], exp_d[i]
        w = CLAMP_HIGH if e > CLAMP_HIGH else (CLAMP_LOW if e < CLAMP_LOW else e)
        x = WEIGHT_HIGH if x > WEIGHT_HIGH else (WEIGHT_LOW if x < WEIGHT_LOW else x)
        is_high += 1.0 if w > upper else 0.0
        is_low += 1.0 if w < lower else 0.0
        x = high_weight if w > high else (0.0 if w < low else x)
        w = high_value if w > high else (low_value if w < low else w)
        z = x if is_far_below else w
        if i == 0:
            origin = z
        least = w if w < least else least
        most = w if w > most else most
        total += w
        applied += x
        sw += z - origin
        sww += (z - origin) * (z - origin)
    count = float(n)
    out[AT.IS_HIGH], out[AT.IS_LOW] = is_high, is_low
    out[AT.W_MIN], out[AT.W_MAX] = least, most
    out[AT.W_SUM], out[AT.WEIGHT_SUM], out[AT.W_M2] = total, applied, sww - sw * sw / count


@exact
def histogram(d: Float64, n: int, zeros: int, slots: Int32, counts: UInt32) -> None:
    """Count |d| by OpenTelemetry's base-2 exponential buckets: (2^(i/8), 2^((i+1)/8)]."""
    for i in range(n):
        x = d[i] * _ROUNDED
        x *= x
        x *= x
        x *= x
        slot = (np.float64(x).view(np.int64) - _SLOT_0) >> 52
        slot = np.int64(0) if slot < 0 else slot
        slots[i] = 2 * HISTOGRAM_HALF - 1 if slot >= 2 * HISTOGRAM_HALF else slot
    for i in range(n):
        counts[np.uint32(slots[i])] += np.uint32(1)
    # Zeros fell below the lowest bucket, and are counted separately.
    counts[0] -= np.uint32(zeros)
