"""TRL's own GRPO on CPU under `stagescope run`: right numbers, and a training as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.api import Service
from tests.support.stores import rows_of
from tests.workers.integrations.test_launcher import LAUNCH

pytest.importorskip("trl")

ROOT: Final = Path(__file__).resolve().parents[3]
RECORDER: Final = """
import json, os, sys
import torch
from examples.trl_cpu import train

# What TRL itself had, written down beside what it reports: the streams of each micro-batch.
options = train.parse(sys.argv[1:])
torch.set_num_threads(1)
trainer = train.make_trainer(options)
seen, inner, forward = [], trainer._compute_loss, trainer._get_per_token_logps_and_entropies
passes = []

def pass_(*args, **kwargs):
    result = forward(*args, **kwargs)
    passes.append(result[0].detach())
    return result

def loss(model, inputs):
    passes.clear()
    value = inner(model, inputs)
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    seen.append({
        "step": trainer.state.global_step + 1,
        "p": inputs.get("old_per_token_logps", passes[0]).double().tolist(),
        "q": None if inputs.get("sampling_per_token_logps") is None
        else inputs["sampling_per_token_logps"].double().tolist(),
        "mask": mask.tolist(),
    })
    return value

rewarded, score = [], trainer._calculate_rewards

def rewards(*args, **kwargs):
    found = score(*args, **kwargs)
    rewarded.append({"step": trainer.state.global_step + 1, "rewards": found.sum(1).tolist()})
    return found

trainer._compute_loss, trainer._get_per_token_logps_and_entropies = loss, pass_
trainer._calculate_rewards = rewards
trainer.train(resume_from_checkpoint=options.resume or None)
weights = {name: value.double().sum().item() for name, value in trainer.model.state_dict().items()}
with open(os.path.join(options.directory, "seen.json"), "w") as file:
    json.dump({
        "seen": seen, "rewarded": rewarded, "weights": weights, "log": trainer.state.log_history
    }, file)
"""


def train(
    directory: Path,
    live: Service | None,
    *options: str,
    run: str = "r",
    prefix: tuple[str, ...] = (),
) -> Any:
    """Train under `stagescope run` where there is a service, else as it is; what TRL itself had."""
    environ = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore"}
    environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "workers"), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    command = [sys.executable, "-c", RECORDER, "--directory", str(directory), *options]
    if live is not None:
        assert live.tokens is not None
        environ |= {"STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.operate}
        command = [sys.executable, "-c", LAUNCH, "run", "--run", run, "--", *command]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "was skipped" not in done.stderr  # an exception of ours that was caught
    return json.loads((directory / "seen.json").read_text()), done


def tokens(seen: list[dict[str, torch.Tensor]], step: int) -> tuple[np.ndarray, np.ndarray]:
    """p and q of the model's tokens of a step."""
    parts = [part for part in seen if part["step"] == step]
    chosen = [np.array(part["mask"], dtype=bool) for part in parts]
    return (
        np.concatenate(
            [np.array(part["p"])[mask] for part, mask in zip(parts, chosen, strict=True)]
        ),
        np.concatenate(
            [np.array(part["q"])[mask] for part, mask in zip(parts, chosen, strict=True)]
        ),
    )


def unmeasured_groups(live: Service, run: str) -> set[str]:
    """Return the doctor's rules on groups of samples that could not be measured."""
    rows = live.get(f"/runs/{run}/diagnosis", limit=1000)["rows"]
    rules = {row["rule"]: row["verdict"] for row in rows if row["rule"].startswith("groups_")}
    assert len(rules) == 4
    return {rule for rule, verdict in rules.items() if verdict == "not measured"}


