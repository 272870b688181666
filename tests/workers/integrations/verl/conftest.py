from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from tests.support.coordinators import FakeCoordinator, FakeService, wait_for
from tests.support.trainers.verl_fakes import Seen, fake_modules

from stagescope_wire.schema import END, Event
from stagescope_workers.integrations import patches
from stagescope_workers.integrations.patches import APPLIED
from stagescope_workers.integrations.verl import (
    driver,
    hooks,
    processes,
    ranks,
    rollout,
    trainer_calls,
)
from stagescope_workers.integrations.verl.modes import FLOAT32, VARIABLE, Mode
from stagescope_workers.probe import handshake, lifecycle
from stagescope_workers.probe.probe import Probe


class Ended(NamedTuple):
    """An end event, with who sent it."""

    stage: str
    role: str
    rank: int
    fields: Mapping[str, Any]
    payload: Any

    @property
    def clock(self) -> tuple[int | None, int | None]:
        return self.fields["step"], self.fields["policy_version"]

    @property
    def part(self) -> tuple[int, int, int]:
        return tuple(self.fields[name] for name in ("occurrence", "epoch", "minibatch"))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin each test as a process begins."""
    monkeypatch.setattr(patches, "_logged", set())
    monkeypatch.setattr(trainer_calls, "_driver", None)
    monkeypatch.setattr(trainer_calls, "_awaiting_tensors", None)
    monkeypatch.setattr(ranks, "_latest_context", None)
    monkeypatch.setattr(driver, "has_service", lambda: True)
    monkeypatch.setattr(rollout, "has_service", lambda: True)
    monkeypatch.setenv("STAGESCOPE_ATTEMPT", "attempt-a")
    for name in (VARIABLE, FLOAT32, "STAGESCOPE_RUN", "STAGESCOPE_URL", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def probes(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Probe]]:
    """Have the plugin's probes find the fake service; yields them as they are made."""
    made: list[Probe] = []

    def init(run: str, **options: Any) -> Probe:
        made.append(lifecycle.init(run, **options))
        return made[-1]

    monkeypatch.setattr(handshake, "find_link", service.find)
    monkeypatch.setattr(processes, "init", init)
    yield made
    processes.forget()
    for probe in made:
        probe.close(0.0)
        if probe._sender is not None:
            probe._sender._thread.join(10.0)


@pytest.fixture
def ended(probes: list[Probe], coordinator: FakeCoordinator) -> Callable[..., list[Ended]]:
    """Return a function that waits for all that was reported, and returns the ends in order."""

    def read(count: int) -> list[Ended]:
        wait_for(lambda: len(coordinator.of_kind(END)) >= count)
        wait_for(lambda: all(probe.outbox.waiting == 0 for probe in probes))
        senders = {sender.incarnation: sender for sender in coordinator.senders}
        found = []
        for (incarnation, seq), event in sorted(coordinator.events.items(), key=_time):
            if event.kind == END:
                sender = senders[incarnation]
                payload = coordinator.payloads.get((incarnation, seq))
                stage = str(event.fields["stage"])
                found.append(Ended(stage, sender.role, sender.rank, event.fields, payload))
        assert len(found) == count
        return found

    return read


def _time(item: tuple[object, Event]) -> float:
    return item[1].mono


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def verl(seen: Seen, monkeypatch: pytest.MonkeyPatch, probes: list[Probe]) -> dict[str, ModuleType]:
    """verl's modules, with every patch of mode `all` applied."""
    modules = fake_modules(seen, monkeypatch)
    for patch in hooks.patches(Mode("all")):
        patch.apply(modules[patch.module])
        assert patch.state == APPLIED, patch
    return modules
