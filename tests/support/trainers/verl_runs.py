"""Real verl trainings on CPU, started, watched and killed by tests."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.cluster import eventually

WORKERS = Path(__file__).resolve().parents[3] / "workers"
SECONDS = 480.0
"""Deadline of a training; verl and its workers take most of it to start."""
_OF_TIME = ("timing", "perf/", "mfu", "throughput", "memory")


@dataclasses.dataclass
class VerlRun:
    """One directory of `examples.verl_cpu`, trained in one or several starts."""

    directory: Path
    address: str
    trainer: str
    steps: int
    overrides: tuple[str, ...] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The run's name, as the plugin makes it of verl's configuration."""
        return f"verl_cpu.{self.directory.name}"

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the training; whatever of it still runs at the end is killed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "examples.verl_cpu.train", "--trainer", self.trainer,
            "--steps", str(self.steps), "--directory", str(self.directory),
            "--address", self.address, *self.overrides,
        ]  # fmt: skip
        log = self.directory / "log.txt"
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                cwd=WORKERS,
                env={**os.environ, **self.variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def train(self) -> None:
        """Train to the end."""
        with self.started() as process:
            self.finish(process)

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the training's end, which must be a good one."""
        assert process.wait(SECONDS) == 0, (self.directory / "log.txt").read_text()[-5000:]

    def logged(self) -> dict[int, dict[str, Any]]:
        """Return what verl's file logger has written, by step; of a step done twice the later."""
        found: dict[int, dict[str, object]] = {}
        for file in sorted(self.directory.glob("metrics-*.jsonl")):
            for line in file.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # one that is being written
                    row = json.loads(line)
                    found[int(row["step"])] = row["data"]
        return found

    def await_step(self, step: int) -> None:
        """Wait until verl has logged a step."""
        eventually(lambda: step in self.logged(), SECONDS)


def untimed(metrics: Mapping[str, object]) -> dict[str, object]:
    """Return the metrics that do not depend on the machine's speed and load."""
    return {
        name: value for name, value in metrics.items() if not any(part in name for part in _OF_TIME)
    }
