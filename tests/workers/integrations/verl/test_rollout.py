"""What agent loop workers report: one stage for the prompts of a step, however they are run."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
from tests.support.coordinators import FakeCoordinator
from tests.support.trainers import verl_fakes
from tests.support.trainers.verl_fakes import Seen
from tests.workers.integrations.verl.conftest import Ended

from stagescope_wire.schema import HELLO
from stagescope_workers.integrations.verl import configuration, rollout
from stagescope_workers.probe.probe import Probe

Modules = dict[str, ModuleType]
Read = Callable[..., list[Ended]]
LOOPS = "verl.experimental.agent_loop.agent_loop"


@pytest.fixture(autouse=True)
def second_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "_index", lambda: 1)


def worker(modules: Modules, **trainer: object) -> Any:
    return modules[LOOPS].AgentLoopWorker(verl_fakes.config(**trainer))


def prompts(**about: object) -> verl_fakes.DataProto:
    return verl_fakes.DataProto(verl_fakes.tensors(), meta_info=about)


def test_a_call_is_a_stage(
    verl: Modules, ended: Read, coordinator: FakeCoordinator, probes: list[Probe]
) -> None:
    loop = worker(verl)
    result = asyncio.run(loop.generate_sequences(prompts(global_steps=3)))
    assert result == "the result of generate_sequences"
    [end] = ended(1)
    assert (end.stage, end.role, end.rank, end.clock) == ("rollout_generate", "rollout", 1, (3, 2))
    [hello] = coordinator.of_kind(HELLO)
    assert (hello.fields["world_size"], hello.fields["layout"]["engine"]) == (2, "vllm")
    # A capture of it is skipped with the reason: the engine's operators are in other processes.
    assert "runs in separate servers" in str(probes[0].options.captures)


@pytest.mark.parametrize("about", [{}, {"global_steps": 3, "validate": True}, {"global_steps": -1}])
def test_what_belongs_to_no_step_is_not_reported(
    about: Mapping[str, object], verl: Modules, probes: list[Probe]
) -> None:
    asyncio.run(worker(verl).generate_sequences(prompts(**about)))
    assert probes == []


def together(
    seen: Seen, loop: Any, trajectories: Sequence[dict[str, object]], fails: int = -1
) -> Any:
    """Run prompts that all begin before one ends, of which one may raise; return the results."""

    async def run() -> object:
        all_there = asyncio.Event()
        there: list[str] = []

        async def generate(prompt: str, **_: object) -> str:
            there.append(prompt)
            if len(there) == len(trajectories):
                all_there.set()
            await all_there.wait()
            if prompt == str(fails):
                raise ValueError("verl's own")
            return prompt

        seen.outcomes["_run_prompt"] = generate
        prompts = [
            loop._run_prompt(str(number), trajectory=trajectory)
            for number, trajectory in enumerate(trajectories)
        ]
        return await asyncio.gather(*prompts, return_exceptions=True)

    return asyncio.run(run())


def of(step: int, *, validate: bool = False) -> dict[str, object]:
    return {"step": step, "validate": validate}


def test_prompts_that_overlap_are_one_stage(verl: Modules, seen: Seen, ended: Read) -> None:
    loop = worker(verl, use_v1=True)
    assert together(seen, loop, [of(3), of(3), of(4), of(3)]) == ["0", "1", "2", "3"]
    assert {(end.clock, end.part, end.fields["status"]) for end in ended(2)} == {
        ((3, 2), (0, 0, 0), "ok"),
        ((4, 3), (0, 0, 0), "ok"),
    }


def test_prompts_that_come_later_are_another_occurrence(
    verl: Modules, seen: Seen, ended: Read
) -> None:
    loop = worker(verl, use_v1=True)
    for _ in range(2):
        together(seen, loop, [of(3)])
    assert [end.part for end in ended(2)] == [(0, 0, 0), (1, 0, 0)]


def test_one_failing_prompt_fails_the_stage_and_no_other_prompt(
    verl: Modules, seen: Seen, ended: Read
) -> None:
    first, second, third = together(seen, worker(verl), [of(3)] * 3, fails=1)
    assert (first, third, str(second)) == ("0", "2", "verl's own")
    [end] = ended(1)
    assert (end.fields["status"], end.fields["error_type"]) == ("failed", "ValueError")


def test_validation_is_not_reported(verl: Modules, seen: Seen, probes: list[Probe]) -> None:
    assert together(seen, worker(verl), [of(3, validate=True)]) == ["0"]
    assert probes == []


def test_where_training_does_not_wait_the_weights_are_the_clock(
    verl: Modules, seen: Seen, ended: Read
) -> None:
    loop = worker(verl, use_v1=True, v1={"trainer_mode": "colocate_async"})
    together(seen, loop, [of(3)])
    assert ended(1)[0].clock == (None, 2)


def test_a_manager_s_workers_get_the_names_that_the_driver_has(
    verl: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("omegaconf")
    monkeypatch.setenv("STAGESCOPE_RUN", "mine")
    given = verl_fakes.config()
    made = verl[LOOPS].AgentLoopManager(given).config
    assert "stagescope" not in given
    monkeypatch.delenv("STAGESCOPE_RUN")
    monkeypatch.delenv("STAGESCOPE_ATTEMPT")
    assert configuration.names(made) == ("mine", "attempt-a")
    assert configuration.names(given) == ("maths.first", None)


@pytest.mark.parametrize(
    ("name", "index"),
    [("agent_loop_worker_0_1a2b3c", 0), ("agent_loop_worker_12_00ff", 12), ("another", 0), ("", 0)],
)
def test_the_rank_stands_in_the_actor_s_name(
    name: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    ray = types.ModuleType("ray")
    runtime = types.SimpleNamespace(get_actor_name=lambda: name)
    ray.get_runtime_context = lambda: runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert rollout._index() == index


class OwnManager:
    """A manager of `agent_loop_manager_class` whose workers are not verl's."""

    agent_loop_workers_class: object = None

    def __init__(self) -> None:
        self.error: Exception | None = None

    def generate_sequences(self, batch: object) -> Any:
        if self.error is not None:
            raise self.error
        return f"generated from {batch}"


