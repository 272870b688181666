"""Checks that compare d = p - q with noise, each computed from one cell.

With r = e^d: if q is the distribution that sampled, E[r] = 1 (`calibration`). Noise of either
side then leaves d almost uncorrelated with q, since E[d | context] is of second order. A
temperature instead makes d proportional to q within a context. Then corr(d, q) is the square root
of the share of q's variance that is within contexts, at any temperature. Under truncation E[r] is
the mass that was kept. The bounds were calibrated on the batches of `tests/support/sampler.py`.

A check needs a number of standard errors that noise alone reaches with a stated probability, and a
size that matters. Tiny differences do not matter even if they are certain, and few tokens make
their noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Final, NamedTuple

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.checks import MANY, Check, needs_more
from stagescope_service.statistics.profile_bins import Bin, Edge
from stagescope_service.statistics.summary import Sequences

SCALED_CORRELATION: Final = 0.4
"""Minimum |corr(d, q)| of a temperature; noise alone stays below 0.2 in the smallest batches."""
SCALED_SLOPE: Final = 0.02
SCALED_SIZE: Final = 1e-3
"""Minimum mean |d| of a temperature, in nats: a smaller difference does not matter. A temperature
of 0.98 makes 2e-3 where a model is sure of nearly every token, or of none."""
SCALED_ALARMS: Final = 6.3e-5
"""Probability that independent noise makes a temperature of any slice that a check looks at: 4
standard errors on either side, and more if there are several slices."""
SCALED_Z: Final = 4.0
"""Standard errors that normal noise has with a probability of `SCALED_ALARMS`."""
DRIFTED_SLOPE: Final = 0.115
"""Maximum distance of a slope from 1 that an update may have made. One that sharpens like a
temperature of 0.9 gives up to 0.111, and a wrong temperature of 0.8 gives 0.12 to 0.25."""
NOISE_RATIO: Final = 1.3
STRONG_RATIO: Final = 1.15
"""|cov(d, q)| / var(d): noise of q itself makes at most 1. The second of strong correlations."""
CALIBRATION_Z: Final = 6.0
CALIBRATION_BIAS: Final = 1e-3
CUT_SHARE: Final = 0.7
"""Minimum share of the unequal tokens in which a q that was cut lies above p. It is 0.5 to 0.6 if
tokens of another model, or other tokens, lower the mean of e^d."""
CUT_CORRELATION: Final = 0.05
"""Minimum corr(d, q) of a q that was cut, if noise hides that."""
OFFSET: Final = 4.0
"""Minimum ratio of |mean d| to its standard deviation, if a constant was added to one stream."""
CUT_SPREAD_OUT: Final = 0.3
"""Minimum share of the tokens that carry the sum of |d| of a q that was cut, if noise of q hides
that. Noise alone has 0.64. Tokens that are scored as others, 5 % of all, have below 0.2."""
CUT_P_SHARE: Final = 0.9
"""Minimum share of the unequal tokens in which a p that was cut lies above q. A q of another model
raises the mean of e^d, and p lies above it in 0.5 to 0.9."""
CUT_ONE_SIDED: Final = 0.9
"""Minimum |sum of d| over the sum of |d| of a vocabulary that was cut, except for noise."""
EDGE_RATIO: Final = 3.0
"""Minimum ratio of mean |d| of edge tokens of rounds to the mean of the others."""
EDGE_SHARE: Final = 0.2
"""Minimum share of the edge tokens that carry the sum of their |d|. Noise has 0.64. One token of 32
that is far off has 0.03, and says nothing about the others."""
_RESIDUE: Final = 1e-13
"""Standard deviation of equal ratios that rounding leaves, relative to their mean, or to mean - 1
where that is the smaller."""


class Calibration(NamedTuple):
    """The distance of the mean importance ratio from 1.

    Attributes:
        tokens: Number of tokens.
        mean: Mean of e^clamp(d, ±20).
        z: (mean - 1) over its standard error; infinite where all ratios equal one number other
            than 1, NaN below two tokens and where all ratios are 1.
    """

    tokens: int
    mean: float
    z: float


def calibration(cell: Cell) -> Calibration:
    """Return the calibration of a cell's tokens, before any rejection or truncation."""
    n, mean, bias = cell.tokens, cell.mean_weight(Field.RAW_SUM), cell.mean(Field.RAW_SUM)
    if n < 2:
        return Calibration(n, mean, math.nan)
    variance, residue = cell[Field.RATIO_M2] / (n - 1), _RESIDUE * min(mean, abs(bias))
    if not variance > residue * residue:
        return Calibration(n, mean, math.copysign(math.inf, bias) if bias else math.nan)
    return Calibration(n, mean, bias / math.sqrt(variance / n))


