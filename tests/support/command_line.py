"""The command line: inside the test's process, and as a user with a home has it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from stagescope import cli

# click before 8.2 mixes stderr into stdout unless told otherwise; later ones keep both apart.
_APART: dict[str, Any] = (
    {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
)


def invoke(*words: str, env: Mapping[str, str] | None = None) -> Result:
    """Run `stagescope WORDS`; the result holds stdout and stderr apart."""
    return CliRunner(**_APART).invoke(cli.main, words, env=env)


def ask(*words: str, width: int = 80) -> Result:
    """Run `stagescope WORDS` in so many columns; the environment names the service."""
    return invoke(*words, env={"COLUMNS": str(width)})


class Home:
    """The commands of a user with a home of their own, each in a process.

    Args:
        path: of the home.
        ray_directory: where Ray puts its files; a short path, for its sockets.
        environment: of each command, beside this process's.
    """

    def __init__(self, path: Path, ray_directory: Path, **environment: str) -> None:
        self.path = path
        kept = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        own = {"STAGESCOPE_HOME": str(path), "RAY_TMPDIR": str(ray_directory)}
        self.environment = {**kept, **own, **environment}

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `stagescope WORDS`."""
        return subprocess.run(
            [sys.executable, "-m", "stagescope", *words],
            capture_output=True, text=True, timeout=150, env=self.environment,
        )  # fmt: skip

    def json(self, *words: str, check: bool = True) -> Any:
        """Return what `stagescope WORDS --json` prints; `check`: it must succeed."""
        done = self.call(*words, "--json")
        assert not check or done.returncode == 0, done.stderr
        return json.loads(done.stdout or "{}")

    def file(self) -> dict[str, Any] | None:
        """Return what the home's service.json holds, if there is one."""
        path = self.path / "service.json"
        content: dict[str, object] | None = json.loads(path.read_text()) if path.exists() else None
        return content
