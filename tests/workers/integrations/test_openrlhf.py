"""OpenRLHF's actor by a fake with its recorded interface: the service's numbers against numpy's."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.api import Service, service
from tests.support.coordinators import FakeCoordinator, wait_for
from tests.support.engines.tiny_llama import tiny_tokenizer

from stagescope_wire.canary import (
    CACHED,
    DECODED,
    DECODED_SCORED,
    FIXED,
    UNCACHED,
    Canary,
)  # fmt: skip
from stagescope_workers import finish
from stagescope_workers.canary.sequences import SCORED, of_tokenizer
from stagescope_workers.integrations import openrlhf, patches
from stagescope_workers.integrations.canary import VARIABLE
from stagescope_workers.probe.probe import Probe

ROWS, TOKENS = 4, 9


def experience(seed: int, *, zeros: str = "") -> SimpleNamespace:
    """A micro-batch: index t of every tensor but `sequences` is of token t + 1; padded right."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((ROWS, TOKENS - 1), bool)
    for row in range(ROWS):
        mask[row, 2 : 6 + row % 3] = True
        mask[row, 3] = False  # a token of the environment's
    q = np.where(mask, -1.5 - rng.exponential(1.0, mask.shape), 0.0)
    p = q + rng.normal(0, 0.05, mask.shape)
    if zeros == "all":
        q = np.zeros_like(q)
    if zeros == "some":
        q[:, 4:6] = 0.0
    return types.SimpleNamespace(
        sequences=torch.tensor(rng.integers(5, 90, (ROWS, TOKENS))),
        action_mask=torch.tensor(mask),
        action_log_probs=torch.tensor(p),
        rollout_log_probs=torch.tensor(q),
        base_action_log_probs=None,
        values=None,
        returns=torch.zeros(mask.shape),
        advantages=torch.ones(mask.shape),
        rewards=torch.tensor([0.0, 1.0, 0.0, 1.0]),
        prompts=["one", "one", "two", "two"],
        info={},
    )


class DeepspeedStrategy:
    def __init__(self, args: object) -> None:
        self.args = args
        self.ds_device_mesh = None
        self.ring_attn_group = "ring"

    def load_ckpt(
        self, model: object, load_dir: object, tag: object = None
    ) -> tuple[object, dict[str, int]]:
        return load_dir, {"global_step": 10}

    def save_model(self, model: object, tokenizer: object, output_dir: object) -> None:
        return None


class ActorPPOTrainer:
    """What of OpenRLHF's trainer is patched; `ppo_train` has two epochs of two micro-batches."""

    zeros = ""

    def __init__(self, strategy: DeepspeedStrategy) -> None:
        self.strategy = strategy
        self.args: Any = strategy.args
        self.actor: Any = types.SimpleNamespace(model=torch.nn.Linear(1, 1))
        self.seen: list[types.SimpleNamespace] = []
        self.tokenizer: Any = None
        self.vllm_engines: list[Any] = []
        self.done: list[str] = []

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        batches = [experience(seed, zeros=self.zeros) for seed in (1, 2)]
        self.seen = batches
        for _ in range(2):
            for step, each in enumerate(batches):
                self.training_step(each, kl_ctl, step, None)
        return {"policy_loss": 0.25, "actor_lr": 1e-6}

    def training_step(
        self, experience: object, kl_ctl: float, step: int, loss_batch_info: object = None
    ) -> object:
        return {
            "metrics": {"policy_loss": torch.tensor(0.25), "reward": torch.ones(ROWS)},
            "weights": {"policy_loss": "token", "reward": "sample"},
        }

    def broadcast_to_vllm(self) -> None:
        self.done.append("sync")


