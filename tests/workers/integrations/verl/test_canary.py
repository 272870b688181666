"""A canary of verl's V0 trainer: its ranks score before each sync, its servers are asked after."""

from __future__ import annotations

import threading
import types
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.support.coordinators import FakeCoordinator, wait_for
from tests.support.engines.tiny_llama import tiny_tokenizer
from tests.support.trainers import verl_fakes
from tests.support.trainers.verl_fakes import DataProto, Seen

from stagescope_wire.canary import FIXED, Canary
from stagescope_wire.errors import EngineError
from stagescope_workers.canary import engine_scorer
from stagescope_workers.canary.sequences import SCORED, of_tokenizer
from stagescope_workers.integrations.canary import VARIABLE
from stagescope_workers.integrations.verl import driver, modes
from stagescope_workers.probe.probe import Probe

RANKS = 4


class Proto:
    """`verl.DataProto`, as far as it is made."""

    @staticmethod
    def from_dict(tensors: Mapping[str, torch.Tensor], meta_info: dict[str, Any]) -> DataProto:
        rows = len(tensors["input_ids"])
        return DataProto(TensorDict(dict(tensors), batch_size=[rows]), {}, meta_info)


@pytest.fixture
def synced(
    verl: dict[str, ModuleType], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """A trainer at step 3, and what it did in order."""
    package = types.ModuleType("verl")
    vars(package)["DataProto"] = Proto
    monkeypatch.setitem(__import__("sys").modules, "verl", package)
    trainer = verl_fakes.trainer(verl)
    done: list[Any] = []

    def log_probs(self: object, batch: DataProto, **_: object) -> object:
        done.append(batch)
        ids = batch.batch["responses"].double()
        return DataProto(TensorDict({"old_log_probs": -ids}, batch_size=[len(batch)])), 0.0

    seen.outcomes["_compute_old_log_prob"] = log_probs
    trainer.checkpoint_manager = SimpleNamespace(
        update_weights=done.append, sleep_replicas=lambda: done.append("sleep")
    )
    trainer.llm_server_manager = SimpleNamespace(server_addresses=["127.0.0.1:9", "actor-name"])
    trainer.actor_rollout_wg = SimpleNamespace(world_size=RANKS, workers=[])
    trainer.tokenizer = tiny_tokenizer()
    trainer.tokenizer.pad_token_id = 1
    rollout = trainer.config["actor_rollout_ref"]["rollout"]
    rollout |= {"prompt_length": 300, "response_length": 213, "temperature": 0.7}
    rollout["log_prob_micro_batch_size_per_gpu"] = 3
    return SimpleNamespace(trainer=trainer, done=done)


def attach(trainer: Any) -> None:
    driver.Driver(trainer, modes.Mode("all")).attach_canary()


def test_ranks_score_before_the_sync_and_servers_are_asked_after(
    synced: SimpleNamespace,
    probes: list[Probe],
    coordinator: FakeCoordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    attach(synced.trainer)
    synced.trainer.checkpoint_manager.update_weights(verl_fakes.STEP)
    batch, sync = synced.done
    assert sync == verl_fakes.STEP
    rows = of_tokenizer(tiny_tokenizer(), max_length=512).rows
    assert len(batch) == RANKS * 3  # whole micro-batches on every rank
    assert batch.meta_info["temperature"] == 1.0
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"].bool()
    assert [tuple(own[kept].tolist()) for own, kept in zip(ids, mask, strict=True)] == [
        *rows, *[rows[-1]] * (len(batch) - len(rows))
    ]  # fmt: skip
    positions = batch.batch["position_ids"][mask]
    assert positions.tolist() == [at for n in mask.sum(-1).tolist() for at in range(n)]
    wait_for(lambda: len(coordinator.of_kind("canary")) == 2)
    events = {event.fields["side"]: event for event in coordinator.of_kind("canary")}
    assert {event.fields["policy_version"] for event in events.values()} == {verl_fakes.STEP}
    arm = Canary.parse(events["trainer"].fields).arms[FIXED]
    assert arm.rows == rows
    for row, values in zip(rows, arm.log_probs, strict=True):
        assert values == tuple(-float(token) for token in row[1:][-SCORED:])
    engine = Canary.parse(events["engine"].fields)
    assert (engine.source, engine.arms) == ("127.0.0.1-9", {})
    assert engine.settings == {}


@pytest.mark.parametrize(("mode", "is_asked"), [("sync", True), ("colocate_async", False)])
def test_v1_asks_the_servers_of_its_synchronous_trainer_alone(
    synced: SimpleNamespace,
    probes: list[Probe],
    coordinator: FakeCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    is_asked: bool,
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    synced.trainer.replay_buffer, synced.trainer.trainer_mode = object(), mode
    attach(synced.trainer)
    synced.trainer.checkpoint_manager.update_weights(verl_fakes.STEP)
    assert synced.done == [verl_fakes.STEP]  # no pass of the ranks
    assert ("has no effect: V1's asynchronous" in caplog.text) is not is_asked
    if is_asked:
        wait_for(lambda: coordinator.of_kind("canary"))
        [event] = coordinator.of_kind("canary")
        assert (event.fields["side"], event.fields["policy_version"]) == ("engine", verl_fakes.STEP)


def test_a_server_sleeps_only_when_no_request_is_left(
    synced: SimpleNamespace,
    probes: list[Probe],
    coordinator: FakeCoordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    reached, opened = threading.Event(), threading.Event()

    def ask(*_: object) -> object:
        reached.set()
        assert opened.wait(30)
        synced.done.append("asked")
        raise EngineError("the engine has gone")

    monkeypatch.setattr(engine_scorer, "connect", lambda *_, **__: ask())
    attach(synced.trainer)
    manager = synced.trainer.checkpoint_manager
    manager.update_weights(verl_fakes.STEP)
    assert reached.wait(30)
    threading.Timer(0.2, opened.set).start()
    manager.sleep_replicas()
    assert synced.done[-2:] == ["asked", "sleep"]
    wait_for(lambda: len(coordinator.of_kind("canary")) == 2)
    problems = [event.fields["problem"] for event in coordinator.of_kind("canary")]
    assert any(problem.startswith("the engine was put to sleep") for problem in problems)


@pytest.mark.parametrize("setting", ["", "0", "yes"])
def test_it_is_off_by_default(
    synced: SimpleNamespace, probes: list[Probe], monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv(VARIABLE, setting)
    update = synced.trainer.checkpoint_manager.update_weights
    attach(synced.trainer)
    assert synced.trainer.checkpoint_manager.update_weights is update
    assert not probes


def test_routes_of_an_engine_that_the_trainer_needs_leave_it_out(
    synced: SimpleNamespace,
    probes: list[Probe],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    actor = synced.trainer.config["actor_rollout_ref"]["actor"]
    actor["router_replay"] = {"mode": "R3"}
    update = synced.trainer.checkpoint_manager.update_weights
    attach(synced.trainer)
    assert synced.trainer.checkpoint_manager.update_weights is update
    assert "STAGESCOPE_CANARY has no effect: with router_replay R3" in caplog.text
