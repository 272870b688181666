"""NexRL's steps, parts and dumps, with fakes of its modules that have the recorded interface."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.support.api import Service
from tests.support.trainers import contracts, nexrl_fakes

from stagescope_workers.integrations import patches, registry
from stagescope_workers.integrations.nexrl import debug_block, ranks
from stagescope_workers.integrations.patches import Patches
from stagescope_workers.probe.lifecycle import finish

EVERYTHING: Final = {
    "enable_data_dump": True,
    "dump_options": dict.fromkeys(debug_block.SELF_HOSTED, True),
    "remote_api_dump_options": dict.fromkeys(debug_block.REMOTE_API, True),
    "target_param_pattern": "q_proj",
}


@dataclasses.dataclass
class NexRL:
    """NexRL's fake modules by name, what patched them, and the variables of the run."""

    module: Callable[[str], ModuleType]
    patches: Patches
    run: pytest.MonkeyPatch


@pytest.fixture
def nexrl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: Service, request: pytest.FixtureRequest
) -> Iterator[NexRL]:
    """NexRL's fake modules, patched, in a process that reports to the service."""
    assert live.tokens is not None
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(nexrl_fakes.write(tmp_path / "fake")))
    monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.operate)
    monkeypatch.setenv("STAGESCOPE_RUN", request.node.name.replace("[", "-").replace("]", ""))
    monkeypatch.setenv("STAGESCOPE_ATTEMPT", "k")
    found = registry.integration("nexrl")
    assert found is not None
    installed = registry.install(found.package, found.module)

    def module(name: str) -> ModuleType:
        return importlib.import_module(f"nexrl.{name}")

    yield NexRL(module, installed, monkeypatch)
    finish(5)
    sys.meta_path.remove(installed)
    ranks._probes.clear()
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "nexrl":
            del sys.modules[name]


class Pool:
    """Gives the trajectories of each step, after it was asked in vain."""

    def __init__(self, steps: Sequence[Sequence[object]]) -> None:
        self._steps = list(steps)
        self._asked = 0

    def get_trajectories(self) -> Sequence[object] | None:
        self._asked += 1
        return self._steps.pop(0) if self._asked % 2 == 0 else None


class Client:
    """A train service that has one FSDP rank in the trainer's process."""

    def __init__(self, nexrl: NexRL, debug: Mapping[str, object]) -> None:
        module = nexrl.module("train_service_backend.fsdp_worker.fsdp_actor")
        config = {"debug": debug, "ppo_mini_batch_size": 4, "ppo_epochs": 2}
        self.actor = module.DataParallelPPOActor(config, log_probs_of)
        self.old: list[tuple[object, object]] = []

    def _data(self, data: dict[str, Any]) -> SimpleNamespace:
        tensors = {name: each for name, each in data["batch"].items() if torch.is_tensor(each)}
        rows = len(tensors["responses"])
        return types.SimpleNamespace(
            batch=TensorDict(tensors, batch_size=[rows]),
            meta_info=json.loads(json.dumps(data["meta_info"])),
        )

    def compute_log_prob(self, data: dict[str, Any]) -> object:
        old = self.actor.compute_log_prob(self._data(data))
        self.old.append((old, data["batch"]["responses"]))
        return {"batch": {"old_log_probs": old}}

    def update_actor(self, data: dict[str, Any]) -> object:
        return {"meta_info": {"metrics": self.actor.update_policy(self._data(data))}}

    def save_checkpoint(self, **arguments: object) -> object:
        return {}


def log_probs_of(responses: torch.Tensor) -> torch.Tensor:
    """What the fake model thinks of tokens: any function of them."""
    return -torch.remainder(responses * 0.37, 2.0) - 0.01


def trajectories(nexrl: NexRL, seed: int, *, logprobs: bool = True) -> list[object]:
    """Nine trajectories of three groups, in any order, two rounds each."""
    rng = np.random.default_rng(seed)
    made = []
    for group in range(3):
        for run in range(3):
            count = int(rng.integers(7, 12))
            mask = [0, 0, 1, 1, 0] + [1] * (count - 5)
            values = np.where(mask, -rng.exponential(1.0, count), 0.0).tolist()
            extra = {"group_id": f"task-{group}", "run_id": run, "task_id": group}
            made.append(
                nexrl.module("nexrl_types").Trajectory(
                    rng.integers(1, 90, count).tolist(),
                    mask,
                    float(rng.integers(0, 2)),
                    False,
                    {**extra, **({"logprobs": values} if logprobs else {})},
                )
            )
    return [made[index] for index in rng.permutation(len(made))]