def arguments(run: str, *, freezing: int = -1) -> SimpleNamespace:
    def space(**fields: object) -> SimpleNamespace:
        return types.SimpleNamespace(**fields)

    return space(
        ckpt=space(output_dir="out"),
        critic=space(freezing_steps=freezing),
        logger=space(wandb=space(run_name=run, key="secret")),
        rollout=space(temperature=1.0, top_p=0.9),
        algo=space(advantage=space(is_correction_enable=False)),
    )


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply every patch to the fakes."""
    for kind in (ActorPPOTrainer, DeepspeedStrategy):
        for name in ("ppo_train", "training_step", "broadcast_to_vllm", "load_ckpt", "save_model"):
            if name in vars(kind):
                monkeypatch.setattr(kind, name, vars(kind)[name])  # undone after the patches
    fake: Any = types.ModuleType("fake")
    fake.ActorPPOTrainer, fake.DeepspeedStrategy = ActorPPOTrainer, DeepspeedStrategy
    for patch in openrlhf.patches():
        patch.apply(fake)
        assert not patch.is_missing, str(patch)


@pytest.fixture
def live(patched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
        assert running.tokens is not None
        monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.operate)
        yield running


def chosen(seen: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    masks = [each.action_mask.numpy() for each in seen]
    return (
        np.concatenate([e.action_log_probs.numpy()[m] for e, m in zip(seen, masks, strict=True)]),
        np.concatenate([e.rollout_log_probs.numpy()[m] for e, m in zip(seen, masks, strict=True)]),
    )


def test_the_model_of_the_end_is_saved_when_everything_has_arrived(live: Service) -> None:
    """Ray ends the ranks right after it."""
    strategy = DeepspeedStrategy(arguments("r"))
    strategy.save_model(None, None, "out")  # of a critic, which reports nothing
    trainer = ActorPPOTrainer(strategy)
    trainer.ppo_train(0.0)
    strategy.save_model(trainer.actor, None, "ckpt/global_step1_hf")
    assert all(each["live"] for each in live.get("/runs")["rows"])
    strategy.save_model(trainer.actor, None, "out")
    (attempt,) = live.get("/runs/r/attempts")["rows"]
    assert (attempt["end_reason"], attempt["last_closed_step"]) == ("finished", 1)
    assert live.get("/steps/1/metrics", run="r")["complete"] == "complete"


def test_steps_are_numbered_as_openrlhf_logs_them_and_tokens_count_once(live: Service) -> None:
    trainer = ActorPPOTrainer(DeepspeedStrategy(arguments("r")))
    trainer.broadcast_to_vllm()  # of a checkpoint's weights, before any step
    for _ in range(2):
        trainer.ppo_train(0.0)
        trainer.broadcast_to_vllm()
    assert finish(30, run="r")
    for step in (1, 2):
        answer = live.get(f"/steps/{step}/metrics", run="r")
        p, q = chosen(trainer.seen)
        assert answer["coverage"]["tokens"] == len(p)
        # vllm_kl of OpenRLHF: masked_mean(rollout_log_probs - old_log_probs)
        assert answer["metrics"]["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)
        assert answer["metrics"]["per_round/total_rounds"] == 2
    rows = live.get("/steps/2/scalars", run="r")["rows"]
    assert {row["name"] for row in rows} == {"policy_loss", "actor_lr"}
    # Each row is a sample of its prompt's group, with its reward.
    rows = live.get("/steps/2/samples", run="r")["rows"]
    assert {row["sample_uid"]: row["reward"] for row in rows} == {
        f"0-{part}-{row}": float(row % 2) for part in (0, 1) for row in range(ROWS)
    }
    assert len({row["group_id"] for row in rows}) == 2
    diagnosis = live.get("/runs/r/diagnosis", limit=1000)["rows"]
    verdicts = {row["rule"]: row["verdict"] for row in diagnosis}
    assert verdicts["groups_equal"] == "not found"


def test_the_weights_that_the_loss_applies_reach_the_service(live: Service) -> None:
    live.engine.keep("old_log_probs", "rollout_log_probs", "response_mask", "rollout_is_weights")
    told = arguments("weights")
    vars(told.algo.advantage).update(
        is_correction_level="token", is_correction_mode="mask", is_correction_gating="ratio",
        is_correction_threshold=[0.95, 1.05],
    )  # fmt: skip
    trainer = ActorPPOTrainer(DeepspeedStrategy(told))
    trainer.ppo_train(0.0)
    assert finish(30, run="weights")
    p, q = chosen(trainer.seen)
    ratio = np.exp(p - q)
    applied = np.where((ratio >= 0.95) & (ratio <= 1.05), ratio, 0.0)
    metrics = live.get("/steps/1/metrics", run="weights")["metrics"]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(applied.mean(), rel=1e-9)
    assert metrics["rollout_corr/rollout_is_truncated"] == 1.0
    rows = live.get("/steps/1/loss", run="weights")["rows"]
    fates = {row["fate"]: row["tokens"] for row in rows}
    assert sum(count for fate, count in fates.items() if "weight" in fate) == (applied == 0).sum()


def test_a_stream_of_zeros_is_left_out_and_named(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActorPPOTrainer, "zeros", "all")
    ActorPPOTrainer(DeepspeedStrategy(arguments("zeros"))).ppo_train(0.0)
    assert finish(30, run="zeros")
    problem = live.problem(404, "/steps/1/metrics", run="zeros")
    assert "rollout_log_probs is left out: 0.0 in every token" in problem["detail"]


def test_single_zeros_are_named_where_the_trainer_is_far_from_them(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActorPPOTrainer, "zeros", "some")
    ActorPPOTrainer(DeepspeedStrategy(arguments("some"))).ppo_train(0.0)
    assert finish(30, run="some")
    answer = live.get("/steps/1/metrics", run="some")
    assert answer["comparable"] == "suspect"
    [lacking] = [row for row in answer["comparability"] if row["code"] == "coverage"]
    assert "0" in lacking["text"]


def test_a_resumed_training_and_frozen_steps_go_on_from_theirs() -> None:
    strategy = DeepspeedStrategy(arguments("x", freezing=2))
    assert openrlhf.Training(calls=1).step(strategy.args) == 4
    assert openrlhf.Training(resumed=10, calls=1).step(strategy.args) == 11
    assert openrlhf.Training(calls=1).step(arguments("x")) == 1


def test_the_step_of_a_checkpoint_is_that_of_the_actors(live: Service) -> None:
    strategy = DeepspeedStrategy(arguments("resumed"))
    strategy.load_ckpt(None, "/checkpoints/_critic")
    trainer = ActorPPOTrainer(strategy)
    assert openrlhf.training(trainer).resumed == 0
    strategy.load_ckpt(None, "/checkpoints/_actor")
    trainer = ActorPPOTrainer(strategy)
    trainer.ppo_train(0.0)
    assert finish(30, run="resumed")
    [attempt] = live.get("/runs/resumed/attempts")["rows"]
    assert attempt["resumed_from_step"] == 10
    assert live.get("/steps/11/metrics", run="resumed")["coverage"]["tokens"] > 0
    assert "secret" not in str(attempt["fingerprint"])


def test_an_error_of_ours_is_none_of_the_trainings(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openrlhf, "probe_of", lambda trainer: 1 / 0)
    trainer = ActorPPOTrainer(DeepspeedStrategy(arguments("e")))
    assert trainer.ppo_train(0.0) == {"policy_loss": 0.25, "actor_lr": 1e-6}


class Actor(torch.nn.Module):
    """OpenRLHF's `Actor`, as it is called: the log-prob of a token is minus its id."""

    def __init__(self, done: list[str]) -> None:
        super().__init__()
        self.temperature, self.done = 0.7, done

    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor,
        attention_mask: torch.Tensor,
        ring_attn_group: object = None,
    ) -> torch.Tensor:
        assert (self.training, torch.is_grad_enabled()) == (False, False)
        assert ring_attn_group == "ring"
        assert attention_mask.shape == sequences.shape
        self.done.append("score")
        return -sequences[:, -action_mask.shape[1] :].float() / self.temperature


