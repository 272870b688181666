"""torch.distributed over gloo on the loopback interface, and the sums that the ranks share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_HOST = "127.0.0.1"
_PATIENCE = timedelta(seconds=120)
# Public and documented, but missing from the names that torch marks as exported.
_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]


class Collective:
    """One rank's place among `world_size`; a world of one needs no process group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store: Any = None

    def listen(self) -> int:
        """On rank 0: open the meeting place on a free port and return the port."""
        self._store = _TCPStore(
            _HOST, 0, self.world_size, is_master=True, timeout=_PATIENCE, wait_for_workers=False
        )
        return int(self._store.port)

    def join(self, port: int) -> None:
        """Meet the other ranks at rank 0's port; returns once all are there."""
        # Without it gloo asks the resolver for this host's name, which need not be reachable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = self._store or _TCPStore(
            _HOST, port, self.world_size, is_master=False, timeout=_PATIENCE
        )
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=_PATIENCE
        )

    def leave(self) -> None:
        """Take the process group down."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def total(self, values: Iterable[torch.Tensor | float]) -> list[float]:
        """Sum each number over the ranks, in float64."""
        numbers = torch.tensor([float(value) for value in values], dtype=torch.float64)
        self._sum(numbers)
        return [float(number) for number in numbers]

    def sum_gradients(self, model: torch.nn.Module) -> None:
        """Sum the gradients over the ranks, in one flat buffer: data parallelism by hand."""
        if self.world_size == 1:
            return
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._sum(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def agree(self, model: torch.nn.Module) -> bool:
        """Tell whether every rank holds the same parameters, bit for bit."""
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        mine = flat.view(torch.int32).to(torch.int64)
        digest = torch.stack([mine.sum(), (mine * torch.arange(1, len(mine) + 1)).sum()])
        if self.world_size == 1:
            return True
        least, most = digest.clone(), digest.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return bool((least == most).all())

    def _sum(self, tensor: torch.Tensor) -> None:
        if self.world_size > 1:
            dist.all_reduce(tensor)
