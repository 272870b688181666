"""The list of verl's patched functions, with what is not reported where one cannot be patched.

verl 0.9 has two trainers: `ray_trainer` (V0) and `v1.trainer_base` (V1). 0.7 and 0.8 have only V0.
0.7 also has older workers, a class for each role, in `fsdp_workers` and `megatron_workers`. They
accept a DataProto and split it into mini-batches themselves, so an update has one part. Their
loss is another function, so the log-probs of bypass mode are not reported.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any, Final

from stagescope_workers.capture.verl_blocks import VERL_STAGES
from stagescope_workers.integrations.patches import Function, Patch, Wrap, before, guarded, wrapper
from stagescope_workers.integrations.verl import context as contexts
from stagescope_workers.integrations.verl import minibatches, modes, ranks, rollout, trainer_calls
from stagescope_workers.integrations.verl.modes import ALL, METRICS, OFF, STAGES, Mode

_log = logging.getLogger("stagescope.verl")


_warned_of_bypass = False


def legacy_engine(name: str) -> Callable[[object], types.SimpleNamespace]:
    """Return a function that finds a worker's model by the attribute names of FSDP or Megatron."""

    def find(worker: object) -> types.SimpleNamespace:
        model = getattr(worker, f"{name}_module_fsdp", getattr(worker, f"{name}_module", None))
        return types.SimpleNamespace(module=model)

    return find


def wrap_update_actor(function: Function) -> Function:
    """Wrap `update_actor` as one stage; warn once that bypass mode's log-probs are missing."""
    as_stage = ranks.wrap_forward("actor_update", "actor", legacy_engine("actor"))
    return _warn_of_bypass(as_stage(function))


@before("the log-probs of bypass mode")
def _warn_of_bypass(worker: object, data: object, *args: object, **kwargs: object) -> None:
    global _warned_of_bypass
    context = contexts.extract(data)
    if context is not None and context.bypass and not _warned_of_bypass:
        _warned_of_bypass = True
        _log.warning(
            "not reported with this version: the log-probs of bypass mode; "
            "trainer.use_legacy_worker_impl=disable has them"
        )


def _forward(stage: str, role: str, name: str) -> Wrap:
    return ranks.wrap_forward(stage, role, legacy_engine(name))


_OLDER_CALLS: Final[dict[str, tuple[Wrap, str]]] = {
    "ActorRolloutRefWorker.compute_log_prob": (
        _forward("actor_compute_log_prob", "actor", "actor"),
        "actor_compute_log_prob",
    ),
    "ActorRolloutRefWorker.compute_ref_log_prob": (
        _forward("ref_compute_log_prob", "ref", "ref"),
        "ref_compute_log_prob",
    ),
    "ActorRolloutRefWorker.update_actor": (wrap_update_actor, "actor_update"),
    "AsyncActorRolloutRefWorker.update_weights": (
        ranks.wrap_update_weights(legacy_engine("actor")),
        "weight_sync",
    ),
    "CriticWorker.compute_values": (
        _forward("compute_values", "critic", "critic"),
        "compute_values",
    ),
    "CriticWorker.update_critic": (
        _forward("critic_update", "critic", "critic"),
        "critic_update",
    ),
}
"""Method -> (wrapper, stage)."""


@wrapper
def wrap_annotate(function: Function, profiler: object, *args: Any, **kwargs: Any) -> object:
    """Wrap `PrecisionDebuggerProfiler.annotate`: it does not annotate stages reported here."""
    is_replaced = False
    with guarded("replacing verl's precision debugger"):
        is_replaced = ranks.is_active() or kwargs.get("role") not in VERL_STAGES
    return _unchanged if is_replaced else function(profiler, *args, **kwargs)


def _unchanged(function: Function) -> Function:
    return function


_LAYERS: Final = ("single_controller/base/decorator.py", "utils/transferqueue_utils.py")


def rewrap_registered(wrap: Wrap) -> Wrap:
    """Return `wrap` for registered methods: it registers the wrapper as the method was.

    The returned function raises LookupError where a method was not registered, or in a way that
    is not known here.
    """

    def rewrap(method: Function) -> Function:
        from verl.single_controller.base.decorator import MAGIC_ATTR, register  # pyright: ignore[reportMissingImports]

        attributes = getattr(method, MAGIC_ATTR, None)
        if not isinstance(attributes, dict):
            raise LookupError("the method is not registered with the single controller")
        inner = _unwrap_layers(method)
        replacement = functools.wraps(inner)(wrap(inner))
        parameters = inspect.signature(register).parameters
        options = {name: value for name, value in attributes.items() if name in parameters}
        if set(options) != set(attributes):
            raise LookupError(f"registered with {sorted(attributes)}")
        registered: Function = register(**options)(replacement)
        return registered

    return rewrap


def _unwrap_layers(method: Function) -> Function:
    layer: Any = method
    while hasattr(layer, "__wrapped__") and _is_layer(layer):
        layer = layer.__wrapped__
    return layer  # type: ignore[no-any-return]


