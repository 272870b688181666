"""Methods that verl registers with its single controller keep their registration."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType

import pytest
from tests.support.trainers import verl_fakes
from tests.support.trainers.verl_fakes import Register, Seen, fake_modules

from stagescope_workers.integrations.patches import Function
from stagescope_workers.integrations.verl.hooks import rewrap_registered

Modules = dict[str, ModuleType]


@pytest.fixture
def modules(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> Modules:
    return fake_modules(seen, monkeypatch)


def ours(function: Function) -> Function:
    def run(*args: object) -> list[object]:
        return ["ours", function(*args)]

    return run


def passing(function: Function) -> Function:
    async def later(*args: object) -> object:
        return await function(*args)

    def now(*args: object) -> object:
        return function(*args)

    return later if inspect.iscoroutinefunction(function) else now


@pytest.mark.parametrize(
    ("name", "method"),
    [("ActorRolloutRefWorker", "compute_log_prob"), ("TrainingWorker", "train_batch"),
     ("ActorRolloutRefWorker", "update_weights")],
)  # fmt: skip
def test_how_a_method_is_dispatched_is_kept(name: str, method: str, modules: Modules) -> None:
    decorator = modules["verl.single_controller.base.decorator"]
    original = vars(vars(modules["verl.workers.engine_workers"])[name])[method]
    attributes = getattr(original, decorator.MAGIC_ATTR)
    replacement = rewrap_registered(passing)(original)
    assert replacement is not original
    assert getattr(replacement, decorator.MAGIC_ATTR) == attributes
    assert replacement.__name__ == original.__name__
    assert inspect.signature(replacement) == inspect.signature(original)
    assert inspect.iscoroutinefunction(replacement) == inspect.iscoroutinefunction(original)


def test_a_layer_is_passed_once_and_ours_runs_inside_it(modules: Modules, seen: Seen) -> None:
    decorator = modules["verl.single_controller.base.decorator"]
    workers = modules["verl.workers.engine_workers"]
    original = workers.ActorRolloutRefWorker.compute_log_prob
    entered: list[list[str]] = []
    seen.outcomes["compute_log_prob"] = lambda *_: entered.append(list(decorator.entered))
    assert rewrap_registered(ours)(original)(verl_fakes.outer_worker(modules), "data") == [
        "ours",
        None,
    ]
    assert entered == [["compute_log_prob"]]


def test_other_decorators_of_verl_stay(modules: Modules) -> None:
    register: Register = modules["verl.single_controller.base.decorator"].register

    def annotate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: object) -> list[object]:
            return ["annotated", function(*args)]

        return run

    @register()
    @annotate
    def method(value: int) -> int:
        return value

    assert rewrap_registered(ours)(method)(1) == ["ours", ["annotated", 1]]


def test_what_another_version_does_differently_is_refused(modules: Modules) -> None:
    decorator = modules["verl.single_controller.base.decorator"]
    with pytest.raises(LookupError, match="not registered"):
        rewrap_registered(ours)(lambda: None)

    register: Register = decorator.register

    @register()
    def method() -> None: ...

    getattr(method, decorator.MAGIC_ATTR)["colour"] = "red"
    with pytest.raises(LookupError, match="colour"):
        rewrap_registered(ours)(method)