def scaled(cell: Cell, p: str, q: str, sequences: Sequences, *, slices: int = 1) -> Check:
    """Check whether d grows with q, as it does between temperatures.

    With r = corr(d, q), the slope of d on q is b = cov(d, q) / var(q), and its z is r sqrt(m). For
    independent noise sum(q d) has the variance sum(q^2 d^2). By Cauchy and Schwarz this is at most
    sum(q^2) sum(d^2) / m. Here m is the geometric mean of the numbers of tokens that carry d and q,
    (sum |x|)^2 / sum(x^2), and no more than carry d. So a few large d, or the few unsure tokens of
    a sure model, prove nothing; m counts only the share of them that different responses have.
    Noise of the trainer leaves b = 0. Noise of q is part of d, too, with the opposite sign. It
    leaves k = -cov(d, q) / var(d) = 1 (errors in variables), or less if the trainer has its own.
    The standard error of k is k sqrt((1 / r^2 - 1) / m).

    A slope is suspect if |r| >= `SCALED_CORRELATION`, |b| >= `SCALED_SLOPE`, |k| >= `NOISE_RATIO`
    and mean |d| >= `SCALED_SIZE`. Normal noise must reach |z|, and for b < 0 also k above 1, in any
    of the slices with at most the probability `SCALED_ALARMS`.

    Args:
        cell: the tokens.
        p, q: the names of the streams.
        sequences: the samples of the tokens. Copies of one response, in a group that a sure model
            answers alike, are evidence once.
        slices: number of slices of this kind that are checked; each may be suspect by chance.
    """
    variance, spread = cell[Field.Q_M2], cell[Field.D_M2]
    covariance = cell[Field.PQ_C] - variance
    if cell.tokens < MANY:
        return Check("temperature", "unknown", needs_more(cell))
    if not variance > 0.0 or math.isnan(spread):
        text = f"{q} is constant, or its values are too large"
        return Check("temperature", "unknown", text)
    if not spread > 1e-18 * variance:
        return Check("temperature", "ok", "the streams differ by one number in every token")
    slope, correlation = covariance / variance, covariance / math.sqrt(variance * spread)
    of_d = cell.carrying(Field.D_ABS_SUM, Field.D_SUM, Field.D_M2)
    of_q = cell.carrying(Field.Q_SUM, Field.Q_SUM, Field.Q_M2)
    carrying = min(of_d, math.sqrt(of_d * of_q))
    z = correlation * math.sqrt(carrying * sequences.different_share)
    size = cell.mean(Field.D_ABS_SUM)
    values = {"slope": 1.0 + slope, "correlation": correlation, "z": z, "abs_diff": size}
    # Where noise of q is most of d, d falls with q by as much as it varies.
    is_strong = abs(correlation) > 0.6 and (slope > 0.0 or -covariance > STRONG_RATIO * spread)
    bound = _normal_bound(SCALED_ALARMS / slices)
    if (
        abs(correlation) >= SCALED_CORRELATION
        and abs(slope) >= SCALED_SLOPE
        and size >= SCALED_SIZE
        and (abs(covariance) >= NOISE_RATIO * spread or is_strong)
        and cell.tokens * sequences.different_share >= MANY
        and abs(z) >= bound
        and (slope > 0.0 or _beyond_one(-covariance / spread, correlation, z) >= bound)
    ):
        text = (
            f"{slope_text(values, p, q)}: the streams were taken at different temperatures, or one "
            "of them before and one after scaling"
        )
        if abs(slope) <= DRIFTED_SLOPE:
            text += ", or the engine lacks an update that sharpened or flattened the policy"
        return Check("temperature", "suspect", text, values)
    return Check("temperature", "ok", f"slope of {p} on {q} is {1.0 + slope:.3f}", values)


def slope_text(values: Mapping[str, float], p: str, q: str) -> str:
    """Describe the slope in the values of `scaled`."""
    return (
        f"{p} grows by {values['slope']:.3f} for each nat of {q} ({abs(values['z']):.1f} standard "
        f"errors from 1), and {values['correlation'] ** 2:.0%} of their difference follows from "
        "that"
    )


def _beyond_one(ratio: float, correlation: float, z: float) -> float:
    """Return how many standard errors -cov(d, q) / var(d) lies above 1; see `scaled`."""
    rest = math.sqrt(max(1.0 - correlation * correlation, 0.0))
    return (ratio - 1.0) * abs(z) / (ratio * rest) if rest else math.inf


def _normal_bound(chance: float) -> float:
    """Return the |z| that a normal number exceeds with a probability."""
    return -NormalDist().inv_cdf(chance / 2.0)


