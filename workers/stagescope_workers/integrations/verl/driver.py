"""What stands beside verl's trainer: it knows the step, and what is wanted of it."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping
from typing import Any, Final

from stagescope_workers.integrations.verl import batches, configuration, context, processes
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.integrations.verl.managers import watch_manager
from stagescope_workers.integrations.verl.modes import Mode
from stagescope_workers.integrations.verl.processes import is_there, warn_if_absent
from stagescope_workers.metrics_feed import MetricsFeed
from stagescope_workers.probe.lifecycle import finish
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

_FINISH_SECONDS: Final = 10.0
_FAILED_SECONDS: Final = 3.0
_NO_SCALARS: Final = ("step", "policy_version")
"""What `Probe.log` would take for the clock."""
_CAPTURES: Final = {
    "driver": False,
    "rollout": "verl's engine runs in servers of its own, not in the trainer's process",
    "reward_model": "verl's reward model runs in servers of its own, not in the trainer's process",
}
"""What becomes of captures in the trainer's process, which runs no model itself."""


class Driver:
    """Plants the context, hands over batches, and brings the service's numbers back.

    The trainer is alone in its process and its loop runs in one thread.
    """

    def __init__(self, trainer: Any, mode: Mode) -> None:
        self.trainer = trainer
        self.mode = mode
        self.is_validating = False
        self.resumed_from_step: int | None = None
        self._step: tuple[int, str, Context] | None = None
        self._feed: MetricsFeed | None = None

    @functools.cached_property
    def _told(self) -> dict[str, Any]:
        config = self.trainer.config
        return {
            "run": configuration.run_name(config),
            "attempt_key": configuration.attempt_key(),
            "stages": self.mode.stages,
            "synchronous": batches.is_synchronous(self.trainer),
            "bypass": self.mode.metrics and configuration.is_bypass(config),
            "settings": configuration.shaping(config),
            "streams": configuration.streams(config),
            "profiler": configuration.profiler(config) if self.mode.stages else None,
        }

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        return configuration.settings(self.trainer.config)

    def prepare(self) -> None:
        """Read the configuration before the first step, whose time it would take."""
        if is_there():
            _ = self._told, self._settings

    @property
    def is_bypass(self) -> bool:
        """Say whether the streams meet in the workers' loss, and not here."""
        return bool(self._told["bypass"])

    def context(self) -> Context | None:
        """Return the context of the step; None where nothing is to be reported."""
        step = getattr(self.trainer, "global_steps", None)
        if self.is_validating or not isinstance(step, int):
            return None
        if not is_there():
            warn_if_absent(configuration.run_name(self.trainer.config))
            return None
        if self._step is None or self._step[0] != step:
            version = getattr(self.trainer, "current_param_version", None)
            made = Context(step=step, version=version, **self._told)
            self._step = (step, made.text(), made)
        return self._step[2]

    def plant(self, batch: Any) -> None:
        """Have the ranks that will get `batch` know the step."""
        found = self.context()
        if found is not None and self._step is not None and (found.stages or found.bypass):
            context.plant(batch, self._step[1])

    def stage(self, name: str, role: str = "driver") -> Stage | None:
        """Return a stage of this step, or None where nothing is to be reported."""
        found = self.context()
        if found is None:
            return None
        probe = self._probe(found, role)
        return probe.stage(name, step=found.step, policy_version=found.policy_version)

    def record(self, stage: Stage, batch: Any, tensors: Mapping[str, Any]) -> None:
        """Hand over tensors of a batch, with the ids and versions of its rows."""
        found = self.context()
        if not tensors or found is None:
            return
        known = batches.versions(batch)
        if not known and found.synchronous:
            known = batches.one_version(found.policy_version, len(batch))
        stage.record({**batches.ids(batch), **known, **self._told["streams"], **tensors})

    def want_numbers(self, rows: int | None = None) -> None:
        """Begin to ask for the step's numbers: its streams were handed over, of `rows` by ranks."""
        found = self.context()
        if found is None or not self.mode.metrics:
            return
        if self._feed is None:
            self._feed = MetricsFeed(self._probe(found, "driver"))
        self._feed.want(found.step, rows)

    def log(self, step: int, data: Mapping[str, Any]) -> Mapping[str, float]:
        """Take verl's metrics of this step as scalars; return the service's numbers of it.

        Metrics of several steps, logged by the version of the weights, are not taken.
        """
        found = self.context()
        if found is None or found.step != step:
            return {}
        scalars: dict[str, Any] = {
            str(name): float(value)
            for name, value in data.items()
            if isinstance(value, numbers.Real) and not isinstance(value, bool)
            if name not in _NO_SCALARS
        }
        self._probe(found, "driver").log(step=step, **scalars)
        return {} if self._feed is None else self._feed.take(step)

    def watch_rollout(self) -> None:
        """Have the configured manager's generation be a stage, where no agent loop reports it."""
        if self.mode.stages:
            watch_manager(self.trainer, lambda: self.stage("rollout_generate", role="rollout"))

    def close(self, error: BaseException | None) -> None:
        """Send what waits: training is over, or ends with `error`."""
        feed, self._feed = self._feed, None
        step, self._step = self._step, None
        if feed is not None:
            feed.close()
        if step is None:  # nothing was reported, or a subclass's fit has called that of its base
            return
        probe = self._probe(step[2], "driver")
        if error is not None:
            probe.close(_FAILED_SECONDS)
        else:
            probe.end_step(step[0])
            finish(_FINISH_SECONDS, run=probe.run)
        processes.forget()

    def _probe(self, found: Context, role: str) -> Probe:
        options = {
            "captures": _CAPTURES.get(role, True),
            "layout": {"framework": "verl"},
            "resumed_from_step": self.resumed_from_step,
            **({"settings": self._settings} if role == "driver" else {}),
            # Of the critic and the reference not every configuration has one.
            "expects": ("actor",) if role == "driver" and found.stages else (),
        }
        return processes.probe_of(found, role, 0, world_size=1, describe=lambda: options)
