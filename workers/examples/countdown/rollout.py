"""The rollout side: generates finished multi-turn samples for puzzles."""

from __future__ import annotations

from examples.countdown.batch import Batch, make_batch
from examples.countdown.config import NONE, Settings, Troubles
from examples.countdown.engine import Engine, Weights
from examples.countdown.environment import make_samples, play
from stagescope_workers import Probe


class Rollout:
    """Plays the puzzles of a step with the policy that the engine holds."""

    def __init__(self, settings: Settings, probe: Probe, troubles: Troubles = NONE) -> None:
        self.settings = settings
        self._switch = troubles.switch
        self._weights: Weights = {}
        self.probe = probe
        self.policy_version = -1
        self._engine = Engine(settings.engine)

    def weight_sync(self, step: int, weights: Weights) -> None:
        """Load the trainer's weights, which are version `step - 1`.

        Weights that are not passed stay as they were. Checksums are recorded before CTranslate2
        fuses and quantises the weights.
        """
        with self.probe.stage("weight_sync", step=step, policy_version=step - 1):
            if self._switch is not None and step >= self._switch.step:
                self._engine, self._switch = Engine(self._switch.engine), None
            self._weights = {**self._weights, **weights}
            self.probe.record_weights(self._weights, version=step - 1, side="rollout", step=step)
            self._engine.load(self._weights, seed=self.settings.seed * 100_003 + step)
            self.policy_version = step - 1

    def generate(self, step: int) -> Batch:
        """Play this step's puzzles; depends only on seed, step and the policy."""
        budget = self.settings.round_tokens
        with self.probe.stage(
            "rollout_generate", step=step, policy_version=self.policy_version
        ) as stage:
            samples = make_samples(self.settings, step)
            play(
                samples,
                lambda playing: self._engine.generate([s.context for s in playing], budget),
            )
            batch = make_batch(samples, self.policy_version, self._engine.name)
            stage.record(batch.trajectories(), **self._engine.sampling(budget))
            stage.log(**batch.counts())
        return batch
