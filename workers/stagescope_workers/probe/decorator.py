"""Runs functions as stages; the step is found in the places where trainers store it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from stagescope_workers.probe.stage import Stage

_Function = TypeVar("_Function", bound=Callable[..., Any])

STEP_NAMES: Final = ("global_steps", "global_step")


class StageMaker(Protocol):
    """The part of a Probe that a decorated function needs."""

    def stage(self, name: str, *, step: int | None = None, model: object = None) -> Stage:
        """Return a stage for `with`."""
        ...


def as_stage(
    name: str,
    *,
    model: object = None,
    step: int | None = None,
    probe: Callable[[], StageMaker | None],
) -> Callable[[_Function], _Function]:
    """Return a decorator that runs a function, also an async one, as the stage `name`.

    Args:
        name: the stage.
        model: the module that runs, or, as a string, its attribute path from the function's first
            argument (`"actor.actor_module"`).
        step: the step, instead of the one in the arguments.
        probe: called at each call; where it returns None, the function runs without a stage.
    """

    def decorate(function: _Function) -> _Function:
        def stage(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Stage | None:
            maker = probe()
            if maker is None:
                return None
            found = find_step(args, kwargs) if step is None else step
            return maker.stage(name, step=found, model=_find_model(model, args))

        def enter(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
            return stage(args, kwargs) or contextlib.nullcontext()

        return cast("_Function", within(function, enter))

    return decorate


def within(
    function: Callable[..., Any], enter: Callable[[tuple[object, ...], Mapping[str, object]], Any]
) -> Callable[..., Any]:
    """Return a function, sync or async, that runs in the context `enter(args, kwargs)` returns."""

    async def call_async(*args: object, **kwargs: object) -> object:
        with enter(args, kwargs):
            return await function(*args, **kwargs)

    def call(*args: object, **kwargs: object) -> object:
        if is_coroutine:
            return call_async(*args, **kwargs)
        with enter(args, kwargs):
            return function(*args, **kwargs)

    # `torch.no_grad` makes a coroutine function look like a plain one.
    is_coroutine = inspect.iscoroutinefunction(inspect.unwrap(function))
    is_async = inspect.iscoroutinefunction(function)
    return functools.wraps(function)(call_async if is_async else call)


def find_step(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int | None:
    """Return the global step of a call, or None.

    First `meta_info["global_steps"]` of any argument is read (verl's DataProto), or its
    `extra_info` (KVBatchMeta). A plain dict or TensorDict among the arguments comes next. The last
    are the attributes `global_steps` and `global_step` of the first argument (the worker).
    """
    values = (*args, *kwargs.values())
    mappings = [_attribute(value, name) for value in values for name in ("meta_info", "extra_info")]
    for mapping in (*mappings, *values):
        found = _step_in(mapping)
        if found is not None:
            return found
    for name in STEP_NAMES:
        found = _as_step(kwargs.get(name))
        if found is None and args:
            found = _as_step(_attribute(args[0], name))
        if found is not None:
            return found
    return None


def _attribute(value: object, name: str) -> object:
    try:
        return getattr(value, name, None)
    except Exception:  # a property of another library's object may raise anything
        return None


def _step_in(mapping: Any) -> int | None:
    if not isinstance(mapping, Mapping) and type(mapping).__name__ != "TensorDict":
        return None
    for name in STEP_NAMES:
        try:
            found = _as_step(mapping.get(name, None))
        except Exception:  # a TensorDict may refuse a key that it stores in another form
            continue
        if found is not None:
            return found
    return None


def _as_step(value: Any) -> int | None:
    value = getattr(value, "data", value) if type(value).__name__ == "NonTensorData" else value
    try:
        return None if value is None or isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _find_model(model: object, args: tuple[object, ...]) -> object:
    if not isinstance(model, str):
        return model
    found: object = args[0] if args else None
    for name in model.split("."):
        found = _attribute(found, name)
    return found