def _is_layer(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.replace("\\", "/").endswith(_LAYERS)


_ANY: Final = frozenset({METRICS, STAGES, ALL})
_WITH_METRICS: Final = frozenset({METRICS, ALL})
_WITH_STAGES: Final = frozenset({STAGES, ALL})

_V0: Final = ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer")
_V1: Final = ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer")
_WORKERS: Final = "verl.workers.engine_workers"
_LOOPS: Final = "verl.experimental.agent_loop.agent_loop"


def patches(mode: Mode) -> list[Patch]:
    """Return the patches of `mode`."""
    everything = [*_job(), *_trainers(), *_numbers(), *_workers(), *_older(), *_rollout()]
    return [patch for patch in everything if mode.name in patch.modes]


def _job() -> list[Patch]:
    return [
        # Also when off: the other processes of the job must know it.
        Patch("verl.trainer.constants_ppo", "get_ppo_ray_runtime_env",
              modes.wrap_runtime_env, "STAGESCOPE_* in the job's other processes",
              frozenset({OFF, METRICS, STAGES, ALL})),
    ]  # fmt: skip


def _trainers() -> list[Patch]:
    with_context = trainer_calls.wrap_with_context
    calls: dict[str, tuple[Wrap, str, frozenset[str]]] = {
        "__init__": (trainer_calls.wrap_trainer_init, "the end of a trainer's own fit", _ANY),
        "_load_checkpoint": (trainer_calls.wrap_load_checkpoint, "the step resumed from", _ANY),
        "_validate": (trainer_calls.wrap_validate, "telling validation from training", _ANY),
        "_balance_batch": (trainer_calls.wrap_balance, "the index of samples", _WITH_METRICS),
        "_compute_old_log_prob": (trainer_calls.wrap_old_log_prob, "the step's log-probs", _ANY),
        "_compute_ref_log_prob": (
            trainer_calls.wrap_with_context,
            "ref_compute_log_prob",
            _WITH_STAGES,
        ),
        "_compute_values": (trainer_calls.wrap_with_context, "compute_values", _WITH_STAGES),
        "_compute_reward_colocate": (trainer_calls.wrap_reward, "compute_rm_score", _WITH_STAGES),
        "_update_critic": (with_context, "critic_update", _WITH_STAGES),
        "_update_actor": (trainer_calls.wrap_update_actor, "actor_update", _ANY),
        "fit": (trainer_calls.wrap_fit, "waiting for receipts at the end", _ANY),
    }
    return [
        Patch(module, f"{name}.{method}", wrap, purpose, modes)
        for module, name in (_V0, _V1)
        for method, (wrap, purpose, modes) in calls.items()
    ]


def _numbers() -> list[Patch]:
    advantage = trainer_calls.wrap_advantage
    return [
        Patch("verl.utils.debug.metrics", "calculate_debug_metrics",
              trainer_calls.wrap_debug_metrics, "V1's log-probs", _WITH_METRICS),
        Patch(_V0[0], "compute_advantage", advantage, "advantages and rewards", _WITH_METRICS),
        Patch(_V1[0], "compute_advantage_for_multi_trajectories", advantage,
              "advantages and rewards", _WITH_METRICS),
        Patch("verl.trainer.ppo.rollout_corr_helper", "compute_offpolicy_metrics",
              trainer_calls.wrap_offpolicy_metrics,
              "V1's perplexities in float32, where asked", _WITH_METRICS),
        Patch("verl.utils.tracking", "Tracking.log", trainer_calls.wrap_log,
              "numbers in verl's log, and verl's scalars", _ANY),
        Patch("verl.workers.utils.losses", "ppo_loss", minibatches.wrap_ppo_loss,
              "which tokens the loss clips, and the log-probs of bypass mode", _WITH_METRICS),
    ]  # fmt: skip


def _workers() -> list[Patch]:
    in_ref = ranks.wrap_forward("ref_compute_log_prob", "ref", ranks.ref_engine)
    in_sync = ranks.wrap_update_weights(ranks.actor_engine)
    worker, inner = "ActorRolloutRefWorker", "TrainingWorker"
    return [
        Patch(_WORKERS, f"{worker}.compute_log_prob", rewrap_registered(ranks.wrap_actor_log_prob),
              "actor_compute_log_prob", _WITH_STAGES),
        Patch(_WORKERS, f"{worker}.compute_ref_log_prob", rewrap_registered(in_ref),
              "ref_compute_log_prob", _WITH_STAGES),
        Patch(_WORKERS, f"{worker}.update_actor", rewrap_registered(ranks.wrap_update_actor),
              "verl's precision_debugger block at actor_update", _WITH_STAGES),
        Patch(_WORKERS, f"{worker}.update_weights", rewrap_registered(in_sync),
              "weight_sync", _WITH_STAGES),
        Patch(_WORKERS, f"{inner}.infer_batch", rewrap_registered(ranks.wrap_infer_batch),
              "compute_values", _WITH_STAGES),
        Patch(_WORKERS, f"{inner}.train_mini_batch", rewrap_registered(ranks.wrap_train_mini_batch),
              "actor_update and critic_update", _ANY),
        Patch(_WORKERS, f"{inner}.train_batch", rewrap_registered(ranks.wrap_train_batch),
              "the mini-batches of an update", _ANY),
        Patch("verl.utils.profiler.precision_debugger_profile",
              "PrecisionDebuggerProfiler.annotate", wrap_annotate,
              "verl's precision_debugger block", _WITH_STAGES),
    ]  # fmt: skip


def _older() -> list[Patch]:
    """verl 0.7, with its default setting."""
    return [
        Patch(module, path, rewrap_registered(wrap), purpose, _WITH_STAGES)
        for module in ("verl.workers.fsdp_workers", "verl.workers.megatron_workers")
        for path, (wrap, purpose) in _OLDER_CALLS.items()
    ]


def _rollout() -> list[Patch]:
    return [
        Patch(_LOOPS, "AgentLoopManager.__init__", rollout.wrap_manager_init,
              "the run's name in agent loops", _WITH_STAGES),
        Patch(_LOOPS, "AgentLoopWorker.__init__", rollout.wrap_init,
              "rollout_generate", _WITH_STAGES),
        Patch(_LOOPS, "AgentLoopWorker.generate_sequences", rollout.wrap_generate,
              "rollout_generate", _WITH_STAGES),
    ]  # fmt: skip
