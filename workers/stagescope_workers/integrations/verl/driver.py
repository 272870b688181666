"""Reports verl's trainer process: injects the context, records batches, fetches the numbers."""

from __future__ import annotations

import dataclasses
import functools
import logging
import numbers
from collections.abc import Mapping
from typing import Any, Final

from stagescope_wire import versions
from stagescope_wire.nonfinite import Json
from stagescope_workers.capture.verl_blocks import otherwise_in_verl
from stagescope_workers.integrations import canary
from stagescope_workers.integrations.configuration import attempt_key, lookup
from stagescope_workers.integrations.patches import guarded
from stagescope_workers.integrations.verl import batches, configuration, processes, ranks
from stagescope_workers.integrations.verl import context as contexts
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.integrations.verl.modes import Mode
from stagescope_workers.integrations.verl.processes import has_service, warn_without_service
from stagescope_workers.integrations.verl.rollout import (
    connect_workers,
    reports_manager,
    wrap_manager,
)
from stagescope_workers.metrics_feed import MetricsFeed
from stagescope_workers.probe.lifecycle import finish
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

_log = logging.getLogger("stagescope.verl")

_FINISH_SECONDS: Final = 10.0
_FAILED_SECONDS: Final = 3.0
_NO_SCALARS: Final = ("step", "policy_version")
"""Keywords of `Probe.log` that are not scalars."""
_CAPTURES: Final = {
    "driver": False,
    "rollout": "verl's engine runs in separate servers, not in the trainer's process",
    "reward_model": "verl's reward model runs in separate servers, not in the trainer's process",
}
"""`init`'s `captures` for each role of the trainer's process, which runs no model itself."""
_WORKER_GROUPS: Final = ("actor_rollout_wg", "actor_wg", "ref_policy_wg", "critic_wg")
"""The attributes of a trainer that are groups of ranks; one may have several names."""


