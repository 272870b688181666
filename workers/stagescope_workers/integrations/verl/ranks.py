"""Reports the stages of verl's workers: actor, ref and critic, on every rank.

Each wrapper here calls one of verl's functions, and reports nothing for data without a context.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from stagescope_wire.errors import StagescopeError
from stagescope_workers.integrations import training
from stagescope_workers.integrations.configuration import present
from stagescope_workers.integrations.patches import (
    Function,
    Wrap,
    guarded,
    running,
    staged,
    wrapper,
)
from stagescope_workers.integrations.verl import context as contexts
from stagescope_workers.integrations.verl import minibatches
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.integrations.verl.minibatches import Epochs, Minibatches
from stagescope_workers.integrations.verl.processes import get_probe
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

FindEngine = Callable[[object], object]
"""Returns the engine of a worker."""


def describe(worker: Any, engine: object) -> dict[str, object]:
    """Return `init`'s options for a worker: layout and data_rank.

    Args:
        worker: verl's Worker, which has the rank.
        engine: its model engine (FSDP, Megatron, VeOmni); missing attributes are omitted.
    """
    layout: dict[str, object] = {"framework": "verl", "engine": _strategy(engine)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        layout["framework_version"] = importlib.metadata.version("verl")
    for name, method in (
        ("dp_rank", "get_data_parallel_rank"),
        ("dp_size", "get_data_parallel_size"),
    ):
        with contextlib.suppress(Exception):
            layout[name] = int(getattr(engine, method)())
    sequence = getattr(getattr(engine, "engine_config", None), "ulysses_sequence_parallel_size", 1)
    if isinstance(sequence, int) and sequence > 1:
        layout |= {"sp_size": sequence, "sp_rank": int(worker.rank) % sequence}
    layout |= training.megatron_layout()
    described: dict[str, object] = {"layout": present(layout)}
    if "dp_rank" in layout:
        described["data_rank"] = layout["dp_rank"]
    return described


def _strategy(engine: object) -> str | None:
    strategy = getattr(getattr(engine, "engine_config", None), "strategy", None)
    return strategy if isinstance(strategy, str) else None


_latest_context: Context | None = None
_active: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar(
    "stagescope_active", default=False
)


def is_active() -> bool:
    """Return whether the caller runs inside a reported stage."""
    return _active.get()


def wrap_forward(name: str, role: str, find_engine: FindEngine) -> Wrap:
    """Return a wrapper of `function(worker, data, ...)` as the stage `name` of `role`."""

    @wrapper
    def wrap(
        function: Function, worker: object, data: object, *args: object, **kwargs: object
    ) -> object:
        with _reported(worker, data, name, role, find_engine):
            return function(worker, data, *args, **kwargs)

    return wrap


def wrap_actor_log_prob(function: Function) -> Function:
    """Wrap `ActorRolloutRefWorker.compute_log_prob`, which with LoRA is the reference's too."""
    as_actor = wrap_forward("actor_compute_log_prob", "actor", actor_engine)(function)
    as_ref = wrap_forward("ref_compute_log_prob", "ref", actor_engine)(function)

    def run(worker: object, data: object, *args: object, **kwargs: object) -> object:
        is_ref = False
        with guarded("distinguishing the reference from the actor"):
            is_ref = bool(contexts.non_tensor(data, "no_lora_adapter"))
        return (as_ref if is_ref else as_actor)(worker, data, *args, **kwargs)

    return run


def wrap_infer_batch(function: Function) -> Function:
    """Wrap `TrainingWorker.infer_batch`: for a critic it is the stage `compute_values`.

    For the other roles it runs inside a stage that is reported already.
    """
    as_values = wrap_forward("compute_values", "critic", training_engine)(function)

    def run(worker: object, data: object, *args: object, **kwargs: object) -> object:
        wrapped = function
        with guarded("compute_values"):
            if is_critic(worker):
                wrapped = as_values
        return wrapped(worker, data, *args, **kwargs)

    return run


@wrapper
def wrap_update_actor(
    function: Function, worker: object, data: object, *args: Any, **kwargs: Any
) -> object:
    """Wrap `ActorRolloutRefWorker.update_actor`, inside which the stage `actor_update` runs.

    It is marked as active because verl calls its own precision debugger here.
    """
    is_reported = False
    with guarded("actor_update"):
        context = _read_context(data)
        is_reported = context is not None and context.stages
    with _activity(is_reported):
        return function(worker, data, *args, **kwargs)


