"""What a probe says of the packages around it, where they are not supported or never tried."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable

import pytest
from tests.support.coordinators import FakeCoordinator

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


@pytest.mark.parametrize(
    ("rank", "logged"), [(0, [(logging.WARNING, OLD), (logging.INFO, NEW)]), (1, [])]
)
def test_rank_0_logs_it_once_and_every_rank_tells_the_service(
    make_probe: MakeProbe,
    coordinator: FakeCoordinator,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    logged: list[tuple[int, str]],
) -> None:
    caplog.set_level(logging.INFO)
    probe = make_probe(rank=rank, strict=True)
    for step in range(3):
        with probe.stage("actor_update", step=step) as stage:
            stage.log(loss=1.0)
    coordinator.fields("end", 3)
    lines = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [line for line in lines if line[1] in (OLD, NEW)] == logged
    versions = coordinator.fields("hello")[0]["fingerprint"]["versions"]
    assert versions["unsupported"] == [OLD]
    assert NEW in versions["untried"]
