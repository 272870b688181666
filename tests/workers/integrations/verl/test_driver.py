"""What the trainer's process reports: the step, its batch as verl had it, its numbers."""

from __future__ import annotations

import asyncio
import math
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.coordinators import FakeCoordinator, FakeService, wait_for
from tests.support.trainers import verl_fakes
from tests.support.trainers.verl_fakes import DataProto, Seen
from tests.workers.integrations.verl.conftest import Ended

from stagescope_wire.schema import END_STEP, FINISH, HELLO, LOG
from stagescope_wire.tensors import NO_TRAINER_ROUTE
from stagescope_workers.integrations.verl import configuration, context, rollout, trainer_calls
from stagescope_workers.integrations.verl.modes import FLOAT32, VARIABLE
from stagescope_workers.probe.probe import Probe

Modules = dict[str, ModuleType]
Read = Callable[..., list[Ended]]

STREAMS = {"rollout_log_probs", "old_log_probs", "response_mask", "responses"}
TRACKING = "verl.utils.tracking"


def planted(batch: Any) -> context.Context:
    carried = batch.extra_info if hasattr(batch, "extra_info") else batch.meta_info
    return context.parse(carried[context.KEY])


def compute_old_log_prob(modules: Modules, seen: Seen, batch: DataProto, **trainer: Any) -> Any:
    made = verl_fakes.trainer(modules, **trainer)
    seen.outcomes["_compute_old_log_prob"] = lambda *_, **__: verl_fakes.old_log_probs(batch)
    made._compute_old_log_prob(batch)
    return made


def in_v1(modules: Modules, seen: Seen, held: Any) -> None:
    """Have V1's `_compute_old_log_prob` ask for its metrics, as verl's does."""
    debug = modules["verl.utils.debug.metrics"]
    data = verl_fakes.DataProto(held)
    seen.outcomes["_compute_old_log_prob"] = lambda *_, **__: debug.calculate_debug_metrics(data)


