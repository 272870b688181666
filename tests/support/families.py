"""Tiny models of three families, one pass through each, and faults to plant in them."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

NAN: Final = 0xFF
"""The byte that makes every float NaN."""

_M_PERTURB: Final = -6  # <malloc.h> of glibc
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
    "attn_implementation": "eager", "use_cache": False,
}  # fmt: skip


class Convolutions(nn.Module):
    """Images [rows, 3, 8, 8] -> logits [rows, 10]; the biases before BatchNorm have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.out = nn.MaxPool2d(2), nn.Linear(8 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.bn1(self.conv1(images)))
        hidden = hidden + torch.relu(self.bn2(self.conv2(hidden)))
        logits: torch.Tensor = self.out(self.pool(hidden).flatten(1))
        return logits


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return Convolutions()


FAMILIES: Final[dict[str, Callable[[], nn.Module]]] = {
    "llama": llama, "convolutions": convolutions, "mixtral": mixtral,
}  # fmt: skip


def one_pass(model: nn.Module, *, backwards: bool = False) -> None:
    """Run one forward and backward pass; `backwards` takes the rows in reversed order."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, Convolutions):
        images, labels = torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)
        if backwards:
            images, labels = images.flip(0), labels.flip(0)
        loss = functional.cross_entropy(model(images), labels)
    else:
        ids = torch.randint(0, 32, (2, 6), generator=generator)
        logits = model(input_ids=ids.flip(0) if backwards else ids).logits
        loss = logits.float().square().mean()
    torch.autograd.backward(loss)


def scaled_weight(model: nn.Module, module: str) -> None:
    _weight(model, module).mul_(1.5)


def other_element(model: nn.Module, module: str) -> None:
    _weight(model, module).view(-1)[0] = 5.0


def nan_weight(model: nn.Module, module: str) -> None:
    _weight(model, module).view(-1)[0] = math.nan


def scaled_gradient(model: nn.Module, module: str) -> None:
    """Make the gradient of a module's result half as large again."""

    def scaled(_: nn.Module, __: object, result: object) -> object:
        return _Scaled.apply(result)  # type: ignore[no-untyped-call]

    model.get_submodule(module).register_forward_hook(scaled)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.5


def _weight(model: nn.Module, module: str) -> torch.Tensor:
    parameters = dict(model.get_submodule(module).named_parameters())
    return parameters.get(
        "weight", parameters.get("down_proj", next(iter(parameters.values())))
    ).data


@contextlib.contextmanager
def leftovers(byte: int) -> Iterator[None]:
    """Have glibc fill what it allocates with a byte, as somebody's earlier tensors would."""
    mallopt = ctypes.CDLL(None).mallopt
    # The lowest eight bits are written inverted; 0 as a whole would switch it off.
    mallopt(_M_PERTURB, 0x100 | (byte ^ 0xFF))
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)
