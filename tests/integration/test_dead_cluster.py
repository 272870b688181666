"""The head of the service's own cluster dies: it is said within seconds, and serve starts anew."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("ray")
from tests.support.cluster import eventually
from tests.support.command_line import Home
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


def processes(home: Home) -> list[psutil.Process]:
    """The keeper of the cluster, and what it started."""
    written = home.file()
    assert written is not None
    keeper = psutil.Process(written["embedded_pid"])
    return [keeper, *keeper.children(recursive=True)]


def serve(home: Home, port: int) -> str:
    done = home.call("serve", "--address", "local", "--port", str(port))
    assert done.returncode == 0, done.stderr
    return done.stderr


def runs(process: psutil.Process) -> bool:
    """Return whether a process runs; its new parent may not look after the end of a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def home() -> Iterator[Home]:
    with short_directory() as directory:
        made = Home(directory / "home", directory)
        yield made
        with contextlib.suppress(subprocess.TimeoutExpired):
            made.call("stop")


def test_the_service_goes_on_in_a_new_cluster_and_no_step_is_missing(home: Home) -> None:
    port = free_port()
    serve(home, port)
    training = subprocess.Popen([sys.executable, "-c", TRAINING], env=home.environment)
    try:
        eventually(lambda: (home.json("steps", "--run", "r", check=False).get("rows") or [])[3:])
        old = processes(home)
        (head,) = [each for each in old if each.name() == "gcs_server"]
        os.kill(head.pid, signal.SIGKILL)
        eventually(lambda: home.json("status", check=False)["ready"] is False)
        status = home.json("status", check=False)
        assert "the Ray cluster of the service does not answer" in status["reason"]
        assert home.call("status").returncode == 3
        said = serve(home, port)
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
