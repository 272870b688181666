"""Evidence of the mismatch by the position of a token in its sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from stagescope_service.rules.evidence import Count, Evidence, not_found, not_measured, short
from stagescope_service.rules.history import READ, RunHistory
from stagescope_service.statistics.noise_checks import few_carry
from stagescope_service.statistics.profile_bins import UNKNOWN, Bin, add_bins

_TOKENS: Final = 128
"""Minimum tokens of a stretch of positions."""
_BACK: Final = 64
"""Maximum number of newest steps that are looked at for the begin."""
_STRETCHES: Final = 3
"""Minimum number of stretches that are compared."""
_BEGIN: Final = 2
"""First bin that is compared: positions 2 and 3. `first_token` looks at what begins a round."""
_EARLY: Final = 2 / 3
"""Share of the doublings up to the last stretch that are early."""
_RISES_ON: Final = 1.5
"""Minimum ratio of the last stretch to the first one that is not early."""


def position_rises(history: RunHistory, *, factor: float) -> Evidence:
    """Return whether mean |d| rises with the position, to `factor` times that of early tokens.

    The positions lie in stretches that double, joined until each has `_TOKENS` tokens. In each of
    the newest `READ` steps the last stretch must be the highest, and more than a few of its tokens
    must carry it.
    """
    found: list[Rise] = []
    lacking = 0
    # Older steps say since when, as far as they show it without a break.
    for step in reversed(history.measured[-_BACK:]):
        shown = history.read(step)
        bins = () if shown is None else shown.summary.summary.profiles.bins("position")
        rise = Rise.of(step.step, bins)
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


class Rise(NamedTuple):
    """Mean |d| of early positions, and of the last ones, in one step."""

    step: int
    early: float
    """The highest of the early stretches."""
    middle: float
    """Of the first stretch after them."""
    last: float
    is_highest: bool
    """Whether the last stretch is the highest, and more than a few tokens carry it."""
    text: str

    @classmethod
    def of(cls, step: int, bins: Iterable[Bin]) -> Rise | None:
        """Return it of a step's bins by position; None: it has too few tokens.

        A template begins many responses with tokens that are nearly certain, and whose |d| is
        small: no rise over the first positions counts. The early stretches are those of two thirds
        of the doublings after them.
        """
        known = [each for each in bins if each.key != UNKNOWN]
        stretches = _stretches(each for each in known if each.key >= _BEGIN)
        if not stretches:
            return None
        last = stretches[-1].sums
        bound = _EARLY * (last.key - 1)
        count = max(1, sum(each.end <= bound for each in stretches))
        if len(stretches) < max(count + 2, _STRETCHES):
            return None
        # The first tokens show no rise, and may show that there is none.
        early = max((*stretches[:count], _stretches(known)[0]), key=lambda each: each.mean)
        text = (
            f"step {step}: mean |d| is {short(early.mean)} at positions {early.text} "
            f"({early.sums.tokens} tokens), {short(stretches[-1].mean)} from position "
            f"{2 ** (last.key - 1)} on ({last.tokens} tokens)"
        )
        is_highest = stretches[-1].mean >= max(each.mean for each in stretches)
        return cls(
            step, early.mean, stretches[count].mean, stretches[-1].mean,
            is_highest and not few_carry(last), text,
        )  # fmt: skip

    def exceeds(self, factor: float) -> bool:
        """Whether the last tokens have `factor` times the mean |d| of early ones, and it still
        rises after these."""
        rises_on = self.last > _RISES_ON * self.middle
        return self.is_highest and self.last > factor * self.early and rises_on


class _Stretch(NamedTuple):
    """The sums of neighbouring positions, under the key of the first bin."""

    sums: Bin
    end: int
    """Key of the last bin."""

    @property
    def mean(self) -> float:
        """Mean |d|."""
        return self.sums.d_abs_sum / self.sums.tokens

    @property
    def text(self) -> str:
        """The positions, such as `4-7`."""
        first = 2 ** (self.sums.key - 1) if self.sums.key else 0
        return f"{first}-{2**self.end - 1}"


def _stretches(bins: Iterable[Bin]) -> list[_Stretch]:
    """Return the bins, each joined with those before it until it has enough tokens.

    What is left at the end joins the last stretch.
    """
    found: list[_Stretch] = []
    for each in bins:
        if not each.tokens:
            continue
        if found and found[-1].sums.tokens < _TOKENS:
            found[-1] = _Stretch(add_bins((found[-1].sums, each)), each.key)
        else:
            found.append(_Stretch(each, each.key))
    if len(found) > 1 and found[-1].sums.tokens < _TOKENS:
        before, rest = found[-2:]
        found[-2:] = [_Stretch(add_bins((before.sums, rest.sums)), rest.end)]
    return found
