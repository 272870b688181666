"""miles' flag: both streams, samples and scalars, at the import paths of the fork."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.api import Service
from tests.support.trainers import contracts
from tests.workers.integrations.conftest import Attach
from tests.workers.integrations.fakes import miles_modules
from tests.workers.integrations.test_slime import fresh_rank, rollout, streams

from stagescope_workers import finish
from stagescope_workers.integrations import miles, slime, slime_modules, training

ACTOR = "miles.backends.megatron_utils.actor"
WIDTH = 16


@pytest.fixture
def run(attach_fake: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The run's name; the fake package can be imported."""
    miles_modules.write(tmp_path)
    with attach_fake("miles") as name, fresh_rank(monkeypatch):
        yield name


def arguments(**options: object) -> Namespace:
    given = {
        "rank": 0, "world_size": 1, "save": "/data/qwen", "save_debug_train_data": None,
        "use_rollout_logprobs": False, "qkv_format": "thd", "rollout_temperature": 1.0,
        "use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0, "custom_tis_function_path": None,
    }  # fmt: skip
    return Namespace(**{**given, **options})


def batch(step: int) -> dict[str, Any]:
    """A rank's share of a rollout, as `train_actor` gets it: without the samples' positions."""
    data = rollout(step)
    del data["partition"]
    return {**data, "max_seq_lens": [WIDTH] * len(data["tokens"])}


def train(args: Namespace, run: str, steps: range = range(2)) -> None:
    """Train as miles' rank does: its own modules come first, then the flag's function."""
    actor = importlib.import_module(ACTOR)
    miles.init(args)
    worker = actor.MegatronTrainRayActor(args)
    for step in steps:
        assert worker.train_actor(step, batch(step), witness_info=None, attempt=0) == "normal"
        worker.update_weights()
    slime._rank.probe.end_step(steps[-1])
    finish(30.0, run=run)


def test_a_step_has_both_streams_samples_and_scalars(live: Service, run: str) -> None:
    train(arguments(), run)
    for step in range(2):
        p, q = streams(batch(step))
        answer = live.get(f"/steps/{step}/metrics", run=run)
        assert (answer["stage"], answer["complete"]) == ("actor_update", "complete")
        assert answer["coverage"]["tokens"] == len(p)
        metrics = answer["metrics"]
        assert metrics["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)
        assert metrics["rollout_corr/rollout_is_truncated"] == 1.0
    rows = live.get("/steps/1/samples", run=run)["rows"]
    assert {row["sample_uid"]: row["reward"] for row in rows} == {
        f"0-{row}": reward for row, reward in enumerate(batch(1)["rewards"])
    }
    rows = live.get("/steps/1/stages", run=run)["rows"]
    assert {(row["role"], row["stage"]) for row in rows} == {
        ("actor", "actor_compute_log_prob"), ("actor", "actor_update"), ("actor", "weight_sync"),
    }  # fmt: skip
    scalars = live.get("/steps/1/scalars", run=run)["rows"]
    assert {row["name"]: row["value"] for row in scalars} == {"train/loss": 0.5}
    [attempt] = live.get(f"/runs/{run}/attempts")["rows"]
    assert "tis_clip" in attempt["fingerprint"]["config"]["miles"]


def layout(rank: int) -> dict[str, int]:
    return {"cp_rank": rank, "cp_size": 2, "dp_rank": 0, "dp_size": 1}


@pytest.mark.parametrize("form", ["thd", "bshd"])
def test_parts_of_context_parallel_ranks_add_up(
    live: Service, run: str, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    actor = importlib.import_module(ACTOR)
    cp = sys.modules["miles.backends.training_utils.cp_utils"]
    for rank in (0, 1):
        monkeypatch.setattr(cp, "rank", rank)
        monkeypatch.setattr(cp, "size", 2)
        monkeypatch.setattr(training, "megatron_layout", lambda rank=rank: layout(rank))
        monkeypatch.setattr(slime, "_rank", slime.Rank())
        args = arguments(rank=rank, world_size=2, qkv_format=form)
        data = batch(0)
        data["rollout_log_probs"] = [
            cp.slice_log_prob_with_cp(row, total, count, form, WIDTH)
            for row, total, count in zip(
                data["rollout_log_probs"], data["total_lengths"], data["response_lengths"],
                strict=True,
            )
        ]  # fmt: skip
        miles.init(args)
        worker = actor.MegatronTrainRayActor(args)
        worker.train_actor(0, data, witness_info=None, attempt=0)
        slime._rank.probe.end_step(0)
    finish(30.0, run=run)
    p, q = streams(rollout(0))
    answer = live.get("/steps/0/metrics", run=run)
    assert answer["coverage"]["tokens"] == len(p)
    assert answer["coverage"]["sequences"] == len(rollout(0)["tokens"])
    assert answer["metrics"]["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)


def test_without_its_pass_before_the_update_a_step_is_not_measured(live: Service, run: str) -> None:
    train(arguments(use_rollout_logprobs=True), run)
    problem = live.problem(404, "/steps/1/metrics", run=run)
    assert "rollout_log_probs" in problem["detail"]
    rows = live.get("/steps/1/stages", run=run)["rows"]
    assert {row["stage"] for row in rows} == {"actor_update", "weight_sync"}


def test_nothing_of_ours_reaches_the_training(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(slime, "payload", fail)
    train(arguments(save_debug_train_data="/d"), run)
    assert len(sys.modules["miles.utils.train_dump_utils"].saved) == 2


def test_the_fakes_are_as_recorded(run: str) -> None:
    def find(module: str, path: str) -> object:
        return contracts.at_path(importlib.import_module(module), path)

    assert contracts.fakes_differ("miles", find) == []


def test_rows_of_slime_have_the_positions_that_it_gives() -> None:
    """The fork's names for rows are its own alone."""
    data = {**rollout(0), "tokens": [torch.as_tensor(row) for row in rollout(0)["tokens"]]}
    found = slime.payload(slime_modules.SLIME, arguments(), data, {})
    assert found["sample_ids"] == ["6", "1", "4", "3"]
