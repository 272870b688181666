"""How old the tokens are where the mismatch is higher: what policy drift explains is no fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.rules.evidence import ABS_DIFF, short
from stagescope_service.rules.history import RunHistory
from stagescope_service.statistics import cell as cells
from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.checks import MANY
from stagescope_service.statistics.summary import Summary

DRIFT: Final = 0.2
"""Maximum rise of mean |d|, in nats per policy version, that drift may have made. PPO clips a token
whose ratio leaves 0.8 to 1.2, and the mean of all tokens moves less than those."""
_ALIKE: Final = 1.25
"""Maximum ratio of the mean |d| of a rank or an engine to that of the old tokens, if these are its
own."""


class _Tokens(NamedTuple):
    """Tokens of one staleness."""

    tokens: float
    size: float
    """Sum of |d|."""

    @property
    def mean(self) -> float:
        return self.size / self.tokens


def drift(
    history: RunHistory, before: Sequence[int], after: Sequence[int], factor: float, rise: float
) -> str | None:
    """Return that policy drift explains a rise of mean |d|, as older versions sampled the tokens
    after it; None: it does not, or their ages are unknown.

    Tokens of the same staleness must not rise `factor` times, where both sides have enough of them.

    Args:
        history: of the run.
        before, after: steps on either side of the rise.
        factor: minimum ratio of the means of a rise.
        rise: of mean |d|, in nats.
    """
    old, new = _by_age(history, before), _by_age(history, after)
    if not old or not new or min(*old, *new) < 0:
        return None
    ages = _mean_age(old), _mean_age(new)
    if not 0.0 < rise <= DRIFT * (ages[1] - ages[0]):
        return None
    text = f"the tokens are older from then on: mean staleness {short(ages[0])} to {short(ages[1])}"
    alike = [age for age in old if age in new and min(old[age].tokens, new[age].tokens) >= MANY]
    for age in sorted(alike):
        one, other = old[age].mean, new[age].mean
        if other >= factor * one:
            return None
        text += f"; {ABS_DIFF} of staleness {age} is {short(one)} before and {short(other)} after"
    return text


def _by_age(history: RunHistory, steps: Sequence[int]) -> Mapping[int, _Tokens]:
    """Return staleness -> the tokens of some steps that count; {} if no age is known."""
    wanted = {*steps}
    chosen = [each for each in history.steps if each.step in wanted and each.verdict is not None]
    counts = dict(history.slices("staleness", "counts/tokens", chosen))
    found: dict[int, _Tokens] = {}
    for step, means in history.slices("staleness", ABS_DIFF, chosen):
        for key, mean in means.items():
            tokens = counts[step][key]
            if tokens:
                tokens_before, size = found.get(key[1], _Tokens(0.0, 0.0))
                found[key[1]] = _Tokens(tokens_before + tokens, size + tokens * mean)
    return found


def _mean_age(ages: Mapping[int, _Tokens]) -> float:
    total = sum(each.tokens for each in ages.values())
    return sum(age * each.tokens for age, each in ages.items()) / total


def is_of_old(mean: float, summary: Summary) -> bool:
    """Return whether staleness alone explains the mean |d| of a rank or an engine.

    It does if the mean |d| of the step's old tokens is at least as large.
    """
    ages = summary.staleness
    is_old = ages.keys > 0
    if not summary.is_staleness_known or not is_old.any():
        return False
    old = Cell(cells.merge(ages.cells[is_old]))
    return old.tokens > 0 and mean <= _ALIKE * old.mean(Field.D_ABS_SUM)
