"""The stages that verl's workers run: actor, ref and critic, on every rank.

Each function here stands round one of verl's, and does nothing where no context was planted.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from stagescope.wire.errors import StagescopeError
from stagescope_workers.integrations.verl import context as contexts
from stagescope_workers.integrations.verl import minibatches
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.integrations.verl.guard import guarded, running
from stagescope_workers.integrations.verl.minibatches import Minibatches
from stagescope_workers.integrations.verl.processes import probe_of
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

_MEGATRON: Final = {
    "tp_rank": "get_tensor_model_parallel_rank",
    "tp_size": "get_tensor_model_parallel_world_size",
    "pp_rank": "get_pipeline_model_parallel_rank",
    "pp_size": "get_pipeline_model_parallel_world_size",
    "cp_rank": "get_context_parallel_rank",
    "cp_size": "get_context_parallel_world_size",
    "ep_rank": "get_expert_model_parallel_rank",
    "ep_size": "get_expert_model_parallel_world_size",
    "etp_rank": "get_expert_tensor_parallel_rank",
    "etp_size": "get_expert_tensor_parallel_world_size",
}


def describe(worker: Any, engine: Any) -> dict[str, Any]:
    """Return `init`'s options for a worker: layout and data_rank.

    Args:
        worker: verl's Worker, which knows its rank.
        engine: its model engine (FSDP, Megatron, VeOmni); one that says nothing gives nothing.
    """
    layout: dict[str, Any] = {"framework": "verl", "engine": _strategy(engine)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        layout["framework_version"] = importlib.metadata.version("verl")
    for name, ask in (
        ("dp_rank", "get_data_parallel_rank"),
        ("dp_size", "get_data_parallel_size"),
    ):
        with contextlib.suppress(Exception):
            layout[name] = int(getattr(engine, ask)())
    sequence = getattr(getattr(engine, "engine_config", None), "ulysses_sequence_parallel_size", 1)
    if isinstance(sequence, int) and sequence > 1:
        layout |= {"sp_size": sequence, "sp_rank": int(worker.rank) % sequence}
    layout |= _megatron()
    described: dict[str, Any] = {
        "layout": {name: value for name, value in layout.items() if value is not None}
    }
    if "dp_rank" in layout:
        described["data_rank"] = layout["dp_rank"]
    return described


def _strategy(engine: Any) -> str | None:
    strategy = getattr(getattr(engine, "engine_config", None), "strategy", None)
    return strategy if isinstance(strategy, str) else None


def _megatron() -> dict[str, int]:
    """Return what Megatron says, where this process has brought it up."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    found: dict[str, int] = {}
    with contextlib.suppress(Exception):
        if state is None or not state.model_parallel_is_initialized():
            return {}
    for name, ask in _MEGATRON.items() if state is not None else ():
        with contextlib.suppress(Exception):
            found[name] = int(getattr(state, ask)())
    return found


Function = Callable[..., Any]

_newest: Context | None = None
_active: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar(
    "stagescope_active", default=False
)


def is_active() -> bool:
    """Say whether the caller runs inside a stage that is reported."""
    return _active.get()


