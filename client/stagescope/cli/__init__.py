"""The command line: `stagescope NOUN`, the same questions as the session's methods.

The service's own commands (`serve`, `stop`) join by an entry point: see `stagescope.cli.common`.
"""

from __future__ import annotations

# Each adds its commands to `main`.
from stagescope.cli import captures, engines, reading
from stagescope.cli import captures
from stagescope.cli import diagnosis
from stagescope.cli import diagnosis
from stagescope.cli import diagnosis
from stagescope.cli import reading
from stagescope.cli import reading
from stagescope.cli import reading
from stagescope.cli.common import main

__all__ = [
    "batches",
    "captures",
    "comparisons",
    "engines",
    "hangs",
    "kept",
    "main",
    "operators",
    "reading",
    "triggers",
    "weights",
]
