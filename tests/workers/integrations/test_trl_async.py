"""TRL's own AsyncGRPOTrainer on CPU under `stagescope run`: streams, rounds, staleness, loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tests.support.api import Service
from tests.workers.integrations.test_launcher import LAUNCH

pytest.importorskip("trl")

ROOT: Final = Path(__file__).resolve().parents[3]
PER_STEP: Final = 16
RECORDER: Final = """
import json, os, sys
import torch
from examples.trl_cpu import async_train

# What TRL itself had, written down beside what it reports: samples as they were taken, and the
# terms of each loss.
options = async_train.parse(sys.argv[1:])
torch.set_num_threads(1)
trainer = async_train.make_trainer(options)
taken, seen, inner = [], [], trainer.compute_loss
rank = trainer.accelerator.process_index

def get(*args, **kwargs):
    sample = async_train.Rollouts.get(trainer.rollout_queue, *args, **kwargs)
    taken.append({
        "version": sample.model_version, "group": sample.group_id,
        "mask": sample.completion_mask.tolist(), "reward": sample.metrics["reward"],
    })
    return sample

def loss(model, inputs, **kwargs):
    passes = []
    hook = model.register_forward_hook(lambda m, a, output: passes.append(output.log_probs))
    value = inner(model, inputs, **kwargs)
    hook.remove()
    terms = inputs["token_index"] >= 0
    seen.append({
        "step": trainer.state.global_step + 1,
        "p": passes[0].flatten()[inputs["token_index"][terms]].double().tolist(),
        "q": inputs["old_log_probs"][terms].double().tolist(),
        "advantages": inputs["advantages"][terms].tolist(),
        "loss": value.item(),
    })
    return value

trainer.compute_loss = loss
if rank == 0:
    trainer.rollout_queue.get = get
trainer.train()
weights = {name: value.double().sum().item() for name, value in trainer.model.state_dict().items()}
with open(os.path.join(options.directory, f"seen{rank}.json"), "w") as file:
    json.dump({
        "seen": seen, "taken": taken, "weights": weights, "log": trainer.state.log_history
    }, file)
