"""slime's flag: both streams of a default GRPO step, from the paths of both of its layouts."""

from __future__ import annotations

import contextlib
import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from tests.support.api import Service
from tests.support.routes import marked, passes_of
from tests.support.trainers import contracts
from tests.workers.integrations.conftest import Attach
from tests.workers.integrations.fakes import slime_modules

from stagescope_workers import finish
from stagescope_workers.integrations import slime, training
from stagescope_workers.integrations import slime_modules as modules

HOMES: Final = ("slime.observability", "slime.utils")
PROMPTS: Final = (3, 2, 4, 2)
RESPONSES: Final = (6, 9, 5, 7)


def rollout(step: int) -> dict[str, Any]:
    """A rank's share of a rollout, in slime's columns; positions are not in order."""
    generator = torch.Generator().manual_seed(step)
    totals = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    tokens = [torch.randint(3, 90, (n,), generator=generator) for n in totals]
    masks = [torch.ones(n, dtype=torch.int) for n in RESPONSES]
    for mask in masks:
        mask[2:4] = 0
    return {
        "tokens": tokens, "loss_masks": masks, "total_lengths": totals,
        "response_lengths": list(RESPONSES), "rewards": [0.0, 1.0, 0.0, 1.0],
        "partition": [6, 1, 4, 3],
        "rollout_log_probs": [
            -0.1 - 0.01 * row[-n:] + 0.03 * torch.randn(n, generator=generator)
            for row, n in zip(tokens, RESPONSES, strict=True)
        ],
    }  # fmt: skip


