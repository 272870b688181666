"""The policy and the critic: a small Qwen2 from a config, eager attention, float32, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2Model

from examples.countdown.config import MODEL, ROPE_THETA


def make_policy(seed: int, **changes: object) -> nn.Module:
    """Return a freshly initialised Qwen2ForCausalLM; `changes` override `MODEL`."""
    torch.manual_seed(seed)
    return _plain(Qwen2ForCausalLM(_config(**changes)))


class Critic(nn.Module):
    """A value for every position: the body of the policy's architecture with a scalar head."""

    def __init__(self, seed: int, **changes: object) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = _config(**changes)
        self.body = _plain(Qwen2Model(config))
        self.head = nn.Linear(config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return values, float32 [rows, tokens], of token ids, int64 [rows, tokens]."""
        hidden = self.body(input_ids=input_ids, use_cache=False).last_hidden_state
        values: torch.Tensor = self.head(hidden).squeeze(-1)
        return values


def _config(**changes: object) -> Qwen2Config:
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    options = {**MODEL, **changes, "rope_parameters": rope, "attn_implementation": "eager"}
    return Qwen2Config(**options)


def _plain(model: Any) -> nn.Module:
    module: nn.Module = model.float().train()
    return module


def token_log_probs(model: nn.Module, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities at temperature 1 over the whole vocabulary.

    Rows are padded on the right; attention is causal, so that real tokens never see padding and no
    attention mask is needed.

    Args:
        model: a causal language model.
        input_ids: int64 [rows, tokens].

    Returns:
        log p(token t | tokens before t) and the entropy of that distribution in nats, both
        float32 [rows, tokens - 1], for t = 1, 2, …
    """
    logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits
    distribution = torch.log_softmax(logits.float(), dim=-1)
    chosen = distribution.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return chosen, entropy
