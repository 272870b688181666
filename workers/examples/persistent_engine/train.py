"""Trains from a saved batch on a CPU, without an engine: only the algorithm, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM

from examples.persistent_engine.generate import RUN
from stagescope_wire.batch import Batch
from stagescope_workers import init

CLIP = 0.2


def response_log_probs(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-prob of each response token, float32 [rows, tokens]."""
    responses, mask = batch["responses"], batch["response_mask"]
    width = responses.shape[1]
    tokens = torch.cat([batch["prompts"], responses], 1)
    attention = torch.cat([batch["prompt_mask"], mask], 1).long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # prompts are padded left
    logits = model(input_ids=tokens, attention_mask=attention, position_ids=positions).logits
    # A token's distribution is at the position before it.
    logits = logits[:, -width - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, responses[..., None])[..., 0]


def group_advantages(batch: Batch) -> torch.Tensor:
    """Return each row's reward relative to those of its group, [rows, 1]."""
    rewards = batch.as_tensors()["rewards"]
    found = torch.zeros_like(rewards)
    for group in set(batch.strings["group_ids"]):
        rows = [row for row, each in enumerate(batch.strings["group_ids"]) if each == group]
        group_rewards = rewards[rows]
        deviation = group_rewards.std(unbiased=False)
        found[rows] = (group_rewards - group_rewards.mean()) / (deviation + 1e-6)
    return found[:, None]


@click.command()
@click.option("--model", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--batch", "path", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--steps", default=3, show_default=True)
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option("--run", default=f"{RUN}-train", show_default=True)
def train(model: Path, path: Path, steps: int, learning_rate: float, run: str) -> None:
    """Make STEPS clipped policy-gradient steps on the batch, with unchanged rollouts."""
    torch.manual_seed(0)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate)
    batch = Batch.load(path)
    tensors = batch.as_tensors()
    mask = tensors["response_mask"].float()
    advantages = group_advantages(batch)
    probe = init(run, role="actor", rank=0, world_size=1)
    old = None
    for step in range(1, steps + 1):
        with probe.stage("actor_compute_log_prob", step=step, model=policy) as stage:
            with torch.no_grad():
                current = response_log_probs(policy, tensors)
            old = current if old is None else old
            stage.record(
                old_log_probs=current,
                rollout_log_probs=tensors["rollout_log_probs"],
                response_mask=tensors["response_mask"],
                responses=tensors["responses"],
                sample_ids=list(batch.strings["sample_ids"]),
            )
        with probe.stage("actor_update", step=step, model=policy) as stage:
            ratio = (response_log_probs(policy, tensors) - old).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            terms = torch.minimum(ratio * advantages, clipped * advantages)
            loss = -(terms * mask).sum() / mask.sum()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            stage.log(loss=loss)
        print(f"step {step}: loss {loss.item():+.6f}")
    probe.close(timeout=30)


if __name__ == "__main__":
    train()
