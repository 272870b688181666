"""A service on a real Ray cluster of the test's own, and ways to harm it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil
import pytest
import ray
from ray import exceptions

import stagescope
from stagescope.session import Session
from stagescope_service.serve import ServiceInfo, start_service, stop_service
from stagescope_service.settings import Settings
from stagescope_wire.discovery import (
    API_NAME,
    COORDINATOR_NAME,
    NAMESPACE,
    ingestor_name,
    relay_name,
)
from stagescope_wire.errors import NotReady, StagescopeError

T = TypeVar("T")
SECONDS = 45.0
"""Deadline of every wait; only a failure takes so long."""


def eventually(condition: Callable[[], T | None], seconds: float = SECONDS) -> T:
    """Return the first true value of `condition`; what it says last is in the failure."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            last: Any = condition()
        except (StagescopeError, httpx.TransportError) as error:
            last = error
        else:
            if last:
                found: T = last
                return found
        if time.monotonic() > deadline:
            raise AssertionError(f"still not so after {seconds} s: {last!r}")
        time.sleep(0.02)


@contextlib.contextmanager
def ray_cluster(**options: Any) -> Iterator[str]:
    """Be the driver of a small cluster; yields its address. Options are ray.init's."""
    context: Any = ray.init(
        address="local",
        **{"num_cpus": 4, "object_store_memory": 200_000_000, **options},
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        yield str(context.address_info["gcs_address"])
    finally:
        ray.shutdown()


@dataclasses.dataclass
class Service:
    """A service and the ways to ask it, to harm it and to see it come back."""

    settings: Settings
    address: str
    info: ServiceInfo

    @classmethod
    def start(cls, home: Path, address: str, **settings: Any) -> Service:
        """Start a service with short leases on a cluster."""
        given = {"port": 0, "lease_seconds": 4.0, "poll_seconds": 1.0, **settings}
        made = Settings(home=home, **given)
        return cls(made, address, start_service(made, address=address))

    def stop(self) -> bool:
        """Stop it; what it stored stays."""
        return stop_service(self.settings, address=self.address)

    @property
    def token(self) -> str:
        """The token to operate."""
        return self.info.operate_token_file.read_text().strip()

    def session(self) -> Session:
        """Return a client over HTTP."""
        # A service of the tests may share two cores with another one and their trainings.
        return stagescope.attach(self.info.url, token=self.token, timeout=60.0)

    def losses(self, run: str, **where: object) -> list[Any]:
        """Return what the API lists as lost, the rows with these values."""
        with self.session() as session:
            rows = list(session.losses(run))
        return [row for row in rows if all(row[name] == value for name, value in where.items())]

    def stages(self, run: str, step: int, **where: Any) -> list[Any]:
        """Return what the API says of a step's stages."""
        with self.session() as session:
            return list(session.step(step, run=run).stages(**where))

    def ready(self) -> tuple[int, str]:
        """Return /readyz's status code and text."""
        said = httpx.get(f"{self.info.url}/readyz", timeout=10.0)
        return said.status_code, said.text

    @property
    def coordinator(self) -> Any:
        """The coordinator's handle."""
        return ray.get_actor(COORDINATOR_NAME, namespace=NAMESPACE)

    def status(self) -> dict[str, Any]:
        """Return what the coordinator says of itself, waiting for its restart."""
        # By a name: in older Rays a method does not keep its actor's handle.
        coordinator = self.coordinator
        status: dict[str, object] = answer(coordinator.status.remote())
        return status

    def pid(self, which: str) -> int:
        """Return the process id of "coordinator", "api", or this node's "ingestor" or "relay"."""
        if which == "coordinator":
            return int(self.status()["pid"])
        if which == "api":
            actor = ray.get_actor(API_NAME, namespace=NAMESPACE)
            return int(answer(actor.where.remote())["pid"])
        of_node = {"ingestor": ingestor_name, "relay": relay_name}[which]
        name = of_node(ray.get_runtime_context().get_node_id())
        actor = ray.get_actor(name, namespace=NAMESPACE)
        return int(answer(actor.pid.remote()))

    def kill(self, which: str, pid: int | None = None) -> int:
        """Kill -9; return the pid that died (to be given of one that cannot answer)."""
        pid = self.pid(which) if pid is None else pid
        kill(pid)
        return pid

    def reborn(self, which: str, old: int) -> tuple[int, float]:
        """Wait until Ray made an actor anew; return its pid and when that was (wall)."""

        def anew() -> tuple[int, float] | None:
            with contextlib.suppress(exceptions.RayError, ValueError):
                pid = self.pid(which)
                if pid != old:
                    return pid, time.time()
            return None

        pid, began = eventually(anew)
        if which == "coordinator":
            began = float(self.status()["started"])
        elif which == "api":
            actor = ray.get_actor(API_NAME, namespace=NAMESPACE)
            began = float(answer(actor.where.remote())["started"])
        return pid, began

    def kill_and_await(
        self, which: str, ready: Callable[[], object] | None = None, pid: int | None = None
    ) -> float:
        """Kill -9, wait until `ready` (by default /readyz) holds.

        Returns how long that took from when Ray had made the actor anew, seconds.
        """
        died = time.time()
        old = self.kill(which, pid)
        began = self.reborn(which, old)[1]
        eventually(ready or (lambda: self.ready()[0] == 200))
        now = time.time()
        print(  # noqa: T201 - what was measured
            f"{which}: made anew {began - died:.2f} s after the kill, answers {now - began:.2f} s "
            "later"
        )
        return now - began

    @contextlib.contextmanager
    def held(self, which: str) -> Iterator[int]:
        """Stop an actor's process for a while, so that what it should do stays undone."""
        pid = self.pid(which)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def answer(ref: Any, seconds: float = SECONDS) -> Any:
    """Wait for an actor's answer."""
    return ray.get(ref, timeout=seconds)


def kill(pid: int) -> None:
    """Kill -9, and wait until the process is gone."""
    process = psutil.Process(pid)
    process.kill()

    def gone() -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # between the two questions
            return True

    eventually(gone)


def expect(step: Any, *payloads: Mapping[str, Any]) -> None:
    """The step's whole is that of these payloads: each counted once, none missing."""
    diffs = []
    for taken in payloads:
        p, q, mask = (
            taken["tensors"][name][2].astype(np.float64)
            for name in ("old_log_probs", "rollout_log_probs", "response_mask")
        )
        diffs.append(np.abs(np.exp(p) - np.exp(q))[mask == 1])
    every = np.concatenate(diffs)

    def metrics() -> Any:
        found = step.metrics()
        tokens = found["counts/tokens"]
        if tokens != every.size:
            raise NotReady(
                f"{step}: {tokens} tokens of {every.size}: {found.about['coverage']}, "
                f"missing {found.about['missing']}"
            )
        return found

    found = eventually(metrics)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(every.mean(), rel=1e-9)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(every.max(), rel=1e-12)
