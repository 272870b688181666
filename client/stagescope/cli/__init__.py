"""The command line: `stagescope NOUN`, the same questions as the session's methods.

The service's own commands (`serve`, `stop`) join by an entry point: see `stagescope.cli.common`.
"""

from __future__ import annotations

# Importing these modules adds their commands to `main`.
from stagescope.cli import captures, collectives, engines, files, reading, runs, top
from stagescope.cli.agents import command as agents
from stagescope.cli.common import main

__all__ = [
    "agents",
    "captures",
    "collectives",
    "engines",
    "files",
    "main",
    "reading",
    "runs",
    "top",
]
