"""Mean |d| by slices of the newest steps, with and without a few tokens that are far off."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

from stagescope_service.rules.evidence import ABS_DIFF
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.steps import CurrentStep
from stagescope_service.statistics.step_metrics import Dimension, SliceKey

FEW: Final = 8
"""Number of tokens that are few: if they carry a mean, it says nothing about the others."""
CARRIED: Final = ": a few tokens carry it, and it says nothing about the others"


class Mean(NamedTuple):
    """Mean |d| of a slice of a step."""

    value: float
    tokens: float
    least: float
    """Mean |d| without the tokens that are far off, if these are few. Each of the few counts as the
    largest one, so this is a lower bound."""


Slices: TypeAlias = "list[tuple[CurrentStep, dict[SliceKey, Mean]]]"


def means_by(history: RunHistory, by: Dimension, few: float = 0.0) -> Slices:
    """Return mean |d| of the slices of the newest steps; `few` is the share of the tokens of a
    slice that are few, too."""
    names = ("counts/tokens", "logprob_abs_diff/max", "tail/abs_diff_over_0.5_count")
    others = [dict(history.slices(by, name)) for name in names]
    found: Slices = []
    for step, means in history.slices(by, ABS_DIFF):
        own: dict[SliceKey, Mean] = {}
        for key, mean in means.items():
            tokens, largest, far = (each.get(step, {}).get(key, math.nan) for each in others)
            count, least = max(far, 1.0), mean
            if count < max(FEW, few * tokens) and tokens > count and math.isfinite(largest):
                least = max(0.0, mean * tokens - count * largest) / (tokens - count)
            own[key] = Mean(mean, tokens, least)
        found.append((step, own))
    return found
