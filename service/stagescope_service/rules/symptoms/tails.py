"""Evidence of single tokens that are far off, while nearly all others agree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from stagescope_service.rules.evidence import (
    ABS_DIFF,
    Evidence,
    Series,
    median,
    not_measured,
    of_rate,
    short,
)
from stagescope_service.rules.history import NEWEST, RunHistory
from stagescope_service.rules.steps import CurrentStep
from stagescope_wire.render import ranks_text
from stagescope_wire.schema import RankKey

_SHARE: Final = "tail/abs_diff_over_1_share"
_USUAL: Final = "logprob_abs_diff/p90"
_LARGEST: Final = "logprob_abs_diff/max"
_HALF: Final = 0.5
"""Share of the newest steps that must show it."""


def hidden_tails(history: RunHistory, *, mean: float, tail: float) -> Evidence:
    """Return whether means look healthy while single tokens are far off.

    `training/rollout_probs_diff_mean` is below `mean` and `logprob_abs_diff/max` over `tail` nats:
    improbable tokens hardly move probabilities.
    """
    means, largest, share = (
        history.metric(name)
        for name in (
            "training/rollout_probs_diff_mean", _LARGEST, _SHARE,
        )
    )  # fmt: skip
    if not len(means) == len(largest) == len(share) > 0:
        return not_measured("no step has both streams")
    has_tokens = ~np.isnan(means.values) & ~np.isnan(largest.values)
    if not has_tokens.any():
        return not_measured("no step has a token that counts")
    means, largest, share = (each.where(has_tokens) for each in (means, largest, share))
    marks = (means.values < mean) & (largest.values > tail)
    text = (
        f"|d| is up to {short(float(largest.newest(NEWEST).values.max()))} nat while the "
        f"mean of |e^p - e^q| is {short(float(np.median(means.newest(NEWEST).values)))}; "
        f"{short(_usual(share))} of the tokens are over 1 nat"
    )
    return of_rate(means.steps, marks, None, _HALF, NEWEST, text)


def tokens_apart(history: RunHistory, *, share: float, factor: float) -> Evidence:
    """Return whether single tokens are far off and carry the mean, while the others agree.

    It looks at all tokens, and at those of each rank. In half of the newest steps, at least `share`
    of the tokens must have |d| over 1 nat. Mean |d| must be over `factor` times the 90th percentile
    of |d| of all tokens of the step.
    """
    numbers = [history.metric(name) for name in (_SHARE, ABS_DIFF, _USUAL)]
    if len({len(each) for each in numbers}) > 1 or not len(numbers[0]):
        return not_measured("no step has both streams")
    has_tokens = np.array(np.isfinite([each.values for each in numbers]).all(axis=0))
    if not has_tokens.any():
        return not_measured("no step has a token that counts")
    far, means, usual = (each.where(has_tokens) for each in numbers)
    marks = (far.values >= share) & (means.values > factor * usual.values)
    text = (
        f"{_usual(far):.2%} of the tokens are over 1 nat apart; 90% of all are within "
        f"{short(_usual(usual))} nat, and mean |d| is {short(_usual(means))}"
    )
    found = of_rate(means.steps, marks, None, _HALF, NEWEST, text)
    bounds = dict(zip(usual.steps.tolist(), factor * usual.values, strict=True))
    by_rank = _by_rank(history, history.measured[-NEWEST:], share, bounds)
    apart = [rank for rank, own in by_rank.items() if sum(own.values()) >= _HALF * len(own)]
    if not apart or len(apart) == len(by_rank):
        return found
    # Since when is asked of a long run only if some rank shows it now.
    every = _by_rank(history, history.measured, share, bounds)
    steps = sorted(set().union(*(every[rank] for rank in apart)))
    marked = np.array([any(every[rank].get(step, False) for rank in apart) for step in steps])
    found = of_rate(np.array(steps), marked, None, _HALF, NEWEST, text)
    return dataclasses.replace(found, where=ranks_text(sorted(apart)), ranks=frozenset(apart))


def _by_rank(
    history: RunHistory, steps: Sequence[CurrentStep], share: float, bounds: Mapping[int, float]
) -> dict[RankKey, dict[int, bool]]:
    """Return of each rank the steps with numbers, and whether single tokens are far off there.

    Args:
        history: of the run.
        steps: the steps.
        share: minimum share of the tokens.
        bounds: the bound of mean |d| of each step that has one.
    """
    far, means = (dict(history.slices("rank", name, steps)) for name in (_SHARE, ABS_DIFF))
    found: dict[RankKey, dict[int, bool]] = {}
    for step, values in far.items():
        bound = bounds.get(step.step, math.nan)
        for (role, rank), value in values.items():
            mean = means[step].get((role, rank), math.nan)
            if role is not None and not math.isnan(value + mean + bound):
                found.setdefault((role, rank), {})[step.step] = value >= share and mean > bound
    return found


def _usual(series: Series) -> float:
    return median(series.newest(NEWEST).values)
