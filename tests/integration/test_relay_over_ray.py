"""Probes that call through the relay of their node, which is killed, stopped and passed by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.measure import payload

from stagescope_workers import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.transport.link import RayLink

ray = pytest.importorskip("ray")
from tests.support.cluster import Service, eventually  # noqa: E402

pytestmark = pytest.mark.ray

STAGE = "actor_compute_log_prob"
STEPS = 10


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home: Path = tmp_path_factory.mktemp("home")
    service = Service.start(home, address, relay_ranks=1, lease_seconds=45.0, poll_seconds=20.0)
    yield service
    service.stop()


@pytest.fixture
def probe(
    service: Service, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Probe]:
    """A probe whose calls are relayed."""
    monkeypatch.setattr(RayLink, "_relays_after", 0.0)
    probe = init(request.node.name, role="driver", rank=0, world_size=1)
    # The first polls are direct: the coordinator counts the ranks every few seconds.
    number = 0

    def relayed() -> bool:
        nonlocal number
        number += 1
        probe.log(step=0, tick=number)
        return is_relayed(probe)

    eventually(relayed)
    eventually(lambda: answers(service))  # a test before may have killed it
    yield probe
    probe.close(0.0)


def answers(service: Service) -> bool:
    with contextlib.suppress(ray.exceptions.RayError):
        return service.pid("relay") > 0
    return False


def is_relayed(probe: Probe) -> bool:
    return probe.service is not None and "through the relay" in probe.service.address


def record(probe: Probe, step: int) -> None:
    taken = payload(seed=step, first_sample=4 * step)
    with probe.stage(STAGE, step=step) as stage:
        stage.record(
            **{name: item[2] for name, item in taken["tensors"].items()}, **taken["strings"]
        )


def is_whole(service: Service, probe: Probe) -> bool:
    """Return whether each step has been counted exactly once."""
    with service.session() as session:
        steps = [session.step(step, run=probe.run) for step in range(1, STEPS + 1)]
        tokens = [step.metrics()["counts/tokens"] for step in steps]
    assert tokens == [44] * STEPS
    return not service.losses(probe.run)


def settled(probe: Probe) -> bool:
    return probe.outbox.is_empty


def test_what_is_relayed_is_acknowledged_and_counted_once(service: Service, probe: Probe) -> None:
    for step in range(1, STEPS + 1):
        record(probe, step)
    eventually(lambda: settled(probe))
    assert is_relayed(probe)
    assert is_whole(service, probe)


def test_a_killed_relay_loses_nothing(service: Service, probe: Probe) -> None:
    killed = 0
    for step in range(1, STEPS + 1):
        record(probe, step)
        if step == 3:
            killed = service.kill("relay")
        if step == 7:
            service.kill("relay", service.reborn("relay", killed)[0])
    eventually(lambda: settled(probe))
    assert is_whole(service, probe)


def test_a_relay_that_is_silent_is_passed_by(
    service: Service, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service.held("relay"):
        for step in range(1, STEPS + 1):
            record(probe, step)
        eventually(lambda: settled(probe))
        assert not is_relayed(probe)
    assert is_whole(service, probe)
    monkeypatch.setattr(RayLink, "_relays_after", 0.0)

    def again() -> bool:
        probe.log(step=STEPS, tick=1.0)
        return is_relayed(probe)

    eventually(again)


def test_a_killed_coordinator_is_called_again_by_the_relay(service: Service, probe: Probe) -> None:
    for step in range(1, STEPS + 1):
        record(probe, step)
        if step == 5:
            service.kill("coordinator")
    eventually(lambda: settled(probe))
    assert is_whole(service, probe)


def test_a_request_reaches_a_relayed_probe(service: Service, probe: Probe) -> None:
    record(probe, 1)
    eventually(lambda: settled(probe))
    revision = probe.plan.revision
    with service.session() as session:
        ordered = session.capture(stages=[STAGE], run=probe.run, steps=10**6)
        eventually(lambda: probe.plan.revision > revision)
        session.remove_capture(ordered["capture_id"])
    assert is_relayed(probe)