class OwnAsyncManager(OwnManager):
    async def generate_sequences(self, batch: object) -> object:
        return super().generate_sequences(batch)


@pytest.mark.parametrize("kind", [OwnManager, OwnAsyncManager])
def test_a_configured_manager_generates_in_a_stage_of_its_own(
    kind: type[OwnManager], verl: Modules, seen: Seen, ended: Read
) -> None:
    trainer = verl_fakes.trainer(verl)
    manager = trainer.async_rollout_manager = kind()

    def step(*_: object) -> Any:
        result = manager.generate_sequences("prompts")
        return asyncio.run(result) if kind is OwnAsyncManager else result

    seen.outcomes["fit"] = step
    assert trainer.fit() == "generated from prompts"
    manager.error = ValueError("the manager's own")
    with pytest.raises(ValueError, match="own"):
        trainer.fit()
    ends = ended(2)
    assert [(end.stage, end.role, end.rank, end.clock) for end in ends] == [
        ("rollout_generate", "rollout", 0, (3, 2))
    ] * 2
    assert [end.fields["status"] for end in ends] == ["ok", "failed"]


def test_verl_s_own_workers_are_not_reported_twice(
    verl: Modules, seen: Seen, probes: list[Probe]
) -> None:
    trainer = verl_fakes.trainer(verl)
    manager = trainer.async_rollout_manager = OwnManager()
    own = verl["verl.experimental.agent_loop.agent_loop"].AgentLoopWorker
    manager.agent_loop_workers_class = type("Derived", (own,), {})
    seen.outcomes["fit"] = lambda *_: manager.generate_sequences("prompts")
    trainer.fit()
    assert probes == []


@pytest.mark.parametrize("is_given", [True, False])  # V1 gives it to `fit`, which sets it
def test_where_no_rollout_can_be_reported_it_is_logged_once(
    verl: Modules, probes: list[Probe], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, is_given: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(rollout, "_logged", set())
    trainer = verl_fakes.trainer(verl, v1=True)
    given = [OwnManager()] if is_given else []
    trainer.agent_loop_manager = None if is_given else OwnManager()
    trainer.fit(*given)
    trainer.fit(*given)
    [line] = [record.getMessage() for record in caplog.records]
    assert "rollout_generate" in line
    assert "OwnManager" in line
