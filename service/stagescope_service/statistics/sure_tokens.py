"""Whether a temperature causes the difference of the streams, shown by tokens of a sure model.

d = p - q. A temperature moves every token whose probability is above one half in one direction: 1 /
sum((q_i / q_1)^s) grows with s. It moves unlikely tokens in the other one. A cut moves all tokens
in one direction. The scores of another model move the sure ones in both. If d is mu + sigma n, with
mu of one sign, the share of the wrong sign shows sigma. This needs no straight line, which a
temperature has only within a context.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from stagescope_service.statistics.checks import Check
from stagescope_service.statistics.noise_checks import CUT_ONE_SIDED, SCALED_SIZE, slope_text
from stagescope_service.statistics.profile_bins import CHANCES, Bin
from stagescope_service.statistics.summary import Summary

FEW: Final = 8
"""Minimum sure tokens, and unlikely ones that are looked at where there are as many."""
ENOUGH: Final = 32
"""Minimum sure tokens to show a temperature if no other check fails: noise moves as many in one
direction with a probability of 2^-31."""
SLOPE_ONE_SIDED: Final = 0.85
"""Minimum |corr(d, q)| of a temperature if all d have one sign: log-probs that were scaled without
renormalising them. A cut reaches 0.72."""
SPREAD: Final = 0.045
"""Maximum distance, in nats, of sure tokens from the move of a temperature. An engine of int8 makes
up to 0.04. Another model, with logits that are 0.3 nats off, makes 0.055 and more."""
CLEAR: Final = (0.97, 0.5)
"""Minimum share of |d| of sure tokens, less the share of the other sign, and minimum share of them
that carry it. They hold for a temperature with a relatively small spread, however many nats it is:
a temperature of 0.4 makes 2.5 times the noise of one of 1."""
ONE_SIDED: Final = 0.9
"""Minimum share of |d| of sure tokens, less the share of the other sign, for a temperature that no
straight line shows."""
CARRYING: Final = 0.2
"""Minimum share of the sure tokens that carry the sum of their |d|. A temperature moves all of
them. Tokens that are scored as others are a few, and p finds all of these unlikely."""
ONE_WAY: Final = 0.8
"""Share of |d| of unlikely tokens, less the share of the other sign, above which they moved like
the sure ones. A cut leaves 0.9 or more, except for noise."""
BEYOND_NOISE: Final = 2.0
"""Minimum ratio of the mean move of unlikely tokens against the sure ones to `spread`. Noise of an
engine of int8 moves some against a shallow cut, by as much as the spread."""
_SURE: Final = CHANCES.index(0.5) + 1
"""The bin of 0.5 to 0.9; those above it hardly move."""
_HALF: Final = _SURE - 1
"""The last bin that may count as unlikely, 0.1 to 0.5."""


@dataclasses.dataclass(frozen=True)
class SureTokens:
    """The moves of tokens whose probability is 0.5 to 0.9, and of the unlikeliest ones.

    Attributes:
        tokens: number of sure ones.
        side: sum of d over the sum of |d| of the sure ones: 1 if p lies above q in all.
        spread: their distance from the move of a temperature, in nats.
        unlikely: sum of d over the sum of |d| of the unlikely ones; NaN if there are none.
        against: mean of |d| of the unlikely ones; those that moved like the sure ones count as 0.
        carrying: share of the sure ones that carry the sum of |d|.
        different: number of sure ones that are no copies, as equal responses of a group are.
    """

    tokens: int
    side: float
    spread: float
    unlikely: float
    against: float
    carrying: float
    different: float

    @classmethod
    def of(cls, summary: Summary) -> SureTokens | None:
        """Return the moves in a step's profiles; None: too few sure tokens differ."""
        bins = summary.profiles.bins("probability")
        sure = [each for each in bins if each.key == _SURE]
        tokens, side = sum(each.tokens for each in sure), _side(sure)
        if tokens < FEW or math.isnan(side):
            return None
        size = sum(each.d_abs_sum for each in sure) / tokens
        spread = size * math.sqrt(max(1.0 - side * side, 0.0))
        least = _least(bins)
        unlikely, count = _side(least), sum(each.tokens for each in least)
        against = (1.0 - math.copysign(unlikely, side * unlikely)) / 2.0
        return cls(
            tokens,
            side,
            spread,
            unlikely,
            against * sum(each.d_abs_sum for each in least) / count if count else math.nan,
            sum(each.carrying for each in sure) / tokens,
            tokens * summary.sequences.different_share,
        )

    @property
    def fit_a_temperature(self) -> bool:
        """Whether they moved as a temperature moves them."""
        return self.is_narrow and (self.crosses or not self.side * self.unlikely > 0.0)

    @property
    def is_narrow(self) -> bool:
        """Whether they all moved as far as one temperature moves them, except for noise."""
        side, carrying = CLEAR
        is_clear = abs(self.side) >= side and self.carrying >= carrying
        return self.spread <= SPREAD or is_clear

    @property
    def crosses(self) -> bool:
        """Whether unlikely tokens moved against the sure ones; False if there are none."""
        is_noise = self.against < BEYOND_NOISE * self.spread
        return self.side * self.unlikely <= ONE_WAY and not is_noise

    def judged(self, scaling: Check, ratio: Check, p: str, q: str) -> tuple[Check, Check]:
        """Return the checks of the slope and of the mean ratio, corrected by the sure tokens.

        If one of the two failed, the other may be the one that should fail.

        Args:
            scaling: the check `temperature` of all tokens.
            ratio: the check `calibration` or `renormalised` of all tokens.
            p, q: the names of the streams.
        """
        if scaling.status == "suspect" and ratio.status != "suspect" and not self.is_narrow:
            text = (
                f"{slope_text(scaling.values, p, q)}. But the {self.tokens} tokens of a "
                f"probability of 0.5 to 0.9 moved in both directions, with a spread of "
                f"{self.spread:.2g} nat. No temperature does that: {p} or {q} holds the scores of "
                "another model or adapter"
            )
            moved = dataclasses.replace(scaling, status="ok", text=text)
            return moved, Check("calibration", "suspect", text, ratio.values)
        is_doubted = ratio.status == "suspect" or self.different >= ENOUGH
        if scaling.status == "ok" and is_doubted and self._show(scaling):
            surer, other = (p, q) if self.side > 0.0 else (q, p)
            share = (1.0 + abs(self.side)) / 2.0
            text = (
                f"{surer} is the surer stream. In the {self.tokens} tokens of a probability of 0.5 "
                f"to 0.9 it lies above {other} ({share:.0%} of their difference has this sign), "
                "and in unlikely ones below it. The streams were taken at different temperatures, "
                "or one before and one after scaling"
            )
            return dataclasses.replace(scaling, status="suspect", text=text), ratio
        return scaling, ratio

    def _show(self, scaling: Check) -> bool:
        """Return whether they alone show a temperature of a size that matters."""
        return (
            scaling.values.get("abs_diff", 0.0) >= SCALED_SIZE
            and abs(self.side) >= ONE_SIDED
            and self.is_narrow
            and not self.carrying < CARRYING
            and self.crosses
        )


