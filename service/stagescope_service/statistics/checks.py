"""Checks of whether two streams are comparable, each computed from one cell.

d = p - q, r = e^d. If q is the distribution that sampled, E[r] = 1 (`calibration`). Noise of either
side then leaves d almost uncorrelated with q, since E[d | context] is of second order. A
temperature instead makes d proportional to q within a context. Then corr(d, q) is the square root
of the share of q's variance that is within contexts, at any temperature. Under truncation E[r] is
the mass that was kept. The bounds were calibrated on the batches of `tests/support/sampler.py`.

A check that tests noise (`temperature`, `calibration`) needs a number of standard errors that noise
alone reaches with a stated probability, and a size that matters. Tiny differences do not matter
even if they are certain, and few tokens make their noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Final, Literal, NamedTuple

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.profiles import Bin, Edge
from stagescope_service.statistics.summary import Sequences

Status = Literal["ok", "suspect", "unknown"]

ENOUGH: Final = 32
"""Minimum tokens for a correlation or a share to be meaningful."""
MANY: Final = 128
"""Minimum tokens for a calibration or a temperature to be meaningful."""
POSITIVE_BOUND: Final = 1e-3
"""Rounding can leave a log-prob slightly above 0."""
SHIFTED_RATIO: Final = 0.5
"""mean |d| at another lag over mean |d| at lag 0, below which the streams are shifted."""
UNRELATED: Final = 0.75
"""Correlation of p and q below which they are different quantities."""
DRIFTED_UNRELATED: Final = 0.2
"""The same if older policy versions sampled the tokens. An update that goes far lowers the
correlation of the same tokens; only other tokens leave nearly none."""
FLAT: Final = 0.1
"""Standard deviation of both streams, in nats, below which noise alone may decorrelate them."""
FAR_TOKENS: Final = 8
FAR_SHARE: Final = 0.01
"""Minimum number and share of tokens with |d| over 0.5 in streams of different tokens."""
ONE_SIGN: Final = 0.98
"""Minimum |sum of d| over sum of |d| if all d have one sign, except for noise."""
CUT_UNRELATED: Final = 0.18
"""`UNRELATED` if all d have one sign. A cut of a nearly flat distribution keeps tokens of similar
log-probs, and d is the mass of the others: the correlation of p and q is 0.35 to 0.8."""
FITS: Final = 0.5
"""mean |d| over the means at the other lags, below which tokens certainly fit their own."""
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
SCALED_ONE_SIDED: Final = 0.85
"""Minimum |corr(d, q)| of a temperature if all d have one sign: log-probs that were scaled without
renormalising them. A cut reaches 0.72."""
EDGE_RATIO: Final = 3.0
"""Minimum ratio of mean |d| of edge tokens of rounds to the mean of the others."""
EDGE_SHARE: Final = 0.2
"""Minimum share of the edge tokens that carry the sum of their |d|. Noise has 0.64. One token of 32
that is far off has 0.03, and says nothing about the others."""
ROUNDED_SHARE: Final = 0.98

SHIFTS: Final = (
    (Field.AHEAD_1, Field.NEXT_N, "1 token after", "1 token late", 1),
    (Field.BEHIND_1, Field.NEXT_N, "1 token before", "1 token early", -1),
    (Field.AHEAD_2, Field.LAG2_N, "2 tokens after", "2 tokens late", 2),
    (Field.BEHIND_2, Field.LAG2_N, "2 tokens before", "2 tokens early", -2),
)
"""(sum of |p - q|, number of pairs, position of q's token, delay of q, the same as a number)."""


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check of the two streams."""

    name: str
    status: Status
    text: str
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ranks: tuple[tuple[str, int], ...] = ()
    """(role, rank) of the ranks whose own tokens fail it, if only some do."""


REST: Final = 0.2
"""Minimum share of tokens that certainly fit in what a broader check covers, for a narrower one to
explain it."""


@dataclasses.dataclass(frozen=True)
class Scope:
    """A check of all tokens, of some ranks, rounds or samples.

    Attributes:
        check: Its result.
        tokens: Number of tokens that it covers; if it failed, only those of the failing slices.
        unknown: Number of tokens of other slices that do not certainly fit either.
    """

    check: Check
    tokens: float
    unknown: float

    def explains(self, broader: Scope) -> bool:
        """Return whether enough tokens of a failed broader check certainly fit."""
        rest = broader.tokens - self.tokens - self.unknown
        return rest >= REST * broader.tokens


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


def _needs_more(cell: Cell, least: int = MANY) -> str:
    """Return why a check was not made: the tokens are too few."""
    return f"not checked: it needs {least} tokens, and {cell.tokens or 'none'} counted"


def constant(cell: Cell, p: str, q: str) -> Check:
    """Check whether a stream is constant."""
    values = {side: cell.extreme(Field[f"{side.upper()}_MIN"]) for side in ("p", "q")}
    if cell.tokens < ENOUGH:
        return Check("constant", "unknown", _needs_more(cell, ENOUGH), values)
    flat = [
        index
        for index, side in enumerate("PQ")
        if cell[Field[f"{side}_MIN"]] == cell[Field[f"{side}_MAX"]]
    ]
    if flat:
        listed = [f"{(p, q)[index]} is {values['pq'[index]]:g} in every token" for index in flat]
        text = f"{' and '.join(listed)}: probably nothing fills it in"
        return Check("constant", "suspect", text, {**values, "flat": float(flat[0])})
    return Check("constant", "ok", "both streams vary", values)


def probabilities(cell: Cell, p: str, q: str) -> Check:
    """Check for values above 0."""
    values = {"p_count": cell[Field.P_POSITIVE], "q_count": cell[Field.Q_POSITIVE]}
    if not cell.tokens:
        return Check("probabilities", "unknown", "no token counts", values)
    found = [
        f"{stream} has {_values(cell[Field[f'{side}_POSITIVE']])} above 0 "
        f"(up to {cell[Field[f'{side}_MAX']]:.3g})"
        for side, stream in (("P", p), ("Q", q))
        if cell[Field[f"{side}_MAX"]] > POSITIVE_BOUND
    ]
    if found:
        text = (
            f"{' and '.join(found)}: log-probs cannot be positive; are they probabilities, "
            "entropies, or negated?"
        )
        return Check("probabilities", "suspect", text, values)
    return Check("probabilities", "ok", "no log-prob lies above 0", values)


def _values(count: float) -> str:
    return f"{count:.0f} value{'' if count == 1 else 's'}"


def shifted(cell: Cell, p: str, q: str, *, filled: float = 0.0) -> Check:
    """Check whether p fits the preceding or following tokens better than its own.

    `filled`: the sum of |d| of tokens that were filled in. The first and the last token of a round
    have fewer pairs at other lags, which such a value does not enlarge.
    """
    own, others = lag_means(cell)
    values = {"lag_0": own, **{where: mean for mean, where in others}}
    if cell.tokens < ENOUGH or not others:
        return Check("shifted", "unknown", "too few tokens", values)
    smallest, where = min(others)
    if smallest < SHIFTED_RATIO * (own - filled / cell.tokens):
        delay, lag = next(shift[3:] for shift in SHIFTS if shift[2] == where)
        values["lag"] = lag
        text = (
            f"{q} is {delay}: {p}[t] matches {q}[t{lag:+d}] (mean difference {smallest:.3g} nat), "
            f"not {q}[t] ({own:.3g} nat)"
        )
        return Check("shifted", "suspect", text, values)
    return Check(
        "shifted", "ok", f"aligned: the mean difference token by token is {own:.3g} nat", values
    )


def lag_means(cell: Cell) -> tuple[float, list[tuple[float, str]]]:
    """Return mean |p - q| at lag 0, and (mean, position) at the other lags."""
    others = [
        (cell[total] / cell[count], where)
        for total, count, where, _, _ in SHIFTS
        if cell[count] >= ENOUGH
    ]
    return cell.mean(Field.D_ABS_SUM), others


def fits(cell: Cell) -> bool:
    """Return whether p certainly fits q token by token; False also if it may."""
    own, others = lag_means(cell)
    if others and own < FITS * min(others)[0]:
        return True
    correlation = cell.correlation(Field.P_M2, Field.Q_M2, Field.PQ_C)
    return cell.tokens >= MANY and correlation > UNRELATED


def unrelated(cell: Cell, p: str, q: str, *, drifts: bool = False) -> Check:
    """Check whether p and q describe the same tokens.

    `drifts`: whether older policy versions sampled tokens of the cell. A trainer that moved far
    since then scores the same tokens differently; other tokens have no correlation left.
    """
    correlation = cell.correlation(Field.P_M2, Field.Q_M2, Field.PQ_C)
    values = {"correlation": correlation}
    if cell.tokens < MANY:
        return Check("unrelated", "unknown", _needs_more(cell), values)
    if math.isnan(correlation):
        text = "a stream is constant, or its values are too large"
        return Check("unrelated", "unknown", text, values)
    spread = max(
        cell.std(Field.P_M2, Field.P_MIN, Field.P_MAX),
        cell.std(Field.Q_M2, Field.Q_MIN, Field.Q_MAX),
    )
    # A few tokens far off spoil any correlation, and say nothing about the others.
    far = cell[Field.ABS_OVER_1]
    is_general = far >= max(FAR_TOKENS, FAR_SHARE * cell.tokens)
    is_cut = abs(cell[Field.D_SUM]) > ONE_SIGN * cell[Field.D_ABS_SUM]
    usual = CUT_UNRELATED if is_cut else UNRELATED
    is_low = correlation < usual and spread > FLAT and is_general
    text = f"correlation {correlation:.3f} token by token"
    if is_low and drifts and correlation >= DRIFTED_UNRELATED:
        text += ": older policy versions sampled them, and policy drift explains a low one"
    elif is_low:
        text = (
            f"{p} hardly correlates with {q} ({correlation:.3f}): its rows are in another order, "
            "its tokens are others, or it is another quantity (an entropy?)"
        )
        return Check("unrelated", "suspect", text, values)
    return Check("unrelated", "ok", text, values)


def rounded(cell: Cell, p: str, q: str) -> Check:
    """Check whether one stream is the other rounded to bfloat16: d is then only rounding error."""
    unequal = cell.tokens - cell[Field.EQUAL]
    same = (cell[Field.SAME_BF16] - cell[Field.EQUAL]) / unequal if unequal > 0 else math.nan
    held = {side: held_by_bfloat16(cell, side) for side in ("P", "Q")}
    values = {"same_once_rounded": same, "p_held": held["P"], "q_held": held["Q"]}
    if unequal < ENOUGH:
        return Check("rounded", "unknown", "too few tokens that differ", values)
    coarse = [stream for side, stream in (("P", p), ("Q", q)) if held[side] >= ROUNDED_SHARE]
    if coarse and same >= ROUNDED_SHARE:
        text = (
            f"{coarse[0]} has only bfloat16 values. In {same:.1%} of the tokens that differ, it is "
            "the other stream rounded to bfloat16. Either it is a rounded copy, or the streams "
            "differ by less than rounding adds"
        )
        return Check("rounded", "suspect", text, values)
    return Check("rounded", "ok", "the streams differ by more than rounding to bfloat16", values)


def held_by_bfloat16(cell: Cell, side: str) -> float:
    """Return the share of a stream's non-zero tokens that are representable in bfloat16."""
    zeros = cell[Field[f"{side}_ZERO"]]
    others = cell.tokens - zeros
    return (cell[Field[f"{side}_BF16"]] - zeros) / others if others >= ENOUGH else math.nan


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
        return Check("temperature", "unknown", _needs_more(cell))
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
        return Check("calibration", "unknown", _needs_more(cell), values)
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