"""


def train(
    directory: Path, live: Service | None, *, run: str = "async", processes: int = 1
) -> list[dict[str, Any]]:
    """Train under `stagescope run` where there is a service, else as it is; what each rank had."""
    environ = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore"}
    environ["OMP_NUM_THREADS"] = "1"
    environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "workers"), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    script = directory.with_name(f"{directory.name}.py")
    script.write_text(RECORDER)
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(script), "--directory", str(directory), "--steps", "4", "--report-to", ""]
    if live is not None:
        assert live.tokens is not None
        environ |= {"STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.operate}
        command = [sys.executable, "-c", LAUNCH, "run", "--run", run, "--", *command]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "was skipped" not in done.stderr, done.stderr
    assert "not reported" not in done.stderr, done.stderr
    return [json.loads((directory / f"seen{n}.json").read_text()) for n in range(processes)]


def rounds(mask: list[int]) -> list[int]:
    """How many tokens each round of a completion has."""
    text = "".join(map(str, mask))
    return [len(each) for each in text.split("0") if each]


def test_a_training_is_reported_exactly_and_stays_as_it_was(
    live: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a canary, whose engine does not exist, after each weight sync."""
    monkeypatch.setenv("STAGESCOPE_CANARY", "1")
    live.engine.keep(
        "log_probs", "rollout_log_probs", "response_mask", "responses", "advantages", "clipped"
    )
    [had], [plain] = train(tmp_path / "with", live), train(tmp_path / "without", None)
    assert had["weights"] == plain["weights"]
    assert had["seen"] == plain["seen"]
    stale = clipped = 0
    for step in (1, 2, 3, 4):
        parts = [part for part in had["seen"] if part["step"] == step]
        p, q, advantages = (
            np.concatenate([np.array(part[name]) for part in parts])
            for name in ("p", "q", "advantages")
        )
        samples = had["taken"][PER_STEP * (step - 1) : PER_STEP * step]
        answer = live.get(f"/steps/{step}/metrics", run="async")
        metrics = answer["metrics"]
        assert (answer["complete"], answer["stage"]) == ("complete", "actor_update")
        assert answer["coverage"]["tokens"] == len(p)
        assert metrics["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-6)
        assert metrics["training/rollout_probs_diff_max"] == pytest.approx(
            np.abs(np.exp(p) - np.exp(q)).max(), rel=1e-6
        )
        # The rounds of multi-turn completions, though the loss terms alone are packed.
        counted = [rounds(sample["mask"]) for sample in samples]
        assert metrics["per_round/total_rounds"] == max(map(len, counted)) >= 2
        for number in range(max(map(len, counted))):
            expected = sum(each[number] for each in counted if len(each) > number)
            assert metrics[f"per_round/round_{number}_token_count"] == expected
        # Two steps are sampled at once: the second trains on tokens of the version before.
        by = live.get(f"/steps/{step}/rounds", run="async", by="staleness")["rows"]
        tokens: dict[int, int] = {}
        for sample in samples:
            staleness = step - sample["version"]
            tokens[staleness] = tokens.get(staleness, 0) + sum(sample["mask"])
        assert {row["staleness"]: row["tokens"] for row in by} == tokens
        stale += sum(count for staleness, count in tokens.items() if staleness)
        ratio = np.exp(p - q)
        fates = {
            "zero advantage": (advantages == 0).sum(),
            "clipped low": ((ratio < 0.8) & (advantages < 0)).sum(),
            "clipped high": ((ratio > 1.2) & (advantages > 0)).sum(),
        }
        rows = live.get(f"/steps/{step}/loss", run="async")["rows"]
        found = {row["fate"]: row["tokens"] for row in rows}
        assert {name: found.get(name, 0) for name in fates} == fates
        clipped += int(fates["clipped low"] + fates["clipped high"])
        stages = {row["stage"] for row in live.get(f"/steps/{step}/stages", run="async")["rows"]}
        assert stages == {"actor_update", "weight_sync"}
    assert stale
    assert clipped
    logged = {
        row["name"]: row["value"]
        for row in live.get("/steps/2/scalars", run="async")["rows"]
        if row["stage"] is None
    }
    theirs = next(row for row in had["log"] if row.get("step") == 2)
    for name in ("grad_norm", "reward", "clip_ratio/low_mean", "sample/staleness_mean"):
        assert logged[name] == theirs[name]
    for version in (1, 2, 3, 4):
        [asked] = live.get(f"/canary/{version}", run="async")["engines"]
        assert "cannot be reached" in asked["problem"]


def test_two_processes_report_their_own_rows_with_the_versions_of_the_main_one(
    live: Service, tmp_path: Path
) -> None:
    ranks = train(tmp_path / "two", live, run="two", processes=2)
    samples = ranks[0]["taken"]
    for step in (1, 2, 3):
        parts = [part for had in ranks for part in had["seen"] if part["step"] == step]
        p, q = (np.concatenate([np.array(part[name]) for part in parts]) for name in ("p", "q"))
        answer = live.get(f"/steps/{step}/metrics", run="two")
        assert (answer["complete"], answer["coverage"]["tokens"]) == ("complete", len(p))
        assert answer["metrics"]["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-6)
        tokens: dict[int, int] = {}
        for sample in samples[2 * PER_STEP * (step - 1) : 2 * PER_STEP * step]:
            staleness = step - sample["version"]
            tokens[staleness] = tokens.get(staleness, 0) + sum(sample["mask"])
        by = live.get(f"/steps/{step}/rounds", run="two", by="staleness")["rows"]
        assert {row["staleness"]: row["tokens"] for row in by} == tokens
        stages = live.get(f"/steps/{step}/stages", run="two")["rows"]
        assert {row["rank"] for row in stages if row["stage"] == "actor_update"} == {0, 1}
