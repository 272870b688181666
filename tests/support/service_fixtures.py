"""Fixtures of all tests that ask a running service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.api import Service, service

from stagescope_service.statistics.summarise import warm


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """The kernel's first compilation takes longer than an answer may."""
    warm()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    """A running service of its own."""
    with service(tmp_path / "home") as running:
        yield running
