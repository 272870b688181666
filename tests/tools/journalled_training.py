"""A training that writes down which of its steps the service acknowledged, and when.

    python -m tests.tools.journalled_training DIRECTORY RUN            # over HTTP, one rank
    python -m tests.tools.journalled_training DIRECTORY RUN ADDRESS IP # two actors on a Ray node

It trains until there is a file `stop` in DIRECTORY, closes its probes and ends. Each rank writes
DIRECTORY/RUN-RANK.jsonl: a line when a step is done, with the newest step of which everything, and
of all before it, had its receipt at that time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.measure import Handed, payload

STAGE: Final = "actor_update"
WORK_SECONDS: Final = 0.1
CHECKPOINT_STEPS: Final = 5
CHECKPOINT_SECONDS: Final = 2.0


class Line(NamedTuple):
    """What one rank wrote of one step."""

    step: int
    wall: float
    """When it was done, Unix seconds."""
    seconds: float
    """What it took."""
    acknowledged: int
    """The newest step whose events and payloads, and those of all before it, had receipts."""
    dropped: int
    """What the probe had dropped so far."""


def handed(rank: int, step: int) -> Handed:
    """Return what a rank hands over in a step."""
    return payload(seed=1000 * rank + step, first_sample=4 * rank)


def read(directory: Path, run: str, rank: int) -> list[Line]:
    """Return what a rank has written so far."""
    path = _path(directory, run, rank)
    text = path.read_text() if path.exists() else ""
    return [Line(*json.loads(line)) for line in text.splitlines(keepends=True) if line[-1] == "\n"]


def stop(directory: Path) -> None:
    """Have the trainings of a directory end."""
    (directory / "stop").touch()


def _path(directory: Path, run: str, rank: int) -> Path:
    return directory / f"{run}-{rank}.jsonl"


def train(directory: Path, run: str, rank: int, world_size: int) -> None:
    """Train until told to stop."""
    from stagescope_workers import init

    probe = init(run, rank=rank, world_size=world_size)
    with _path(directory, run, rank).open("a") as journal:
        step, acknowledged = 0, 0
        while not (directory / "stop").exists():
            step += 1
            began = time.perf_counter()
            time.sleep(WORK_SECONDS)  # a device works, and this process waits for it
            with probe.stage(STAGE, step=step) as stage:
                tensors = handed(rank, step)
                values = {name: item[2] for name, item in tensors["tensors"].items()}
                stage.record(**values, **tensors["strings"])
            took = time.perf_counter() - began
            if step % CHECKPOINT_STEPS == 0 and _is_acknowledged(probe):
                acknowledged = step
            dropped = sum(probe.status()["dropped"].values())
            line = Line(step, time.time(), took, acknowledged, dropped)
            journal.write(json.dumps(line) + "\n")
            journal.flush()
    probe.end_step(step)
    if not probe.close(60.0):
        raise RuntimeError(f"rank {rank} of {run} closed without all receipts: {probe.status()}")


def _is_acknowledged(probe: Any) -> bool:
    """Return whether everything has its receipt; waits for it for a while, as a checkpoint does."""
    until = time.monotonic() + CHECKPOINT_SECONDS
    while True:
        status = probe.status()
        if status["connected"] and not (status["waiting_events"] or status["waiting_payloads"]):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.01)


def _train_in_ray(directory: Path, run: str, address: str, ip: str) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, _node_ip_address=ip, log_to_driver=False)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    rank = ray.remote(_Rank).options(num_cpus=0, scheduling_strategy=here)
    ranks: list[Any] = [rank.remote() for _ in range(2)]
    ray.get([each.train.remote(directory, run, number, 2) for number, each in enumerate(ranks)])


class _Rank:
    def train(self, directory: Path, run: str, rank: int, world_size: int) -> int:
        train(directory, run, rank, world_size)
        return os.getpid()


if __name__ == "__main__":
    from tests.tools import journalled_training as importable

    _directory, _run, *_ray = sys.argv[1:]
    if _ray:
        importable._train_in_ray(Path(_directory), _run, *_ray)
    else:
        importable.train(Path(_directory), _run, 0, 1)