def is_temperature(scaling: Check, ratio: Check, sure: SureTokens | None) -> bool:
    """Return whether a slope explains a mean ratio other than 1.

    The sure tokens decide, if they are known; for a cut only if unlikely ones moved against them.

    Truncation has the opposite slope: the mass that q loses is larger in less certain contexts, so
    d rises with q as it does for a flatter q. A colder q lacks rare tokens on average, and d falls
    with q. It also falls if q is of another model, which raises the mean ratio. All d have one sign
    if log-probs were scaled without renormalising them. So have those of a deep cut, but they do
    not follow q as closely.
    """
    if scaling.status != "suspect":
        return False
    correlation = scaling.values["correlation"]
    if ratio.status != "suspect":
        return True
    if ratio.values["one_sided"] >= CUT_ONE_SIDED:
        return abs(correlation) > SLOPE_ONE_SIDED
    if sure is not None and (ratio.name == "calibration" or sure.crosses):
        return sure.fit_a_temperature
    return (ratio.values["mean"] < 1.0) == (correlation < 0.0)


def _least(bins: Sequence[Bin]) -> list[Bin]:
    """Return the bins of the unlikeliest `FEW` tokens or a few more."""
    found, tokens = [], 0
    for each in bins:  # by ascending probability
        if each.key > _HALF or tokens >= FEW:
            break
        found.append(each)
        tokens += each.tokens
    return found


def _side(bins: Sequence[Bin]) -> float:
    size = sum(each.d_abs_sum for each in bins)
    return sum(each.d_sum for each in bins) / size if size > 0.0 else math.nan
