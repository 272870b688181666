"""Faults that the first version of the rules did not name: the rules for them came after them."""

from __future__ import annotations

from typing import Final

import numpy as np
from tests.service.rules.benchmark.faults.engines import sampled
from tests.service.rules.benchmark.faults.streams import disturb, fault, when
from tests.service.rules.benchmark.faults.trainings import with_scalar
from tests.service.rules.benchmark.scene import Sampling, Scene
from tests.service.rules.planted import Batch


def far_positions(batch: Batch) -> None:
    """The engine's attention window ends after 80 tokens."""
    at = np.arange(batch.p.shape[1])[None, :]
    disturb(batch, 0.25, (at > 80) & (batch.rounds >= 0))


def positions_scaled(batch: Batch) -> None:
    """The two sides scale their positions otherwise: they are further apart with each token."""
    for begin in range(0, batch.p.shape[1], 16):
        at = np.arange(batch.p.shape[1])[None, :]
        disturb(batch, begin / 640, (at >= begin) & (at < begin + 16) & (batch.rounds >= 0))


_POSITIONS: Final = "the sides disagree more with each token, so positions or the cache differ"
_TOKENS: Final = "the trainer scores other token ids in a few places"
_LONG: Final = Scene(rounds=1, usual=90)

UNNAMED: Final = (
    fault("far positions", "positions over 80 from 10", "mismatch_rises_with_position", _POSITIONS,
          _LONG.but(seed=214), change=when(far_positions, 10)),
    fault("far positions", "positions scaled from the begin", "mismatch_rises_with_position",
          _POSITIONS, _LONG.but(ranks=2, rows=8, seed=215), change=positions_scaled),
    fault("other tokens", "2% other tokens from 9", "tokens_apart", _TOKENS, Scene(seed=233),
          sample=sampled(Sampling(foreign=0.02), 9)),
    fault("other tokens", "2% other tokens on rank 2 from 9", "tokens_apart", _TOKENS,
          Scene(seed=234), where="2", sample=sampled(Sampling(foreign=0.02), 9, (2,))),
    fault("no gradient", "gradient zero from 12", "gradient_zero",
          "the parameters are frozen, or the loss is detached from them", Scene(seed=240),
          scalars=with_scalar("grad_norm", lambda step, value: 0.0 if step >= 12 else value)),
    fault("no gradient", "gradient zero from the begin", "gradient_zero",
          "the parameters are frozen, or the loss is detached from them",
          Scene(ranks=2, rows=8, seed=241),
          scalars=with_scalar("grad_norm", lambda step, value: 0.0)),
    fault("entropy rises", "entropy rises at once in 15", "entropy_rises",
          "the update pushes tokens down that it should not", Scene(ranks=8, seed=242),
          scalars=with_scalar("entropy", lambda step, value: value * (5.0 if step >= 15 else 1.0))),
    fault("slow ranks", "ranks 0 and 5 slow from 12", "straggler", "two cards are slow",
          Scene(ranks=8, seed=243), where="ranks 0, 5",
          seconds=lambda step, rank, usual:
              usual * (2.5 if rank in (0, 5) and step >= 12 else 1.0)),
    fault("slow ranks", "ranks 2 and 3 slower and slower from 9", "straggler",
          "a node with two ranks throttles", Scene(ranks=8, seed=235), where="ranks 2-3",
          seconds=lambda step, rank, usual:
              usual * (1.0 + 0.15 * max(step - 8, 0)) if rank in (2, 3) else usual),
    fault("entropy rises", "entropy rises from 10", "entropy_rises",
          "an entropy bonus is too large", Scene(seed=239),
          scalars=with_scalar(
              "entropy", lambda step, value: value * (1.0 + 0.3 * max(step - 10, 0)))),
)  # fmt: skip
