"""Wrappers of the functions of verl's trainers, in the driver's process."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from stagescope_workers.integrations.patches import (
    Function,
    after,
    before,
    ending,
    guarded,
    running,
    staged,
    wrapper,
)
from stagescope_workers.integrations.verl import batches
from stagescope_workers.integrations.verl.driver import Driver
from stagescope_workers.integrations.verl.modes import current_mode, wants_float32
from stagescope_workers.probe.stage import Stage

_driver: Driver | None = None
_awaiting_tensors: tuple[Stage, object] | None = None
"""V1's stage and batch that wait for tensors which only its metrics function receives."""


def get_driver(trainer: object) -> Driver:
    """Return the driver of `trainer`, which becomes the process's current one."""
    global _driver
    if _driver is None or _driver.trainer is not trainer:
        _driver = Driver(trainer, current_mode())
    return _driver


@before("the context of the ranks")
def wrap_with_context(trainer: object, batch: object, *args: object, **kwargs: object) -> None:
    """Wrap a trainer's method so that its batch brings the context to the ranks."""
    get_driver(trainer).inject_context(batch)


def wrap_update_actor(function: Function) -> Function:
    """Wrap `_update_actor`: in bypass mode both streams are recorded when it returns."""
    return _named(_requested(wrap_with_context(function)))


@before("the ids of the samples")
def _named(trainer: object, batch: Any, *args: object, **kwargs: object) -> None:
    driver = get_driver(trainer)
    if driver.context() is not None and driver.is_bypass:
        batches.name_samples(batch)


@after("requesting the step's numbers")
def _requested(
    result: object, trainer: object, batch: Any, *args: object, **kwargs: object
) -> None:
    if get_driver(trainer).is_bypass:
        get_driver(trainer).request_numbers(rows=len(batch))


@wrapper
def wrap_old_log_prob(
    function: Function, trainer: object, batch: object, *args: Any, **kwargs: Any
) -> object:
    """Wrap `_compute_old_log_prob`, after which both log-prob streams can be recorded."""
    stage: Stage | None = None
    with guarded("the step's log-probs"):
        driver = get_driver(trainer)
        driver.inject_context(batch)
        if driver.mode.metrics and not driver.is_bypass:
            stage = driver.stage("actor_compute_log_prob")
    if stage is None:
        return function(trainer, batch, *args, **kwargs)
    with running(stage):
        with _await_tensors(stage, batch):
            result = function(trainer, batch, *args, **kwargs)
        with guarded("the step's log-probs"):
            _record_log_probs(trainer, stage, batch, result)
    with guarded("requesting the step's numbers"):
        get_driver(trainer).request_numbers()
    return result


@wrapper
def wrap_debug_metrics(function: Function, data: object, *args: Any, **kwargs: Any) -> object:
    """Wrap `calculate_debug_metrics`, which V1 calls with the step's log-probs.

    They are bfloat16, with a mean rounding error of 0.0037; STAGESCOPE_VERL_FLOAT32 upcasts them.
    """
    with guarded("the step's log-probs"):
        if _awaiting_tensors is not None and _driver is not None:
            stage, batch = _awaiting_tensors
            _driver.record(stage, batch, batches.log_probs(data))
    upcast = data
    if wants_float32():
        with guarded("upcasting log-probs"):
            upcast = batches.in_float32(data)
    return function(upcast, *args, **kwargs)


@wrapper
def wrap_offpolicy_metrics(function: Function, *args: Any, **kwargs: Any) -> object:
    """Wrap `compute_offpolicy_metrics`: V1's perplexities are summed in bfloat16.

    STAGESCOPE_VERL_FLOAT32 upcasts them. They are only logged; the training does not change.
    """
    if not wants_float32():
        return function(*args, **kwargs)
    with guarded("upcasting log-probs"):
        args = tuple(batches.at_least_float32(value) for value in args)
        kwargs = {name: batches.at_least_float32(value) for name, value in kwargs.items()}
    return function(*args, **kwargs)


@wrapper
def wrap_advantage(function: Function, data: object, *args: Any, **kwargs: Any) -> object:
    """Wrap `compute_advantage`: records rewards and advantages as the update uses them."""
    stage: Stage | None = None
    driver = _driver
    with guarded("the step's advantages"):
        if driver is not None and driver.mode.metrics and not _is_nested_call(kwargs):
            stage = driver.stage("compute_advantage")
    if driver is None or stage is None:
        return function(data, *args, **kwargs)
    with running(stage):
        result = function(data, *args, **kwargs)
        with guarded("the step's advantages"):
            samples = batches.Keys.from_list(kwargs.get("batch_keys")) or result
            driver.record(stage, samples, batches.advantages(result))
    return result


@staged("compute_rm_score")
def wrap_reward(trainer: object, *args: object, **kwargs: object) -> Stage | None:
    """Wrap `_compute_reward_colocate` as the stage `compute_rm_score`."""
    driver = get_driver(trainer)
    return driver.stage("compute_rm_score", role="reward_model") if driver.mode.stages else None


