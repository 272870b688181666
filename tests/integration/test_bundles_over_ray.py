"""A bundle over real Ray: of a live service, and by itself when a training is killed."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.measure import payload

pytest.importorskip("ray")
from tests.support.cluster import Service, eventually
from tests.support.ranks import Rank

pytestmark = pytest.mark.ray

RUN = "dies"


def test_an_attempt_that_is_killed_has_a_bundle(address: str, tmp_path: Path) -> None:
    service = Service.start(tmp_path / "home", address, port=0, lease_seconds=2.0, poll_seconds=0.5)
    try:
        rank = Rank(RUN, world_size=1)
        for step in (1, 2):
            rank.ask("report", step, payload(), "actor_compute_log_prob")
        eventually(rank.settled)
        with service.session() as session:
            asked = tmp_path / "asked.tar.gz"
            saved = session.save_bundle(asked, RUN, 1)
            assert saved["bytes"] == asked.stat().st_size
            rank.kill()

            def kept() -> Any:
                rows = session.findings(RUN, only="attempt_bundled")
                return rows[0] if len(rows) else None

            finding = eventually(kept, 120.0)
        path = Path(finding["evidence"]["path"])
        assert path.parent == service.settings.data_path / "bundles"
        assert finding["step"] == 2
        for archive in (asked, path):
            with tarfile.open(archive) as tar:
                names = tar.getnames()
            assert sum("/payloads/" in name for name in names) == 1
            assert "stagescope-bundle/report-step.html" in names
    finally:
        service.stop()
