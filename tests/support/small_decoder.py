"""A decoder of two layers, small enough to be captured whole in a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from stagescope_wire.plan import CaptureRequest
from stagescope_wire.schema import Part


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attention(self.norm(hidden)).chunk(3, dim=-1)
        scores = torch.softmax(torch.matmul(query, key.transpose(-1, -2)), dim=-1)
        hidden = hidden + self.out(torch.matmul(scores, value))
        changed: torch.Tensor = hidden + self.down(functional.silu(self.up(hidden)))
        return changed


class SmallDecoder(nn.Module):
    """Token ids [rows, tokens] -> logits [rows, tokens, vocabulary]."""

    def __init__(self, width: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.failing: str | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        if self.failing == "module":
            raise ValueError("the model broke")
        if self.failing == "api":
            torch.matmul(hidden, torch.zeros(3, 5))
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


def small_decoder(seed: int = 0, **sizes: int) -> SmallDecoder:
    torch.manual_seed(seed)
    return SmallDecoder(**sizes)


def token_ids(rows: int = 2, tokens: int = 6, vocabulary: int = 32) -> torch.Tensor:
    return torch.arange(rows * tokens).reshape(rows, tokens) % vocabulary


def forward_backward(model: nn.Module, tokens: torch.Tensor) -> float:
    """Run one pass and leave fresh gradients; return the loss."""
    model.zero_grad(set_to_none=True)
    logits = model(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    torch.autograd.backward(loss)
    return float(loss.detach())


def begin(request: Mapping[str, object], model: object = None, **work: Any) -> Any:
    """Begin a capture of `request`, of the first update of a run's first actor but for `work`."""
    from stagescope_workers.capture.msprobe_capture import begin_capture

    usual = {"run": "run", "attempt_key": "k", "stage": "actor_update", "step": 1, "part": Part()}
    usual |= {"role": "actor", "rank": 0, "data_root": None}
    capture = cast(CaptureRequest, {"capture_id": "c", **request})
    return begin_capture(capture, model=model, **{**usual, **work})
