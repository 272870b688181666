"""A decoder on tensor-parallel ranks, hand-written as Megatron cuts it; `tp` of 1 is the whole.

`python -m tests.support.parallel_decoder RANK TP DP STORE OUT SCENARIO...` captures one pass of
each scenario with full tensors into OUT/SCENARIO/rank{RANK}. Ranks of one `dp` hold the same rows.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from tests.support.dumps import capture
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

WIDTH: Final = 16
HEADS: Final = 4
VOCABULARY: Final = 32
ROWS: Final = 4
TOKENS: Final = 6
FAULTY_RANK: Final = 3


class Group:
    """The tensor-parallel ranks of a process, and its place among them."""

    def __init__(self, index: int = 0, size: int = 1, group: Any = None) -> None:
        self.index, self.size, self.group = index, size, group

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(self.size, dim)[self.index].clone()


class _Copy(torch.autograd.Function):
    """Identity forward, sum of the ranks' gradients backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone()
        distributed.all_reduce(total, group=ctx.group.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Sum of the ranks' tensors forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        total = tensor.clone()
        distributed.all_reduce(total, group=group.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """Concatenation of the ranks' last dimensions forward, the own part backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(group.size)]
        distributed.all_gather(parts, tensor.contiguous(), group=group.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.part(gradients[0], -1), None


copied: Callable[[torch.Tensor, Group], torch.Tensor] = _Copy.apply
summed: Callable[[torch.Tensor, Group], torch.Tensor] = _Sum.apply
gathered: Callable[[torch.Tensor, Group], torch.Tensor] = _Gather.apply


class ColumnLinear(nn.Module):
    """A linear layer whose results are sharded."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.group, self.scale = group, 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.group.size > 1:
            hidden = copied(hidden, self.group)
        result = functional.linear(hidden, self.weight, self.bias)
        return result if self.scale == 1.0 else result * self.scale


class RowLinear(nn.Module):
    """A linear layer whose input is sharded; the ranks' partial sums are added."""

    def __init__(self, weight: torch.Tensor, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.group = group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = functional.linear(hidden, self.weight)
        return summed(result, self.group) if self.group.size > 1 else result


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are sharded."""

    def __init__(self, weight: torch.Tensor, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.group = group

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return functional.embedding(tokens, self.weight)
        own = len(self.weight)
        local = tokens - self.group.index * own
        outside = (local < 0) | (local >= own)
        found = functional.embedding(local.masked_fill(outside, 0), self.weight)
        total: torch.Tensor = summed(found.masked_fill(outside.unsqueeze(-1), 0.0), self.group)
        return total


class ParallelBlock(nn.Module):
    def __init__(self, weights: Mapping[str, torch.Tensor], group: Group) -> None:
        super().__init__()
        # Fused, by heads: each rank has the queries, keys and values of its own heads.
        fused = [group.part(weights[name], 0) for name in ("query", "key", "value")]
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = ColumnLinear(torch.cat(fused), None, group)
        self.out = RowLinear(group.part(weights["out"], 1), group)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.up = ColumnLinear(group.part(weights["up"], 0), group.part(weights["bias"], 0), group)
        self.down = RowLinear(group.part(weights["down"], 1), group)
        self.heads = HEADS // group.size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = hidden.shape
        fused = self.attention(self.norm(hidden)).chunk(3, dim=-1)
        query, key, value = (
            each.reshape(rows, tokens, self.heads, WIDTH // HEADS).transpose(1, 2) for each in fused
        )
        scores = torch.softmax(torch.matmul(query, key.transpose(-1, -2)), dim=-1)
        mixed = torch.matmul(scores, value).transpose(1, 2).reshape(rows, tokens, -1)
        hidden = hidden + self.out(mixed)
        changed: torch.Tensor = hidden + self.down(
            functional.silu(self.up(self.second_norm(hidden)))
        )
        return changed


class ParallelDecoder(nn.Module):
    """Token ids [rows, tokens] -> logits [rows, tokens, vocabulary]."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made) * 0.2

        blocks = [
            {
                **{name: weight(WIDTH, WIDTH) for name in ("query", "key", "value", "out")},
                "up": weight(2 * WIDTH, WIDTH),
                "bias": weight(2 * WIDTH),
                "down": weight(WIDTH, 2 * WIDTH),
            }
            for _ in range(2)
        ]
        self.embedding = VocabularyEmbedding(group.part(weight(VOCABULARY, WIDTH), 0), group)
        self.blocks = nn.ModuleList([ParallelBlock(each, group) for each in blocks])
        self.lm_head = ColumnLinear(group.part(weight(VOCABULARY, WIDTH), 0), None, group)
        self.group = group

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.lm_head(hidden)
        return gathered(logits, self.group) if self.group.size > 1 else logits


def _healthy(model: ParallelDecoder) -> None: ...


@torch.no_grad()
def _weight(model: ParallelDecoder) -> None:
    """Change one element of a weight, as a broken copy of it would."""
    model.get_parameter("blocks.1.up.weight")[3, 5] += 0.5


def _kernel(model: ParallelDecoder) -> None:
    """Let a layer compute other values with the right weight."""
    layer = model.get_submodule("blocks.0.up")
    assert isinstance(layer, ColumnLinear)
    layer.scale = 1.01


@torch.no_grad()
def _partial(model: ParallelDecoder) -> None:
    """Let a partial sum become NaN."""
    model.get_parameter("blocks.1.down.weight")[2, 1] = float("nan")


FAULTS: Final[Mapping[str, Callable[[ParallelDecoder], None]]] = {
    "healthy": _healthy, "weight": _weight, "kernel": _kernel, "partial": _partial,
}  # fmt: skip


DTENSORS: Final = "dtensors"
"""A scenario: torch's own tensor parallelism, whose parameters are DTensors."""


class _Mlp(nn.Module):
    """Rows -> rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.down(functional.silu(self.up(hidden)))
        return changed


def _parallel_mlp(tp: int, dp: int) -> nn.Module:
    model = nn.Sequential(_Mlp())
    if tp * dp > 1:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model[0], mesh["tp"], plan)
    return model


def _run_mlp(model: nn.Module, rank: int, tp: int, dp: int) -> None:
    made = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, TOKENS, WIDTH, generator=made).chunk(dp)[rank // tp]
    torch.autograd.backward(model(rows).square().mean())


def token_ids() -> torch.Tensor:
    return torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * 7 % VOCABULARY


def run(model: ParallelDecoder, tokens: torch.Tensor) -> None:
    """Run one pass; the loss is a mean over the rank's own tokens."""
    model.zero_grad(set_to_none=True)
    logits = model(tokens)
    torch.autograd.backward(functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()))


def main(rank: int, tp: int, dp: int, store: str, out: Path, scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    group = Group()
    if tp * dp > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=tp * dp
        )
        groups = [distributed.new_group([*range(at * tp, at * tp + tp)]) for at in range(dp)]
        group = Group(rank % tp, tp, groups[rank // tp])
    tokens = token_ids().chunk(dp)[rank // tp]
    for scenario in scenarios:
        model: nn.Module
        if scenario == DTENSORS:
            model = _parallel_mlp(tp, dp)
            body = functools.partial(_run_mlp, model, rank, tp, dp)
        else:
            model = decoder = ParallelDecoder(group)
            if rank == FAULTY_RANK or tp * dp == 1:
                FAULTS[scenario](decoder)
            body = functools.partial(run, decoder, tokens)
        made = out / "made" / scenario / str(rank)
        found = capture(made, model, task="tensor", body=body, rank=rank)
        shutil.copytree(found, out / scenario / f"rank{rank}")
    if tp * dp > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    rank, tp, dp = map(int, sys.argv[1:4])
    main(rank, tp, dp, sys.argv[4], Path(sys.argv[5]), sys.argv[6:])
