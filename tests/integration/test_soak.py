"""The short form of `make soak`: each kind of process killed, and each step as written down."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")
from tests.support.soak import soak

pytestmark = pytest.mark.ray


def test_acknowledged_steps_outlive_kills_at_random_moments() -> None:
    report = soak(30.0, steps_per_second=10.0, kill_every=4.0, seed=3)
    assert report.wrong == []
    assert report.steps > 100
    assert report.attempts >= 2
    assert set(report.kills) == {"coordinator", "ingestor", "api", "job"}
