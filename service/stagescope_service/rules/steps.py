"""What a history says of a step, and what reads its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from stagescope_service.store.tables import UnfinishedRank
from stagescope_wire.batch import Batch


class CurrentStep(NamedTuple):
    """A current step: no later attempt repeats it."""

    step: int
    attempt_id: int
    attempt: int
    """The attempt's number in its run."""
    verdict: str | None
    """The comparability of its streams; None: it was not measured."""
    suspects: tuple[str, ...]
    """The checks of its streams that failed."""


class MissingRank(NamedTuple):
    """The steps and stages that a rank is missing in.

    Attributes:
        steps: the steps that closed without it, ascending.
        stages: the stages of them that it did not end.
    """

    steps: list[int]
    stages: list[str]


class CutOffStep(NamedTuple):
    """A step that the end of its attempt closed, and the ranks that it lacks."""

    step: int
    missing: Sequence[UnfinishedRank]


@dataclasses.dataclass(frozen=True)
class LossOfStep:
    """The effect of the loss on the kept tokens of a step.

    Attributes:
        tokens: number of these tokens.
        shares: a fate of `loss_fate.NAMES` -> its share of the sum of |d|, 0 to 1; empty: the
            tokens were not read.
        unrecorded: a field of `loss_fate.LossTokens` -> how to record it.
    """

    tokens: int
    shares: Mapping[str, float]
    unrecorded: Mapping[str, str]


class KeptTensors(Protocol):
    """Reads what the ring and the kept files still hold of a step."""

    def loss(self, step: CurrentStep, wanted: Collection[str]) -> LossOfStep:
        """Return the effect of the loss on a step's tokens.

        Args:
            step: the step.
            wanted: fields of `loss_fate.LossTokens`. If none of them is recorded, the tokens are
                not read.

        Raises:
            StagescopeError: its streams are not kept.
        """
        ...

    def batch(self, step: CurrentStep, names: Sequence[str]) -> Batch | None:
        """Return the rows of a step with these tensors; None: not all of them are kept.

        Raises:
            StagescopeError: they cannot be read.
        """
        ...
