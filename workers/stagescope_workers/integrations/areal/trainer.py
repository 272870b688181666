"""AReaL's trainer process: its scopes as stages, its statistics as scalars, numbers in its log.

`perf_tracer.trace_scope` opens a scope for each part of a step, with the step's number, also where
AReaL's own tracing is off. With a controller (v1 and v2) this process runs no model, and reports as
the role `driver`. Without one (torchrun, AREAL_SPMD_MODE) it is a rank. It then reports the parts
that its models do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stagescope_wire.errors import StagescopeError
from stagescope_wire.nonfinite import Json
from stagescope_workers.integrations import canary
from stagescope_workers.integrations.areal import ranks, rows
from stagescope_workers.integrations.configuration import lookup, plain_leaves
from stagescope_workers.integrations.patches import Function, before, guarded, wrapper
from stagescope_workers.integrations.training import (
    ReportedTraining,
    closed_at_end,
    scalars,
)
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    from stagescope_workers.canary.after_syncs import WeightCanary

_STAGES: Final = {
    "train.rollout": "rollout_generate",
    "train.compute_values": "compute_values",
    "train.ref_logp": "ref_compute_log_prob",
    "train.teacher_logp": "teacher_compute_log_prob",
    "train.recompute_logp": "actor_compute_log_prob",
    "train.compute_advantage": "compute_advantage",
    "train.ppo_update": "actor_update",
    "train.critic_ppo_update": "critic_update",
    "train.update_weights": "weight_sync",
    "train.save": "save_checkpoint",
    "train.eval": "evaluate",
}
"""The scopes of a step -> stages."""
_OF_RANKS: Final = (
    "train.compute_values", "train.ref_logp", "train.recompute_logp", "train.compute_advantage",
    "train.ppo_update", "train.critic_ppo_update",
)  # fmt: skip
"""Scopes that the models of a rank report themselves."""
_SYNC: Final = "train.update_weights"
_WEIGHTS: Final = (".update_weights_from_distributed", ".update_weights_from_disk")
_SENDERS: Final = ("fsdp_engine", "megatron_engine", "archon_engine")
"""First parts of the scopes of weights that every rank enters."""
_OPTIMIZER: Final = "_engine.step"
_SPMD: Final = "AREAL_SPMD_MODE"
_COUNT: Final = "__count"


def is_rank() -> bool:
    """Return whether the trainer's process is a rank: there is no controller."""
    return os.environ.get(_SPMD, "").lower() in ("1", "true")


Trainer: TypeAlias = Any
"""Attributes read from AReaL's `PPOTrainer`: config; for a canary: tokenizer, rollout."""


class Training(ReportedTraining):
    """Reports one `PPOTrainer`."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.step: int | None = None
        self.rows = 0
        """How many samples the step's batch has, of all ranks; 0: not known."""
        self._canary: tuple[Probe, WeightCanary | None] | None = None

    @property
    def last_step(self) -> int | None:
        """The step of the last scope that was entered."""
        return self.step

    @property
    def writes_log(self) -> bool:
        """Whether this process writes AReaL's log."""
        return not is_rank() or ranks.place()[0] == 0

    def _make_probe(self) -> Probe:
        trainer = self.trainer
        rank, world_size = ranks.place() if is_rank() else (0, 1)
        info = getattr(trainer, "recover_info", None)
        options: dict[str, Any] = {"expects": ("actor",), "captures": False}
        return init(
            ranks.run_name(trainer.config),
            role="actor" if is_rank() else "driver",
            rank=rank,
            world_size=world_size,
            layout={"framework": "areal"},
            settings=settings(trainer.config),
            resumed_from_step=None if info is None else int(info.last_step_info.global_step),
            **({} if is_rank() else options),
        )

    def stage(self, name: str, step: int) -> Stage | None:
        """Return the stage of a scope; None where a model of this process reports it."""
        if self.step != step:
            self.step, self.rows = step, 0
        probe = self.probe
        if is_rank() and name in _OF_RANKS:
            return None
        return probe.stage(_STAGES[name], step=step, policy_version=step)

    def find_canary(self) -> WeightCanary | None:
        """Return the canary that asks the servers; None where this process has none."""
        if not self.writes_log:
            return None
        if self._canary is None or self._canary[0] is not self.probe:
            from stagescope_workers.integrations.areal.canary import of_servers

            self._canary = (self.probe, of_servers(self.trainer, self.probe))
        return self._canary[1]

    def ask_canary(self, found: WeightCanary) -> None:
        """Ask the servers, which have the weights of the step's update."""
        from stagescope_workers.integrations.areal.canary import ask

        if self.step is not None:
            ask(found, self.trainer.config, self.step)

    def want_step(self) -> None:
        """Request the step's numbers from the service: all of its streams were recorded."""
        if self.step is not None and self.rows:
            self.want(self.step, self.rows)


