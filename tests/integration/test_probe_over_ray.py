"""A probe on a real Ray cluster, against a small actor in the coordinator's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from ray.actor import ActorHandle
from tests.support.coordinators import wait_for

from stagescope_wire.schema import Event, Sender
from stagescope_workers.probe import lifecycle
from stagescope_workers.probe.probe import Probe
from stagescope_workers.transport.link import RayLink, ray_process

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

Handle: TypeAlias = "ActorHandle[Any]"  # not subscriptable in older versions of ray


def make_coordinator() -> type:
    """Return the class of the stand-in, by value: the actor's process cannot import this file."""

    class DebugCoordinator:
        def __init__(self) -> None:
            self.name = os.urandom(4).hex()
            self.events: list[object] = []
            self.values: dict[int, object] = {}
            self.drained: list[tuple[str, str | None]] = []

        async def record_events(
            self, *, sender: object, events: Any, payloads: Any = None
        ) -> dict[str, object]:
            import time

            self.events += [(sender, event) for event in events]
            for seq, ref in (payloads or {}).items():
                self.values[seq] = await ref
            return {
                "coordinator": self.name, "wall": time.time(), "received": len(events),
                "refused": {}, "receipts": {}, "revision": 0,
            }  # fmt: skip

        async def poll(
            self, *, sender: object, revision: int, unreceipted: Any, wait: float
        ) -> dict[str, object]:
            import asyncio
            import time

            receipts = {seq: "ingested" for seq in unreceipted if seq in self.values}
            if not receipts:
                await asyncio.sleep(min(wait, 0.2))
            return {
                "coordinator": self.name, "wall": time.time(), "revision": 0, "plan": None,
                "receipts": receipts, "poll_seconds": 0.2,
            }  # fmt: skip

        async def drain(
            self, *, run: Any, timeout: float, attempt_key: str | None = None, **_: object
        ) -> dict[str, object]:
            self.drained.append((run, attempt_key))
            return {"run": run, "drained": True, "pending": 0}

        async def asked_to_drain(self) -> list[tuple[str, str | None]]:
            return self.drained

        async def seen(self) -> tuple[int, list[object], dict[int, object]]:
            return os.getpid(), self.events, self.values

    return DebugCoordinator


@pytest.fixture
def coordinator(address: str) -> Iterator[Handle]:
    actor = ray.remote(make_coordinator())
    handle = actor.options(
        name="DebugCoordinator",
        namespace="stagescope",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
    ).remote()
    ray.get(handle.seen.remote())
    yield handle
    ray.kill(handle)
    wait_for(lambda: RayLink.find() is None)


def seen(handle: Handle) -> tuple[int, list[tuple[Sender, Event]], dict[int, Any]]:
    pid, events, values = ray.get(handle.seen.remote(), timeout=30)
    parsed = [(Sender.parse(sender), Event.parse(event)) for sender, event in events]
    return pid, parsed, values


def report(probe: Probe, step: int) -> None:
    with probe.stage("actor_update", step=step) as stage:
        stage.record(old_log_probs=np.full((4, 1000), float(step)), sample_ids=list("abcd"))


def test_stage_and_payload_arrive_and_are_receipted(coordinator: Handle) -> None:
    probe = lifecycle.init("over-ray", rank=2)
    report(probe, 5)
    assert probe.close(30.0), probe.status()
    _, events, values = seen(coordinator)
    assert [event.kind for _, event in events] == ["hello", "begin", "end", "finish"]
    sender = events[-1][0]
    place = ray_process()
    assert place is not None
    assert sender.attempt_key == place.attempt_key
    assert ray.get_runtime_context().get_job_id() in place.attempt_key
    assert sender.node_id == ray.get_runtime_context().get_node_id()
    tag, shape, buffer, offsets = values[3]["tensors"]["old_log_probs"]
    assert (tag, shape, offsets) == ("float64", (4, 1000), None)
    assert float(buffer.mean()) == 5.0


def test_killed_coordinator_is_found_again_and_gets_what_it_lost(coordinator: Handle) -> None:
    probe = lifecycle.init("killed", attempt_key="a")
    report(probe, 1)
    wait_for(lambda: probe.outbox.is_empty, 30.0)
    pid, _, _ = seen(coordinator)
    os.kill(pid, signal.SIGKILL)
    for step in (2, 3, 4):
        report(probe, step)
    wait_for(lambda: probe.outbox.is_empty, 60.0)
    new_pid, events, values = seen(coordinator)
    assert new_pid != pid
    # Ray may deliver a batch twice; the sequence number says so.
    assert {e.seq: e.fields["step"] for _, e in events if e.kind == "end"} == {5: 2, 7: 3, 9: 4}
    assert sorted(values) == [5, 7, 9]
    assert probe.outbox.dropped == {}
    probe.close(0.0)


