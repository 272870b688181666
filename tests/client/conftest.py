from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.answering import OPERATE, Answering, serving
from tests.support.api import Service

from stagescope import Session, attach


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No service of this machine's user is found by a test."""
    for name in ("STAGESCOPE_URL", "STAGESCOPE_TOKEN", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def _server() -> Iterator[Answering]:
    service = Answering()
    with serving(service.app) as url:
        service.url = url
        yield service


@pytest.fixture
def service(_server: Answering) -> Answering:
    _server.refusals.clear()
    _server.captures.clear()
    _server.seen.clear()
    _server.headers.clear()
    _server.token_count = 7
    _server.ready = True
    return _server


@pytest.fixture
def client(service: Answering) -> Iterator[Session]:
    """A session with the small service."""
    with attach(service.url, token=OPERATE, timeout=5.0) as session:
        service.seen.clear()
        service.headers.clear()
        yield session


@pytest.fixture
def found(real: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """The module's `real` service; the environment names it and its operate token."""
    assert real.tokens is not None
    monkeypatch.setenv("STAGESCOPE_URL", real.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", real.tokens.operate)
    return real


@pytest.fixture
def session(found: Service) -> Iterator[Session]:
    """A session with the module's `real` service."""
    with attach() as session:
        yield session
