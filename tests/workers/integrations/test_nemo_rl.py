"""NeMo-RL's driver by a fake with its recorded interface: the service's numbers against numpy's."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.api import Service, service
from tests.support.routes import marked, passes_of

from stagescope_workers.integrations import nemo_rl

ROWS, WIDTH = 4, 8


def train_data(step: int, *, skipped: bool = False) -> dict[str, Any]:
    """A batch of whole sequences; index t is of token t, and row 3 is not counted."""
    rng = np.random.default_rng(step)
    mask = np.zeros((ROWS, WIDTH))
    mask[:, 3:7] = 1.0
    mask[:, 4] = 0.0
    q = np.where(mask > 0, -rng.exponential(1.0, mask.shape), 0.0)
    p = q + rng.normal(0, 0.05, mask.shape)
    return {
        "input_ids": torch.tensor(rng.integers(5, 90, mask.shape)),
        "token_mask": torch.tensor(mask),
        "sample_mask": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "generation_logprobs": torch.tensor(q),
        "prev_logprobs": torch.zeros(mask.shape) if skipped else torch.tensor(p),
    }


class Logger:
    def log_metrics(
        self, metrics: object, step: int, prefix: str | None = "", step_metric: object = None,
        step_finished: bool = False,
    ) -> None:  # fmt: skip
        return None

    def log_batched_dict_as_jsonl(self, to_log: object, filename: str) -> None:
        return None


class Policy:
    def get_logprobs(self, data: Any, timer: object = None) -> Any:
        return {"logprobs": data["prev_logprobs"]}

    def get_reference_policy_logprobs(self, data: Any, timer: object = None) -> Any:
        return {"reference_logprobs": data["prev_logprobs"]}

    def train(self, data: Any, loss_fn: object = None) -> Any:
        return {"loss": 1.0}


def compute_and_apply_seq_logprob_error_masking(
    train_data: Any, rewards: object, seq_logprob_error_threshold: float | None
) -> dict[str, object]:
    train_data["sample_mask"] = torch.zeros(ROWS)  # everything was too far
    return {"max_seq_mult_prob_error": 1.25, "num_masked_seqs": 3}


def grpo_train(
    policy: Any,
    logger: Any,
    grpo_save_state: Any,
    master_config: object,
    *,
    skipped: bool,
    fake: ModuleType,
) -> list[Any]:
    total_steps = grpo_save_state.total_steps
    made = []
    for _ in range(2):
        logger.log_metrics({"rollout/length": 4.0}, total_steps + 1, prefix="train")
        data = train_data(total_steps, skipped=skipped)
        made.append(dict(data))
        if not skipped:
            policy.get_logprobs(data)
            fake.compute_and_apply_seq_logprob_error_masking(
                train_data=data, rewards=torch.ones(ROWS), seq_logprob_error_threshold=2.0
            )
        policy.train(data)
        log = {
            "token_ids": data["input_ids"].tolist(),
            "token_loss_mask": data["token_mask"].tolist(),
            "sample_loss_mask": data["sample_mask"].tolist(),
            "generation_logprobs": data["generation_logprobs"].tolist(),
            "prev_logprobs": data["prev_logprobs"].tolist(),
            "rewards": [1.0] * ROWS,
        }
        logger.log_batched_dict_as_jsonl(log, f"train_data_step{total_steps + 1}.jsonl")
        logger.log_metrics({"loss": 0.5, "lr": torch.tensor(1.0)}, total_steps + 1, prefix="train")
        logger.log_metrics({"t": 1.0}, total_steps + 1, prefix="timing/train", step_finished=True)
        total_steps += 1
    return made


def ppo_train(policy: Any, logger: Any, ppo_save_state: Any, master_config: object) -> list[Any]:
    """0.7.0's: it masks no sequences, writes no batch, and updates once in each epoch."""
    data = train_data(0)
    policy.get_logprobs(data)
    for _ in range(2):
        policy.train(data)
    step = ppo_save_state["total_steps"] + 1
    logger.log_metrics({"loss": 0.5}, step, prefix="train")
    logger.log_metrics({"t": 1.0}, step, prefix="timing/train", step_finished=True)
    return [data]


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
        assert running.tokens is not None
        monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.operate)
        yield running


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One module that stands for NeMo-RL's, patched."""
    made = types.ModuleType("fake")
    vars(made).update(
        Logger=type("Logger", (), dict(vars(Logger))),
        Policy=type("Policy", (), dict(vars(Policy))),
        grpo_train=grpo_train,
        ppo_train=ppo_train,
        compute_and_apply_seq_logprob_error_masking=compute_and_apply_seq_logprob_error_masking,
    )
    for patch in nemo_rl.patches():
        if patch.path.partition(".")[0] in vars(made):
            patch.apply(made)
            assert not patch.is_missing, str(patch)
    return made


