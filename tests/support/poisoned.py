"""Ranks of a training in whose model one weight becomes NaN on one rank, at a step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray
from tests.support.cluster import SECONDS, answer, kill


def _rank_class() -> Any:
    """Return the class by value: the actor's process cannot import the tests."""

    class Rank:
        """A rank that takes log-probs with a model of three layers, in step with the others."""

        def __init__(self, run: str, rank: int, size: int, store: str) -> None:
            import torch

            from stagescope_workers import init

            torch.set_num_threads(1)
            torch.manual_seed(0)
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size
            )
            self.middle = torch.nn.Linear(8, 8)
            self.model = torch.nn.Sequential(
                torch.nn.Embedding(16, 8), self.middle, torch.nn.Linear(8, 16)
            )
            self.torch, self.rank = torch, rank
            self.stopping = False
            self.probe = init(run=run, rank=rank, world_size=size)

        def pid(self) -> int:
            """Return the process id."""
            import os

            return os.getpid()

        def train(self, first: int, last: int, poisoned_at: int, seconds: float) -> int:
            """Do steps of some length; from one on, rank 1's middle layer holds a NaN.

            Returns the last step that was done: `last`, or that in which somebody said `stop`.
            """
            import time

            torch = self.torch
            rows, tokens = 4, 10
            generator = torch.Generator().manual_seed(self.rank)
            ids = torch.randint(0, 16, (rows, tokens), generator=generator)
            mask = torch.ones(rows, tokens, dtype=torch.int64)
            mask[:, 4] = 0
            for step in range(first, last + 1):
                stopping = torch.tensor([float(self.stopping)])
                torch.distributed.all_reduce(stopping)
                if stopping.item():
                    return step - 1
                if step == poisoned_at and self.rank == 1:
                    with torch.no_grad():
                        self.middle.weight[0, 0] = float("nan")
                name = "actor_compute_log_prob"
                with self.probe.stage(name, step=step, model=self.model) as stage, torch.no_grad():
                    scores = torch.log_softmax(self.model(ids), dim=-1)
                    p = scores.gather(-1, ids[..., None])[..., 0]
                    stage.record(
                        old_log_probs=p,
                        rollout_log_probs=torch.nan_to_num(p, nan=-1.0) + 0.001,
                        response_mask=mask,
                        responses=ids,
                        sample_ids=[f"sample-{self.rank}-{row}" for row in range(rows)],
                    )
                time.sleep(seconds)
            return last

        def stop(self) -> None:
            """Let every rank end its training with the step that it is in."""
            self.stopping = True

        def close(self) -> bool:
            """Take leave."""
            return bool(self.probe.close(30.0))

    return Rank


class Poisoned:
    """Two ranks of a run."""

    def __init__(self, run: str, size: int = 2) -> None:
        self.run = run
        store = Path(tempfile.mkdtemp(prefix="gloo")) / "store"
        made = ray.remote(_rank_class()).options(num_cpus=0, max_restarts=0, max_concurrency=2)
        self.ranks = [made.remote(run, rank, size, str(store)) for rank in range(size)]
        self.pids = [int(answer(rank.pid.remote(), 2 * SECONDS)) for rank in self.ranks]

    def train(self, first: int, last: int, poisoned_at: int, seconds: float) -> list[object]:
        """Begin these steps; return the refs of the ends."""
        return [rank.train.remote(first, last, poisoned_at, seconds) for rank in self.ranks]

    def stop(self) -> None:
        """End a training before its last step."""
        answer(self.ranks[0].stop.remote())

    def leave(self) -> None:
        """Take leave and end the processes."""
        answer([rank.close.remote() for rank in self.ranks], 2 * SECONDS)
        for pid in self.pids:
            kill(pid)