def run_forward(
    name: str, role: str, find_engine: Callable[[Any], Any], function: Function
) -> Function:
    """Return `function(worker, data, ...)` run as the stage `name` of `role`."""

    def run(worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        with _reported(worker, data, name, role, find_engine):
            return function(worker, data, *args, **kwargs)

    return run


def run_actor_log_prob(function: Function) -> Function:
    """Return `ActorRolloutRefWorker.compute_log_prob`, which with LoRA is the reference's too."""
    as_actor = run_forward("actor_compute_log_prob", "actor", actor_engine, function)
    as_ref = run_forward("ref_compute_log_prob", "ref", actor_engine, function)

    def run(worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        is_ref = False
        with guarded("telling the reference from the actor"):
            is_ref = bool(contexts.non_tensor(data, "no_lora_adapter"))
        return (as_ref if is_ref else as_actor)(worker, data, *args, **kwargs)

    return run


def run_infer_batch(function: Function) -> Function:
    """Return `TrainingWorker.infer_batch`: a critic's is `compute_values`, others are inner."""
    as_values = run_forward("compute_values", "critic", own_engine, function)

    def run(worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = function
        with guarded("compute_values"):
            if is_critic(worker):
                chosen = as_values
        return chosen(worker, data, *args, **kwargs)

    return run


def run_update_actor(function: Function) -> Function:
    """Return `ActorRolloutRefWorker.update_actor`, whose inside is the stage `actor_update`.

    Here, round its mini-batches, verl asks its own precision debugger.
    """

    def run(worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        is_reported = False
        with guarded("actor_update"):
            context = _note(data)
            is_reported = context is not None and context.stages
        with _activity(is_reported):
            return function(worker, data, *args, **kwargs)

    return run


def run_train_mini_batch(function: Function) -> Function:
    """Return `TrainingWorker.train_mini_batch` with a part of its stage for each mini-batch."""

    def run(worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        update: Minibatches | None = None
        with guarded("the mini-batches of an update"):
            update = _update(worker, data)
        if update is None:
            return function(worker, data, *args, **kwargs)
        with minibatches.entered(update), _activity(update.is_reported):
            return function(worker, data, *args, **kwargs)

    return run


def run_train_batch(function: Function) -> Function:
    """Return `TrainingWorker.train_batch`, which ends a mini-batch where it is one of several."""

    def run(worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        output = function(worker, data, *args, **kwargs)
        update = minibatches.current()
        if update is not None:
            metrics: Any = None
            with guarded("the metrics of a mini-batch"):
                metrics = None if output is None else contexts.non_tensor(output, "metrics")
            with guarded("the mini-batches of an update", but=StagescopeError):
                update.advance(metrics)
        return output

    return run


def run_update_weights(find_engine: Callable[[Any], Any], function: Function) -> Function:
    """Return `ActorRolloutRefWorker.update_weights` as the stage `weight_sync`."""

    async def run(worker: Any, *args: Any, **kwargs: Any) -> Any:
        stage: Stage | None = None
        with guarded("weight_sync"):
            step = kwargs.get("global_steps", args[0] if args else None)
            stage = _weight_sync(worker, step, find_engine)
        with running(stage):
            return await function(worker, *args, **kwargs)

    return run


# --- whose model, whose rank -----------------------------------------------------------------


def actor_engine(worker: Any) -> Any:
    """Return the engine of an ActorRolloutRefWorker's actor."""
    return worker.actor.engine


def ref_engine(worker: Any) -> Any:
    """Return the engine of an ActorRolloutRefWorker's reference."""
    return worker.ref.engine


def own_engine(worker: Any) -> Any:
    """Return the engine of a TrainingWorker."""
    return worker.engine


def is_critic(worker: Any) -> bool:
    """Say whether a TrainingWorker holds a value model."""
    return getattr(getattr(worker, "config", None), "model_type", None) == "value_model"


def _probe(context: Context, worker: Any, role: str, engine: Any) -> Probe:
    return probe_of(
        context,
        role,
        int(worker.rank),
        world_size=int(worker.world_size),
        describe=lambda: describe(worker, engine),
    )


def _note(data: Any) -> Context | None:
    global _newest
    context = contexts.find(data)
    if context is not None:
        _newest = context
    return context


@contextlib.contextmanager
def _reported(
    worker: Any, data: Any, name: str, role: str, find_engine: Callable[[Any], Any]
) -> Iterator[None]:
    stage: Stage | None = None
    with guarded(name):
        context = _note(data)
        # The older workers' reference calls the actor's method where the model has LoRA.
        if context is not None and context.stages and not is_active():
            engine = find_engine(worker)
            stage = _probe(context, worker, role, engine).stage(
                name,
                step=context.step,
                policy_version=context.policy_version,
                model=getattr(engine, "module", None),
            )
    if stage is None:
        yield
        return
    with _activity(), running(stage):
        yield


@contextlib.contextmanager
def _activity(active: bool = True) -> Iterator[None]:
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)


def _update(worker: Any, data: Any) -> Minibatches | None:
    context = _note(data)
    critic = is_critic(worker)
    if context is None or not (context.stages or (context.bypass and not critic)):
        return None
    probe = _probe(context, worker, "critic" if critic else "actor", worker.engine)
    rows, size, count = (
        int(data.shape[0]),
        contexts.non_tensor(data, "mini_batch_size"),
        contexts.non_tensor(data, "num_mini_batch"),
    )
    if count is None and size is not None:
        count = rows // max(1, int(size) // int(worker.engine.get_data_parallel_size()))
    return Minibatches(
        probe,
        "critic_update" if critic else "actor_update",
        context,
        model=getattr(worker.engine, "module", None),
        a_epoch=None if count is None else int(count),
        epochs=int(contexts.non_tensor(data, "epochs") or 1),
        collects=context.bypass and not critic,
    )


def _weight_sync(worker: Any, step: Any, find_engine: Callable[[Any], Any]) -> Stage | None:
    # The sync before the first step has no batch that could carry a context: it is not reported.
    context = _newest
    if context is None or not context.stages or not isinstance(step, int):
        return None
    engine = find_engine(worker)
    probe = _probe(context, worker, "actor", engine)
    return probe.stage(
        "weight_sync",
        step=context.step,
        policy_version=step,  # verl counts versions by steps, where it does not count them apart
        model=getattr(engine, "module", None),
    )
