"""A bundle over real Ray: of a live service, and by itself when a training is killed."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
from tests.support.cluster import Service, answer, eventually, kill  # noqa: E402

pytestmark = pytest.mark.ray

RUN = "dies"


def _trainer_class() -> type:
    """Return the class by value: the actor's process cannot import the tests."""

    class Trainer:
        """A rank that records both streams."""

        def __init__(self) -> None:
            from stagescope_workers import init

            self.probe = init("dies", rank=0, world_size=1)

        def step(self, step: int) -> None:
            """Do a step."""
            import numpy as np

            with self.probe.stage("actor_compute_log_prob", step=step) as stage:
                q = -np.linspace(0.1, 2.0, 64, dtype=np.float32).reshape(4, 16)
                stage.record(
                    old_log_probs=q - np.float32(0.01), rollout_log_probs=q,
                    response_mask=np.ones((4, 16), np.int64),
                    sample_ids=[f"s{row}" for row in range(4)],
                )  # fmt: skip

        def settled(self) -> bool:
            """Say whether everything has its receipt."""
            said = self.probe.status()
            waiting = said["waiting_events"] or said["waiting_payloads"]
            return bool(said["connected"]) and not waiting

        def pid(self) -> int:
            """Return the process id."""
            import os

            return os.getpid()

    return Trainer


def test_an_attempt_that_is_killed_has_a_bundle(address: str, tmp_path: Path) -> None:
    service = Service.start(tmp_path / "home", address, port=0, lease_seconds=2.0, poll_seconds=0.5)
    try:
        trainer = ray.remote(_trainer_class()).options(num_cpus=0, max_restarts=0).remote()
        for step in (1, 2):
            answer(trainer.step.remote(step))
        eventually(lambda: answer(trainer.settled.remote()))
        with service.session() as session:
            asked = tmp_path / "asked.tar.gz"
            saved = session.save_bundle(asked, RUN, 1)
            assert saved["bytes"] == asked.stat().st_size
            kill(answer(trainer.pid.remote()))

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
