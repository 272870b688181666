from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.api import Service, service

from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.store.ring import Ring


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose ring keeps the last steps."""
    with service(tmp_path_factory.mktemp("doctor") / "home", page_size=200) as running:
        data = running.settings.data_path
        ring = Ring(data / "ring" / "here", 64 << 20, reserve_bytes=0)
        running.engine.read_with(PayloadReader(data, "here", ring))
        yield running
