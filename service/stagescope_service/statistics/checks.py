"""Checks of whether two streams are comparable, each computed from one cell.

These look at the values of the streams, and at which tokens belong together. `noise_checks` has
those that compare the difference of the streams with noise. d = p - q.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final, Literal

from stagescope_service.statistics.cell import Cell, Field

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
ROUNDED_SHARE: Final = 0.98
"""Minimum share of a stream's values that are bfloat16, and of the tokens that are equal once both
streams are rounded."""
REST: Final = 0.2
"""Minimum share of tokens that certainly fit in what a broader check covers, for a narrower one to
explain it."""

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


def needs_more(cell: Cell, least: int = MANY) -> str:
    """Return why a check was not made: the tokens are too few."""
    return f"not checked: it needs {least} tokens, and {cell.tokens or 'none'} counted"


def constant(cell: Cell, p: str, q: str) -> Check:
    """Check whether a stream is constant."""
    values = {side: cell.extreme(Field[f"{side.upper()}_MIN"]) for side in ("p", "q")}
    if cell.tokens < ENOUGH:
        return Check("constant", "unknown", needs_more(cell, ENOUGH), values)
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
        return Check("unrelated", "unknown", needs_more(cell), values)
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
