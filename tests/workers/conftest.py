from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.support.coordinators import FakeCoordinator, FakeService

from stagescope_workers.probe import handshake
from stagescope_workers.probe.options import checked_options
from stagescope_workers.probe.probe import Probe


@pytest.fixture
def service() -> FakeService:
    return FakeService(FakeCoordinator())


@pytest.fixture
def coordinator(service: FakeService) -> FakeCoordinator:
    assert service.coordinator is not None
    return service.coordinator


@pytest.fixture
def make_probe(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Probe]]:
    """Make probes that find `service`; they are closed at the end."""
    monkeypatch.setattr(handshake, "find_link", service.find)
    made: list[Probe] = []

    def make(**options: object) -> Probe:
        probe = Probe(checked_options({"run": "test-run", "attempt_key": "attempt-a"} | options))
        probe.start()
        made.append(probe)
        return probe

    yield make
    for probe in made:
        probe.close(0.0)
        # A thread still in its last turn would find the next test's service.
        if probe._sender is not None:
            probe._sender._thread.join(10.0)