class RolloutRayActor:
    """A handle of OpenRLHF's engine; a call's answer is vLLM's, as far as it is read."""

    def __init__(self, done: list[str]) -> None:
        self.generate = types.SimpleNamespace(remote=self._generate)
        self.told: list[SimpleNamespace] = []
        self.done = done

    def _generate(self, prompt_token_ids: list[int], told: SimpleNamespace) -> SimpleNamespace:
        assert self.done[-1] == "sync"
        self.told.append(told)

        def place(token: int) -> dict[int, SimpleNamespace]:
            return {
                each: types.SimpleNamespace(logprob=-float(each)) for each in (token, token + 1)
            }

        new = [(getattr(told, "seed", 0) + at) % 90 + 5 for at in range(told.max_tokens)]
        output = types.SimpleNamespace(token_ids=new, logprobs=[place(token) for token in new])
        prompt = [None, *(place(token) for token in prompt_token_ids[1:])]
        return types.SimpleNamespace(outputs=[output], prompt_logprobs=prompt)


Synced = Callable[..., ActorPPOTrainer]


@pytest.fixture
def synced(
    patched: None, make_probe: Callable[..., Probe], monkeypatch: pytest.MonkeyPatch
) -> Synced:
    """Return a function that makes a rank's trainer, which has trained three steps."""
    monkeypatch.setattr(patches, "_logged", set())
    monkeypatch.setenv(VARIABLE, "1")
    for name, field, value in (
        ("vllm", "SamplingParams", types.SimpleNamespace),
        ("ray", "get", lambda found, timeout: found),
    ):
        module = types.ModuleType(name)
        vars(module)[field] = value
        monkeypatch.setitem(sys.modules, name, module)

    def make(rank: int = 0, **vllm: bool) -> ActorPPOTrainer:
        told = arguments("canary")
        told.vllm = types.SimpleNamespace(**vllm)
        told.data = types.SimpleNamespace(max_len=513)
        trainer = ActorPPOTrainer(DeepspeedStrategy(told))
        trainer.tokenizer = tiny_tokenizer()
        trainer.actor = Actor(trainer.done)
        trainer.vllm_engines = [RolloutRayActor(trainer.done) for _ in range(2)]
        found = openrlhf.training(trainer)
        found.calls, found.probe = 3, make_probe(role="actor", rank=rank, world_size=2)
        return trainer

    return make


