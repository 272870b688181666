"""The command line, run inside the test's process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
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
