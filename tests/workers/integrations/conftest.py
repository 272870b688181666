"""A service for the integrations, and a process that trains for it with a fake trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.support.api import Service, service

from stagescope_workers.probe.stage import Stage

Attach: TypeAlias = Callable[[str], AbstractContextManager[str]]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def attach_fake(
    live: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Attach:
    """Let the process report as the run of the test's name, while a fake package can be imported.

    It is called with the package's name and gives the run's; the fake lies in `tmp_path`.
    """
    assert live.tokens is not None
    name = "".join(c if c.isalnum() else "-" for c in request.node.name).strip("-")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.operate)
    monkeypatch.setenv("STAGESCOPE_ATTEMPT", "a1")
    monkeypatch.setenv("STAGESCOPE_RUN", name)

    @contextmanager
    def attach(package: str) -> Iterator[str]:
        try:
            yield name
        finally:
            for module in [each for each in sys.modules if each.split(".")[0] == package]:
                del sys.modules[module]

    return attach


@pytest.fixture
def with_routes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What stages record that has routes, in order."""
    found: list[dict[str, Any]] = []
    record = Stage.record

    def noted(stage: Stage, values: dict[str, Any], **named: object) -> None:
        if {"rollout_routed_experts", "routes_refused"} & values.keys():
            found.append({**values, **named})
        record(stage, values, **named)

    monkeypatch.setattr(Stage, "record", noted)
    return found
