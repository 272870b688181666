"""Exponentials of one block of tokens: polynomials that vectorize.

`out` is always a cell's vector.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from stagescope_service.statistics.cell import AT, Float64
from stagescope_service.statistics.jit import exact, fused, reduction

NEAR: Final = 0.3465
"""Half of ln 2, rounded down: the reduced argument of an exponential."""


@fused
def _beyond_linear(r: float) -> tuple[float, float]:
    """Return the even and the odd part of e^r - 1 - r for |r| <= NEAR: its Taylor series to
    r^12/12! (relative error below 1e-14)."""
    square = r * r
    even = 1.0 / 479001600.0
    even = even * square + 1.0 / 3628800.0
    even = even * square + 1.0 / 40320.0
    even = even * square + 1.0 / 720.0
    even = even * square + 1.0 / 24.0
    even = even * square + 0.5
    odd = 1.0 / 39916800.0
    odd = odd * square + 1.0 / 362880.0
    odd = odd * square + 1.0 / 5040.0
    odd = odd * square + 1.0 / 120.0
    odd = odd * square + 1.0 / 6.0
    return even * square, odd * (square * r)


@fused
def _reduced(x: float) -> tuple[int, float]:
    """Return the bits of 2^k, and r with x = k ln 2 + r and |r| <= NEAR."""
    # Adding 1.5 * 2^52 leaves the rounded integer in the low bits.
    shifted = x * 1.4426950408889634 + 6755399441055744.0
    k = shifted - 6755399441055744.0
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    bits = np.int64(np.float64(shifted).view(np.int64) << 52)
    return int(bits + np.int64(0x3FF0000000000000)), r


_Four = tuple[float, float, float, float]
_C = (
    0.5000000000000001, 0.16666666666666669, 0.04166666666662413, 0.008333333333330062,
    0.0013888888917213717, 0.00019841269863053618, 2.4801521295954376e-05,
    2.7557268459997064e-06, 2.7620088445409746e-07, 2.510038549551032e-08,
)  # fmt: skip
"""(e^r - 1 - r) / r^2 for |r| <= NEAR, interpolated at Chebyshev's points: with these terms the
relative error of e^r - 1 is below 1e-16."""
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9 = _C


@fused
def _of_near_0(x: float) -> tuple[float, float, float]:
    """Return e^x - 1, e^x - 1 - x and e^|x| - 1 for |x| <= NEAR."""
    even, odd = _beyond_linear(x)
    return x + (even + odd), even + odd, abs(x + odd) + even


@fused
def _of_d(x: float) -> _Four:
    """Return e^x - 1, e^x, e^x - 1 - x and e^|x| for |x| <= 700; the terms of the third do not
    cancel."""
    bits, r = _reduced(x)
    even, odd = _beyond_linear(r)
    scale = np.int64(bits).view(np.float64)
    c = even + odd
    # Not e^x - 1 + 1: for x far below 0 that loses all significant digits of e^x.
    exp = scale * (r + c) + scale
    third = scale * c + ((scale * r - x) + (scale - 1.0))
    # 2^-k, and the signs of odd powers turned: a division takes longer.
    inverse = np.int64(np.int64(0x7FE0000000000000) - bits).view(np.float64)
    other = inverse * (even - (r + odd)) + inverse
    return scale * (r + c) + (scale - 1.0), exp, third, other if x < 0.0 else exp


@reduction
def exponentials_near_0(x: Float64, n: int, em1: Float64, out: Float64) -> None:
    """Do `exponentials_of_d` for |x| <= NEAR, but for e^x, and `ratio_sums`, since none is clamped.
    `out` has the sum of x."""
    third = absolute = sw = sww = 0.0
    first, _, _ = _of_near_0(x[0])
    for i in range(n):
        e, c, a = _of_near_0(x[i])
        em1[i] = e
        third += c
        absolute += a
        z = e - first
        sw += z
        sww += z * z
    count = float(n)
    raw = out[AT.D_SUM] + third
    out[AT.K3_SUM], out[AT.EXP_ABS_SUM] = third, absolute + count
    out[AT.RAW_SUM], out[AT.RATIO_SUM] = raw, raw + count
    out[AT.RATIO_M2] = sww - sw * sw / count
    out[AT.CHI2_SUM] = sww + first * (2.0 * sw + first * count) + 2.0 * raw


@exact
def one_more(em1: Float64, n: int, exp: Float64) -> None:
    """Compute e^x from e^x - 1 for |x| <= NEAR."""
    for i in range(n):
        exp[i] = em1[i] + 1.0


@reduction
def exponentials_of_d(x: Float64, n: int, em1: Float64, exp: Float64, out: Float64) -> None:
    """Compute e^x - 1 and e^x for |x| <= 700, and the sums of e^x - 1 - x and e^|x|."""
    third = absolute = 0.0
    for i in range(n):
        em1[i], exp[i], c, a = _of_d(x[i])
        third += c
        absolute += a
    out[AT.K3_SUM], out[AT.EXP_ABS_SUM] = third, absolute


@fused
def _exponential(x: float) -> tuple[float, float]:
    bits, r = _reduced(x)
    scale, square = np.int64(bits).view(np.float64), r * r
    # Pairs of terms: a processor waits less for them than for one chain.
    c = (_C9 * r + _C8) * square + (_C7 * r + _C6)
    c = c * square + (_C5 * r + _C4)
    c = c * square + (_C3 * r + _C2)
    c = c * square + (_C1 * r + _C0)
    c = c * square + r
    return scale * c + (scale - 1.0), scale * c + scale


@fused
def exponentials(x: Float64, n: int, less: Float64, whole: Float64) -> None:
    """Compute e^x - 1 and e^x for |x| <= 700, to a few units in the last place."""
    for i in range(n):
        less[i], whole[i] = _exponential(x[i])


@exact
def exponentials_of_d_wide(x: Float64, n: int, em1: Float64, exp: Float64, out: Float64) -> None:
    """Compute the same for any finite x; rare, so it calls the C library."""
    third = absolute = 0.0
    for i in range(n):
        em1[i], exp[i] = math.expm1(x[i]), math.exp(x[i])
        third += em1[i] - x[i]
        absolute += math.exp(abs(x[i]))
    out[AT.K3_SUM], out[AT.EXP_ABS_SUM] = third, absolute
