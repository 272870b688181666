"""Train from a kept batch, on a CPU, with no engine: the algorithm alone, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM

from examples.persistent_engine.generate import RUN
from stagescope.batch import Batch
from stagescope_workers import init

CLIP = 0.2


def log_probs_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-prob of each response token, float32 [rows, tokens]."""
    responses, mask = batch["responses"], batch["response_mask"]
    width = responses.shape[1]
    tokens = torch.cat([batch["prompts"], responses], 1)
    seen = torch.cat([batch["prompt_mask"], mask], 1).long()
    positions = (seen.cumsum(1) - 1).clamp(min=0)  # prompts are padded left
    logits = model(input_ids=tokens, attention_mask=seen, position_ids=positions).logits
    # A token's distribution stands one place before it.
    logits = logits[:, -width - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, responses[..., None])[..., 0]


def advantages_of(batch: Batch) -> torch.Tensor:
    """Return each row's reward against those of its group, [rows, 1]."""
    rewards = batch.as_tensors()["rewards"]
    found = torch.zeros_like(rewards)
    for group in set(batch.strings["group_ids"]):
        rows = [row for row, each in enumerate(batch.strings["group_ids"]) if each == group]
        own = rewards[rows]
        found[rows] = (own - own.mean()) / (own.std(unbiased=False) + 1e-6)
    return found[:, None]


@click.command()
@click.option("--model", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--batch", "path", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--steps", default=3, show_default=True)
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option("--run", default=f"{RUN}-train", show_default=True)
def train(model: Path, path: Path, steps: int, learning_rate: float, run: str) -> None:
    """Take STEPS clipped policy-gradient steps on the batch; rollouts stay as they were."""
    torch.manual_seed(0)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate)
    kept = Batch.load(path)
    tensors = kept.as_tensors()
    mask = tensors["response_mask"].float()
    advantages = advantages_of(kept)
    probe = init(run, role="actor", rank=0, world_size=1)
    old = None
    for step in range(1, steps + 1):
        with probe.stage("actor_compute_log_prob", step=step, model=policy) as stage:
            with torch.no_grad():
                current = log_probs_of(policy, tensors)
            old = current if old is None else old
            stage.record(
                old_log_probs=current,
                rollout_log_probs=tensors["rollout_log_probs"],
                response_mask=tensors["response_mask"],
                responses=tensors["responses"],
                sample_ids=list(kept.strings["sample_ids"]),
            )
        with probe.stage("actor_update", step=step, model=policy) as stage:
            ratio = (log_probs_of(policy, tensors) - old).exp()
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
