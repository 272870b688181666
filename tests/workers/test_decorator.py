"""Functions as stages: where the step comes from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import NonTensorData, TensorDict
from tests.support.coordinators import FakeCoordinator, wait_for

import stagescope_workers
from stagescope_workers.probe import lifecycle
from stagescope_workers.probe.decorator import as_stage, find_step
from stagescope_workers.probe.probe import Probe

MakeProbe = Callable[..., Probe]


def batch(step: int) -> SimpleNamespace:
    return SimpleNamespace(meta_info={"global_steps": step})


class Worker:
    global_step = 2

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    @property
    def broken(self) -> int:
        raise RuntimeError


@pytest.mark.parametrize(
    ("args", "kwargs", "step"),
    [
        ((Worker(), batch(5)), {}, 5),
        ((Worker(),), {"data": batch(6)}, 6),
        ((Worker(), {"global_steps": 9}), {"data": batch(7)}, 7),
        ((Worker(), SimpleNamespace(extra_info={"global_steps": 8})), {}, 8),
        ((Worker(), {"global_steps": 9}), {}, 9),
        ((Worker(), TensorDict({"global_steps": NonTensorData(10)})), {}, 10),
        ((Worker(global_steps=11), {}), {}, 11),
        ((Worker(), SimpleNamespace(meta_info={})), {}, 2),
        ((Worker(),), {"global_steps": 12}, 12),
        ((object(), "text"), {}, None),
        ((), {}, None),
        (({"global_steps": "soon"},), {}, None),
    ],
)
def test_step_is_found_where_trainers_keep_it(
    args: tuple[object, ...], kwargs: dict[str, object], step: int | None
) -> None:
    assert find_step(args, kwargs) == step


def test_function_runs_as_a_stage(make_probe: MakeProbe, coordinator: FakeCoordinator) -> None:
    probe = make_probe()

    class Actor:
        global_steps = 4

        @probe.as_stage("actor_update")
        def update(self, data: object) -> str:
            """Update."""
            return f"updated {data}"

        @probe.as_stage("rollout_generate", step=3)
        async def generate(self) -> str:
            await asyncio.sleep(0)
            raise ValueError("no tokens")

    assert Actor().update("it") == "updated it"
    assert Actor.update.__doc__ == "Update."
    with pytest.raises(ValueError, match="no tokens"):
        asyncio.run(Actor().generate())
    wait_for(lambda: len(coordinator.of_kind("end")) == 2)
    reported = [
        (e.fields["stage"], e.fields["step"], e.fields["status"])
        for e in coordinator.of_kind("end")
    ]
    assert reported == [("actor_update", 4, "ok"), ("rollout_generate", 3, "failed")]


def test_decorator_before_init_finds_the_probe_later(
    make_probe: MakeProbe, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_newest", None)

    @stagescope_workers.as_stage("compute_values", step=1)
    def compute() -> int:
        return 7

    assert compute() == 7
    monkeypatch.setattr(lifecycle, "_newest", make_probe())
    assert compute() == 7
    assert coordinator.fields("end")[0]["stage"] == "compute_values"


def test_model_is_found_from_the_worker() -> None:
    models: list[object] = []

    class Maker:
        def stage(self, name: str, *, step: int | None = None, model: object = None) -> Any:
            models.append(model)
            return contextlib.nullcontext()

    worker = SimpleNamespace(engine=SimpleNamespace(module="the model"))
    for path in ("engine.module", "engine.absent"):
        as_stage("actor_update", model=path, step=1, probe=Maker)(lambda self: None)(worker)
    assert models == ["the model", None]