def test_hung_coordinator_holds_up_nobody(coordinator: Handle) -> None:
    probe = lifecycle.init("hung", attempt_key="a")
    wait_for(lambda: probe.status()["connected"], 30.0)
    pid, _, _ = seen(coordinator)
    os.kill(pid, signal.SIGSTOP)
    try:
        for step in range(50):
            report(probe, step)
        assert probe.status()["waiting_events"] >= 50
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: probe.outbox.is_empty, 60.0)
    _, events, _ = seen(coordinator)
    assert [e.fields["step"] for _, e in events if e.kind == "end"] == list(range(50))
    probe.close(0.0)


def test_finish_on_the_driver_waits_for_the_run(coordinator: Handle) -> None:
    probe = lifecycle.init("finished", attempt_key="a")
    report(probe, 1)
    assert lifecycle.finish(30.0)
    assert probe.is_inert
    _, events, _ = seen(coordinator)
    assert events[-1][1].kind == "finish"


@pytest.mark.parametrize("role", ["driver", "actor"])
def test_finish_in_an_actor_ends_the_job_where_its_role_is_driver(
    coordinator: Handle, role: str
) -> None:
    def train(role: str) -> bool:
        from stagescope_workers import finish, init

        with init(f"by-{role}", role=role, attempt_key=None).stage("report", step=1):
            pass
        return bool(finish(30.0))

    assert ray.get(ray.remote(num_cpus=0)(train).remote(role), timeout=120)
    place = ray_process()
    assert place is not None
    asked = dict(ray.get(coordinator.asked_to_drain.remote(), timeout=30))
    # With the key, the service asks the other processes of the job to leave, too.
    assert asked[f"by-{role}"] == (place.attempt_key if role == "driver" else None)


def test_a_worker_knows_the_directory_of_its_driver(address: str, tmp_path: Path) -> None:
    program = """
    import ray
    from stagescope_workers.transport.link import ray_directory

    ray.init(log_to_driver=False)
    print(ray_directory())
    print(ray.get(ray.remote(num_cpus=0)(lambda: ray_directory()).remote(), timeout=60))
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"},
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert said.split() == [str(tmp_path)] * 2


def test_init_before_ray_starts_no_cluster() -> None:
    program = """
    import time
    import ray
    from stagescope_workers import init

    is_initialized, looks = ray.is_initialized, []
    ray.is_initialized = lambda: looks.append(time.monotonic()) or is_initialized()
    probe = init("early", attempt_key=None)
    with probe.stage("s", step=1):
        pass
    deadline = time.monotonic() + 30
    while len(looks) < 5:  # it looks for a cluster again and again, and makes none
        assert time.monotonic() < deadline, looks
        time.sleep(0.01)
    assert not is_initialized()
    ray.init(address="local", num_cpus=1, object_store_memory=100_000_000,
             include_dashboard=False, log_to_driver=False)
    assert probe.outbox.waiting == 3
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=100)


def test_a_probe_that_outlives_ray_starts_no_cluster(coordinator: Handle, address: str) -> None:
    program = """
    import time
    import numpy as np
    import ray
    from stagescope_workers import init

    def wait_for(condition):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, probe
            time.sleep(0.01)

    ray.init(log_to_driver=False)
    probe = init("left", rank=0)
    wait_for(lambda: "connected to" in repr(probe) and probe.outbox.is_empty)
    ray.shutdown()
    with probe.stage("actor_update", step=5) as stage:
        stage.record(old_log_probs=np.zeros((4, 1000)), sample_ids=list("abcd"))
    wait_for(lambda: "not connected" in repr(probe))
    assert not ray.is_initialized()
    assert probe.outbox.waiting == 2
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=True,
        timeout=100,
        env={**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"},
    )


def test_a_call_in_the_midst_of_leaving_ray_starts_no_cluster(
    coordinator: Handle, address: str
) -> None:
    """Nor does it end the process, as a call into a core worker that is shut down does."""
    program = """
    import threading
    import time
    import ray
    from stagescope_workers import init

    ray.init(logging_level="ERROR", log_to_driver=False)
    lookup, begun, ended = ray.get_actor, threading.Event(), threading.Event()

    def slow(*arguments, **named):
        begun.set()
        time.sleep(0.5)
        try:
            return lookup(*arguments, **named)
        finally:
            ended.set()

    ray.get_actor = slow
    probe = init("left", rank=0)
    assert begun.wait(60)
    ray.shutdown()
    assert ended.wait(60)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        assert not ray.is_initialized()
        time.sleep(0.02)
    probe.close(0.0)
    print("through")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=False,
        timeout=200,
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"},
    )
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr
    assert "Traceback" not in done.stderr