class Driver:
    """Injects the context, records batches, and fetches the service's numbers.

    A process has one trainer, whose loop runs in one thread.
    """

    def __init__(self, trainer: Any, mode: Mode) -> None:
        self.trainer = trainer
        self.mode = mode
        self.is_validating = False
        self.resumed_from_step: int | None = None
        self._step: tuple[int, str, Context] | None = None
        self._feed: MetricsFeed | None = None
        self._has_probes = False

    @functools.cached_property
    def _base_context(self) -> Context:
        """The context of any step; `context` sets the step and version."""
        config = self.trainer.config
        profiler = configuration.profiler(config) if self.mode.stages else None
        _log_otherwise(profiler)
        return Context(
            run=configuration.run_name(config),
            attempt_key=attempt_key(),
            step=0,
            stages=self.mode.stages,
            synchronous=batches.is_synchronous(self.trainer),
            bypass=self.mode.metrics and configuration.is_bypass(config),
            settings=configuration.statistics_settings(config),
            streams=configuration.streams(config),
            profiler=profiler,
        )

    @functools.cached_property
    def _settings(self) -> dict[str, object]:
        return configuration.settings(self.trainer.config)

    def prepare(self) -> None:
        """Read the configuration before the first step, so that no step is slower for it."""
        if has_service():
            _ = self._base_context, self._settings

    def connect(self) -> None:
        """Have this process and the ranks connect before the first step; waits for nothing.

        Connecting takes a process up to a second, most of it Python. Within the first step it would
        delay that step, and its numbers would come after verl logs them. The ranks would also not
        know the captures that were requested before.
        """
        if not self._trains():
            return
        context = self._base_context
        for role in self._roles():
            self._probe(context, role)
        if self.mode.metrics:
            self._metrics_feed(context).prepare()
        if context.stages or context.bypass:
            groups = [getattr(self.trainer, name, None) for name in _WORKER_GROUPS]
            actors = [actor for group in groups for actor in getattr(group, "workers", ())]
            processes.call_actors(actors, ranks.make_probes, context.text())

    def _roles(self) -> list[str]:
        """Return the roles that this process has in every step."""
        roles = ["driver"]
        if self.mode.stages and reports_manager(self.trainer):
            roles.append("rollout")
        if self.mode.stages and configuration.is_reward_model_colocated(self.trainer.config):
            roles.append("reward_model")
        return roles

    def _trains(self) -> bool:
        """Return whether there is a service, and there will be steps."""
        config = self.trainer.config
        return has_service() and not lookup(config, "trainer", "val_only")

    @property
    def is_bypass(self) -> bool:
        """Whether only the workers' loss has both log-prob streams."""
        return self._base_context.bypass

    def context(self) -> Context | None:
        """Return the context of the step; None where nothing is reported."""
        step = getattr(self.trainer, "global_steps", None)
        if self.is_validating or not isinstance(step, int):
            return None
        if not has_service():
            warn_without_service(configuration.run_name(self.trainer.config))
            return None
        if self._step is None or self._step[0] != step:
            version = getattr(self.trainer, "current_param_version", None)
            context = dataclasses.replace(self._base_context, step=step, version=version)
            self._step = (step, context.text(), context)
        return self._step[2]

    def inject_context(self, batch: object) -> None:
        """Inject the context into `batch`, for the ranks that will get it."""
        context = self.context()
        if context is not None and self._step is not None and (context.stages or context.bypass):
            contexts.inject(batch, self._step[1])

    def stage(self, name: str, role: str = "driver") -> Stage | None:
        """Return a stage of this step, or None where nothing is reported."""
        context = self.context()
        if context is None:
            return None
        probe = self._probe(context, role)
        return probe.stage(name, step=context.step, policy_version=context.policy_version)

    def record(self, stage: Stage, batch: Any, tensors: Mapping[str, object]) -> None:
        """Record tensors of a batch, with the ids and versions of its rows."""
        context = self.context()
        if not tensors or context is None:
            return
        versions = batches.versions(batch)
        if not versions and context.synchronous:
            versions = batches.constant_versions(context.policy_version, len(batch))
        stage.record({**batches.ids(batch), **versions, **context.streams, **tensors})

    def request_numbers(self, rows: int | None = None) -> None:
        """Begin to request the step's numbers, after its streams were recorded.

        Args:
            rows: How many samples the ranks record; None where this process records all of them.
        """
        context = self.context()
        if context is None or not self.mode.metrics:
            return
        self._metrics_feed(context).request(context.step, rows)

    def _metrics_feed(self, context: Context) -> MetricsFeed:
        if self._feed is None:
            self._feed = MetricsFeed(self._probe(context, "driver"))
        return self._feed

    def log(self, step: int, data: Mapping[str, object]) -> Mapping[str, float]:
        """Report verl's metrics of this step as scalars; return the service's numbers of it.

        Metrics of several steps, logged by the version of the weights, are ignored.
        """
        context = self.context()
        if context is None or context.step != step:
            return {}
        scalars: dict[str, Json] = {
            str(name): float(value)
            for name, value in data.items()
            if isinstance(value, numbers.Real) and not isinstance(value, bool)
            if name not in _NO_SCALARS
        }
        self._probe(context, "driver").log(step=step, **scalars)
        return {} if self._feed is None else self._feed.get(step)

    def wrap_rollout(self, *given: object) -> None:
        """Report the configured manager's generation as a stage, where no agent loop does.

        Args:
            given: the arguments of `fit`; V1's is the manager.
        """
        if self.mode.stages:
            stage = functools.partial(self.stage, "rollout_generate", role="rollout")
            wrap_manager(self.trainer, stage, *given)
            if self._trains():
                connect_workers(self.trainer, *given)

    def attach_canary(self) -> None:
        """Have the servers and the ranks score a canary with each weight sync, where wanted."""
        if canary.every() is not None and self._trains():
            from stagescope_workers.integrations.verl.canary import attach

            attach(self.trainer, self._probe(self._base_context, "driver"))

    def close(self, error: BaseException | None) -> None:
        """Send everything that waits: training is over, or ends with `error`."""
        feed, self._feed = self._feed, None
        step, self._step = self._step, None
        if feed is not None:
            feed.close()
        if not self._has_probes:  # no service, or a subclass's fit called its base class's
            return
        probe = self._probe(self._base_context, "driver")
        self._has_probes = False
        if error is not None:
            probe.close(_FAILED_SECONDS)
        else:
            if step is not None:
                probe.end_step(step[0])
            finish(_FINISH_SECONDS, run=probe.run)
        processes.forget()

    def _probe(self, context: Context, role: str) -> Probe:
        self._has_probes = True
        options: dict[str, object] = {
            "captures": _CAPTURES.get(role, True),
            "layout": {"framework": "verl"},
            "resumed_from_step": self.resumed_from_step,
            **({"settings": self._settings} if role == "driver" else {}),
            # Not every configuration has a critic or a reference.
            "expects": ("actor",) if role == "driver" and context.stages else (),
        }
        return processes.get_probe(context, role, 0, world_size=1, describe=lambda: options)


def _log_otherwise(profiler: object) -> None:
    """Log in one line what the installed verl would do otherwise with its precision debugger."""
    with guarded("comparing verl's precision_debugger block"):
        line = otherwise_in_verl(
            {} if profiler is None else profiler, versions.installed("verl") or ""
        )
        if line:
            _log.warning("%s", line)
