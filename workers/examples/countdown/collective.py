"""torch.distributed over gloo on the loopback interface, and sums over the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=120)
# Public and documented, but missing from the names that torch marks as exported.
_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]


class Collective:
    """One rank of `world_size`; a single rank needs no process group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store: Any = None

    def listen(self) -> int:
        """On rank 0: open the store on a free port and return the port."""
        self._store = _TCPStore(
            _HOST, 0, self.world_size, is_master=True, timeout=_TIMEOUT, wait_for_workers=False
        )
        return int(self._store.port)

    def join(self, port: int) -> None:
        """Connect to the other ranks through rank 0's port; return once all have joined."""
        # Without it gloo resolves this host's name, whose address may not be reachable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = self._store or _TCPStore(
            _HOST, port, self.world_size, is_master=False, timeout=_TIMEOUT
        )
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=_TIMEOUT
        )

    def leave(self) -> None:
        """Destroy the process group."""
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

    def has_equal_parameters(self, model: torch.nn.Module) -> bool:
        """Return whether every rank has the same parameters, bit for bit."""
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        words = flat.view(torch.int32).to(torch.int64)
        checksum = torch.stack([words.sum(), (words * torch.arange(1, len(words) + 1)).sum()])
        if self.world_size == 1:
            return True
        smallest, largest = checksum.clone(), checksum.clone()
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return bool((smallest == largest).all())

    def _sum(self, tensor: torch.Tensor) -> None:
        if self.world_size > 1:
            dist.all_reduce(tensor)
