"""Ranks that train a small module under gloo, in processes of their own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from tests.support.cluster import SECONDS, answer, kill


def _trainer_class() -> Any:
    """Return the class by value: the actor's process cannot import the tests."""

    class Trainer:
        """One rank: a module, a group, and steps until it is told to stop."""

        def __init__(self, run: str, rank: int, size: int, store: str) -> None:
            import torch

            from stagescope_workers import init

            torch.set_num_threads(1)
            torch.manual_seed(0)
            self.torch = torch
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size
            )
            self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
            self.probe = init(run=run, rank=rank, world_size=size)
            self.step = 0
            self.seconds = 0.0
            self.stopping = False

        def pid(self) -> int:
            """Return the process id."""
            import os

            return os.getpid()

        def train(self, seconds: float) -> int:
            """Do steps of some length until `stop`; return how many."""
            import time

            torch = self.torch
            self.seconds = seconds
            while True:
                going = torch.tensor([0.0 if self.stopping else 1.0])
                torch.distributed.all_reduce(going, op=torch.distributed.ReduceOp.MIN)
                if not going.item():
                    return int(self.step)
                self.step += 1
                with self.probe.stage("actor_update", step=self.step, model=self.model):
                    self.model.zero_grad()
                    self.model(torch.ones(2, 8)).sum().backward()
                    for parameter in self.model.parameters():
                        torch.distributed.all_reduce(parameter.grad)
                time.sleep(self.seconds)

        def slow_down(self, seconds: float) -> None:
            """Let steps take so long from the next one on."""
            self.seconds = seconds

        def stop(self) -> None:
            """Let every rank end with this step."""
            self.stopping = True

        def where(self) -> int:
            """Return the step it is in."""
            return int(self.step)

        def status(self) -> dict[str, object]:
            """Return what the probe says of itself."""
            return self.probe.status()

    return Trainer


class Training:
    """`size` ranks that train together, from its making until `stop`."""

    def __init__(self, run: str, size: int = 2, seconds: float = 0.05) -> None:
        self.run, self.size, self.seconds = run, size, seconds
        store = Path(tempfile.mkdtemp(prefix="gloo")) / "store"
        made = ray.remote(_trainer_class()).options(num_cpus=0, max_restarts=0, max_concurrency=4)
        self.ranks = [made.remote(run, rank, size, str(store)) for rank in range(size)]
        self.pids = [int(answer(rank.pid.remote(), 2 * SECONDS)) for rank in self.ranks]
        self._running = [rank.train.remote(seconds) for rank in self.ranks]

    def where(self, rank: int = 0) -> int:
        """Return the step that a rank is in."""
        return int(answer(self.ranks[rank].where.remote()))

    @contextlib.contextmanager
    def slowed(self, seconds: float) -> Iterator[None]:
        """Let every step take so long inside the block."""
        ray.get([rank.slow_down.remote(seconds) for rank in self.ranks], timeout=SECONDS)
        try:
            yield
        finally:
            ray.get([rank.slow_down.remote(self.seconds) for rank in self.ranks], timeout=SECONDS)

    def stop(self) -> None:
        """End after the present step, then the processes."""
        answer(self.ranks[0].stop.remote())
        answer(self._running[0])
        for pid in self.pids:
            kill(pid)