def streams(data: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """p and q of the model's tokens, by plain numpy."""
    p, q = [], []
    for row, count, mask, rollout_row in zip(
        data["tokens"], RESPONSES, data["loss_masks"], data["rollout_log_probs"], strict=True
    ):
        on = mask.numpy().astype(bool)
        ids = row[-count:].numpy().astype(np.float32)
        p.append((np.float32(-0.1) - np.float32(0.01) * ids)[on])
        q.append(rollout_row.numpy()[on])
    return np.concatenate(p).astype(np.float64), np.concatenate(q).astype(np.float64)


def arguments(**options: object) -> Namespace:
    given = {
        "rank": 0, "world_size": 1, "save": "/data/qwen", "save_debug_train_data": None,
        "makes_old": False, "steps": 1, "rollout_temperature": 1.0, "wandb_key": "hidden-value",
    }  # fmt: skip
    return Namespace(**{**given, **options})


@pytest.fixture
def home(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", HOMES[0])


@pytest.fixture
def run(
    attach_fake: Attach, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The run's name; the fake package can be imported."""
    slime_modules.write(tmp_path, home)
    with attach_fake("slime") as name, fresh_rank(monkeypatch):
        yield name


@contextlib.contextmanager
def fresh_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the flag's function find a process in which it was not called; miles' is the same."""
    monkeypatch.setattr(slime, "_rank", slime.Rank())
    monkeypatch.setattr(slime, "_installed", None)
    yield
    if slime._installed is not None:
        sys.meta_path.remove(slime._installed)


def train(args: Namespace, run: str, steps: range = range(2)) -> list[dict[str, object]]:
    """Train as slime's rank does: its own modules come first, then the flag's function."""
    actor = importlib.import_module("slime.backends.megatron_utils.actor")
    slime.init(args)
    worker = actor.MegatronTrainRayActor(args)
    for step in steps:
        worker.train_actor(step, rollout(step))
        worker.update_weights()
    slime._rank.probe.end_step(steps[-1])
    finish(30.0, run=run)
    return [rollout(step) for step in steps]


def check(live: Service, run: str, step: int, data: dict[str, Any]) -> Any:
    p, q = streams(data)
    answer = live.get(f"/steps/{step}/metrics", run=run)
    metrics = answer["metrics"]
    assert (answer["stage"], answer["complete"]) == ("actor_update", "complete")
    assert answer["coverage"]["tokens"] == len(p)
    assert metrics["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(
        np.mean([np.abs(part).mean() for part in np.split(p - q, np.cumsum(sizes(data))[:-1])]),
        rel=1e-9,
    )
    return answer


def sizes(data: dict[str, Any]) -> list[int]:
    return [int(mask.sum()) for mask in data["loss_masks"]]


@pytest.mark.parametrize("home", HOMES, indirect=True)
def test_the_default_has_no_log_probs_and_is_captured(live: Service, run: str) -> None:
    """Two optimizer steps of one rollout: the first pass over each sample is what counts."""
    made = train(arguments(steps=2), run)
    for step, data in enumerate(made):
        answer = check(live, run, step, data)
        assert answer["metrics"]["per_round/total_rounds"] == 2
    rows = live.get("/steps/1/stages", run=run)["rows"]
    assert {(row["role"], row["stage"]) for row in rows} == {
        ("actor", "actor_update"), ("actor", "weight_sync")
    }  # fmt: skip
    scalars = live.get("/steps/1/scalars", run=run)["rows"]
    assert {row["name"]: row["value"] for row in scalars} == {"train/loss": 0.5}


@pytest.mark.parametrize(
    "options", [{"makes_old": True}, {"save_debug_train_data": "/d"}], ids=["old", "saved"]
)
def test_log_probs_that_slime_has_itself(
    live: Service, run: str, options: Mapping[str, object]
) -> None:
    made = train(arguments(**options), run)
    check(live, run, 1, made[1])
    if "save_debug_train_data" in options:
        saved = sys.modules["slime.observability.train_data_utils"].saved
        assert [step for step, _ in saved] == [0, 1]
        assert all("log_probs" in columns for _, columns in saved)


def test_parts_of_context_parallel_ranks_add_up(
    live: Service, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("slime.backends.megatron_utils.actor")
    cp = sys.modules["slime.backends.megatron_utils.cp_utils"]
    for rank in (0, 1):
        layout = {"cp_rank": rank, "cp_size": 2, "dp_rank": 0, "dp_size": 1}
        monkeypatch.setattr(cp, "rank", rank)
        monkeypatch.setattr(cp, "size", 2)
        monkeypatch.setattr(training, "megatron_layout", lambda layout=layout: layout)
        monkeypatch.setattr(modules, "ranks", lambda *_, rank=rank: (0, rank))
        monkeypatch.setattr(slime, "_rank", slime.Rank())
        args = arguments(rank=rank, world_size=2)
        data = rollout(0)
        whole = zip(
            data["rollout_log_probs"], data["total_lengths"], data["response_lengths"], strict=True
        )
        data["rollout_log_probs"] = [cp.slice_log_prob_with_cp(*row) for row in whole]
        slime.init(args)
        worker = sys.modules["slime.backends.megatron_utils.actor"].MegatronTrainRayActor(args)
        worker.train_actor(0, data)
        slime._rank.probe.end_step(0)
    finish(30.0, run=run)
    p, q = streams(rollout(0))
    answer = live.get("/steps/0/metrics", run=run)
    assert answer["coverage"]["tokens"] == len(p)
    assert answer["metrics"]["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)


def test_the_routes_of_the_engine_are_those_of_its_passes(
    run: str, with_routes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    plain, routes = rollout, [torch.tensor(row[:-1]) for row in marked(totals)]
    monkeypatch.setitem(
        globals(), "rollout", lambda step: {**plain(step), "rollout_routed_experts": routes}
    )
    train(arguments(makes_old=True), run, range(1))
    [recorded] = with_routes
    tokens = [*passes_of(recorded)]
    assert {row for row, *_ in tokens} == {0, 1, 2, 3}
    for row, column, of_row, token in tokens:
        assert (of_row, token) == (row, PROMPTS[row] + column - 1)


def test_both_ways_to_attach_wrap_once(run: str) -> None:
    importlib.import_module("slime.backends.megatron_utils.actor")
    slime.init(arguments())
    timer = sys.modules["slime.observability.timer"].Timer
    first = timer.start
    for patch in slime.patches():
        patch.apply(sys.modules[patch.module])
        assert not patch.is_missing, str(patch)
    assert timer.start is first


def test_nothing_of_ours_reaches_the_training(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(slime, "payload", fail)
    monkeypatch.setattr(slime, "start_capture", fail)
    train(arguments(save_debug_train_data="/d"), run)
    assert len(sys.modules["slime.observability.train_data_utils"].saved) == 2


def test_the_fakes_are_as_recorded(run: str) -> None:
    def find(module: str, path: str) -> object:
        return contracts.at_path(importlib.import_module(module), path)

    assert contracts.fakes_differ("slime", find) == []