def biased(cell: Cell, p: str, q: str, sequences: Sequences) -> Check:
    """Check whether the mean ratio is 1; the check is `renormalised` if mass is missing.

    `sequences`: see `scaled`.
    """
    found = calibration(cell)
    unequal = cell.tokens - cell[Field.EQUAL]
    above = cell[Field.Q_GREATER] / unequal if unequal else math.nan
    values = {
        "mean": found.mean,
        "z": found.z,
        "share_of_unequal": above,
        "one_sided": one_sided(cell),
    }
    if found.tokens < MANY:
        return Check("calibration", "unknown", needs_more(cell), values)
    if math.isnan(found.z):
        return Check("calibration", "unknown", "no token differs", values)
    bias = found.mean - 1.0
    mean = f"the mean of e^({p} - {q}) is {found.mean:.4f}, "
    if math.isinf(found.z):
        mean += "the same in every token, and not "
    else:
        mean += f"{abs(found.z):.1f} standard errors from "
    # The infinite z of equal ratios needs no more than one response.
    is_sure = (
        math.isinf(found.z) or abs(found.z) * math.sqrt(sequences.different_share) >= CALIBRATION_Z
    )
    if abs(found.z) < CALIBRATION_Z or abs(bias) < CALIBRATION_BIAS or not is_sure:
        return Check("calibration", "ok", f"{mean}1", values)
    if _is_cut(cell, bias, above):
        high, low = (q, p) if bias < 0 else (p, q)
        text = f"{mean}1, and {high} lies above {low} in {max(above, 1 - above):.0%} of the "
        offset = abs(cell[Field.D_SUM]) / cell.tokens
        spread = math.sqrt(max(cell[Field.D_M2], 0.0) / cell.tokens)
        if offset > OFFSET * spread:
            text += (
                f"tokens that differ. They differ by nearly the same amount, {offset:.3g} nat with "
                f"a standard deviation of {spread:.2g}: a constant was added to {high}, or "
                f"subtracted from {low}. A cut vocabulary shifts unsure tokens more"
            )
        else:
            text += (
                f"tokens that differ. Either {high} was renormalised over a cut vocabulary (top-p, "
                f"top-k, min-p), or it holds processed log-probs and {low} holds raw ones"
            )
        return Check("renormalised", "suspect", text, values)
    text = (
        f"{mean}1: {q} is not the distribution that sampled these tokens (a temperature or a "
        "cut that it does not show, another adapter, filled-in values)"
    )
    return Check("calibration", "suspect", text, values)


def one_sided(cell: Cell) -> float:
    """Return |sum of d| over the sum of |d|: 1 if all d have one sign, NaN if all are 0."""
    size = cell[Field.D_ABS_SUM]
    return abs(cell[Field.D_SUM]) / size if size > 0.0 else math.nan


def _is_cut(cell: Cell, bias: float, above: float) -> bool:
    """Return whether one stream was renormalised over a cut vocabulary.

    Every token that a cut keeps gains the mass of the others: d has one sign except for noise. The
    scores of another model differ in both directions, and other tokens are few that are far off. If
    q is the stream that was cut, noise hides the sign of small gains. The gain is larger in less
    certain contexts, so that d still rises with q, or nearly all tokens have it.

    Args:
        cell: The tokens.
        bias: The mean of e^d, minus 1.
        above: The share of the unequal tokens in which q lies above p.
    """
    if bias > 0.0:
        return above <= 1.0 - CUT_P_SHARE and one_sided(cell) >= CUT_ONE_SIDED
    spread_out = cell.carrying(Field.D_ABS_SUM, Field.D_SUM, Field.D_M2) / cell.tokens
    if above >= CUT_SHARE or spread_out >= CUT_SPREAD_OUT:
        return above > 0.5
    variance, spread = cell[Field.Q_M2], cell[Field.D_M2]
    rise = cell[Field.PQ_C] - variance
    return above > 0.5 and rise > CUT_CORRELATION * math.sqrt(variance * spread)


def few_carry(found: Bin) -> bool:
    """Return whether a few of some tokens carry the sum of their |d|; False if the squares are
    unknown."""
    return found.carrying < EDGE_SHARE * found.tokens


def edge_token(edge: Edge, found: Bin, others: Bin) -> Check | None:
    """Return the check that fails if the mean ratio is 1 except for the edge tokens of rounds.

    For normal noise E[e^d] is 1 if the mean of d is -variance / 2, and the mean of |d| is the
    standard deviation times sqrt(2 / pi). None: it is not so.
    """
    size, of_edge = (each.d_abs_sum / each.tokens for each in (others, found))
    deviation = size * math.sqrt(math.pi / 2.0)
    mean = others.d_sum / others.tokens
    bound = max(CALIBRATION_Z * deviation / math.sqrt(others.tokens), CALIBRATION_BIAS)
    is_noise = abs(mean + deviation * deviation / 2.0) <= bound  # may be infinite
    if not (of_edge > EDGE_RATIO * size and is_noise) or few_carry(found):
        return None
    text = (
        f"the {found.tokens} {edge} tokens of rounds differ by {of_edge:.3g} nat. All others "
        f"differ by {size:.3g} with a mean of {mean:.2g}, as noise does. Another distribution "
        "would show in all tokens"
    )
    values = {"edge": of_edge, "others": size, "tokens": float(found.tokens)}
    return Check(f"{edge}_token", "suspect", text, values)
