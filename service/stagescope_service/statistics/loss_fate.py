"""The fate of each token in the loss: trained on, or left without a gradient, and why.

Arrays in, codes and sums out. A token has one fate, the first that applies in the order of `Fate`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

import numpy as np
import numpy.typing as npt

from stagescope_service.statistics.cell import Bool, Float64, UInt8
from stagescope_service.statistics.settings import StatisticsSettings, clamped_exp

Int8 = npt.NDArray[np.int8]


class Fate(enum.IntEnum):
    """The fate of a token in the loss, in the order in which it is decided."""

    ENVIRONMENT = 0
    """Environment or padding: the mask is 0."""
    NOT_FINITE = 1
    """A log-prob of the token is NaN or infinite: one such token can make the whole loss NaN."""
    REJECTED = 2
    """Under the mask of the streams but not under the update's, or not in the loss."""
    ZERO_WEIGHT = 3
    """The importance weight that the loss applies is 0 (IcePop)."""
    ZERO_ADVANTAGE = 4
    CLIPPED_LOW = 5
    """The ratio of the policy loss is cut at its lower bound in every pass: no gradient."""
    CLIPPED_HIGH = 6
    """The same at its upper bound, or at the bound of dual clipping."""
    UNKNOWN = 7
    """No reason against it is recorded, but the end of the step's update is not recorded either."""
    TRAINED = 8


NAMES: Final = {fate: fate.name.lower().replace("_", " ") for fate in Fate}
LOSS_FIELDS: Final = ("in_loss", "weight", "advantage", "clipped")
"""The fields of `LossTokens` that a trainer may not record."""


@dataclasses.dataclass(frozen=True)
class LossTokens:
    """The recorded data of the loss's tokens, [rows, tokens] each; None: not recorded.

    Attributes:
        mask: 1 = model token.
        in_loss: whether the token is under the mask of the update and counts in the loss.
        weight: the importance weight that the loss applies.
        advantage: the token's advantage.
        clipped: -1, 1: cut at the lower, upper bound in every pass over the row; 0: not.
        updated: whether the update of the step is known to have ended.
        finite: whether both log-probs of the token are finite; None: all are.
    """

    mask: Bool
    in_loss: Bool | None = None
    weight: Float64 | None = None
    advantage: Float64 | None = None
    clipped: Int8 | None = None
    updated: bool = True
    finite: Bool | None = None

    def unrecorded(self) -> list[str]:
        """Return the names of the fields that are not recorded."""
        return [name for name in LOSS_FIELDS if getattr(self, name) is None]

    def fates(self) -> UInt8:
        """Return the `Fate` of each token; fields that are not recorded exclude nothing."""
        rest = Fate.TRAINED if self.updated else Fate.UNKNOWN
        fates = np.full(self.mask.shape, rest, np.uint8)
        # The last assignment wins: from the last fate to the first.
        if self.clipped is not None:
            fates[self.clipped > 0] = Fate.CLIPPED_HIGH
            fates[self.clipped < 0] = Fate.CLIPPED_LOW
        if self.advantage is not None:
            fates[self.advantage == 0.0] = Fate.ZERO_ADVANTAGE
        if self.weight is not None:
            fates[self.weight == 0.0] = Fate.ZERO_WEIGHT
        if self.in_loss is not None:
            fates[~self.in_loss] = Fate.REJECTED
        if self.finite is not None:
            fates[~self.finite] = Fate.NOT_FINITE
        fates[~self.mask] = Fate.ENVIRONMENT
        return fates


@dataclasses.dataclass(frozen=True)
class FateSum:
    """The tokens of one fate."""

    fate: Fate
    tokens: int
    finite: int
    """Number of them whose p and q are finite, as in `abs_diff_sum`."""
    abs_diff_sum: float
    """Sum of |p - q| in nats."""


def sums(fates: UInt8, d: Float64) -> list[FateSum]:
    """Return the tokens and the mismatch of each fate that occurs among model tokens.

    Args:
        fates: of `LossTokens.fates`.
        d: p - q in nats; not finite if one of them is not.
    """
    finite = np.isfinite(d)
    size = np.where(finite, np.abs(d), 0.0)
    found = []
    for fate in Fate:
        chosen = fates == fate
        if fate is not Fate.ENVIRONMENT and chosen.any():
            tokens, counted = int(chosen.sum()), int((chosen & finite).sum())
            found.append(FateSum(fate, tokens, counted, float(size[chosen].sum())))
    return found


def raw_weights(d: Float64, mask: Bool, settings: StatisticsSettings) -> Float64:
    """Return the importance weights before they are cut, [rows, tokens].

    This is exp(d) of a token. If the run weighs sequences, it is exp of the sum of d over the row's
    model tokens. Both are clamped as verl does.

    Args:
        d: p - q in nats.
        mask: the model's tokens.
        settings: whether the run weighs tokens or sequences.
    """
    if settings.rollout_is != "sequence":
        return clamped_exp(d)
    of_row = np.where(mask, d, 0.0).sum(axis=1, keepdims=True)
    return np.broadcast_to(clamped_exp(of_row), d.shape)