@before("the ids of the samples")
def wrap_balance(trainer: object, batch: object, *args: object, **kwargs: object) -> None:
    """Wrap `_balance_batch`, which reorders the rows: the samples are named before."""
    if get_driver(trainer).context() is not None:
        batches.name_samples(batch)


@wrapper
def wrap_validate(function: Function, trainer: object, *args: Any, **kwargs: Any) -> object:
    """Wrap `_validate`: validation samples belong to no step."""
    with guarded("telling validation from training"):
        get_driver(trainer).is_validating = True
    try:
        return function(trainer, *args, **kwargs)
    finally:
        with guarded("telling validation from training"):
            get_driver(trainer).is_validating = False


@wrapper
def wrap_load_checkpoint(function: Function, trainer: object, *args: Any, **kwargs: Any) -> object:
    """Wrap `_load_checkpoint`: the step that it sets is the one resumed from.

    The ranks have their models then, and the first step is near.
    """
    result = function(trainer, *args, **kwargs)
    with guarded("the step resumed from"):
        get_driver(trainer).resumed_from_step = getattr(trainer, "global_steps", None) or None
    with guarded("connecting the ranks"):
        get_driver(trainer).connect()
    return result


def wrap_fit(function: Function) -> Function:
    """Wrap `fit`: when it ends, everything that waits is sent before the job ends."""
    run: Any = _closed_fit(function)
    run._stagescope_closes = True
    return run  # type: ignore[no-any-return]


@wrapper
def _closed_fit(function: Function, trainer: object, *args: object, **kwargs: object) -> object:
    with _closing(trainer, *args, *kwargs.values()):
        return function(trainer, *args, **kwargs)


@after("waiting for receipts at the end of a trainer's own fit")
def wrap_trainer_init(result: None, trainer: Any, *args: object, **kwargs: object) -> None:
    """Wrap a trainer's `__init__`, so that a `fit` that a subclass overrides is closed too."""
    fit = getattr(type(trainer), "fit", None)
    if callable(fit) and not hasattr(fit, "_stagescope_closes"):
        trainer.fit = _wrap_own_fit(trainer, trainer.fit)


def _wrap_own_fit(trainer: object, fit: Function) -> Function:
    @functools.wraps(fit)
    def run(*args: object, **kwargs: object) -> object:
        with _closing(trainer, *args, *kwargs.values()):
            return fit(*args, **kwargs)

    @functools.wraps(fit)
    async def run_async(*args: object, **kwargs: object) -> object:
        with _closing(trainer, *args, *kwargs.values()):
            return await fit(*args, **kwargs)

    return run_async if inspect.iscoroutinefunction(fit) else run


@contextlib.contextmanager
def _closing(trainer: object, *given: object) -> Iterator[None]:
    with guarded("reading verl's configuration"):
        get_driver(trainer).prepare()
    with guarded("the rollout's stage"):
        get_driver(trainer).wrap_rollout(*given)
    with guarded("the canary"):
        get_driver(trainer).attach_canary()
    with ending("closing the probes", lambda error: get_driver(trainer).close(error)):
        yield


@wrapper
def wrap_log(
    function: Function, tracking: object, data: Any, step: Any, *args: Any, **kwargs: Any
) -> object:
    """Wrap `Tracking.log`: it adds the service's numbers to verl's own, which do not change.

    Where verl logs a name too, the service's number is logged under `stagescope/`.
    """
    logged = data
    with guarded("the numbers in verl's log"):
        if _driver is not None and "training/global_step" in data:
            numbers = _driver.log(int(step), data)
            renamed = {_unique_name(name, data): value for name, value in numbers.items()}
            logged = renamed | {**data}
    return function(tracking, logged, step, *args, **kwargs)


def _unique_name(name: str, data: Mapping[str, object]) -> str:
    return f"stagescope/{name}" if name in data else name


@contextlib.contextmanager
def _await_tensors(stage: Stage, batch: object) -> Any:
    global _awaiting_tensors
    with guarded("the step's log-probs"):
        _awaiting_tensors = (stage, batch) if batches.is_keys(batch) else None
    try:
        yield
    finally:
        _awaiting_tensors = None


def _record_log_probs(trainer: object, stage: Stage, batch: object, result: Any) -> None:
    """Record the log-probs of a trainer before V1: the batch, and (old log-probs, ...)."""
    if batches.is_keys(batch):
        return
    old = result[0] if isinstance(result, tuple) else result
    tensors = batches.log_probs(batch, old.batch)
    get_driver(trainer).record(stage, batch, tensors)


def _is_nested_call(kwargs: dict[str, object]) -> bool:
    """Return whether V1's own function calls the one that earlier trainers call."""
    return _driver is not None and batches.is_v1(_driver.trainer) and "batch_keys" not in kwargs
