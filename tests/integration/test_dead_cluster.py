"""The head of the service's own cluster dies: it is said within seconds, and serve starts anew."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")
from tests.support.cluster import eventually
from tests.support.ray_nodes import free_port, short_directory

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

STEPS = 40
TRAINING = f"""
import sys, time
from stagescope_workers import finish, init

probe = init(run="r", rank=0, world_size=1)
for step in range(1, {STEPS} + 1):
    with probe.stage("actor_update", step=step) as stage:
        stage.log(loss=1.0 / step)
        time.sleep(1)
    probe.end_step(step)
sys.exit(0 if finish(timeout=180) else 1)
"""


class Home:
    """Commands of a user with a home of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "home"
        self.port = free_port()
        kept = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self.environment = {
            **kept, "STAGESCOPE_HOME": str(self.directory), "RAY_TMPDIR": str(directory),
        }  # fmt: skip

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stagescope", *words],
            capture_output=True, text=True, timeout=150, env=self.environment,
        )  # fmt: skip

    def serve(self) -> str:
        done = self.call("serve", "--address", "local", "--port", str(self.port))
        assert done.returncode == 0, done.stderr
        return done.stderr

    def json(self, *words: str) -> Any:
        done = self.call(*words, "--json")
        return json.loads(done.stdout or "{}")

    def processes(self) -> list[psutil.Process]:
        """The keeper of the cluster, and what it started."""
        pid = json.loads((self.directory / "service.json").read_text())["embedded_pid"]
        keeper = psutil.Process(pid)
        return [keeper, *keeper.children(recursive=True)]


def runs(process: psutil.Process) -> bool:
    """Return whether a process runs; its new parent may not look after the end of a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def home() -> Iterator[Home]:
    with short_directory() as directory:
        made = Home(directory)
        yield made
        with contextlib.suppress(subprocess.TimeoutExpired):
            made.call("stop")


def test_the_service_goes_on_in_a_new_cluster_and_no_step_is_missing(home: Home) -> None:
    home.serve()
    training = subprocess.Popen([sys.executable, "-c", TRAINING], env=home.environment)
    try:
        eventually(lambda: (home.json("steps", "--run", "r").get("rows") or [])[3:])
        old = home.processes()
        (head,) = [each for each in old if each.name() == "gcs_server"]
        os.kill(head.pid, signal.SIGKILL)
        eventually(lambda: home.json("status")["ready"] is False)
        status = home.json("status")
        assert "the Ray cluster of the service does not answer" in status["reason"]
        assert home.call("status").returncode == 3
        said = home.serve()
        assert "had died" in said
        assert not [each for each in old if runs(each)]
        assert training.wait(300) == 0
    finally:
        training.kill()
        training.wait()
    rows = home.json("steps", "--run", "r", "--limit", "100")["rows"]
    assert {row["step"] for row in rows} == {*range(1, STEPS + 1)}
    assert {row["complete"] for row in rows} == {"complete"}
    (attempt,) = home.json("attempts", "--run", "r")["rows"]
    assert attempt["end_reason"] == "finished"
    doctor = home.json("doctor", "r")
    failed = [row for row in doctor["rows"] if row["rule"] == "processes_failed"]
    assert [row["verdict"] for row in failed] == ["not found"]
