"""What a probe says of the packages around it, where they are not supported or never tried."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable

import pytest
from tests.support.coordinators import FakeCoordinator, wait_for

from stagescope_workers.probe.probe import Probe

MakeProbe = Callable[..., Probe]
OLD = "torch 2.3.1+cu121 is not supported, 2.4 and later are: pip install 'torch>=2.4'"
NEW = "ray 99.0.0 was not tried with stagescope: 2.44 to 2.60 were"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two packages installed that no test ran with."""
    versions = {"torch": "2.3.1+cu121", "ray": "99.0.0"}

    def version(package: str) -> str:
        if package in versions:
            return versions[package]
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)


def said_by(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if record.getMessage() in (OLD, NEW)
    ]


def test_start_says_it_once_and_training_continues(
    make_probe: MakeProbe, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    probe = make_probe(strict=True)
    for step in range(3):
        with probe.stage("actor_update", step=step) as stage:
            stage.log(loss=1.0)
    wait_for(lambda: len(coordinator.of_kind("end")) == 3)
    assert said_by(caplog) == [(logging.WARNING, OLD), (logging.INFO, NEW)]
    [hello] = coordinator.of_kind("hello")
    versions = hello.fields["fingerprint"]["versions"]
    assert versions["unsupported"] == [OLD]
    assert NEW in versions["untried"]


def test_other_ranks_tell_the_service_alone(
    make_probe: MakeProbe, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_probe(rank=1)
    wait_for(lambda: coordinator.of_kind("hello"))
    assert coordinator.of_kind("hello")[0].fields["fingerprint"]["versions"]["unsupported"] == [OLD]
    assert said_by(caplog) == []
