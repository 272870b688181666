"""Ranks with the real probe, in processes of their own that can be killed."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.support.cluster import SECONDS, answer, kill
from tests.support.measure import Handed

_DRIVER = """
import sys, time
import numpy as np
import ray

ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, run, rank):
        from stagescope_workers import init
        self.probe = init(run, rank=rank, world_size=2)
        self.rank = rank

    def train(self, first):
        values = np.full((2, 8), -1.0, np.float32)
        with self.probe.stage("actor_update", step=first) as stage:
            stage.record(old_log_probs=values, rollout_log_probs=values + 0.01 * first,
                         response_mask=np.ones((2, 8), np.int64),
                         sample_ids=[f"{self.rank}-{row}" for row in range(2)])
        self.stage = self.probe.begin("actor_update", step=first + 1)
        while self.probe.status()["waiting_events"] or self.probe.status()["waiting_payloads"]:
            time.sleep(0.01)

workers = [Worker.remote(sys.argv[2], rank) for rank in range(2)]
ray.get([worker.train.remote(int(sys.argv[3])) for worker in workers])
print("hanging", flush=True)
time.sleep(600)
"""


def _rank_class() -> Any:
    """Return the class by value: the actor's process cannot import the tests."""

    class Rank:
        """A rank with the real probe."""

        def __init__(self, run: str, rank: int, options: Mapping[str, Any]) -> None:
            from stagescope_workers import init

            self.probe = init(run=run, rank=rank, **options)
            self.open: Any = None

        def report(self, step: int, payload: Handed | None, stage: str = "actor_update") -> None:
            """Do one stage that hands over a payload."""
            with self.probe.stage(stage, step=step) as span:
                if payload is not None:
                    tensors = {name: item[2] for name, item in payload["tensors"].items()}
                    span.record(**tensors, **payload["strings"])
                span.log(loss=float(step))

        def report_own(self, step: int, rows: int, tokens: int, seed: int) -> None:
            """Do one stage whose payload is made here: nothing of it comes from the caller."""
            from tests.support.measure import payload

            self.report(step, payload(rows, tokens, seed=seed, first_sample=rows * seed))

        def flood(self, step: int) -> None:
            """Do one stage that hands over a thousand scalars."""
            with self.probe.stage("actor_update", step=step) as span:
                span.log(**{f"scalar_{number}": float(number) for number in range(1000)})

        def end_raw(self, run: str, step: int, payload: Handed) -> list[object]:
            """End a stage with a raw call; return the refs, which this process owns."""
            import ray

            coordinator = ray.get_actor("DebugCoordinator", namespace="stagescope")
            refs = {name: ray.put(item[2]) for name, item in payload["tensors"].items()}
            self.open = coordinator.end_stage.remote(
                run=run, step=step, stage="actor_update", rank=0, payload=refs
            )
            return [*refs.values()]

        def train(self, steps: list[int], payload: Handed | None, seconds: float) -> list[float]:
            """Do steps of some work each; return how long each took."""
            import numpy as np

            took = []
            for step in steps:
                began = time.perf_counter()
                while time.perf_counter() < began + seconds:
                    np.sort(np.random.default_rng(step).random(20_000))
                self.report(step, payload)
                took.append(time.perf_counter() - began)
            return took

        def begin(self, step: int, stage: str = "actor_update") -> None:
            """Begin a stage and stay in it."""
            self.open = self.probe.begin(stage, step=step)

        def end(self) -> None:
            """End the stage that `begin` began."""
            self.probe.end(self.open)

        def end_step(self, step: int) -> None:
            """Say that a step is over."""
            self.probe.end_step(step)

    return Rank


class Process:
    """An actor in a process of its own, with a probe; calls wait for their answer.

    Args:
        made: its class, by value.
        arguments: of the class.
        node_id: of the node that it runs on; None: any.
        options: of the actor.
    """

    def __init__(
        self, made: Any, *arguments: object, node_id: str | None = None, **options: object
    ) -> None:
        place = node_id and NodeAffinitySchedulingStrategy(node_id, soft=False)
        given = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, **options}
        actor = ray.remote(made).options(scheduling_strategy=place, **given)
        self.handle = actor.remote(*arguments)

    @functools.cached_property
    def pid(self) -> int:
        """The process id; ranks that meet in their constructors are made before it is asked."""
        return int(self.call(lambda _: os.getpid()))

    def ask(self, method: str, *arguments: object) -> Any:
        """Call and wait."""
        return answer(self.begins(method, *arguments), 2 * SECONDS)

    def begins(self, method: str, *arguments: object) -> Any:
        """Call; return the ref of the answer."""
        return getattr(self.handle, method).remote(*arguments)

    def call(self, function: Callable[[Any], object]) -> Any:
        """Call a function with the actor, in its process."""
        return answer(self.handle.__ray_call__.remote(function), 2 * SECONDS)

    def status(self) -> Any:
        """Return what the probe says of itself."""
        return self.call(lambda actor: actor.probe.status())

    def acknowledged(self) -> bool:
        """Say whether every event (payloads apart) has its receipt."""
        status = self.status()
        return bool(status["connected"]) and status["waiting_events"] == 0

    def settled(self) -> bool:
        """Say whether everything has its receipt, payloads included."""
        status = self.status()
        waiting = status["waiting_events"] or status["waiting_payloads"]
        return bool(status["connected"]) and not waiting

    def close(self) -> None:
        """Let the probe take leave, and end the process."""
        self.call(lambda actor: actor.probe.close(30.0))
        self.kill()

    def kill(self) -> None:
        """Kill -9."""
        kill(self.pid)


class Rank(Process):
    """A rank with the real probe."""

    def __init__(
        self, run: str, rank: int = 0, node_id: str | None = None, **options: object
    ) -> None:
        super().__init__(_rank_class(), run, rank, options, node_id=node_id)
        _ = self.pid  # known before its process is held


class HangingJob:
    """A training job in a driver process of its own, whose two ranks hang inside a stage."""

    def __init__(self, driver: subprocess.Popen[str]) -> None:
        self._driver = driver

    def kill(self) -> None:
        """Kill the driver with -9; its ranks die with it."""
        kill(self._driver.pid)
        self._driver.wait()
        if self._driver.stdout is not None:
            self._driver.stdout.close()


def hanging_job(address: str, run: str, first: int) -> HangingJob:
    """Start a job that has done step `first` and hangs inside step `first + 1`."""
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, address, run, str(first)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "token"},
    )
    assert driver.stdout is not None
    assert any(line.strip() == "hanging" for line in iter(driver.stdout.readline, ""))
    return HangingJob(driver)
