"""The short form of `make soak`: each kind of process killed, and each step as written down."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]


def test_acknowledged_steps_outlive_kills_at_random_moments() -> None:
    # In a process of its own: this one may have joined a cluster that other tests share.
    command = [sys.executable, "-m", "tests.tools.soak", "0.5", "10", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing lost, nothing twice, nothing grew" in done.stdout
    found = re.search(r"(\d+) steps acknowledged, (\d+) attempts", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) > 100
    assert int(found[2]) >= 2
    for kind in ("coordinator", "ingestor", "api", "job"):
        assert re.search(rf"killed: .*\b{kind} \d", done.stdout), done.stdout
