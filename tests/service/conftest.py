"""Fixtures of all tests of the service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.support.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real browser; without one, tests that need it are skipped."""
    with chromium() as running:
        yield running