def test_what_verl_would_do_otherwise_with_its_block_is_logged(
    verl: Modules, seen: Seen, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps of both lists are captured; verl ignores those of its own block."""
    path = tmp_path / "config.json"
    path.write_text('{"task": "statistics", "level": "L1"}')
    batch = verl_fakes.batch_v0()
    made = verl_fakes.trainer(verl)
    made.config["global_profiler"] = {
        "tool": "precision_debugger", "steps": [1, 2], "global_tool_config": {
            "precision_debugger": {"config_path": str(path), "steps": [2, 7]}
        },
    }  # fmt: skip
    made.config["actor_rollout_ref"]["actor"]["profiler"] = {"enable": True, "ranks": [0]}
    seen.outcomes["_compute_old_log_prob"] = lambda *_, **__: verl_fakes.old_log_probs(batch)
    for _ in range(2):
        made._compute_old_log_prob(batch)
    [line] = [each for each in caplog.messages if "precision_debugger" in each]
    assert "ignores precision_debugger.steps ([2, 7]) and captures steps [1, 2]" in line
    assert "stagescope steps [2]; it captures every rank of actor, stagescope ranks [0]" in line
    assert planted(batch).profiler is not None


# --- before the first step --------------------------------------------------------------------


class Group:
    """A worker group whose actor runs what it is called for at once."""

    def __init__(self, *held: object) -> None:
        self.workers = [self]
        self.worker_dict = dict(enumerate(held))
        self.calls = 0

    @property
    def __ray_call__(self) -> SimpleNamespace:
        def remote(function: Callable[..., None], *args: object) -> None:
            self.calls += 1
            function(self, *args)

        return types.SimpleNamespace(remote=remote)


def with_ranks(modules: Modules, **trainer: Any) -> Any:
    made = verl_fakes.trainer(modules, **trainer)
    critic = verl_fakes.inner_worker(modules, critic=True)
    group = Group(verl_fakes.outer_worker(modules), critic)
    made.actor_rollout_wg = made.ref_policy_wg = made.critic_wg = group
    return made


@pytest.mark.parametrize(
    ("trainer", "mode", "expected"),
    [
        ({}, "all", {"driver", "actor", "ref", "critic"}),
        ({"bypass": True}, "metrics", {"driver", "actor"}),
        ({}, "metrics", {"driver"}),
    ],
)
def test_all_are_connected_before_the_first_step(
    trainer: Any,
    mode: str,
    expected: set[str],
    verl: Modules,
    coordinator: FakeCoordinator,
    service: FakeService,
    probes: list[Probe],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, mode)
    made = with_ranks(verl, **trainer)
    made._load_checkpoint()
    wait_for(lambda: len(coordinator.of_kind(HELLO)) >= len(expected))
    assert {probe.role for probe in probes} == expected
    wait_for(lambda: service.api.asked)  # and the API, whose numbers verl logs
    assert made.actor_rollout_wg.calls == (expected != {"driver"})
    worker = made.actor_rollout_wg.worker_dict[0]
    worker.compute_log_prob(verl_fakes.with_notes(verl_fakes.tensors(), **noted(made)))
    assert len(probes) == len(expected)  # the first stage finds its probe


def noted(trainer: Any) -> dict[str, object]:
    """Return what a batch of the trainer brings to the ranks."""
    batch = verl_fakes.batch_v0()
    trainer._compute_ref_log_prob(batch)
    return dict(batch.meta_info)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("all", {"driver", "rollout", "reward_model"}), ("metrics", {"driver"})],
)
def test_what_the_trainer_s_process_reports_is_connected_before_the_first_step(
    mode: str,
    expected: set[str],
    verl: Modules,
    seen: Seen,
    coordinator: FakeCoordinator,
    probes: list[Probe],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, mode)
    made = verl_fakes.trainer(verl)
    made.config["reward"] = {"reward_model": {"enable": True, "enable_resource_pool": False}}
    manager = made.async_rollout_manager = types.SimpleNamespace(
        agent_loop_workers_class=None, generate_sequences=lambda batch: batch
    )
    before: list[str] = []

    def fit(*_: object) -> None:
        made._load_checkpoint()
        before.extend(probe.role for probe in probes)
        manager.generate_sequences("prompts")
        made._compute_reward_colocate(verl_fakes.batch_v0())
        made._compute_ref_log_prob(verl_fakes.batch_v0())

    seen.outcomes["fit"] = fit
    coordinator.settle_at_once = True
    made.fit()
    assert {*before} == expected
    assert len(probes) == len(expected)  # the first stages find theirs
    told = {event.fields["resumed_from_step"] for event in coordinator.of_kind(HELLO)}
    assert told == {verl_fakes.STEP}


def test_nobody_is_connected_for_a_validation_alone(verl: Modules, probes: list[Probe]) -> None:
    made = with_ranks(verl)
    made.config["trainer"]["val_only"] = True
    made._load_checkpoint()
    made.fit()
    assert probes == []


def test_a_training_that_fails_before_its_first_step_is_closed(
    verl: Modules, seen: Seen, probes: list[Probe]
) -> None:
    made = with_ranks(verl)
    made._load_checkpoint()
    seen.outcomes["fit"] = ValueError("verl's own")
    with pytest.raises(ValueError, match="own"):
        made.fit()
    assert [probe.is_inert for probe in probes if probe.role == "driver"] == [True]


def test_agent_loops_are_connected_before_the_first_step(
    verl: Modules, probes: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = verl_fakes.trainer(verl)
    loop = Group()
    loop.config = made.config  # type: ignore[attr-defined]
    made.async_rollout_manager = types.SimpleNamespace(agent_loop_workers=[loop])
    monkeypatch.setattr(rollout, "_workers_report", lambda manager: True)
    monkeypatch.setattr(rollout, "_index", lambda: 1)
    made.fit()
    assert [(probe.role, probe.rank) for probe in probes] == [("rollout", 1)]


# --- the batch -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indexes", "expected"),
    [
        ([7, 7, 9, 9], ["gsm8k:7", "gsm8k:7", "gsm8k:9", "gsm8k:9"]),
        ([0, 0, 0, 0], None),  # a dataset without indexes: verl gives each row 0
    ],
)
def test_prompts_are_told_by_their_dataset_where_it_tells_them_apart(
    verl: Modules, seen: Seen, ended: Read, indexes: list[int], expected: list[str] | None
) -> None:
    batch = verl_fakes.batch_v0()
    extra = np.empty(4, dtype=object)
    extra[:] = [{"index": index} for index in indexes]
    batch.non_tensor_batch |= {"extra_info": extra, "data_source": np.array(["gsm8k"] * 4, object)}
    compute_old_log_prob(verl, seen, batch)
    [end] = ended(1)
    assert end.payload["strings"].get("prompt_hashes") == expected


def test_the_step_s_log_probs_with_ids_and_versions(verl: Modules, seen: Seen, ended: Read) -> None:
    batch = verl_fakes.batch_v0()
    compute_old_log_prob(verl, seen, batch)
    [end] = ended(1)
    assert (end.stage, end.role, end.rank, end.clock) == (
        "actor_compute_log_prob",
        "driver",
        0,
        (3, 2),
    )
    assert set(end.payload["tensors"]) == STREAMS | {"versions"}
    assert end.payload["strings"] == {
        "sample_ids": ["g0_0", "g0_1", "g1_0", "g1_1"],
        "group_ids": ["g0", "g0", "g1", "g1"],
    }
    tag, shape, data, _ = end.payload["tensors"]["old_log_probs"]
    expected = batch.batch["rollout_log_probs"] - 0.01
    assert (tag, tuple(shape)) == ("float32", (4, 3))
    np.testing.assert_array_equal(np.asarray(data).reshape(4, 3), expected.numpy())
    assert np.asarray(end.payload["tensors"]["versions"][2]).tolist() == [2, 2, 2, 2]
    rollout = end.payload["meta"]["streams"]["rollout"]
    assert (rollout["engine"], rollout["temperature"]) == ("vllm", 0.7)


def test_the_index_of_a_sample_stays_with_its_row(verl: Modules, seen: Seen, ended: Read) -> None:
    batch = verl_fakes.batch_v0()
    order = [2, 0, 3, 1]

    def reorder(*_: object, **__: object) -> None:
        batch.batch = batch.batch[order]
        batch.non_tensor_batch = {k: v[order] for k, v in batch.non_tensor_batch.items()}

    seen.outcomes["_balance_batch"] = reorder
    batch.non_tensor_batch["uid"] = np.array(["g0", "g0", "g1", "g1"], dtype=object)
    verl_fakes.trainer(verl)._balance_batch(batch)
    compute_old_log_prob(verl, seen, batch)
    strings = ended(1)[0].payload["strings"]
    assert strings["sample_ids"] == ["g1_0", "g0_0", "g1_1", "g0_1"]
    assert strings["group_ids"] == ["g1", "g0", "g1", "g0"]


@pytest.mark.parametrize("is_asked", [False, True])
def test_bfloat16_is_reported_and_verl_s_own_metrics_are_upcast_where_asked(
    is_asked: bool, verl: Modules, seen: Seen, ended: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_asked:
        monkeypatch.setenv(FLOAT32, "1")
    half, mask = torch.full((4, 3), -0.3, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.int64)
    held = verl_fakes.tensors(old_log_probs=half)
    in_v1(verl, seen, held)
    verl_fakes.trainer(verl, v1=True)._compute_old_log_prob(verl_fakes.batch_v1())
    tensors = ended(1)[0].payload["tensors"]
    assert (tensors["old_log_probs"][0], tensors["rollout_log_probs"][0]) == ("bfloat16", "float32")
    [given] = [args[0] for name, args, _ in seen.calls if name == "calculate_debug_metrics"]
    expected = half.float() if is_asked else half
    assert given.batch["old_log_probs"].dtype == expected.dtype
    assert torch.equal(given.batch["old_log_probs"], expected)
    assert given.batch["response_mask"] is held["response_mask"]
    assert held["old_log_probs"] is half  # what trains is not touched
    helper = verl["verl.trainer.ppo.rollout_corr_helper"]
    helper.compute_offpolicy_metrics(half, rollout_log_prob=half.float(), response_mask=mask)
    _, metrics_of, _ = seen.calls[-1]
    assert [t.dtype for t in metrics_of] == [expected.dtype, torch.float32, torch.int64]
    assert metrics_of[2] is mask


def test_v1_s_keys_name_the_samples_and_tags_their_versions(
    verl: Modules, seen: Seen, ended: Read
) -> None:
    batch = verl_fakes.batch_v1()
    newest = [2, 2, 2, 3]
    batch.tags = [{"min_global_steps": 2, "max_global_steps": n} for n in newest]
    in_v1(verl, seen, verl_fakes.tensors())
    verl_fakes.trainer(verl, v1=True)._compute_old_log_prob(batch)
    payload = ended(1)[0].payload
    assert payload["strings"]["sample_ids"] == ["g0_0_0", "g0_1_0", "g1_0_0", "g1_1_0"]
    assert payload["strings"]["group_ids"] == ["g0", "g0", "g1", "g1"]
    assert np.asarray(payload["tensors"]["versions"][2]).tolist() == [2, 2, 2, 2]
    assert payload["meta"]["samples_of_mixed_versions"] == 1


def test_a_trainer_that_may_be_asynchronous_claims_no_versions(
    verl: Modules, seen: Seen, ended: Read
) -> None:
    plain = verl["verl.trainer.ppo.ray_trainer"].RayPPOTrainer
    vars(verl["verl.trainer.ppo.ray_trainer"])["RayPPOTrainer"] = type(
        "FullyAsyncTrainer", (plain,), {}
    )
    compute_old_log_prob(verl, seen, verl_fakes.batch_v0())
    assert set(ended(1)[0].payload["tensors"]) == STREAMS


def test_metrics_that_belong_to_no_step_are_not_used(
    verl: Modules, seen: Seen, probes: list[Probe]
) -> None:
    held = verl_fakes.DataProto(verl_fakes.tensors())
    verl["verl.utils.debug.metrics"].calculate_debug_metrics(held)
    assert (seen.calls[0][1][0], probes) == (held, [])


def test_rewards_and_the_advantages_of_the_update(verl: Modules, seen: Seen, ended: Read) -> None:
    rejected = torch.tensor([[1, 0, 0]] * 4)
    scores = torch.tensor([[0.0, 0.0, float(row)] for row in range(4)])
    more = {"advantages": torch.ones(4, 3), "token_level_scores": scores, "response_mask": rejected}
    data = verl_fakes.DataProto(verl_fakes.tensors(**more), verl_fakes.batch_v0().non_tensor_batch)
    v0 = verl["verl.trainer.ppo.ray_trainer"]
    trainer_calls.get_driver(verl_fakes.trainer(verl))
    seen.outcomes["compute_advantage"] = lambda data, _: data
    assert v0.compute_advantage(data, adv_estimator="gae") is data
    [end] = ended(1)
    assert (end.stage, end.clock) == ("compute_advantage", (3, 2))
    tensors = end.payload["tensors"]
    assert np.asarray(tensors["rewards"][2]).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert np.asarray(tensors["response_mask"][2]).reshape(4, 3).tolist() == rejected.tolist()
    assert {"advantages", "versions"} <= set(tensors)
    assert end.payload["strings"]["sample_ids"][0] == "g0_0"


def test_v1_s_inner_call_is_not_a_second_batch(verl: Modules, seen: Seen, ended: Read) -> None:
    data = verl_fakes.DataProto(verl_fakes.tensors(advantages=torch.ones(4, 3)))
    v1 = verl["verl.trainer.ppo.v1.trainer_base"]
    inner = verl["verl.trainer.ppo.ray_trainer"].compute_advantage
    trainer_calls.get_driver(verl_fakes.trainer(verl, v1=True))
    seen.outcomes["compute_advantage"] = data
    seen.outcomes["compute_advantage_for_multi_trajectories"] = lambda data, _: inner(data, "gae")
    keys = verl_fakes.batch_v1().keys
    v1.compute_advantage_for_multi_trajectories(data, batch_keys=keys)
    [end] = ended(1)
    assert end.payload["strings"]["sample_ids"] == keys


# --- the step, where the ranks find it --------------------------------------------------------


@pytest.mark.parametrize("v1", [False, True])
@pytest.mark.parametrize("method", ["_compute_ref_log_prob", "_compute_values", "_update_critic"])
def test_each_batch_carries_the_step(v1: bool, method: str, verl: Modules) -> None:
    batch: Any = verl_fakes.batch_v1() if v1 else verl_fakes.batch_v0()
    getattr(verl_fakes.trainer(verl, v1=v1), method)(batch)
    found = planted(batch)
    assert (found.run, found.attempt_key) == ("maths.first", "attempt-a")
    assert (found.step, found.policy_version, found.synchronous) == (3, 2, True)


def test_the_text_is_the_same_throughout_a_step(verl: Modules) -> None:
    # verl asserts that meta_info of batches that it unites is equal.
    trainer, one, other = verl_fakes.trainer(verl), verl_fakes.batch_v0(), verl_fakes.batch_v0()
    trainer._compute_values(one)
    trainer._update_actor(other)
    assert one.meta_info == other.meta_info
    trainer.global_steps += 1
    trainer._update_actor(other)
    assert planted(other).step == 4


def test_weights_that_are_counted_apart_are_not_counted_by_steps(
    verl: Modules, seen: Seen, ended: Read, coordinator: FakeCoordinator
) -> None:
    trainer, batch = verl_fakes.trainer(verl), verl_fakes.batch_v0()
    trainer.current_param_version = 1
    trainer._compute_reward_colocate(batch)
    trainer._compute_values(batch)
    assert (planted(batch).step, planted(batch).policy_version) == (3, 1)
    assert ended(1)[0].clock == (3, 1)
    # It logs what it gathered over several steps, by that version.
    data = {"training/global_step": 3, "loss": 0.5}
    verl[TRACKING].Tracking().log(data, step=1)
    [(_, (_, logged, _, _), _)] = [call for call in seen.calls if call[0] == "log"]
    trainer._compute_reward_colocate(batch)
    ended(2)
    assert (logged, coordinator.of_kind(LOG)) == (data, [])


def test_a_whole_configuration_travels_once_and_is_read_before_the_first_step(
    verl: Modules, seen: Seen, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, batch = verl_fakes.trainer(verl), verl_fakes.batch_v0()
    trainer.config["algorithm"]["rollout_correction"]["rollout_is"] = "token"
    trainer.config["padding"] = {f"option_{n}": "x" * 50 for n in range(500)}
    read: list[str] = []
    settings = configuration.settings

    def counted(config: object) -> dict[str, Any]:
        read.append("settings")
        return settings(config)

    monkeypatch.setattr(configuration, "settings", counted)

    def fit(*_: object) -> None:
        assert read == ["settings"]
        trainer._update_actor(batch)
        trainer._compute_reward_colocate(batch)

    seen.outcomes["fit"] = fit
    coordinator.settle_at_once = True
    trainer.fit()
    assert planted(batch).settings == {"rollout_is": "token"}
    assert len(batch.meta_info[context.KEY]) < 2000
    wait_for(lambda: coordinator.of_kind(FINISH))
    told = [event.fields["settings"] for event in coordinator.of_kind(HELLO)]
    assert sorted("verl" in each for each in told) == [False, True]
    assert read == ["settings"]


def test_validation_belongs_to_no_step(verl: Modules, seen: Seen) -> None:
    trainer, during, after = verl_fakes.trainer(verl), verl_fakes.batch_v0(), verl_fakes.batch_v0()

    def validate(*_: object) -> None:
        trainer._compute_values(during)
        raise ValueError("verl's own")

    seen.outcomes["_validate"] = validate
    with pytest.raises(ValueError, match="own"):
        trainer._validate()
    trainer._compute_values(after)
    assert (context.extract(during), planted(after).step) == (None, 3)


def test_rewards_of_a_colocated_model_are_a_stage(verl: Modules, ended: Read) -> None:
    verl_fakes.trainer(verl)._compute_reward_colocate(verl_fakes.batch_v0())
    [end] = ended(1)
    assert (end.stage, end.role, end.clock) == ("compute_rm_score", "reward_model", (3, 2))


def test_bypass_mode_names_the_samples_and_has_the_loss_report(
    verl: Modules, seen: Seen, probes: list[Probe]
) -> None:
    batch = verl_fakes.batch_v0()
    trainer = verl_fakes.trainer(verl, bypass=True)
    trainer._update_actor(batch)
    assert planted(batch).bypass
    assert list(batch.non_tensor_batch[context.SAMPLES]) == ["g0_0", "g0_1", "g1_0", "g1_1"]
    other = verl_fakes.batch_v0()
    verl_fakes.trainer(verl)._update_actor(other)
    assert not planted(other).bypass
    assert context.SAMPLES not in other.non_tensor_batch


# --- numbers that return, and the end ----------------------------------------------------------


def answer(**metrics: object) -> dict[str, Any]:
    return {
        "stage": "actor_compute_log_prob", "complete": "complete", "missing": (),
        "coverage": {"payloads_pending": 0}, "metrics": metrics,
    }  # fmt: skip


def test_the_service_s_numbers_stand_beside_verl_s_own(
    verl: Modules, seen: Seen, service: FakeService, coordinator: FakeCoordinator
) -> None:
    coordinator.settle_at_once = True
    service.api.answers[3] = answer(**{"per_round/total_rounds": 2, "mine": 1.0, "nan": "nan"})
    compute_old_log_prob(verl, seen, verl_fakes.batch_v0())
    assert trainer_calls._driver is not None
    feed = trainer_calls._driver._feed
    assert feed is not None
    wait_for(lambda: feed.get(3))
    tracking = verl[TRACKING].Tracking()
    data = {"training/global_step": 3, "mine": 0.5, "step": 9, "flag": True, "text": "x"}
    tracking.log(data=data, step=3)
    [(_, (_, logged, step, backend), _)] = [call for call in seen.calls if call[0] == "log"]
    assert (logged["per_round/total_rounds"], logged["mine"], step, backend) == (2, 0.5, 3, None)
    assert math.isnan(logged["nan"])
    assert logged["stagescope/mine"] == 1.0  # beside verl's own of that name
    assert "per_round/total_rounds" not in data
    wait_for(lambda: coordinator.of_kind(LOG))
    [told] = coordinator.of_kind(LOG)
    assert told.fields["scalars"] == {"training/global_step": 3.0, "mine": 0.5}
    assert told.fields["step"] == 3


def test_another_s_log_is_not_changed(verl: Modules, seen: Seen, probes: list[Probe]) -> None:
    trainer_calls.get_driver(verl_fakes.trainer(verl))
    data = {"val/score": 0.5}
    verl[TRACKING].Tracking().log(data, 3)
    assert (seen.calls[0][1][1] is data, probes) == (True, [])


@pytest.mark.parametrize("mode", ["hang", "dead"])
def test_a_service_that_is_gone_changes_and_delays_nothing(
    mode: str, verl: Modules, seen: Seen, service: FakeService, coordinator: FakeCoordinator
) -> None:
    if mode == "dead":
        coordinator.die()
    coordinator.mode, service.api.hangs = mode, True
    batch = verl_fakes.batch_v0()
    trainer = compute_old_log_prob(verl, seen, batch)
    assert trainer._update_actor(batch) == "the result of _update_actor"
    data = {"training/global_step": 3, "loss": 0.5}
    verl[TRACKING].Tracking().log(data, step=3)
    [(_, (_, logged, _, _), _)] = [call for call in seen.calls if call[0] == "log"]
    assert logged == data
    assert coordinator.events == {}


def test_the_resumed_step_is_the_one_that_was_loaded(
    verl: Modules, seen: Seen, coordinator: FakeCoordinator, ended: Read
) -> None:
    trainer = verl_fakes.trainer(verl)
    trainer._load_checkpoint()
    trainer.global_steps += 1
    trainer._compute_reward_colocate(verl_fakes.batch_v0())
    assert ended(1)[0].clock == (4, 3)
    wait_for(lambda: len(coordinator.of_kind(HELLO)) == 2)
    assert {hello.fields["resumed_from_step"] for hello in coordinator.of_kind(HELLO)} == {3}


def test_the_end_of_training_is_the_end_of_its_step(
    verl: Modules, seen: Seen, coordinator: FakeCoordinator
) -> None:
    trainer = verl_fakes.trainer(verl)
    seen.outcomes["fit"] = lambda *_: trainer._compute_reward_colocate(verl_fakes.batch_v0())
    coordinator.settle_at_once = True
    trainer.fit()
    wait_for(lambda: coordinator.of_kind(FINISH))
    steps = [event.fields["step"] for event in coordinator.of_kind(END_STEP)]
    assert steps == [3]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_trainer_s_own_fit_is_closed_as_verl_s_is(
    is_async: bool, verl: Modules, coordinator: FakeCoordinator
) -> None:
    plain = verl["verl.trainer.ppo.ray_trainer"].RayPPOTrainer

    def fit(self: Any) -> str:
        self._compute_reward_colocate(verl_fakes.batch_v0())
        plain.fit(self)  # verl's own in it closes nothing twice
        return "the result"

    async def fit_async(self: object) -> str:
        return fit(self)

    own = type("RayPPOTrainer", (plain,), {"fit": fit_async if is_async else fit})
    vars(verl["verl.trainer.ppo.ray_trainer"])["RayPPOTrainer"] = own
    coordinator.settle_at_once = True
    trainer = verl_fakes.trainer(verl)
    assert (asyncio.run(trainer.fit()) if is_async else trainer.fit()) == "the result"
    wait_for(lambda: coordinator.of_kind(FINISH))
    assert [event.fields["step"] for event in coordinator.of_kind(END_STEP)] == [3]
    assert len(coordinator.of_kind(HELLO)) == 2  # driver and reward_model, none made anew


def test_the_routes_of_the_batch_are_compared(verl: Modules, seen: Seen, ended: Read) -> None:
    batch = verl_fakes.batch_v0()
    rows, width = batch.batch["response_mask"].shape
    routes = torch.tensor([4, 1], dtype=torch.int16).repeat(rows, 2 + width, 3, 1)
    routes[:, -1] = 0  # verl fills the row of the last token
    batch.batch["routed_experts"] = routes
    compute_old_log_prob(verl, seen, batch)
    sent = ended(1)[0].payload["tensors"]
    assert "routed_experts" not in sent
    on = batch.batch["response_mask"].numpy() != 0
    assert {*np.asarray(sent["routing_flips"][2])[on].tolist()} == {NO_TRAINER_ROUTE}