_current: Training | None = None


def settings(config: object) -> dict[str, object]:
    """Return AReaL's configuration, without what may be secret."""
    with guarded("AReaL's configuration"):
        tree: Any = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else {}  # type: ignore[arg-type]
        applied = ranks.statistics_settings(lookup(config, "actor"))
        return {**applied, "areal": plain_leaves(tree)}
    return {}


@before("the trainer")
def wrap_init(trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Wrap `PPOTrainer.__init__`: the trainer becomes the process's current one."""
    global _current
    _current = Training(trainer)


@wrapper
def wrap_train(function: Function, trainer: Trainer, *args: Any, **kwargs: Any) -> object:
    """Wrap `PPOTrainer.train`: when it ends, everything that waits is sent."""
    with closed_at_end(_close):
        return function(trainer, *args, **kwargs)


def _close(error: BaseException | None) -> None:
    if _current is not None:
        _current.close(error)


@wrapper
def wrap_scope(function: Function, name: str, *args: Any, **kwargs: Any) -> object:
    """Wrap `trace_scope`: the scopes of a step, of weights that are sent, of optimizer steps."""
    scope = function(name, *args, **kwargs)
    with guarded("a scope"):
        if name in _STAGES or name.endswith((*_WEIGHTS, _OPTIMIZER)):
            return _Scope(scope, name, kwargs.get("args"))
    return scope


class _Scope(contextlib.AbstractContextManager[object]):
    """AReaL's scope together with our stage; both are entered and left here."""

    def __init__(
        self,
        scope: contextlib.AbstractContextManager[object],
        name: str,
        arguments: Mapping[str, int | None] | None,
    ) -> None:
        self._scope = scope
        self._name = name
        self._arguments = arguments
        self._stage: Stage | None = None
        self._sync = contextlib.ExitStack()

    def __getattr__(self, name: str) -> object:
        return getattr(self._scope, name)

    def __enter__(self) -> object:
        with guarded("the beginning of a scope", reraise=StagescopeError):
            self._stage = self._find_stage()
            if self._stage is not None:
                self._stage.begin()
        if self._name == _SYNC and _current is not None and canary.every() is not None:
            around = canary.around_sync(_current.find_canary, after=_current.ask_canary)
            self._sync.enter_context(around)
        return self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            return self._scope.__exit__(kind, error, trace)
        finally:
            self._sync.__exit__(kind, error, trace)
            with guarded("the end of a scope"):
                if self._stage is not None:
                    self._stage.end(error)
                if self._name.endswith(_OPTIMIZER):
                    ranks.end_minibatch()
                elif self._name == "train.ppo_update" and error is None and _current is not None:
                    _current.want_step()

    def _find_stage(self) -> Stage | None:
        if self._name.endswith(_WEIGHTS):
            if canary.every() is not None and self._name.partition(".")[0] in _SENDERS:
                from stagescope_workers.integrations.areal.canary import score

                score()
            return ranks.weight_sync()
        step = (self._arguments or {}).get("global_step")
        if self._name not in _STAGES or _current is None or step is None:
            return None
        return _current.stage(self._name, int(step))


@before("the number of samples")
def wrap_count(controller: object, *args: Any, **kwargs: object) -> None:
    """Wrap a controller's `compute_advantages`, whose batch has all samples of the step."""
    if _current is not None and args:
        _current.rows = rows.count_rows(args[0])


@wrapper
def wrap_commit(function: Function, *args: object, **kwargs: object) -> object:
    """Wrap `StatsLogger.commit`: reports AReaL's statistics, and adds numbers under `stagescope/`.

    All that AReaL logs goes where it went.
    """
    with guarded("AReaL's statistics"):
        if _current is not None and (_current.step is not None):
            bound = inspect.signature(function).bind(*args, **kwargs)
            given = bound.arguments
            step = int(given["global_step"])
            _report(_current, step, given["data"])
            given["data"] = _with_numbers(given["data"], _current.numbers(step))
            args, kwargs = bound.args, bound.kwargs
    return function(*args, **kwargs)


def _report(trainer: Training, step: int, data: object) -> None:
    reported: dict[str, Json] = {}
    for item in data if isinstance(data, list) else [data]:
        found = scalars(item)
        reported |= {name: value for name, value in found.items() if not name.endswith(_COUNT)}
    if reported and trainer.writes_log:
        trainer.probe.log(step=step, **reported)


def _with_numbers(data: Any, ours: Mapping[str, float]) -> object:
    if not ours:
        return data
    if isinstance(data, list):
        return [{**ours, **data[0]}, *data[1:]] if data else data
    return {**ours, **data}
