"""A loop of plain PyTorch: REINFORCE on responses that a bfloat16 copy of the policy sampled.

The lines that end with `# stagescope` attach it; `python -m examples.attach.plain_pytorch`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from examples.attach.task import HALF, VOCABULARY, log_probs_of, make_batch, make_model
from stagescope_workers import finish, init  # stagescope

STEPS = 4


@torch.no_grad()
def sample(policy: torch.nn.Module, prompts: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return sequences and the log-probs that their sampler had: another dtype, as an engine."""
    engine, tokens = copy.deepcopy(policy).bfloat16(), prompts
    for _ in range(HALF):
        scores = torch.log_softmax(engine(input_ids=tokens).logits[:, -1].float(), -1)
        tokens = torch.cat([tokens, torch.multinomial(scores.exp(), 1)], dim=1)
    return tokens, log_probs_of(engine, tokens)


def main() -> None:
    """Train."""
    policy = make_model()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    probe = init("plain-pytorch", rank=0, world_size=1)  # stagescope
    for step in range(1, STEPS + 1):
        prompts = make_batch(step)[:, :HALF]
        tokens, q = sample(policy, prompts)
        rewards = (tokens[:, HALF:] < VOCABULARY // 2).float().mean(dim=1)
        with probe.stage("actor_update", step=step, model=policy) as stage:  # stagescope
            p = log_probs_of(policy, tokens)
            loss = -((rewards - rewards.mean())[:, None] * p).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mask = torch.ones_like(q)
            stage.record(rollout_log_probs=q, log_probs=p, response_mask=mask)  # stagescope
            stage.log(loss=loss, reward=rewards.mean())  # stagescope
        print(f"step {step} loss {loss.item():.9g}")
    finish(timeout=30)  # stagescope


if __name__ == "__main__":
    main()
