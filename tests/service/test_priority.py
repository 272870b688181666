"""The CPU priority of processes that Ray started at niceness 15."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_NICE = """
import os, threading
from stagescope_service import priority

def niceness():
    return [os.getpriority(os.PRIO_PROCESS, int(each)) for each in os.listdir("/proc/self/task")]

os.nice(15 - os.getpriority(os.PRIO_PROCESS, 0))
stop = threading.Event()
threading.Thread(target=stop.wait).start()
"""
_NOBODY = "os.setuid(65534)\n" if os.getuid() == 0 else ""


def printed(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{_NICE}\n{code}\nstop.set()"],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become less nice")
def test_the_coordinator_takes_the_ordinary_priority_in_all_its_threads() -> None:
    assert printed("print(priority.take_ordinary_priority(), *niceness())") == ["True", "0", "0"]


def test_who_may_not_become_less_nice_goes_on_as_it_is() -> None:
    code = f"{_NOBODY}print(priority.take_ordinary_priority(), *niceness())"
    assert printed(code) == ["False", "15", "15"]


@pytest.mark.parametrize(("least", "is_now"), [(10, "15"), (18, "18")])
def test_an_ingestors_thread_never_becomes_less_nice(least: int, is_now: str) -> None:
    code = f"{_NOBODY}priority.be_nice({least}); print(os.getpriority(os.PRIO_PROCESS, 0))"
    assert printed(code) == [is_now]
