"""Nothing at all where no service runs, where it is switched off, and where no step was planted."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.coordinators import wait_for
from tests.support.trainers import verl_fakes
from tests.support.trainers.verl_fakes import Seen, fake_modules

from stagescope_workers.integrations.verl import (
    context,
    driver,
    hooks,
    modes,
    rollout,
    trainer_calls,
)
from stagescope_workers.integrations.verl import processes as services
from stagescope_workers.integrations.verl.modes import VARIABLE, Mode
from stagescope_workers.probe.probe import Probe
from stagescope_workers.transport import link as links

Modules = dict[str, ModuleType]


def a_step(modules: Modules, *, v1: bool, bypass: bool) -> Any:
    """Take a trainer and its workers through a step; return the batch that was handed on."""
    trainer = verl_fakes.trainer(modules, v1=v1, bypass=bypass)
    batch: Any = verl_fakes.batch_v1() if v1 else verl_fakes.batch_v0()
    for name in ("_balance_batch", "_compute_reward_colocate", "_compute_values", "_update_actor"):
        getattr(trainer, name)(batch)
    trainer._compute_old_log_prob(batch)
    modules["verl.utils.tracking"].Tracking().log({"training/global_step": 3}, 3)
    worker, inner = verl_fakes.outer_worker(modules), verl_fakes.inner_worker(modules)
    worker.compute_log_prob(verl_fakes.tensors())
    inner.train_mini_batch(verl_fakes.tensors())
    asyncio.run(worker.update_weights(3))
    loop = modules["verl.experimental.agent_loop.agent_loop"].AgentLoopWorker(trainer.config)
    asyncio.run(loop._run_prompt("p", trajectory={"step": 3}))
    asyncio.run(
        loop.generate_sequences(
            verl_fakes.DataProto(verl_fakes.tensors(), meta_info={"global_steps": 3})
        )
    )
    trainer.fit()
    return batch


@pytest.mark.parametrize("v1", [False, True])
@pytest.mark.parametrize("bypass", [False, True])
def test_where_no_service_runs_nothing_is_made_or_planted(
    v1: bool, bypass: bool, verl: Modules, seen: Seen, probes: list[Probe],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for module in (driver, rollout):
        monkeypatch.setattr(module, "has_service", lambda: False)
    batch = a_step(verl, v1=v1, bypass=bypass)
    carried = batch.extra_info if v1 else {**batch.meta_info, **batch.non_tensor_batch}
    assert set(carried) <= {"uid"}
    assert probes == []
    assert len(seen.calls) == 13  # each of the functions above
    assert caplog.records == []


def test_metrics_alone_carry_no_stages(
    seen: Seen, probes: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "metrics")
    modules = fake_modules(seen, monkeypatch)
    for patch in hooks.patches(Mode("metrics")):
        patch.apply(modules[patch.module])
    verl_fakes.trainer(modules)._update_actor(batch := verl_fakes.batch_v0())
    assert context.KEY not in batch.meta_info
    verl_fakes.trainer(modules, bypass=True)._update_actor(batch)
    planted = context.parse(batch.meta_info[context.KEY])
    assert (planted.bypass, planted.stages, planted.profiler) == (True, False, None)
    assert trainer_calls._driver is not None
    assert trainer_calls._driver._feed is not None


def test_stages_alone_hand_over_no_tensors(
    seen: Seen, probes: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "stages")
    modules = fake_modules(seen, monkeypatch)
    for patch in hooks.patches(Mode("stages")):
        patch.apply(modules[patch.module])
    batch = verl_fakes.batch_v0()
    verl_fakes.trainer(modules, bypass=True)._compute_old_log_prob(batch)
    planted = context.parse(batch.meta_info[context.KEY])
    assert (planted.bypass, planted.stages) == (False, True)
    assert (probes, context.SAMPLES in batch.non_tensor_batch) == ([], False)


# --- whether there is a service ---------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class FakeRayLink:
    """Where a service may be found, over Ray."""

    def __init__(self) -> None:
        self.found: object = None
        self.asked = 0

    def find(self) -> object:
        self.asked += 1
        return self.found


def test_a_service_is_searched_now_and_then_until_it_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, place = Clock(), FakeRayLink()
    monkeypatch.setattr(services, "time", clock)
    monkeypatch.setattr(services, "RayLink", place)
    monkeypatch.setattr(services, "_found", False)
    monkeypatch.setattr(services, "_searched_at", float("-inf"))
    assert [services.has_service() for _ in range(3)] == [False] * 3
    assert place.asked == 1
    place.found, clock.now = object(), clock.now + 6
    assert services.has_service()
    place.found, clock.now = None, clock.now + 6
    assert (services.has_service(), place.asked) == (True, 2)  # it will come back


def test_a_search_that_is_under_way_answers_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent loop worker searches in its introduction and in its first prompts, at one time."""
    begun, go_on = threading.Event(), threading.Event()

    class SlowRayLink(FakeRayLink):
        def find(self) -> object:
            begun.set()
            assert go_on.wait(30.0)
            return object()

    monkeypatch.setattr(services, "RayLink", SlowRayLink())
    monkeypatch.setattr(services, "_found", False)
    monkeypatch.setattr(services, "_searched_at", float("-inf"))
    monkeypatch.delenv("STAGESCOPE_URL", raising=False)
    with ThreadPoolExecutor(2) as threads:
        introduction = threads.submit(services.has_service)
        assert begun.wait(30.0)
        prompt = threads.submit(services.has_service)
        assert not wait([prompt], timeout=0.2).done  # without the lock it says at once that none is
        go_on.set()
        assert introduction.result(30.0)
        assert prompt.result(30.0)


