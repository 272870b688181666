"""The end of the service's own cluster, where Ray itself cannot end it any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from stagescope_service import embedded

CHILD = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
KEEPER = """
import subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", sys.argv[3]], start_new_session=True)
print(started.pid, flush=True)
time.sleep(600)
"""
"""Like a keeper whose driver has lost its head: it ends at a signal, and its cluster does not."""


def test_what_the_keeper_started_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEEPER, "stagescope_service.embedded", str(tmp_path), CHILD]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    started = [psutil.Process(int(keeper.stdout.readline())) for _ in range(2)]
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert embedded.is_ours(keeper.pid, tmp_path)
        assert embedded.stop(keeper.pid, tmp_path)
        _gone, alive = psutil.wait_procs(started, 10)
        assert not alive
        assert other.poll() is None
        assert not embedded.stop(keeper.pid, tmp_path)
    finally:
        other.kill()
        other.wait()
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()
