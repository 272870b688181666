"""Evidence of the mismatch by the position of a token in its sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from stagescope_service.rules.evidence import Count, Evidence, not_found, not_measured, short
from stagescope_service.rules.history import READ, RunHistory
from stagescope_service.statistics.noise_checks import few_carry
from stagescope_service.statistics.profile_bins import UNKNOWN, Bin, add_bins
from stagescope_service.statistics.summary import Summary

_TOKENS: Final = 128
"""Minimum tokens of a stretch of positions."""
_BACK: Final = 64
"""Maximum number of newest steps that are looked at for the begin."""
_STRETCHES: Final = 3
"""Minimum number of stretches that are compared."""


def position_rises(history: RunHistory, *, factor: float) -> Evidence:
    """Return whether mean |d| rises with the position, to `factor` times that of the first tokens.

    The positions lie in stretches that double, joined until each has `_TOKENS` tokens. In each of
    the newest `READ` steps the last stretch must be the highest, and more than a few of its tokens
    must carry it.
    """
    found: list[_Rise] = []
    lacking = 0
    # Older steps say since when, as far as they show it without a break.
    for step in reversed(history.measured[-_BACK:]):
        shown = history.read(step)
        rise = None if shown is None else _Rise.of(step.step, shown.summary.summary)
        if rise is None:
            lacking += 1
            if lacking > READ and len(found) < READ:
                break
            continue
        if not rise.exceeds(factor):
            if len(found) < READ:
                return not_found(rise.text)
            break
        found.append(rise)
    if len(found) < READ:
        return not_measured(
            f"the newest steps lack {_STRETCHES} stretches of positions with {_TOKENS} tokens each",
            waits=bool(found),
        )
    count = Count(len(found), len(found))
    is_about = len(found) + lacking == _BACK
    since = found[-1].step
    return Evidence("found", 1.0, since, "", (found[0].text,), count=count, is_about=is_about)


class _Rise(NamedTuple):
    """Mean |d| at the begin of samples, and at their end, in one step."""

    step: int
    first: float
    last: float
    is_highest: bool
    """Whether the last stretch is the highest, and more than a few tokens carry it."""
    text: str

    @classmethod
    def of(cls, step: int, summary: Summary) -> _Rise | None:
        """Return it of a step; None: it has too few tokens."""
        bins = summary.profiles.bins("position")
        stretches = _stretches(each for each in bins if each.key != UNKNOWN and each.tokens)
        if len(stretches) < _STRETCHES:
            return None
        means = [each.d_abs_sum / each.tokens for each in stretches]
        newest = stretches[-1]
        text = (
            f"step {step}: mean |d| is {short(means[0])} over the first {stretches[0].tokens} "
            f"tokens of samples, {short(means[-1])} from position {2 ** (newest.key - 1)} on"
        )
        is_highest = means[-1] >= max(means) and not few_carry(newest)
        return cls(step, means[0], means[-1], is_highest, text)

    def exceeds(self, factor: float) -> bool:
        """Whether the last tokens have `factor` times the mean |d| of the first ones."""
        return self.is_highest and self.last > factor * self.first


def _stretches(bins: Iterable[Bin]) -> list[Bin]:
    """Return the bins, each joined with those before it until it has enough tokens.

    The key of a stretch is that of its first bin; what is left at the end joins the last one.
    """
    found: list[Bin] = []
    for each in bins:
        if found and found[-1].tokens < _TOKENS:
            found[-1] = add_bins((found[-1], each))
        else:
            found.append(each)
    if len(found) > 1 and found[-1].tokens < _TOKENS:
        found[-2:] = [add_bins(found[-2:])]
    return found