def config(name: str) -> dict[str, object]:
    return {
        "logger": {"log_dir": f"logs/{name}", "wandb": {"name": name}},
        "policy": {"generation": {"backend": "vllm", "temperature": 1.0, "top_p": 0.95}},
        "loss_fn": {"use_importance_sampling_correction": True,
                    "truncated_importance_sampling_ratio": 2.0},
    }  # fmt: skip


def run(fake: ModuleType, name: str, *, done: int = 0, skipped: bool = False) -> Any:
    state = types.SimpleNamespace(total_steps=done, current_step=done)
    return fake.grpo_train(
        policy=fake.Policy(), logger=fake.Logger(), grpo_save_state=state,
        master_config=config(name), skipped=skipped, fake=fake,
    )  # fmt: skip


def test_streams_are_those_before_the_masking(live: Service, fake: ModuleType) -> None:
    made = run(fake, "r")
    for step, data in enumerate(made, 1):
        mask = (data["token_mask"] * data["sample_mask"].unsqueeze(-1))[:, 1:].bool().numpy()
        p, q = (data[n][:, 1:].numpy()[mask] for n in ("prev_logprobs", "generation_logprobs"))
        answer = live.get(f"/steps/{step}/metrics", run="r")
        assert answer["coverage"]["tokens"] == len(p) == 9
        assert answer["metrics"]["token_mult_prob_error"] == pytest.approx(
            np.exp(np.abs(q - p)).mean(), rel=1e-9
        )
        assert answer["metrics"]["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)
        stages = {row["stage"] for row in live.get(f"/steps/{step}/stages", run="r")["rows"]}
        assert stages == {"actor_compute_log_prob", "actor_update"}
    rows = live.get("/steps/2/scalars", run="r")["rows"]
    found = {row["name"]: row["value"] for row in rows}
    assert found["loss"] == 0.5
    assert found["max_seq_mult_prob_error"] == 1.25


def test_the_routes_of_the_engine_are_those_of_its_passes(
    live: Service,
    fake: ModuleType,
    with_routes: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, routes = train_data, torch.tensor(np.stack(marked([WIDTH] * ROWS)))
    monkeypatch.setitem(
        globals(), "train_data", lambda *a, **k: {**plain(*a, **k), "routed_experts": routes}
    )
    run(fake, "routed")
    tokens = [*passes_of(with_routes[0])]
    assert {row for row, *_ in tokens} == {0, 1, 2}
    for row, column, of_row, token in tokens:  # column 0 is of token 1, which pass 0 scored
        assert (of_row, token) == (row, column)


def test_a_pass_that_was_not_made_is_not_measured_and_says_why(
    live: Service, fake: ModuleType
) -> None:
    run(fake, "skipped", skipped=True)
    for step in (1, 2):
        problem = live.problem(404, f"/steps/{step}/metrics", run="skipped")
        assert "computes no prev_logprobs with force_on_policy_ratio" in problem["detail"]
        assert "rollout_log_probs" in problem["detail"]


def test_the_batch_of_the_first_update_is_recorded_where_no_call_gave_it(
    live: Service, fake: ModuleType
) -> None:
    [data] = fake.ppo_train(
        policy=fake.Policy(), logger=fake.Logger(), ppo_save_state={"total_steps": 0},
        master_config=config("ppo"),
    )  # fmt: skip
    mask = (data["token_mask"] * data["sample_mask"].unsqueeze(-1))[:, 1:].bool().numpy()
    p, q = (data[n][:, 1:].numpy()[mask] for n in ("prev_logprobs", "generation_logprobs"))
    answer = live.get("/steps/1/metrics", run="ppo")
    assert answer["coverage"]["tokens"] == len(p) == 9
    assert answer["metrics"]["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)


def test_a_resumed_training_goes_on_from_its_step(live: Service, fake: ModuleType) -> None:
    run(fake, "resumed", done=5)
    [attempt] = live.get("/runs/resumed/attempts")["rows"]
    assert attempt["resumed_from_step"] == 5
    assert live.get("/steps/6/metrics", run="resumed")["coverage"]["tokens"] == 9
    assert live.get("/steps/7/metrics", run="resumed")["coverage"]["tokens"] == 9


def test_an_error_of_ours_is_none_of_the_trainings(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nemo_rl, "init", lambda *args, **kwargs: 1 / 0)
    assert len(run(fake, "e")) == 2
