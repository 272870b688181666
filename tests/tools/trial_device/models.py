"""The training that a trial reports: steps of a small model on the device, and their batch."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from tests.support.small_decoder import small_decoder, token_ids
from tests.tools.trial_device.results import Effort
from tests.tools.trial_device.target import Target
from torch.nn import functional

VOCABULARY: Final = 512
_MODEL_ROWS: Final = 4
_MODEL_TOKENS: Final = 256


class Batch(NamedTuple):
    """What a rank records of a step: four tensors [rows, tokens] on the device."""

    rollout_log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    response_mask: torch.Tensor
    responses: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self)


class Training:
    """A model and its batch; `step` runs forward and backward, and writes new log-probs."""

    def __init__(self, target: Target, effort: Effort) -> None:
        self.model = small_decoder(width=effort.width, vocabulary=VOCABULARY)
        self.model.to(target.device)
        self._tokens = target.place(token_ids(_MODEL_ROWS, _MODEL_TOKENS, VOCABULARY))
        shape = (effort.rows, effort.tokens)
        generator = torch.Generator().manual_seed(0)
        old = -torch.rand(shape, generator=generator)
        self.batch = Batch(
            target.place(old + 1e-3),
            target.place(old),
            target.place(torch.ones(shape, dtype=torch.bool)),
            target.place(torch.randint(0, VOCABULARY, shape, generator=generator)),
        )

    def step(self, passes: int = 1) -> torch.Tensor:
        """Queue one step, overwrite the log-probs in place, and return the loss on the device."""
        loss = torch.zeros((), device=self._tokens.device)
        for _ in range(passes):
            self.model.zero_grad(set_to_none=True)
            logits = self.model(self._tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), self._tokens.flatten())
            torch.autograd.backward(loss)
        self.batch.old_log_probs.mul_(0.999)
        self.batch.rollout_log_probs.mul_(0.999)
        return loss.detach()
