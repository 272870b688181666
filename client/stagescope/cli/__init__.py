"""The command line: `stagescope NOUN`, the same questions as the session's methods.

The service's own commands (`serve`, `stop`) join by an entry point: see `stagescope.plugins`.
"""

from __future__ import annotations

# Each adds its commands to `main`.
from stagescope.cli import (
    batches,
    captures,
    comparisons,
    engines,
    hangs,
    kept,
    operators,
    reading,
    triggers,
    weights,
)
from stagescope.cli.questions import main

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