ROWS_OF_CANARY = len(of_tokenizer(tiny_tokenizer(), max_length=512).rows)


def test_ranks_score_a_canary_before_the_sync_and_rank_0_asks_after_it(
    synced: Synced, coordinator: FakeCoordinator
) -> None:
    trainer = synced(enable_prefix_caching=True)
    trainer.broadcast_to_vllm()
    assert trainer.done == [*["score"] * ROWS_OF_CANARY, "sync"]
    assert (trainer.actor.temperature, trainer.actor.training) == (0.7, True)
    wait_for(lambda: len(coordinator.of_kind("canary")) == 3)
    events = [event.fields for event in coordinator.of_kind("canary")]
    assert {(each["policy_version"], each["step"]) for each in events} == {(3, 3)}
    found = {each.source: each for each in map(Canary.parse, events)}
    assert {*found} == {"", "vllm-0", "vllm-1"}
    rows = of_tokenizer(trainer.tokenizer, max_length=512).rows
    for each in found.values():
        assert each.problem == ""
        assert each.arms[FIXED].rows == rows
        for row, values in zip(rows, each.arms[FIXED].log_probs, strict=True):
            assert values == tuple(-float(token) for token in row[1:][-SCORED:])
    arms = found["vllm-0"].arms
    assert arms[DECODED] == arms[DECODED_SCORED]
    assert arms[CACHED] == arms[UNCACHED]
    counts = {told.logprobs for told in trainer.vllm_engines[0].told if hasattr(told, "logprobs")}
    assert counts == {20}


def test_an_engine_of_processed_log_probs_is_asked_for_no_more_than_it_returns(
    synced: Synced, coordinator: FakeCoordinator
) -> None:
    trainer = synced()
    trainer.args.algo.advantage = types.SimpleNamespace(is_correction_level="token")
    trainer.broadcast_to_vllm()
    wait_for(lambda: len(coordinator.of_kind("canary")) == 3)
    engine = trainer.vllm_engines[0]
    assert max(getattr(told, "logprobs", 1) for told in engine.told) == 1
    found = [Canary.parse(event.fields) for event in coordinator.of_kind("canary")]
    assert {each.settings.get("processed") for each in found if each.source} == {True}
    assert all(CACHED not in each.arms for each in found)  # it has no prefix cache


def test_other_ranks_score_and_ask_nothing(synced: Synced, coordinator: FakeCoordinator) -> None:
    trainer = synced(rank=1)
    trainer.broadcast_to_vllm()
    assert trainer.done == [*["score"] * ROWS_OF_CANARY, "sync"]
    assert [engine.told for engine in trainer.vllm_engines] == [[], []]
    assert coordinator.of_kind("canary") == []


def test_engines_that_sleep_get_no_canary(synced: Synced, caplog: pytest.LogCaptureFixture) -> None:
    trainer = synced(enable_sleep=True)
    trainer.broadcast_to_vllm()
    assert trainer.done == ["sync"]
    assert "no effect with vllm.enable_sleep" in caplog.text


def test_no_canary_is_the_default(synced: Synced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    trainer = synced()
    trainer.broadcast_to_vllm()
    assert trainer.done == ["sync"]
