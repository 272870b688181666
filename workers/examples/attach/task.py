"""The task that the examples train: a tiny Qwen2 copies the first half of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 32
HALF = 8
"""Tokens of a prompt, and of the response that repeats it."""


def make_model(seed: int = 0) -> Any:
    """Return the model, freshly initialised."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2 * HALF,
    )
    return Qwen2ForCausalLM(config)


def make_batch(step: int, rank: int = 0, rows: int = 8) -> torch.Tensor:
    """Return the sequences of a step, int64 [rows, 2 * HALF]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    prompts = torch.randint(VOCABULARY, (rows, HALF), generator=generator)
    return torch.cat([prompts, prompts], dim=1)


def log_probs_of(model: Any, tokens: torch.Tensor) -> Any:
    """Return the log-probs of the responses' tokens, a float32 tensor [rows, HALF]."""
    logits = model(input_ids=tokens[:, :-1]).logits.float()
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return chosen[:, HALF - 1 :]
