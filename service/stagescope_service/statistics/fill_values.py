"""Values that a stream holds in place of log-probs that it lacks: clamps and fill values.

An engine or a trainer without a log-prob of a token may give a number instead. Examples are -9999
(vLLM, for -inf), -100, -1e4, -1, and the logarithm of the small number that keeps log(0) away. The
other stream has an ordinary log-prob there, so these tokens differ most. Exact zeros, which a sure
model also has, are the subject of `coverage.missing_values`.

A value alone does not tell whether it was filled in or scored wrongly. It was filled in if

* people choose such numbers, and the stream's other values have more digits,
* or no distribution over a vocabulary gives it, and no other token comes near it,
* or several tokens have it, and the stream's other values differ,
* or all tokens that differ most have it: a clamp cut the stream off there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np

from stagescope_service.statistics.cell import Bool, Field, Float64, Int64
from stagescope_service.statistics.checks import FAR_TOKENS
from stagescope_service.statistics.profile_bins import Bin
from stagescope_service.statistics.summary import Summary, Tokens

DENORMAL: Final = 2.0**-126
"""A float32 nearer to 0 has fewer digits; no log-softmax in float32 returns one but 0."""
_FAR: Final = 1.0
"""Nats. FillValue-in values whose other stream is nearer do not matter."""
_DEEP: Final = 3.0
_UNHEARD: Final = -40.0
"""Sampled tokens have log-probs down to about -25, and those that a trainer scores as others
seldom less than this."""
_IMPOSSIBLE: Final = -1000.0
"""No logits differ by as much."""
_APART: Final = 2.0
"""Minimum ratio of a value below `_UNHEARD` to the least other one."""
_SURE: Final = 2.0**-7
"""Nats. Values nearer to 0 have few digits in float32, where 1 - e^v is rounded."""
_ENOUGH: Final = 8
"""Minimum number of other values that show how many digits a stream has."""
_CUT_OFF: Final = 32
"""Minimum number of tokens that differ most and have one value, if nearly no others are known."""
_COARSE_SHARE: Final = 0.05
_DIGITS: Final = 12
"""Binary digits of a coarse number; a coarse decimal one is a multiple of 1e-4."""
_COINCIDENCE: Final = 2e-3
"""Maximum probability that tokens which differ most have one value by chance."""
_PRIOR: Final = 20
"""Pairs of values that are added to the observed pairs; one of them counts as equal."""
_NEAR: Final = 0.5
"""Maximum difference, in nats, of the other stream's values of one token in copies of a response,
whose contexts are the same."""
_RATIO: Final = 0.7
"""The same for the logarithm of a value near 0, as noise of a logit makes it."""
_SUREST: Final = 1e-4
"""Nats. Values nearer to 0 count as one."""
Why = Literal["chosen", "impossible", "repeated", "cut off"]
WHY: Final[dict[Why, str]] = {
    "chosen": "a round number or the logarithm of one, which its other values are not",
    "impossible": "no distribution over a vocabulary gives it",
    "repeated": "the same number in each, while its other values differ",
    "cut off": "the same number in each, while the other stream's values differ",
}
"""What shows that a value was filled in."""
_NEARLY: Final = 0.9
_EXPONENTS: Final = np.arange(-45.0, 39.0)
_CHOSEN: Final = np.concatenate([-(10.0**_EXPONENTS), [-9999.0]]).astype(np.float32)
_FLOATS: Final = [np.finfo(kind) for kind in (np.float16, np.float32, np.float64)]
_LOGARITHMS: Final = np.concatenate(
    [
        np.log(10.0) * _EXPONENTS[_EXPONENTS < -3],
        np.log([float(each.eps) for each in _FLOATS] + [float(each.tiny) for each in _FLOATS]),
    ]
)


class FillValue(NamedTuple):
    """Tokens of a stream that were filled with one value."""

    side: int
    """0: values of p, 1: values of q."""
    value: float
    tokens: Bool
    """Mask of the worst tokens."""
    why: Why


@dataclasses.dataclass(frozen=True)
class FillValues:
    """The values that were filled in, the largest difference first."""

    values: tuple[FillValue, ...]
    worst: Tokens
    sizes: Float64
    """|d| of each worst token that was filled in; 0 for the others."""
    source: Int64
    """The payload of each worst token."""

    @classmethod
    def of(cls, summary: Summary) -> FillValues:
        """Return the filled-in values of a summary."""
        values, worst = tuple(_values(summary)), summary.worst
        filled = np.zeros(len(worst), bool)
        for each in values:
            filled |= each.tokens
        with np.errstate(invalid="ignore"):
            sizes = np.where(filled, np.abs(worst.p - worst.q), 0.0)
        return cls(values, worst, sizes, summary.sequences.source[worst.sequence])

    def of_sources(self, sources: Sequence[int] | None) -> float:
        """Return the sum of |d| in payloads; None: in all."""
        chosen = self.sizes if sources is None else self.sizes[np.isin(self.source, [*sources])]
        return _sum(chosen)

    def of_round(self, number: int) -> float:
        """Return the sum of |d| in a round."""
        return self._by_round.get(number, 0.0)

    @cached_property
    def _by_round(self) -> dict[int, float]:
        sums: dict[int, float] = {}
        for number, size in zip(self.worst.round.tolist(), self.sizes.tolist(), strict=True):
            sums[number] = sums.get(number, 0.0) + size
        return sums

    def share_of_edge(self, edge: Bin) -> Literal["all", "few", "unknown"]:
        """Return whether the tokens that were filled in are the first or the last ones of rounds.

        `edge`: the sums of the edge tokens. 'all': most of these and no others were filled in;
        'few': the other edge tokens hardly differ.
        """
        filled, count = _sum(self.sizes), int((self.sizes > 0.0).sum())
        if not count:
            return "unknown"
        at_edge = edge.d_abs_sum / (filled / count)
        is_full = count == len(self.worst) or count >= max(FAR_TOKENS, edge.tokens / 2)
        if is_full and at_edge >= _NEARLY * count:
            return "all"
        return "few" if filled >= _NEARLY * edge.d_abs_sum else "unknown"


def _values(summary: Summary) -> list[FillValue]:
    worst, total = summary.worst, summary.total
    size = np.abs(worst.p - worst.q)
    far = (size > _FAR) & (worst.p <= 0.0) & (worst.q <= 0.0)
    found = []
    for side, own, other in ((0, worst.p, worst.q), (1, worst.q, worst.p)):
        name = "PQ"[side]
        if total[Field[f"{name}_MIN"]] == total[Field[f"{name}_MAX"]]:
            continue  # the check `constant` says so
        for value in np.unique(own[far & (own < 0.0)]).tolist():
            tokens = far & (own == value)
            # Misaligned streams have it on both sides.
            if 3 * int((other == value).sum()) > int(tokens.sum()):
                continue
            if why := _why(value, tokens, own, other):
                found.append(FillValue(side, value, tokens, why))
    found.sort(key=lambda each: (each.why == "repeated", -_sum(size[each.tokens])))
    taken = np.zeros(len(worst), bool)
    kept = []
    for each in found:
        if not (each.tokens & taken).any():
            kept.append(each)
            taken |= each.tokens
    return kept


def _sum(values: Float64) -> float:
    """Return the sum, which may exceed float64."""
    return float(sum(values.tolist()))


def _why(value: float, tokens: Bool, own: Float64, other: Float64) -> Why | None:
    """Return what shows that tokens of one value were filled in, None if nothing does."""
    others = own[~tokens & ~_is_chosen(own)]
    if _is_chosen(np.array([value])).all() and _has_digits(others):
        return "chosen"
    size, count = np.abs(own - other), int(tokens.sum())
    if value < _UNHEARD:
        least = min([0.0, *others.tolist(), *other.tolist()])
        bound = -value / 2.0 if value < _IMPOSSIBLE else _DEEP
        is_apart = value < _APART * least
        if is_apart and int(((size > bound) & ~tokens & ~_is_chosen(own)).sum()) <= count:
            return "impossible"
    if value > -_SURE:
        return None
    independent = _independent(other[tokens])
    is_alone = count >= _CUT_OFF and int((~tokens).sum()) < _ENOUGH and independent >= 2
    if is_alone and 2 * len(np.unique(other[tokens])) > count:  # a coarse format has few values
        return "cut off"
    chance = _equal_by_chance(others)
    for bound in (_FAR, _DEEP):
        near, n = int((tokens & (size > bound)).sum()), int((size > bound).sum())
        if near < max(2, n / 2) or independent < 2:
            continue
        log_odds = math.log(n) + (independent - 1) * math.log(n * chance)
        if log_odds - math.lgamma(independent + 1) < math.log(_COINCIDENCE):
            return "repeated"
    return None


def _is_chosen(values: Float64) -> Bool:
    """Return a mask of the powers of ten, -9999 and logarithms of numbers that avoid log(0)."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    near = np.abs(values[:, None] / _LOGARITHMS - 1.0) < 2.0**-22
    chosen: Bool = np.isin(single, _CHOSEN) | near.any(axis=1)
    return chosen


def _has_digits(values: Float64) -> bool:
    """Return whether nearly no value fits into a coarse format: so it was computed in float32."""
    values = values[(values < -_SURE) & (values > _IMPOSSIBLE)]
    if len(values) < _ENOUGH:
        return False
    significand = np.frexp(values)[0] * 2.0**_DIGITS
    decimal = values * 1e4
    coarse = (significand == np.round(significand)) | (
        np.abs(decimal - np.round(decimal)) < 1e-7 * np.abs(decimal)
    )
    return bool(coarse.mean() <= _COARSE_SHARE)


def _equal_by_chance(values: Float64) -> float:
    """Return a slightly high estimate of the probability that two tokens have one value."""
    n = len(values)
    _, counts = np.unique(values, return_counts=True)
    equal = float((counts * (counts - 1)).sum()) / 2.0
    return (equal + 1.0) / (n * (n - 1) / 2.0 + _PRIOR)


def _independent(other: Float64) -> int:
    """Return the number of tokens; those that may be copies of one token count once."""
    ordered = np.sort(other)
    ratio = np.diff(np.log(np.maximum(-ordered, _SUREST)))
    return 1 + int(((np.diff(ordered) > _NEAR) | (ratio < -_RATIO)).sum())