def tokens(given: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """p and q of the model's tokens, each trajectory once."""
    p, q = [], []
    for one in given:
        chosen = np.array(one["mask"])[1:] == 1
        p.append(log_probs_of(torch.tensor(one["tokens"][1:]).float()).double().numpy()[chosen])
        q.append(np.array(one["q"])[1:][chosen])
    return np.concatenate(p), np.concatenate(q)


def remembered(given: list[Any]) -> list[object]:
    """What the trajectories were before the trainer padded them."""
    return [
        {"tokens": list(one.tokens), "mask": list(one.loss_mask), "reward": one.reward,
         "q": list(one.extra_fields.get("logprobs", []))}
        for one in given
    ]  # fmt: skip


def train(nexrl: NexRL, steps: Sequence[list[object]], debug: dict[str, Any]) -> Any:
    config = {"total_train_steps": len(steps), "debug": debug, "client": Client(nexrl, debug)}
    module = nexrl.module("trainer.self_hosted_grpo_trainer")
    trainer = module.SelfHostedGrpoTrainer(config)
    trainer._trajectory_pool = Pool(steps)
    trainer._main_loop()
    return trainer


def answer(live: Service, path: str, run: str) -> Any:
    """An answer that has everything that was announced."""
    deadline = time.monotonic() + 60
    while True:
        response = live.read.get(path, params={"run": run})
        found = response.json()
        if response.status_code == 200 and not found.get("coverage", {}).get("payloads_pending"):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_both_streams_of_live_trajectories_and_each_row_once(nexrl: NexRL, live: Service) -> None:
    run = "test_both_streams_of_live_trajectories_and_each_row_once"
    steps = [trajectories(nexrl, seed) for seed in (1, 2)]
    had = [remembered(step) for step in steps]
    train(nexrl, steps, {})
    for step in (0, 1):
        p, q = tokens(had[step])
        found = answer(live, f"/steps/{step}/metrics", run)
        metrics = found["metrics"]
        assert found["stage"] == "actor_compute_log_prob"
        # Twelve rows were trained: three are copies of others.
        assert found["coverage"]["tokens"] == len(p)
        assert found["coverage"]["sequences"] == 9
        assert metrics["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-6)
        assert metrics["training/rollout_probs_diff_max"] == pytest.approx(
            np.abs(np.exp(p) - np.exp(q)).max(), rel=1e-6
        )
        assert metrics["per_round/total_rounds"] == 2
        stages = {row["stage"] for row in answer(live, f"/steps/{step}/stages", run)["rows"]}
        assert stages == {
            "rollout_generate", "actor_compute_log_prob", "actor_update", "weight_sync"
        }  # fmt: skip
    scalars = answer(live, "/steps/1/scalars", run)["rows"]
    names = {row["name"] for row in scalars}
    assert {"actor/grad_norm", "grpo/advantage/mean"} <= names
    assert "training/note" not in names


def test_parts_are_counted_where_nexrls_numbers_begin_again(nexrl: NexRL, live: Service) -> None:
    run = "test_parts_are_counted_where_nexrls_numbers_begin_again"
    train(nexrl, [trajectories(nexrl, 3)], {})
    rows = answer(live, "/steps/0/scalars", run)["rows"]
    found = {
        row["part"]: row["value"]
        for row in rows
        if row["name"] == "loss" and row["stage"] == "actor_update"
    }
    # 12 rows: two epochs of three mini-batches of two micro-batches.
    assert found == {
        f"0.{epoch}.{mini}.{micro}": 100.0 * epoch + 10.0 * mini + micro
        for epoch in range(2)
        for mini in range(3)
        for micro in range(2)
    }


@pytest.mark.parametrize(
    "debug",
    [
        {},
        {"enable_data_dump": True, "dump_options": {"loss": True}},
        {"enable_data_dump": True, "dump_options": {"loss": True}, "dump_every_n_steps": 2},
        EVERYTHING,
    ],
)
def test_nexrls_own_files_are_those_of_its_options(
    nexrl: NexRL, live: Service, tmp_path: Path, debug: Mapping[str, object]
) -> None:
    def files(name: str) -> list[str]:
        block = {**debug, "dump_dir": str(tmp_path / name)}
        train(nexrl, [trajectories(nexrl, seed) for seed in (4, 5)], block)
        return sorted(path.name for path in tmp_path.glob(f"{name}/*"))

    with_us = files("with")
    for patch in nexrl.patches:
        if patch.path.startswith("DataDumper"):
            assert patch.replacement is not None
            dumper = sys.modules[patch.module].DataDumper
            setattr(dumper, patch.path.partition(".")[2], vars(patch.replacement)["__wrapped__"])
    assert with_us == files("without")
    assert bool(with_us) == bool(debug)


def test_the_mismatch_is_not_measured_without_the_rollouts_log_probs(
    nexrl: NexRL, live: Service, caplog: pytest.LogCaptureFixture
) -> None:
    run = "test_the_mismatch_is_not_measured_without_the_rollouts_log_probs"
    patches._logged.clear()
    train(nexrl, [trajectories(nexrl, 6, logprobs=False)], {})
    assert live.read.get("/steps/0/metrics", params={"run": run}).status_code == 404
    assert "the mismatch is not measured" in caplog.text


def test_the_remote_api_mode(nexrl: NexRL, live: Service, tmp_path: Path) -> None:
    run = "test_the_remote_api_mode"
    debug = {**EVERYTHING, "dump_dir": str(tmp_path / "d")}
    config = {"total_train_steps": 1, "debug": debug}
    trainer = nexrl.module("trainer.remote_api_grpo_trainer").RemoteApiGrpoTrainer(config)
    trainer._trajectory_pool = Pool([trajectories(nexrl, 7)])
    trainer._main_loop()
    scalars = {
        (row["stage"], row["name"]): row["value"]
        for row in answer(live, "/steps/0/scalars", run)["rows"]
    }
    assert scalars["actor_update", "loss"] == 0.25
    assert scalars[None, "training/loss"] == 0.25
    stages = {row["stage"] for row in answer(live, "/steps/0/stages", run)["rows"]}
    assert stages == {"rollout_generate", "actor_update"}
    findings = live.get("/findings", run=run)["rows"]
    assert [each for each in findings if each["severity"] == "error"] == []
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [
        "datums_0", "prepared_trajectories_0", "training_metrics_0",
    ]  # fmt: skip


def test_an_exception_of_ours_leaves_the_training_alone(
    nexrl: NexRL, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stagescope_workers.integrations.nexrl import training

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    for name in ("observe", "record_old", "record_update", "report", "begin", "note_batch"):
        monkeypatch.setattr(training.Training, name, fail)
    trainer = train(nexrl, [trajectories(nexrl, 8)], {})
    assert trainer.logged[0]["actor/grad_norm"] == 1.0


def test_every_patch_finds_its_function(nexrl: NexRL) -> None:
    """The fakes have the interface of NexRL 1.4.0."""
    for patch in nexrl.patches:
        importlib.import_module(patch.module)
    inherited = {"SelfHostedOpdTrainer"}
    missing = [str(each) for each in nexrl.patches if each.is_missing]
    assert [each for each in missing if not any(name in each for name in inherited)] == []


def test_the_debug_block_is_read_as_nexrl_reads_it(nexrl: NexRL, tmp_path: Path) -> None:
    dumper = nexrl.module("utils.data_dumper").DataDumper
    assert debug_block.read_dumper(dumper({})) is None
    block = debug_block.read_dumper(
        dumper({"debug": {**EVERYTHING, "dump_dir": str(tmp_path / "x"), "dump_every_n_steps": 5}})
    )
    assert block is not None
    assert block.types == (*debug_block.SELF_HOSTED, *debug_block.REMOTE_API)
    assert block.keep() == {
        "every_n_steps": 5,
        "what": ["trajectory", "old_log_probs", "forward_data", "loss",
                 "prepared_trajectories", "datums", "training_metrics"],
    }  # fmt: skip
    assert "use_orig_params=False" in block.lines()[1]


def test_weavers_variables() -> None:
    assert debug_block.read_weaver({}) is None
    assert debug_block.read_weaver({"WEAVER_DEBUG_DUMP_ENABLED": "0"}) is None
    found = debug_block.read_weaver(
        {
            "WEAVER_DEBUG_DUMP_ENABLED": "1",
            "WEAVER_DEBUG_DUMP_DIR": "/d",
            "WEAVER_DEBUG_DUMP_EVERY_N": "x",
            "WEAVER_DEBUG_DUMP_OPTIONS": "forward_data, is_loss_debug,nonsense",
        }
    )
    assert found is not None
    assert (found.directory, found.every_n_steps) == ("/d", 1)
    assert found.options == ("forward_data", "is_loss_debug")
    assert len(found.problems) == 2
    assert "stagescope import /d --run r-weaver" in found.lines("r")[-1]


def test_a_trainer_by_the_configuration_is_attached_once(nexrl: NexRL) -> None:
    from stagescope_workers.integrations.nexrl import door

    before = list(sys.meta_path)
    made = door.SelfHostedGrpoTrainer
    assert sys.meta_path == before
    assert made.__module__ == door.__name__
    assert door.SelfHostedGrpoTrainer is made
    with pytest.raises(AttributeError, match="RemoteApiGrpoTrainer"):
        _ = door.Nonsense
    delattr(door, "SelfHostedGrpoTrainer")


def test_the_fakes_are_as_recorded(nexrl: NexRL) -> None:
    def find(module: str, path: str) -> object:
        return contracts.at_path(importlib.import_module(module), path)

    assert contracts.fakes_differ("nexrl", find) == []
