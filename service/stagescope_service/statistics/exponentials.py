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
def _exponential(x: float) -> tuple[int, float, float, float]:
    """Return the bits of 2^k, and r, even, odd with e^x = 2^k (1 + r + even + odd), to a few units
    in the last place.

    x = k ln 2 + r with |r| <= NEAR.
    """
    # Adding 1.5 * 2^52 leaves the rounded integer in the low bits.
    shifted = x * 1.4426950408889634 + 6755399441055744.0
    k = shifted - 6755399441055744.0
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    bits = np.int64(np.float64(shifted).view(np.int64) << 52)
    even, odd = _beyond_linear(r)
    return int(bits + np.int64(0x3FF0000000000000)), r, even, odd


_Four = tuple[float, float, float, float]


@fused
def _of_near_0(x: float) -> tuple[float, float, float]:
    """Return e^x - 1, e^x - 1 - x and e^|x| - 1 for |x| <= NEAR."""
    even, odd = _beyond_linear(x)
    return x + (even + odd), even + odd, abs(x + odd) + even


@fused
def _of_d(x: float) -> _Four:
    """Return e^x - 1, e^x, e^x - 1 - x and e^|x| for |x| <= 700; the terms of the third do not
    cancel."""
    bits, r, even, odd = _exponential(x)
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
def exponentials_near_0(x: Float64, n: int, em1: Float64, exp: Float64, out: Float64) -> None:
    """Do `exponentials_of_d` for |x| <= NEAR: with k = 0."""
    third = absolute = 0.0
    for i in range(n):
        e, c, a = _of_near_0(x[i])
        em1[i] = e
        exp[i] = e + 1.0
        third += c
        absolute += a
    out[AT.K3_SUM], out[AT.EXP_ABS_SUM] = third, absolute + float(n)


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
def exponentials_of_q(x: Float64, n: int, em1: Float64, exp: Float64) -> None:
    """Compute e^x - 1 and e^x for |x| <= 700."""
    for i in range(n):
        bits, r, even, odd = _exponential(x[i])
        scale, c = np.int64(bits).view(np.float64), r + (even + odd)
        exp[i] = scale * c + scale
        em1[i] = scale * c + (scale - 1.0)


@exact
def exponentials_of_d_wide(x: Float64, n: int, em1: Float64, exp: Float64, out: Float64) -> None:
    """Compute the same for any finite x; rare, so it calls the C library."""
    third = absolute = 0.0
    for i in range(n):
        em1[i], exp[i] = math.expm1(x[i]), math.exp(x[i])
        third += em1[i] - x[i]
        absolute += math.exp(abs(x[i]))
    out[AT.K3_SUM], out[AT.EXP_ABS_SUM] = third, absolute
