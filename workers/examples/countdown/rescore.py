"""Scores stored rollouts with another engine: the same tokens, other log-probs.

`train --replay RUN:STEP --rescore int8` shows the effect of an engine on the log-probs alone: the
samples, rewards and training stay the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

import stagescope
from examples.countdown.batch import Batch
from examples.countdown.config import Settings
from examples.countdown.engine import Engine, Weights
from examples.countdown.replay import ReplayedRollout
from stagescope_workers import Probe


class RescoredRollout(ReplayedRollout):
    """Replays stored steps with an engine's log-probs of their tokens."""

    def __init__(
        self,
        settings: Settings,
        probe: Probe,
        stored: Sequence[stagescope.Batch],
        compute_type: str,
    ) -> None:
        super().__init__(settings, probe, stored)
        self._engine = Engine(compute_type)

    def weight_sync(self, step: int, weights: Weights) -> None:
        """Load the trainer's weights into the engine; the seed has no effect without sampling."""
        with self.probe.stage("weight_sync", step=step, policy_version=step - 1):
            self._engine.load(weights, self.settings.seed)
            self.policy_version = step - 1

    def play(self, step: int) -> Batch:
        """Return the stored step with the engine's log-probs; raises as `generate`."""
        batch = super().play(step)
        lengths = (batch.turn_ids >= 0).sum(axis=1)
        rows = [
            [*prompt, *response[:length]]
            for prompt, response, length in zip(
                batch.prompts.tolist(), batch.responses.tolist(), lengths.tolist(), strict=True
            )
        ]
        found = np.zeros_like(batch.rollout_log_probs)
        first = batch.prompts.shape[1] - 1  # the log-prob of a row's token t + 1 is at t
        for row, scored in enumerate(self._engine.score(rows)):
            found[row, : lengths[row]] = scored[first:]
        found[batch.response_mask == 0] = 0.0
        return dataclasses.replace(batch, rollout_log_probs=found, engine=self._engine.name)
