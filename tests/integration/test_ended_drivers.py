"""A Ray driver that is ended: what the service records of it, and what it costs the driver."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.support.cluster import Service, eventually
from tests.support.pseudo_terminal import rest_of

pytestmark = pytest.mark.ray

DRIVER = """
import contextlib, fcntl, signal, sys, termios, time
# Here, not in a preexec_fn: it would fork this process, and Ray's calls may hang after a fork.
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # stdin sends signals to this session
signal.signal(signal.SIGINT, signal.default_int_handler)
import ray
from stagescope_workers import finish, init

address, run, how = sys.argv[1:]

@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, rank):
        self.probe = init(run, rank=rank, world_size=2)

    def train(self, step):
        with self.probe.stage("actor_update", step=step):
            pass
        while self.probe.status()["waiting_events"]:
            time.sleep(0.01)

ray.init(address=address, log_to_driver=False)
with contextlib.ExitStack() as stack:
    if how == "shutdown":
        stack.callback(ray.shutdown)
    if how == "finish":
        stack.callback(finish)
    workers = [Worker.remote(rank) for rank in range(2)]
    for step in (1, 2, 3):
        ray.get([worker.train.remote(step) for worker in workers])
    print("between two steps", flush=True)
    if how == "raise":
        raise ValueError("the loader is empty")
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # Leases that outlast the test: nothing here is seen from silence.
    made = Service.start(tmp_path_factory.mktemp("home"), address, lease_seconds=300.0)
    eventually(lambda: made.ready()[0] == 200)
    yield made
    made.stop()


def _in_terminal(address: str, run: str, how: str, end: Callable[[int, int], None]) -> int:
    """Run the driver in a terminal of its own, end it between two steps; return its status.

    Args:
        address: of the cluster.
        run: name of the run.
        how: as the driver's script has it.
        end: called with the terminal's controller and the driver's pid.
    """
    controller, terminal = pty.openpty()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, run, how],
        stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, text=True,
        start_new_session=True, env={**os.environ, "RAY_AUTH_MODE": "token"},
    )  # fmt: skip
    os.close(terminal)
    reading = threading.Thread(target=rest_of, args=[controller], daemon=True)
    try:
        assert driver.stdout is not None
        assert any("between" in line for line in iter(driver.stdout.readline, ""))
        end(controller, driver.pid)
        reading.start()
        return driver.wait(60)
    finally:
        driver.kill()
        driver.communicate()


def _press_ctrl_c(controller: int, _: int) -> None:
    os.write(controller, b"\x03")


def _terminate(_: int, pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


CASES: dict[str, tuple[str, Callable[[int, int], None], str]] = {
    "ctrl-c": ("exit", _press_ctrl_c, "it was interrupted"),
    "ctrl-c-shutdown": ("shutdown", _press_ctrl_c, "it was interrupted"),
    "ctrl-c-finish": ("finish", _press_ctrl_c, "it was interrupted"),
    "sigterm-shutdown": ("shutdown", _terminate, "it was interrupted"),
    "raise": ("raise", lambda *_: None, "an exception ended one of its processes"),
}
"""Name -> how the driver ends, what ends it, and the reason that is recorded."""


@pytest.mark.parametrize("name", CASES)
def test_what_ends_a_driver_between_two_steps_is_recorded(
    service: Service, address: str, name: str
) -> None:
    how, end, reason = CASES[name]
    run = f"ended-{name}"
    assert _in_terminal(address, run, how, end) != 0
    with service.session() as session:
        [attempt] = eventually(lambda: [row for row in session.attempts(run) if row["ended"]])
        assert attempt["end_reason"] == reason
        kind = "process_crashed" if how == "raise" else "process_interrupted"
        [found] = [row for row in session.findings(run) if row["kind"] == kind]
        assert (found["step"], found["rank"]) == (3, None)
    assert service.losses(run) == []
