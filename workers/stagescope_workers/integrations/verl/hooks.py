"""Every function of verl's that is patched, with what is not reported where it cannot be.

verl 0.9 has two trainers: `ray_trainer` (V0) and `v1.trainer_base` (V1); 0.7 and 0.8 have V0
alone, and 0.7 also has workers of an older kind, a class for each role, in `fsdp_workers` and
`megatron_workers`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from stagescope_workers.capture.verl_blocks import VERL_STAGES
from stagescope_workers.integrations.verl import (
    minibatches,
    modes,
    older_workers,
    ranks,
    rollout,
    trainer_calls,
)
from stagescope_workers.integrations.verl.guard import guarded
from stagescope_workers.integrations.verl.modes import ALL, METRICS, OFF, STAGES, Mode
from stagescope_workers.integrations.verl.patches import Patch


def run_annotate(function: Function) -> Function:
    """Return `PrecisionDebuggerProfiler.annotate`, which leaves alone what is not its own."""

    def run(profiler: Any, *args: Any, **kwargs: Any) -> Any:
        steps_aside = False
        with guarded("stepping in for verl's precision debugger"):
            steps_aside = ranks.is_active() or kwargs.get("role") not in VERL_STAGES
        return _alone if steps_aside else function(profiler, *args, **kwargs)

    return run


def _alone(function: Function) -> Function:
    return function


_LAYERS: Final = ("single_controller/base/decorator.py", "utils/transferqueue_utils.py")


def inside(wrap: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Return `wrap` for registered methods: what it returns is registered as the method was.

    The returned function raises LookupError where a method was not registered, or as another
    version of verl does it.
    """

    def rewrap(method: Function) -> Function:
        from verl.single_controller.base.decorator import MAGIC_ATTR, register  # pyright: ignore[reportMissingImports]

        attributes = getattr(method, MAGIC_ATTR, None)
        if not isinstance(attributes, dict):
            raise LookupError("the method is not registered with the single controller")
        inner = _peel(method)
        replacement = functools.wraps(inner)(wrap(inner))
        known = inspect.signature(register).parameters
        options = {name: value for name, value in attributes.items() if name in known}
        if set(options) != set(attributes):
            raise LookupError(f"registered with {sorted(attributes)}")
        registered: Function = register(**options)(replacement)
        return registered

    return rewrap


