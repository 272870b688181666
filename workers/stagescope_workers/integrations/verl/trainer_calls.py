"""What stands round the functions of verl's trainers, in the driver's process."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stagescope_workers.integrations.verl import batches
from stagescope_workers.integrations.verl.driver import Driver
from stagescope_workers.integrations.verl.guard import guarded, running
from stagescope_workers.integrations.verl.modes import chosen, wants_float32
from stagescope_workers.probe.stage import Stage

Function = Callable[..., Any]

_driver: Driver | None = None
_expecting: tuple[Stage, Any] | None = None
"""V1's stage and batch that wait for tensors which only its metrics function has in hand."""


def driver_of(trainer: Any) -> Driver:
    """Return what stands beside `trainer`; the newest trainer of a process has it."""
    global _driver
    if _driver is None or _driver.trainer is not trainer:
        _driver = Driver(trainer, chosen())
    return _driver


def run_planted(function: Function) -> Function:
    """Return a trainer's method whose batch carries the context to the ranks."""

    def run(trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with guarded("planting the step"):
            driver_of(trainer).plant(batch)
        return function(trainer, batch, *args, **kwargs)

    return run


def run_update_actor(function: Function) -> Function:
    """Return `_update_actor`: in bypass mode the streams have met when it returns."""
    planted = run_planted(function)

    def run(trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with guarded("the ids of the samples"):
            driver = driver_of(trainer)
            if driver.context() is not None and driver.is_bypass:
                batches.name_samples(batch)
        result = planted(trainer, batch, *args, **kwargs)
        with guarded("asking for the step's numbers"):
            if driver_of(trainer).is_bypass:
                driver_of(trainer).want_numbers(rows=len(batch))
        return result

    return run


def run_old_log_prob(function: Function) -> Function:
    """Return `_compute_old_log_prob`, where the trainer's log-probs meet the rollout's."""

    def run(trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        stage: Stage | None = None
        with guarded("the step's log-probs"):
            driver = driver_of(trainer)
            driver.plant(batch)
            if driver.mode.metrics and not driver.is_bypass:
                stage = driver.stage("actor_compute_log_prob")
        if stage is None:
            return function(trainer, batch, *args, **kwargs)
        with running(stage):
            with _expected(stage, batch):
                result = function(trainer, batch, *args, **kwargs)
            with guarded("the step's log-probs"):
                _take_log_probs(trainer, stage, batch, result)
        with guarded("asking for the step's numbers"):
            driver_of(trainer).want_numbers()
        return result

    return run


def run_debug_metrics(function: Function) -> Function:
    """Return `calculate_debug_metrics`, which V1 calls with the step's log-probs in hand.

    They are bfloat16, rounded by 0.0037 in the mean; STAGESCOPE_VERL_FLOAT32 upcasts them.
    """

    def run(data: Any, *args: Any, **kwargs: Any) -> Any:
        with guarded("the step's log-probs"):
            if _expecting is not None and _driver is not None:
                stage, batch = _expecting
                _driver.record(stage, batch, batches.log_probs(data))
        upcast = data
        if wants_float32():
            with guarded("upcasting log-probs"):
                upcast = batches.in_float32(data)
        return function(upcast, *args, **kwargs)

    return run


def run_offpolicy_metrics(function: Function) -> Function:
    """Return `compute_offpolicy_metrics`: V1's perplexities are summed in bfloat16.

    STAGESCOPE_VERL_FLOAT32 upcasts them. It makes numbers for the log alone; what trains is not
    touched.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if not wants_float32():
            return function(*args, **kwargs)
        with guarded("upcasting log-probs"):
            args = tuple(batches.at_least_float32(value) for value in args)
            kwargs = {name: batches.at_least_float32(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return run


def run_advantage(function: Function) -> Function:
    """Return `compute_advantage`: rewards and advantages of the step, as the update sees them."""

    def run(data: Any, *args: Any, **kwargs: Any) -> Any:
        stage: Stage | None = None
        driver = _driver
        with guarded("the step's advantages"):
            if driver is not None and driver.mode.metrics and not _is_inner(kwargs):
                stage = driver.stage("compute_advantage")
        if driver is None or stage is None:
            return function(data, *args, **kwargs)
        with running(stage):
            result = function(data, *args, **kwargs)
            with guarded("the step's advantages"):
                named = batches.Keys.of(kwargs.get("batch_keys")) or result
                driver.record(stage, named, batches.outcome(result))
        return result

    return run


def run_reward(function: Function) -> Function:
    """Return `_compute_reward_colocate` as the stage `compute_rm_score`."""

    def run(trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        stage: Stage | None = None
        with guarded("compute_rm_score"):
            driver = driver_of(trainer)
            if driver.mode.stages:
                stage = driver.stage("compute_rm_score", role="reward_model")
        with running(stage):
            return function(trainer, batch, *args, **kwargs)

    return run


def run_balance(function: Function) -> Function:
    """Return `_balance_batch`, which reorders the rows: their index is taken before."""

    def run(trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with guarded("the ids of the samples"):
            if driver_of(trainer).context() is not None:
                batches.name_samples(batch)
        return function(trainer, batch, *args, **kwargs)

    return run


def run_validate(function: Function) -> Function:
    """Return `_validate`; what is generated in it belongs to no step."""

    def run(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with guarded("telling validation from training"):
            driver_of(trainer).is_validating = True
        try:
            return function(trainer, *args, **kwargs)
        finally:
            with guarded("telling validation from training"):
                driver_of(trainer).is_validating = False

    return run


def run_load_checkpoint(function: Function) -> Function:
    """Return `_load_checkpoint`; the step that it leaves behind is the one resumed from."""

    def run(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(trainer, *args, **kwargs)
        with guarded("the step resumed from"):
            driver_of(trainer).resumed_from_step = getattr(trainer, "global_steps", None) or None
        return result

    return run


def run_fit(function: Function) -> Function:
    """Return `fit`; what waits when it ends is sent before the job is gone."""

    def run(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with _closing(trainer):
            return function(trainer, *args, **kwargs)

    run._stagescope_closes = True  # type: ignore[attr-defined]
    return run


def run_trainer_init(function: Function) -> Function:
    """Return a trainer's `__init__`, after which a `fit` of its subclass's own is closed too."""

    def run(trainer: Any, *args: Any, **kwargs: Any) -> None:
        function(trainer, *args, **kwargs)
        with guarded("waiting for receipts at the end of a trainer's own fit"):
            own = getattr(type(trainer), "fit", None)
            if callable(own) and not hasattr(own, "_stagescope_closes"):
                trainer.fit = _closed_after(trainer, trainer.fit)

    return run


def _closed_after(trainer: Any, fit: Function) -> Function:
    @functools.wraps(fit)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _closing(trainer):
            return fit(*args, **kwargs)

    @functools.wraps(fit)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        with _closing(trainer):
            return await fit(*args, **kwargs)

    return run_async if inspect.iscoroutinefunction(fit) else run


@contextlib.contextmanager
def _closing(trainer: Any) -> Iterator[None]:
    with guarded("reading verl's configuration"):
        driver_of(trainer).prepare()
    with guarded("the rollout's stage"):
        driver_of(trainer).watch_rollout()
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        with guarded("taking leave"):
            driver_of(trainer).close(error)


def run_log(function: Function) -> Function:
    """Return `Tracking.log`, with the service's numbers beside verl's own, which stay.

    A name that verl logs too is ours under `stagescope/`.
    """

    def run(tracking: Any, data: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        logged = data
        with guarded("the numbers in verl's log"):
            if _driver is not None and "training/global_step" in data:
                ours = _driver.log(int(step), data)
                logged = {_beside(name, data): value for name, value in ours.items()} | {**data}
        return function(tracking, logged, step, *args, **kwargs)

    return run


def _beside(name: str, data: Mapping[str, Any]) -> str:
    return f"stagescope/{name}" if name in data else name


@contextlib.contextmanager
def _expected(stage: Stage, batch: Any) -> Any:
    global _expecting
    with guarded("the step's log-probs"):
        _expecting = (stage, batch) if batches.is_keys(batch) else None
    try:
        yield
    finally:
        _expecting = None


def _take_log_probs(trainer: Any, stage: Stage, batch: Any, result: Any) -> None:
    """Take what a trainer before V1 has in hand: the batch, and (old log-probs, ...)."""
    if batches.is_keys(batch):
        return
    old = result[0] if isinstance(result, tuple) else result
    tensors = batches.log_probs(batch, old.batch)
    driver_of(trainer).record(stage, batch, tensors)


def _is_inner(kwargs: dict[str, Any]) -> bool:
    """Say whether V1's own function calls the one that earlier trainers call."""
    return _driver is not None and batches.is_v1(_driver.trainer) and "batch_keys" not in kwargs