@wrapper
def wrap_train_mini_batch(
    function: Function, worker: object, data: object, *args: Any, **kwargs: Any
) -> object:
    """Wrap `TrainingWorker.train_mini_batch`: each mini-batch is a part of its stage."""
    update: Minibatches | None = None
    with guarded("the mini-batches of an update"):
        update = _update(worker, data)
    if update is None:
        return function(worker, data, *args, **kwargs)
    with minibatches.entered(update), _activity(update.is_reported):
        return function(worker, data, *args, **kwargs)


@wrapper
def wrap_train_batch(
    function: Function, worker: object, data: object, *args: Any, **kwargs: Any
) -> object:
    """Wrap `TrainingWorker.train_batch`, which ends a mini-batch of an update."""
    output = function(worker, data, *args, **kwargs)
    update = minibatches.current()
    if update is not None:
        metrics: object = None
        with guarded("the metrics of a mini-batch"):
            metrics = None if output is None else contexts.non_tensor(output, "metrics")
        with guarded("the mini-batches of an update", reraise=StagescopeError):
            update.advance(metrics)
    return output


def wrap_update_weights(find_engine: FindEngine) -> Wrap:
    """Return a wrapper of `ActorRolloutRefWorker.update_weights` as the stage `weight_sync`."""

    def make(worker: object, *args: object, **kwargs: object) -> Stage | None:
        step = kwargs.get("global_steps", args[0] if args else None)
        return _weight_sync(worker, step, find_engine)

    return staged("weight_sync")(make)


# --- before the first step --------------------------------------------------------------------


def make_probes(worker: object, text: str) -> None:
    """Make the probes of a rank's roles; runs in the process of the rank.

    Args:
        worker: one of verl's workers, or the object of an actor that holds several.
        text: the context, as a batch brings it.
    """
    with guarded("connecting a rank"):
        context = contexts.parse(text)
        for each in _workers_of(worker):
            for role, engine in _engines_of(each):
                if context.stages or (context.bypass and role == "actor"):
                    _probe(context, each, role, engine)


def _workers_of(actor: object) -> Iterable[object]:
    """Return the workers that verl has put into one actor; `actor` itself where it is one."""
    for name in ("worker_dict", "fused_worker_dict"):
        if workers := getattr(actor, name, None):
            return tuple(workers.values())
    return (actor,)


def _engines_of(worker: Any) -> Iterator[tuple[str, object]]:
    """Yield the roles of a worker, with their engines; none of a worker before verl 0.8."""
    for role in ("actor", "ref"):
        engine = getattr(getattr(worker, role, None), "engine", None)
        if engine is not None:
            yield role, engine
    if is_critic(worker):
        yield "critic", worker.engine


# --- the model and probe of a worker ----------------------------------------------------------


def actor_engine(worker: Any) -> object:
    """Return the engine of an ActorRolloutRefWorker's actor."""
    return worker.actor.engine


def ref_engine(worker: Any) -> object:
    """Return the engine of an ActorRolloutRefWorker's reference."""
    return worker.ref.engine


def training_engine(worker: Any) -> object:
    """Return the engine of a TrainingWorker."""
    return worker.engine


def is_critic(worker: object) -> bool:
    """Return whether a TrainingWorker has a value model."""
    return getattr(getattr(worker, "config", None), "model_type", None) == "value_model"


def _probe(context: Context, worker: Any, role: str, engine: object) -> Probe:
    return get_probe(
        context,
        role,
        int(worker.rank),
        world_size=int(worker.world_size),
        describe=lambda: describe(worker, engine),
    )


def _read_context(data: object) -> Context | None:
    global _latest_context
    context = contexts.extract(data)
    if context is not None:
        _latest_context = context
    return context


@contextlib.contextmanager
def _reported(
    worker: object, data: object, name: str, role: str, find_engine: FindEngine
) -> Iterator[None]:
    stage: Stage | None = None
    with guarded(name):
        context = _read_context(data)
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
    context = _read_context(data)
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
        epochs=Epochs(
            int(contexts.non_tensor(data, "epochs") or 1), None if count is None else int(count)
        ),
        collects=_collected(context, critic=critic),
    )


def _collected(context: Context, *, critic: bool) -> frozenset[str]:
    """Return what the loss of an update records of each token."""
    wanted = {minibatches.STREAMS: context.bypass, minibatches.CLIPPED: context.stages}
    return frozenset(name for name, is_wanted in wanted.items() if is_wanted and not critic)


def _weight_sync(worker: object, step: object, find_engine: FindEngine) -> Stage | None:
    # The sync before the first step has no batch with a context: it is not reported.
    context = _latest_context
    if context is None or not context.stages or not isinstance(step, int):
        return None
    engine = find_engine(worker)
    probe = _probe(context, worker, "actor", engine)
    return probe.stage(
        "weight_sync",
        step=context.step,
        policy_version=step,  # verl counts versions by steps, unless its trainer counts them
        model=getattr(engine, "module", None),
    )