def test_an_address_is_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    place = FakeRayLink()
    monkeypatch.setattr(services, "RayLink", place)
    monkeypatch.setattr(services, "_found", False)
    monkeypatch.setattr(services, "_searched_at", float("-inf"))
    monkeypatch.setenv("STAGESCOPE_URL", "http://head:8700")
    assert (services.has_service(), place.asked) == (True, 0)


def test_a_service_that_attach_finds_is_there_once_it_takes_connections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(services, "time", clock)
    monkeypatch.setattr(services, "RayLink", FakeRayLink())
    monkeypatch.setattr(services, "_FIRST_WAIT", 30.0)
    monkeypatch.setattr(links, "_warned_in", set())
    for name, value in {
        "_found": False,
        "_searched_at": float("-inf"),
        "_first_search": None,
    }.items():
        monkeypatch.setattr(services, name, value)
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    (tmp_path / "service.json").write_text(json.dumps({"url": url}))  # an old one
    assert not services.has_service()
    services.warn_without_service("maths.first")
    assert caplog.records == []
    clock.now += 11
    services.warn_without_service("maths.first")
    services.warn_without_service("maths.first")
    [line] = [record.getMessage() for record in caplog.records]
    assert "maths.first" in line
    assert url in line
    port = int(url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):

        def is_there_later() -> bool:
            clock.now += 6
            return services.has_service()

        wait_for(is_there_later)


# --- the variables, in every process of the job -----------------------------------------------


@pytest.mark.parametrize(
    ("mode", "proxy"), [("off", "http://proxy:3128"), ("all", "http://user:secret@proxy:3128")]
)
def test_variables_are_brought_to_the_job_s_processes(
    mode: str, proxy: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = fake_modules(seen, monkeypatch)
    for patch in hooks.patches(Mode(mode)):
        patch.apply(modules[patch.module])
    held = {"env_vars": {"NCCL_DEBUG": "WARN", "STAGESCOPE_RUN": "verl's"}, "working_dir": None}
    seen.outcomes["get_ppo_ray_runtime_env"] = held
    monkeypatch.setenv(VARIABLE, mode)
    monkeypatch.setenv("STAGESCOPE_RUN", "ours")
    monkeypatch.setenv("STAGESCOPE_TOKEN", "secret")
    monkeypatch.setenv("STAGESCOPE_PROXY", proxy)
    monkeypatch.setenv("STAGESCOPE_HOME", "/shared/home")
    monkeypatch.setenv("STAGESCOPE_TOKEN_FILE", "operate.token")
    assert modules["verl.trainer.constants_ppo"].get_ppo_ray_runtime_env() is held
    assert held["env_vars"] == {
        "NCCL_DEBUG": "WARN",
        "STAGESCOPE_RUN": "verl's",
        "STAGESCOPE_ATTEMPT": "attempt-a",
        "STAGESCOPE_HOME": "/shared/home",
        "STAGESCOPE_TOKEN_FILE": str(Path("operate.token").absolute()),  # where it is, no token
        VARIABLE: mode,
        **({} if "secret" in proxy else {"STAGESCOPE_PROXY": proxy}),
    }
    assert "STAGESCOPE_TOKEN" not in modes.PASSED_VARIABLES
