"""verl 0.7 and 0.8: workers of an older kind, and what there is no module for."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.trainers import verl_fakes
from tests.support.trainers.verl_fakes import DataProto, Seen
from tests.workers.integrations.verl.conftest import Ended

from stagescope_workers.integrations import patches
from stagescope_workers.integrations.verl import context, hooks
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.integrations.verl.modes import Mode

Modules = dict[str, ModuleType]
Read = Callable[..., list[Ended]]


def data(*, bypass: bool = False) -> DataProto:
    text = Context(run="r", attempt_key="a", step=3, bypass=bypass).text()
    return verl_fakes.DataProto(verl_fakes.tensors(), meta_info={context.KEY: text})


@pytest.fixture(params=["verl.workers.fsdp_workers", "verl.workers.megatron_workers"])
def make(verl: Modules, request: pytest.FixtureRequest) -> Callable[[str], object]:
    """Return a function that makes a worker of one of the modules."""

    def make(name: str) -> object:
        worker = vars(verl[request.param])[name]()
        worker.rank, worker.world_size = 1, 2
        return worker

    return make


def test_each_stage_is_a_whole(make: Callable[[str], Any], ended: Read) -> None:
    actor, critic = make("ActorRolloutRefWorker"), make("CriticWorker")
    for name in ("compute_log_prob", "compute_ref_log_prob", "update_actor"):
        assert getattr(actor, name)(data()) == f"the result of {name}"
    for name in ("compute_values", "update_critic"):
        assert getattr(critic, name)(data()) == f"the result of {name}"
    asyncio.run(make("AsyncActorRolloutRefWorker").update_weights(global_steps=3))
    assert [(end.stage, end.role, end.rank, end.clock) for end in ended(6)] == [
        ("actor_compute_log_prob", "actor", 1, (3, 2)),
        ("ref_compute_log_prob", "ref", 1, (3, 2)),
        ("actor_update", "actor", 1, (3, 2)),
        ("compute_values", "critic", 1, (3, 2)),
        ("critic_update", "critic", 1, (3, 2)),
        ("weight_sync", "actor", 1, (3, 3)),
    ]


def test_the_model_is_found_under_either_name() -> None:
    find = hooks.legacy_engine("actor")
    assert find(types.SimpleNamespace(actor_module_fsdp="f", actor_module="m")).module == "f"
    assert find(types.SimpleNamespace(actor_module="m")).module == "m"
    assert find(object()).module is None


def test_bypass_mode_is_logged_once(
    make: Callable[[str], Any], seen: Seen, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hooks, "_warned_of_bypass", False)
    worker = make("ActorRolloutRefWorker")
    worker.update_actor(data())
    assert caplog.records == []
    for _ in range(2):
        worker.update_actor(data(bypass=True))
    [record] = caplog.records
    assert "bypass mode" in record.getMessage()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts an imported verl in place, with files for these modules."""
    monkeypatch.delenv("RANK", raising=False)

    def install(*modules: str) -> None:
        for module in modules:
            file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        verl: Any = types.ModuleType("verl")
        verl.__path__, verl.__version__ = [str(tmp_path / "verl")], "0.7.9"
        monkeypatch.setitem(sys.modules, "verl", verl)

    return install


def of_all(without: str = "-") -> list[str]:
    modules = {patch.module for patch in hooks.patches(Mode("all"))}
    return sorted(module for module in modules if without not in module)


@pytest.mark.parametrize("without", ["-", ".v1.", "fsdp_workers", "ray_trainer"])
def test_what_another_module_serves_is_not_left_out(
    without: str, installed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    installed(*of_all(without))
    patches.log_version(hooks.patches(Mode("all")), "verl")
    assert caplog.records == []


def test_what_no_module_serves_is_logged_in_one_line(
    installed: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(*(module for module in of_all("precision") if "tracking" not in module))
    monkeypatch.setenv("RANK", "3")
    patches.log_version(hooks.patches(Mode("all")), "verl")
    assert caplog.records == []
    monkeypatch.setenv("RANK", "0")
    patches.log_version(hooks.patches(Mode("all")), "verl")
    [record] = caplog.records
    assert record.getMessage() == (
        "not reported with verl 0.7.9: numbers in verl's log, and verl's scalars; "
        "verl's precision_debugger block"
    )
