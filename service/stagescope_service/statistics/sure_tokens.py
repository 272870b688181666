"""Whether a temperature makes the difference of the streams, told by the tokens of a sure model.

d = p - q. A temperature moves every token whose probability is above one half in one direction:
1 / sum((q_i / q_1)^s) grows with s. It moves unlikely tokens in the other one. A cut moves all
tokens in one direction, and the scores of another model move the sure ones in both: of d that is
mu + sigma n, with mu of one sign, the share of the wrong sign tells sigma. This needs no straight
line, which a temperature has within a context alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from stagescope_service.statistics.checks import (
    CUT_ONE_SIDED,
    SCALED_ONE_SIDED,
    SCALED_SIZE,
    SCALED_SLOPE,
    Check,
)
from stagescope_service.statistics.profiles import CHANCES, Bin, Profiles

FEW: Final = 8
"""Minimum sure tokens."""
SPREAD: Final = 0.045
"""Nats by which sure tokens differ from the move of a temperature. An engine of int8 makes up to
0.04, another model, of logits that are 0.3 nats off, 0.055 and more."""
ONE_SIDED: Final = 0.9
"""Minimum share of |d| of sure tokens, less that of the other sign, of a temperature that no
straight line shows."""
OPPOSITE: Final = (0.2, 0.6)
"""The same of the other sign in unlikely tokens, where p is the surer stream and where it is not:
p of another token is always less sure."""
_SURE: Final = CHANCES.index(0.5) + 1
"""The bin of 0.5 to 0.9; those above it hardly move."""
_HALF: Final = _SURE - 1
"""The last bin that may count as unlikely, 0.1 to 0.5."""


@dataclasses.dataclass(frozen=True)
class SureTokens:
    """How tokens moved whose probability is 0.5 to 0.9, and the unlikeliest ones.

    Attributes:
        tokens: how many sure ones.
        side: sum of d over the sum of |d| of the sure ones: 1 where p lies above q in all.
        spread: by how much they differ from the move of a temperature, in nats.
        unlikely: sum of d over the sum of |d| of the unlikely ones; 0 where there are none.
    """

    tokens: int
    side: float
    spread: float
    unlikely: float

    @classmethod
    def of(cls, profiles: Profiles) -> SureTokens | None:
        """Return what the profiles of a step tell; None: too few sure tokens differ."""
        bins = profiles.bins("probability")
        sure = [each for each in bins if each.key == _SURE]
        tokens, side = sum(each.tokens for each in sure), _side(sure)
        if tokens < FEW or math.isnan(side):
            return None
        size = sum(each.d_abs_sum for each in sure) / tokens
        unlikely = _side(_least(bins))
        spread = size * math.sqrt(max(1.0 - side * side, 0.0))
        return cls(tokens, side, spread, 0.0 if math.isnan(unlikely) else unlikely)

    @property
    def fit_a_temperature(self) -> bool:
        """Whether they moved as a temperature moves them."""
        return self.spread <= SPREAD and self.side * self.unlikely <= 0.0

    def judged(self, scaling: Check, ratio: Check, p: str, q: str) -> tuple[Check, Check]:
        """Return the checks of the slope and of the mean ratio, with what the sure tokens tell.

        Where one of the two failed, the other may be the one that it should be.

        Args:
            scaling: the check `temperature` of all tokens.
            ratio: the check `calibration` or `renormalised` of all tokens.
            p, q: the names of the streams.
        """
        if scaling.status == "suspect" and ratio.status != "suspect" and self.spread > SPREAD:
            text = (
                f"{scaling.text.partition(': ')[0]}, but no temperature moves the {self.tokens} "
                f"tokens of a probability of 0.5 to 0.9 as they moved: in both directions, "
                f"{self.spread:.2g} nat apart. {p} or {q} holds the scores of another model or "
                "adapter"
            )
            moved = dataclasses.replace(scaling, status="ok", text=text)
            return moved, Check("calibration", "suspect", text, ratio.values)
        if scaling.status == "ok" and ratio.status == "suspect" and self._show(scaling):
            surer, other = (p, q) if self.side > 0.0 else (q, p)
            share = (1.0 + abs(self.side)) / 2.0
            text = (
                f"{surer} is the surer stream: it lies above {other} in the {self.tokens} tokens "
                f"of a probability of 0.5 to 0.9 ({share:.0%} of their difference is of this "
                "sign) and below it in unlikely ones: the streams were taken at different "
                "temperatures, or one of them before and one after scaling"
            )
            return dataclasses.replace(scaling, status="suspect", text=text), ratio
        return scaling, ratio

    def _show(self, scaling: Check) -> bool:
        """Return whether they show a temperature by themselves, of a slope that matters."""
        if math.isnan(slope := scaling.values.get("slope", math.nan) - 1.0):
            return False
        opposite = OPPOSITE[self.side < 0.0]
        return (
            abs(slope) >= SCALED_SLOPE
            and (slope > 0.0) == (self.side > 0.0)
            and scaling.values["abs_diff"] >= SCALED_SIZE
            and abs(self.side) >= ONE_SIDED
            and self.spread <= SPREAD
            and -math.copysign(self.unlikely, self.side * self.unlikely) >= opposite
        )


def is_temperature(scaling: Check, ratio: Check, sure: SureTokens | None) -> bool:
    """Return whether a slope explains a mean ratio other than 1.

    The sure tokens tell, where they are known.

    Truncation has the opposite slope: the mass that q loses is larger in less certain contexts,
    so d rises with q as it does for a flatter q. With a colder q, which lacks rare tokens on
    average, d falls with q, as it does where q is of another model, which raises the mean ratio.
    All d have one sign where log-probs were scaled without renormalising them, and of a deep cut,
    whose d do not follow q as closely.
    """
    if scaling.status != "suspect":
        return False
    correlation = scaling.values["correlation"]
    if ratio.status != "suspect":
        return True
    if ratio.values["one_sided"] >= CUT_ONE_SIDED:
        return abs(correlation) > SCALED_ONE_SIDED
    if sure is not None and ratio.name == "calibration":
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