def outside(wrap: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Return `wrap` so that what it makes is known by the original's name."""

    def rewrap(function: Function) -> Function:
        return functools.wraps(function)(wrap(function))

    return rewrap


def _peel(method: Function) -> Function:
    layer: Any = method
    while hasattr(layer, "__wrapped__") and _is_layer(layer):
        layer = layer.__wrapped__
    return layer  # type: ignore[no-any-return]


def _is_layer(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.replace("\\", "/").endswith(_LAYERS)


Function = Callable[..., Any]
Wrap = Callable[[Function], Function]

_ANY: Final = frozenset({METRICS, STAGES, ALL})
_WITH_METRICS: Final = frozenset({METRICS, ALL})
_WITH_STAGES: Final = frozenset({STAGES, ALL})

_V0: Final = ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer")
_V1: Final = ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer")
_WORKERS: Final = "verl.workers.engine_workers"
_LOOPS: Final = "verl.experimental.agent_loop.agent_loop"


def patches(mode: Mode) -> list[Patch]:
    """Return what `mode` patches."""
    everything = [*_job(), *_trainers(), *_numbers(), *_workers(), *_older(), *_rollout()]
    return [patch for patch in everything if mode.name in patch.modes]


def _job() -> list[Patch]:
    return [
        # Also when off: the other processes of the job must hear of it.
        Patch("verl.trainer.constants_ppo", "get_ppo_ray_runtime_env",
              outside(modes.run_runtime_env), "STAGESCOPE_* in the job's other processes",
              frozenset({OFF, METRICS, STAGES, ALL})),
    ]  # fmt: skip


def _trainers() -> list[Patch]:
    calls: dict[str, tuple[Wrap, str, frozenset[str]]] = {
        "__init__": (trainer_calls.run_trainer_init, "the end of a trainer's own fit", _ANY),
        "_load_checkpoint": (trainer_calls.run_load_checkpoint, "the step resumed from", _ANY),
        "_validate": (trainer_calls.run_validate, "telling validation from training", _ANY),
        "_balance_batch": (trainer_calls.run_balance, "the index of samples", _WITH_METRICS),
        "_compute_old_log_prob": (trainer_calls.run_old_log_prob, "the step's log-probs", _ANY),
        "_compute_ref_log_prob": (trainer_calls.run_planted, "ref_compute_log_prob", _WITH_STAGES),
        "_compute_values": (trainer_calls.run_planted, "compute_values", _WITH_STAGES),
        "_compute_reward_colocate": (trainer_calls.run_reward, "compute_rm_score", _WITH_STAGES),
        "_update_critic": (trainer_calls.run_planted, "critic_update", _WITH_STAGES),
        "_update_actor": (trainer_calls.run_update_actor, "actor_update", _ANY),
        "fit": (trainer_calls.run_fit, "waiting for receipts at the end", _ANY),
    }
    return [
        Patch(module, f"{name}.{method}", outside(wrap), purpose, modes)
        for module, name in (_V0, _V1)
        for method, (wrap, purpose, modes) in calls.items()
    ]


def _numbers() -> list[Patch]:
    advantage = outside(trainer_calls.run_advantage)
    return [
        Patch("verl.utils.debug.metrics", "calculate_debug_metrics",
              outside(trainer_calls.run_debug_metrics), "V1's log-probs", _WITH_METRICS),
        Patch(_V0[0], "compute_advantage", advantage, "advantages and rewards", _WITH_METRICS),
        Patch(_V1[0], "compute_advantage_for_multi_trajectories", advantage,
              "advantages and rewards", _WITH_METRICS),
        Patch("verl.trainer.ppo.rollout_corr_helper", "compute_offpolicy_metrics",
              outside(trainer_calls.run_offpolicy_metrics),
              "V1's perplexities in float32, where asked", _WITH_METRICS),
        Patch("verl.utils.tracking", "Tracking.log", outside(trainer_calls.run_log),
              "numbers in verl's log, and verl's scalars", _ANY),
        Patch("verl.workers.utils.losses", "ppo_loss", outside(minibatches.run_ppo_loss),
              "the log-probs of bypass mode", _WITH_METRICS),
    ]  # fmt: skip


def _workers() -> list[Patch]:
    in_ref = partial(ranks.run_forward, "ref_compute_log_prob", "ref", ranks.ref_engine)
    in_sync = partial(ranks.run_update_weights, ranks.actor_engine)
    worker, inner = "ActorRolloutRefWorker", "TrainingWorker"
    return [
        Patch(_WORKERS, f"{worker}.compute_log_prob", inside(ranks.run_actor_log_prob),
              "actor_compute_log_prob", _WITH_STAGES),
        Patch(_WORKERS, f"{worker}.compute_ref_log_prob", inside(in_ref),
              "ref_compute_log_prob", _WITH_STAGES),
        Patch(_WORKERS, f"{worker}.update_actor", inside(ranks.run_update_actor),
              "verl's precision_debugger block at actor_update", _WITH_STAGES),
        Patch(_WORKERS, f"{worker}.update_weights", inside(in_sync),
              "weight_sync", _WITH_STAGES),
        Patch(_WORKERS, f"{inner}.infer_batch", inside(ranks.run_infer_batch),
              "compute_values", _WITH_STAGES),
        Patch(_WORKERS, f"{inner}.train_mini_batch", inside(ranks.run_train_mini_batch),
              "actor_update and critic_update", _ANY),
        Patch(_WORKERS, f"{inner}.train_batch", inside(ranks.run_train_batch),
              "the mini-batches of an update", _ANY),
        Patch("verl.utils.profiler.precision_debugger_profile",
              "PrecisionDebuggerProfiler.annotate", outside(run_annotate),
              "verl's precision_debugger block", _WITH_STAGES),
    ]  # fmt: skip


def _older() -> list[Patch]:
    """verl 0.7, where it is not told otherwise."""
    return [
        Patch(module, path, inside(wrap), purpose, _WITH_STAGES)
        for module in ("verl.workers.fsdp_workers", "verl.workers.megatron_workers")
        for path, (wrap, purpose) in older_workers.CALLS.items()
    ]


def _rollout() -> list[Patch]:
    return [
        Patch(_LOOPS, "AgentLoopManager.__init__", outside(rollout.run_manager_init),
              "the run's name in agent loops", _WITH_STAGES),
        Patch(_LOOPS, "AgentLoopWorker.__init__", outside(rollout.run_init),
              "rollout_generate", _WITH_STAGES),
        Patch(_LOOPS, "AgentLoopWorker.generate_sequences", outside(rollout.run_generate),
              "rollout_generate", _WITH_STAGES),
    ]  # fmt: skip