def test_a_training_is_reported_exactly_and_stays_as_it_was(live: Service, tmp_path: Path) -> None:
    """Two rounds and more, streams of the update's own passes, numbers in TRL's own log."""
    options = ("--steps", "3", "--report-to", "tensorboard", "--beta", "0.04")
    had, done = train(tmp_path / "with", live, *options)
    plain, _ = train(tmp_path / "without", None, *options)
    assert had["weights"] == plain["weights"]
    assert had["seen"] == plain["seen"]
    assert "reports to" in done.stderr
    for step in (1, 2, 3):
        answer = live.get(f"/steps/{step}/metrics", run="r")
        p, q = tokens(had["seen"], step)
        metrics = answer["metrics"]
        assert (answer["complete"], answer["stage"]) == ("complete", "actor_update")
        assert answer["coverage"]["tokens"] == len(p)
        assert metrics["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)
        assert metrics["training/rollout_probs_diff_max"] == pytest.approx(
            np.abs(np.exp(p) - np.exp(q)).max(), rel=1e-9
        )
        assert metrics["per_round/total_rounds"] >= 2
        [rewarded] = [each["rewards"] for each in had["rewarded"] if each["step"] == step]
        rows = live.get(f"/steps/{step}/samples", run="r")["rows"]
        found = {(row["sample_uid"], row["group_id"]): row["reward"] for row in rows}
        assert found == {
            (f"{row // 4}-{row % 4}", str(row // 4)): pytest.approx(reward)
            for row, reward in enumerate(rewarded)
        }
        stages = {row["stage"] for row in live.get(f"/steps/{step}/stages", run="r")["rows"]}
        assert stages == {
            "rollout_generate", "compute_rm_score", "ref_compute_log_prob", "actor_update"
        }  # fmt: skip
    assert unmeasured_groups(live, "r") == set()
    # However late they came, every step's numbers are in TRL's TensorBoard, once and at its step.
    board = EventAccumulator(str(next((tmp_path / "with").rglob("events.out.tfevents*")).parent))
    board.Reload()
    written = board.Scalars("train/stagescope/rollout_corr/k3_kl")
    answers = {
        step: live.get(f"/steps/{step}/metrics", run="r")["metrics"]["rollout_corr/k3_kl"]
        for step in (1, 2, 3)
    }
    assert sorted(each.step for each in written) == [1, 2, 3]
    assert {each.step: each.value for each in written} == pytest.approx(answers, rel=1e-6)
    assert not any("stagescope" in name for name in had["log"][-1])
    scalars = live.get("/steps/2/scalars", run="r")["rows"]
    logged = {row["name"]: row["value"] for row in scalars if row["stage"] is None}
    theirs = next(row for row in had["log"] if row.get("step") == 2)
    assert logged["grad_norm"] == theirs["grad_norm"]
    assert logged["reward"] == theirs["reward"]
    # What TRL logs itself is as without stagescope; ours stand beside it.
    own = [{k: v for k, v in row.items() if not k.startswith("stagescope/")} for row in had["log"]]
    timed = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    assert [{k: v for k, v in row.items() if k not in timed} for row in own] == [
        {k: v for k, v in row.items() if k not in timed} for row in plain["log"]
    ]


def test_streams_before_the_update_where_trl_computes_them(live: Service, tmp_path: Path) -> None:
    """One generation serves two optimizer steps, so TRL computes the trainer's log-probs first."""
    had, _ = train(
        tmp_path, live, "--steps", "4", "--steps-per-generation", "4", "--report-to", "", run="old"
    )
    for generated in (1, 3):
        answer = live.get(f"/steps/{generated}/metrics", run="old")
        # Both steps consume the batch that the first one generated.
        p, q = (np.concatenate(pair) for pair in zip(
            tokens(had["seen"], generated), tokens(had["seen"], generated + 1), strict=True
        ))  # fmt: skip
        assert answer["stage"] == "actor_compute_log_prob"
        assert answer["coverage"]["tokens"] == len(p)
        assert answer["metrics"]["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)
    # The second step trains parts of the groups, which are no groups of its own.
    [attempt] = [
        row["attempt_id"] for row in rows_of(live.store, "attempts") if row["run"] == "old"
    ]
    grouped = [
        row for row in rows_of(live.store, "samples")
        if row["attempt_id"] == attempt and row["group_id"] is not None
    ]  # fmt: skip
    assert {row["step"] for row in grouped} == {1, 3}
    assert None not in {row["reward"] for row in grouped}
    assert unmeasured_groups(live, "old") == set()


def test_generation_without_log_probs_is_not_measured_and_why(
    live: Service, tmp_path: Path
) -> None:
    train(tmp_path, live, "--steps", "1", "--generate", "transformers", "--report-to", "", run="hf")
    problem = live.problem(404, "/steps/1/metrics", run="hf")
    assert "log_probs, response_mask, responses" in problem["detail"]
    assert "rollout_log_probs" in problem["expected"]
    assert unmeasured_groups(live, "hf") == set()  # the rewards are there


def test_an_update_is_reported_that_has_the_trainers_log_probs_alone(
    live: Service, tmp_path: Path
) -> None:
    """The pass before the update is made, and generation by transformers has no log-probs."""
    options = ("--steps", "2", "--generate", "transformers", "--steps-per-generation", "4")
    train(tmp_path, live, *options, "--report-to", "", run="alone")
    for step in (1, 2):
        rows = live.get(f"/steps/{step}/scalars", run="alone")["rows"]
        assert "loss" in {row["name"] for row in rows if row["stage"] == "actor_update"}


def test_a_restart_is_the_next_attempt_and_says_where_it_resumed(
    live: Service, tmp_path: Path
) -> None:
    train(tmp_path, live, "--steps", "2", "--save-steps", "1", "--report-to", "", run="again")
    train(
        tmp_path, live, "--steps", "3", "--save-steps", "1", "--report-to", "", "--resume",
        run="again",
    )  # fmt: skip
    attempts = live.get("/runs/again/attempts")["rows"]
    assert [row["resumed_from_step"] for row in attempts] == [2, None]
    assert live.get("/steps/3/metrics", run="again")["attempt"] == 2
