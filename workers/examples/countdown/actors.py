"""Thin Ray actors around the trainer and the rollout, which do the heavy imports themselves.

The driver imports this module, but not torch and transformers, so it starts in a second.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from examples.countdown.config import NONE, Settings, Troubles
from stagescope_workers import Probe, init

if TYPE_CHECKING:
    import numpy as np

    import stagescope
    from examples.countdown.batch import Batch
    from examples.countdown.replay import ReplayedRollout
    from examples.countdown.rollout import Rollout


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The arguments of `stagescope_workers.init` for the processes of this attempt."""

    run: str
    attempt_key: str | None = None
    capture: str | None = None
    """Path of a YAML file with captures that are active without the service."""
    resumed_from_step: int | None = None
    keep: Mapping[str, object] | None = None
    """The data that the service keeps: `stagescope_wire.keep.KEEP_FIELDS`."""


class RankActor:
    """One training rank; `do` calls any method of `Trainer`."""

    def __init__(
        self, settings: Settings, rank: int, report: Report, troubles: Troubles = NONE
    ) -> None:
        layout = {"dp_rank": rank, "dp_size": settings.world_size, "framework": "transformers"}
        self._probes = [_probe(settings, role, rank, report, layout) for role in _roles(settings)]

        from examples.countdown.collective import Collective
        from examples.countdown.trainer import Trainer

        self._collective = Collective(rank, settings.world_size)
        self._trainer = Trainer(
            settings, self._collective, self._probes[0], self._probes[-1], troubles
        )

    def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def listen(self) -> int:
        """On rank 0: open the ranks' store; see `Collective`."""
        return self._collective.listen()

    def join(self, port: int) -> None:
        """Connect to the other ranks."""
        self._collective.join(port)

    def do(self, method: str, *arguments: object) -> object:
        """Call a method of `Trainer`."""
        return getattr(self._trainer, method)(*arguments)

    def close(self, timeout: float) -> None:
        """Send the last events to the service: Ray runs no `atexit` in its workers."""
        self._collective.leave()
        for probe in self._probes:
            probe.close(timeout)


class RolloutActor:
    """The process with the engine, or with stored rollouts instead."""

    def __init__(
        self,
        settings: Settings,
        report: Report,
        troubles: Troubles = NONE,
        stored: Sequence[stagescope.Batch] = (),
        rescore: str | None = None,
    ) -> None:
        engine = f"ctranslate2 {rescore or settings.engine}"
        layout = {"engine": engine if rescore or not stored else "stored rollouts"}
        self._probe = _probe(settings, "rollout", 0, report, layout)
        self._rollout: Rollout | ReplayedRollout
        if stored and rescore:
            from examples.countdown.rescore import RescoredRollout

            self._rollout = RescoredRollout(settings, self._probe, stored, rescore)
        elif stored:
            from examples.countdown.replay import ReplayedRollout

            self._rollout = ReplayedRollout(settings, self._probe, stored)
        else:
            from examples.countdown.rollout import Rollout

            self._rollout = Rollout(settings, self._probe, troubles)

    def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def weight_sync(self, step: int, weights: dict[str, np.ndarray]) -> None:
        """Load the trainer's weights."""
        self._rollout.weight_sync(step, weights)

    def generate(self, step: int) -> Batch:
        """Play the puzzles of a step."""
        return self._rollout.generate(step)

    def close(self, timeout: float) -> None:
        """Send the last events to the service."""
        self._probe.close(timeout)


def _roles(settings: Settings) -> tuple[str, ...]:
    return ("actor", "critic") if settings.algorithm == "ppo" else ("actor",)


def _probe(
    settings: Settings, role: str, rank: int, report: Report, layout: Mapping[str, object]
) -> Probe:
    return init(
        report.run,
        role=role,
        rank=rank,
        world_size=1 if role == "rollout" else settings.world_size,
        attempt_key=report.attempt_key,
        layout={**layout, "device_kind": "cpu"},
        resumed_from_step=report.resumed_from_step,
        settings=dataclasses.asdict(settings),
        plan=report.capture,
        keep=report.keep,
    )
