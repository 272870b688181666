"""The settings of a run that affect the statistics: the importance weights that it applies."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import numpy as np

from stagescope_service.statistics.cell import CLAMP, Float64
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import JsonObject

KEPT_TOKENS: Final = 64
"""Number of worst and of non-finite tokens that a summary keeps."""


@dataclasses.dataclass(frozen=True)
class StatisticsSettings:
    """verl's `rollout_correction` settings that affect `rollout_is_*`.

    Attributes:
        rollout_is: 'token', 'sequence', or None if the run applies no weights: the statistics are
            then of the untruncated weights, and marked as such.
        rollout_is_threshold: U: weights above are cut to U (truncated importance sampling); or
            'L_U': weights outside are set to 0 (IcePop).
        rollout_is_batch_normalize: Whether the run divides the weights by their mean.
        worst: Number of worst and of non-finite tokens to keep.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | str | None = None
    rollout_is_batch_normalize: bool = False
    worst: int = KEPT_TOKENS

    def __post_init__(self) -> None:
        if self.rollout_is not in (None, "token", "sequence"):
            raise InvalidInput(
                f"rollout_is is {self.rollout_is!r}", expected="'token', 'sequence' or None"
            )
        if not 1 <= self.worst <= 4096:
            raise InvalidInput(f"worst is {self.worst}", expected="1 to 4096 tokens to keep")
        if self.rollout_is_threshold == math.inf:  # JSON cannot represent the number
            object.__setattr__(self, "rollout_is_threshold", "inf")
        _ = self.bounds

    @classmethod
    def of_run(cls, settings: JsonObject) -> StatisticsSettings:
        """Return the settings for the statistics among a run's settings.

        Raises:
            InvalidInput: a rollout_is or threshold that verl does not have.
        """
        names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
        return cls(**{name: settings[name] for name in names if settings.get(name) is not None})

    @property
    def bounds(self) -> tuple[float, float, bool]:
        """(L, U, whether weights outside become 0).

        L defaults to 1/U, which exceeds U for a U below 1, as in verl.
        """
        threshold = self.rollout_is_threshold
        if self.rollout_is is None:
            return 0.0, math.inf, False
        low = ""
        try:
            low, _, high = str(2.0 if threshold is None else threshold).rpartition("_")
            upper = float(high)
            lower = float(low) if low else 1.0 / upper
        except (ValueError, ZeroDivisionError):
            lower = upper = math.nan
        if not upper > 0.0 or (low and not 0.0 < lower <= upper):
            raise InvalidInput(
                f"rollout_is_threshold is {threshold!r}",
                expected="U > 0, or 'L_U' with 0 < L <= U",
            )
        return lower, upper, bool(low)

    def weight_rule(self) -> Float64:
        """Return the kernel's parameters for w - 1: (count above, count below, high, its value,
        low, its value); a weight beyond `high` or `low` is replaced by the value. Last is the
        weight that replaces one beyond `high`."""
        if self.rollout_is != "token":
            return np.array([np.inf, -np.inf, np.inf, 0.0, -np.inf, 0.0, 0.0])
        lower, upper, drops = self.bounds
        cut_low = lower - 1.0 if drops else -np.inf
        high_value = -1.0 if drops else upper - 1.0
        bounds = [upper - 1.0, lower - 1.0, upper - 1.0, high_value, cut_low, -1.0]
        return np.array([*bounds, 0.0 if drops else upper])

    def apply(self, weights: Float64) -> Float64:
        """Return the weights that the run applies for raw `weights` of any shape."""
        lower, upper, drops = self.bounds
        if drops:
            return np.where((weights >= lower) & (weights <= upper), weights, 0.0)
        return np.minimum(weights, upper)

    def to_json(self) -> dict[str, object]:
        """Return the settings as built-in types."""
        return dataclasses.asdict(self)


def clamped_exp(log_ratio: Float64) -> Float64:
    """Return e^x with x clamped to verl's safety bound of ±20."""
    return np.exp(np.clip(log_ratio, -CLAMP, CLAMP))
