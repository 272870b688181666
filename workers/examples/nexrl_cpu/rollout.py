"""A rollout worker of the recipe's own: puzzles over several rounds, sampled by CTranslate2."""

# NexRL is not installed where this is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import random
from typing import Any

from nexrl.nexrl_types import Trajectory
from nexrl.rollout_worker import BaseRolloutWorker

from examples.countdown.config import Settings
from examples.countdown.engine import Engine
from examples.countdown.environment import Sample, make_puzzle, play, score
from examples.nexrl_cpu import service


class CountdownWorker(BaseRolloutWorker):  # type: ignore[misc]
    """Plays a task's puzzle with the trainer's weights of now, in int8 arithmetic."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._settings = Settings(seed=config.get("seed", 0))
        self._engine = Engine(self._settings.engine)
        self._version: int | None = None

    def rollout(self, task: dict[str, Any]) -> str:
        """Put the trajectory of a task into the pool, with the engine's log-probs."""
        version, weights = service.policy()
        if version != self._version:
            self._engine.load(weights, seed=1000 * self._settings.seed + version)
            self._version = version
        group, run = str(task["group_id"]), int(task["run_id"])
        puzzle = make_puzzle(random.Random(f"{self._settings.seed} {group}"))
        sample = Sample(puzzle, f"{group}-{run}", self._settings)
        budget = self._settings.round_tokens
        play([sample], lambda now: self._engine.generate([each.context for each in now], budget))
        blank = [0] * len(sample.prompt)
        # The answer itself is seldom found, so the number of digits also distinguishes samples.
        digits = sum(each > 4 for each in sample.tokens) / 1000
        return str(
            self._put_trajectory(
                Trajectory(
                    tokens=[*sample.prompt, *sample.tokens],
                    loss_mask=[*blank, *sample.mask],
                    reward=score(puzzle, sample.answer, sample.results) + digits,
                    is_val=False,
                    extra_fields={
                        "group_id": group,
                        "run_id": run,
                        "task_id": task["task_id"],
                        "logprobs": [*map(float, blank), *sample.log_probs],
                    },
                )
            )
        )
