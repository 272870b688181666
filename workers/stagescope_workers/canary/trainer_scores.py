"""Scores the sequences of a canary with the trainer's own torch model."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from stagescope_workers.canary.sequences import SCORED, Row

_POSITIONS: Final = 128
"""Positions whose logits are converted to float32 at a time: a vocabulary of 150 k needs 77 MB."""


def score_with_model(
    model: Any, rows: Sequence[Row], temperature: float = 1.0
) -> list[tuple[float, ...]]:
    """Return the log-probs of the last tokens of each row, at most `SCORED`.

    The model runs in evaluation mode and without gradients, one row at a time, in its own dtype.
    Log-probs are the log-softmax of its float32 logits over the whole vocabulary. The training
    mode of each module and the state of the random generators are the same afterwards. Where the
    model is sharded, call this on all its ranks.

    Args:
        model: called as transformers' causal models are: `model(input_ids=..., use_cache=False)`
            returns `.logits` [1, tokens, vocabulary].
        rows: token ids, at least two in each row.
        temperature: divides the logits.
    """
    device = _device_of(model)
    cuts = _accepts(model, "logits_to_keep")
    found = []
    with _evaluating(model, device), torch.no_grad():
        for row in rows:
            ids = torch.tensor([row], device=device)
            count = min(len(row) - 1, SCORED)
            options = {"logits_to_keep": count + 1} if cuts else {}
            answer = model(input_ids=ids, use_cache=False, **options)
            logits = getattr(answer, "logits", answer)[0, -count - 1 : -1]
            found.append(_log_probs(logits, ids[0, -count:], temperature))
    return [tuple(values.tolist()) for values in found]


def adapter_is_zero(model: Any) -> bool | None:
    """Return whether every LoRA `B` of a peft model is zero, so that it equals its base.

    None: the model has no LoRA here, or its values cannot be read.
    """
    found = [value for name, value in model.named_parameters() if "lora_B" in name]
    if not found or any(value.numel() == 0 for value in found):  # sharded elsewhere
        return None
    return not any(bool(value.detach().any()) for value in found)


def _log_probs(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    found = []
    for start in range(0, len(ids), _POSITIONS):
        piece = slice(start, start + _POSITIONS)
        values = logits[piece].float() / temperature
        chosen = values.gather(-1, ids[piece, None].to(values.device))[:, 0]
        found.append(chosen - values.logsumexp(-1))
    return torch.cat(found)


def _device_of(model: Any) -> torch.device:
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


@contextlib.contextmanager
def _evaluating(model: Any, device: torch.device) -> Iterator[None]:
    """Run the body in evaluation mode; restore each module's mode and the random generators."""
    training = [module for module in model.modules() if module.training]
    others = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(others, device_type=device.type if others else "cuda"):
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def _accepts(model: Any, name: str) -> bool:
    """Return whether the innermost model's `forward` has an argument of this name."""
    for _ in range(5):
        inner = getattr(model, "get_base_model", None)
        inner = inner() if callable(inner) else getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            break
        model = inner
    with contextlib.suppress(TypeError, ValueError):
        return name in inspect.signature(model.forward).parameters
    return False


def tail(values: Any, row: Row) -> tuple[float, ...]:
    """Return the log-probs of a row's last tokens from what a trainer's function returned.

    `values` has one number for each token of the row, or for the last ones.
    """
    numbers = [float(each) for each in values][-min(len(row) - 1, SCORED) :]
    return tuple(value if math.isfinite(value) or value < 0 else math.nan for value in numbers)
