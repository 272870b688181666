"""Thin Ray shells around the trainer and the rollout; heavy imports begin inside the actors.

The driver imports this module and neither torch nor transformers: it starts in a second.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from examples.countdown.config import Pause, Settings

if TYPE_CHECKING:
    import numpy as np

    from examples.countdown.batch import Batch


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """How the processes of this attempt name themselves to stagescope."""

    run: str
    attempt_key: str | None = None
    capture: str | None = None
    """Path of a YAML file with captures that are in force without the service."""
    resumed_from_step: int | None = None


class RankActor:
    """One training rank; every method name of `Trainer` may be called through `do`."""

    def __init__(self, settings: Settings, rank: int, report: Report, pause: Pause | None) -> None:
        from stagescope_workers import init

        self._probe = init(
            run=report.run,
            role="actor",
            rank=rank,
            world_size=settings.world_size,
            attempt_key=report.attempt_key,
            plan=report.capture,
            resumed_from_step=report.resumed_from_step,
            layout={
                "dp_rank": rank,
                "dp_size": settings.world_size,
                "device_kind": "cpu",
                "engine": "transformers",
                "framework": "countdown",
            },
        )
        from examples.countdown.collective import Collective
        from examples.countdown.trainer import Trainer

        self._collective = Collective(rank, settings.world_size)
        self._trainer = Trainer(settings, self._collective, self._probe, pause)

    def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def listen(self) -> int:
        """On rank 0: open the ranks' meeting place; see `Collective`."""
        return self._collective.listen()

    def join(self, port: int) -> None:
        """Meet the other ranks."""
        self._collective.join(port)

    def do(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Trainer`."""
        return getattr(self._trainer, method)(*arguments)

    def close(self, timeout: float) -> None:
        """Send what is left to the service: Ray runs no `atexit` in its workers."""
        self._collective.leave()
        self._probe.close(timeout)


class RolloutActor:
    """The process that holds the engine."""

    def __init__(self, settings: Settings, report: Report) -> None:
        from stagescope_workers import init

        self._probe = init(
            run=report.run,
            role="rollout",
            rank=0,
            world_size=1,
            attempt_key=report.attempt_key,
            resumed_from_step=report.resumed_from_step,
            layout={"device_kind": "cpu", "engine": f"ctranslate2-{settings.engine}"},
        )
        from examples.countdown.rollout import Rollout

        self._rollout = Rollout(settings, self._probe)

    def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def weight_sync(self, step: int, weights: dict[str, np.ndarray]) -> None:
        """Take the trainer's weights."""
        self._rollout.weight_sync(step, weights)

    def generate(self, step: int) -> Batch:
        """Play the puzzles of a step."""
        return self._rollout.generate(step)

    def close(self, timeout: float) -> None:
        """Send what is left to the service."""
        self._probe.close(timeout)
