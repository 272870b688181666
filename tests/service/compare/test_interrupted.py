"""A comparison that is interrupted ends at once, whatever its threads do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.support.dump_files import nexrl_directory

from stagescope_service.compare.task_runner import thread_mapper

PROGRAM = """
import signal, sys, threading
from stagescope_service.compare import task_runner
from stagescope.cli import main

def hang(tasks):
    print("running", flush=True)
    threading.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)
task_runner.run_tasks = hang
main(["compare", *sys.argv[1:]])
"""


def test_tasks_that_did_not_begin_are_dropped_with_their_reader() -> None:
    begun: list[int] = []
    release = threading.Event()

    def work(task: int) -> int:
        begun.append(task)
        if task:
            release.wait(60)
        return task

    results = thread_mapper(2)(work, range(100))
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("compare_"):
            thread.join(60)
    assert len(begun) <= 3


def test_ctrl_c_ends_the_command_while_a_shard_is_compared(tmp_path: Path) -> None:
    sides = [str(nexrl_directory(tmp_path / name)) for name in "ab"]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *sides],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read().splitlines()[-1] == "interrupted"
