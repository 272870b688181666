"""Ranks that hang for real: a gloo collective that one of them never enters, a held interpreter."""

from __future__ import annotations

from typing import Any

import ray
from tests.support.cluster import SECONDS, answer, kill


def _trainer_class() -> Any:
    """Return the class by value: the actor's process cannot import the tests."""

    class Trainer:
        """A rank that trains in a thread, so that its actor still answers."""

        def __init__(self, run: str, rank: int, store: str, options: dict[str, Any]) -> None:
            from stagescope_workers import init

            self.rank, self.store = rank, store
            self.probe = init(run=run, rank=rank, world_size=2, **options)
            self.group: object = None
            self.thread: Any = None

        def pid(self) -> int:
            import os

            return os.getpid()

        def join(self) -> None:
            """Make the process group of both ranks."""
            import torch.distributed as dist

            dist.init_process_group(
                "gloo", init_method=f"file://{self.store}", rank=self.rank, world_size=2
            )

        def train(self, first: int, last: int, skip: int) -> None:
            """Reduce once in each step; in step `skip` rank 1 never comes to it."""
            import threading

            self.release = threading.Event()
            self.thread = threading.Thread(
                target=self._train, args=(first, last, skip), name="trainer", daemon=True
            )
            self.thread.start()

        def _train(self, first: int, last: int, skip: int) -> None:
            for step in range(first, last + 1):
                self.sample(step)
                if step == skip and self.rank == 1:
                    self.lose_the_way()
                with self.probe.stage("actor_update", step=step):
                    self.reduce_gradients()

        def sample(self, step: int) -> None:
            with self.probe.stage("rollout_generate", step=step):
                pass

        def lose_the_way(self) -> None:
            self.release.wait()

        def reduce_gradients(self) -> None:
            import torch
            import torch.distributed as dist

            dist.all_reduce(torch.ones(4))

        def go_on(self) -> None:
            """Let rank 1 come to the collective after all."""
            self.release.set()

        def is_done(self) -> bool:
            return not self.thread.is_alive()

        def hold_interpreter(self, step: int, seconds: float) -> None:
            """Stand still inside a stage: PyDLL's functions do not let the interpreter go."""
            import ctypes
            import pathlib
            import threading
            import time

            def hold() -> None:
                with self.probe.stage("actor_update", step=step):
                    # Its file says the stage once the watchdog was set inside it.
                    file = pathlib.Path(str(self.probe.stage_tracker.start_watchdog()))
                    while "actor_update" not in file.read_text():
                        time.sleep(0.01)
                    ctypes.PyDLL(None).usleep(int(seconds * 1e6))

            threading.Thread(target=hold, name="trainer", daemon=True).start()

        def report(self, step: int) -> None:
            with self.probe.stage("actor_update", step=step):
                pass

        def status(self) -> dict[str, object]:
            return self.probe.status()

        def close(self) -> bool:
            return self.probe.close(30.0)

    return Trainer


class Trainer:
    """A rank in a process of its own; calls wait for their answer."""

    def __init__(self, run: str, rank: int, store: str, **options: object) -> None:
        made = ray.remote(_trainer_class()).options(num_cpus=0, max_restarts=0, max_task_retries=0)
        self.handle = made.remote(run, rank, store, options)
        self.pid = self.ask("pid")

    def ask(self, method: str, *arguments: object) -> Any:
        """Call and wait."""
        return answer(getattr(self.handle, method).remote(*arguments), 2 * SECONDS)

    def begins(self, method: str, *arguments: object) -> object:
        """Call; return the ref of the answer."""
        return getattr(self.handle, method).remote(*arguments)

    def acknowledged(self) -> bool:
        """Say whether every event has its receipt."""
        status = self.ask("status")
        return bool(status["connected"]) and status["waiting_events"] == 0

    def kill(self) -> None:
        """Kill -9."""
        kill(self.pid)
