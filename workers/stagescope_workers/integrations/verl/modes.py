"""STAGESCOPE_VERL: how much of verl is watched."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Final

_log = logging.getLogger("stagescope.verl")

OFF: Final = "off"
METRICS: Final = "metrics"
STAGES: Final = "stages"
ALL: Final = "all"
_MODES: Final = (OFF, METRICS, STAGES, ALL)
VARIABLE: Final = "STAGESCOPE_VERL"
FLOAT32: Final = "STAGESCOPE_VERL_FLOAT32"
"""Set to 1: V1's own debug metrics and perplexities are computed in float32, not in bfloat16."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """What is wanted.

    Attributes:
        name: off, metrics, stages or all.
    """

    name: str

    @property
    def metrics(self) -> bool:
        """Say whether batches are handed over, and numbers come back into verl's log."""
        return self.name in (METRICS, ALL)

    @property
    def stages(self) -> bool:
        """Say whether stages are reported, and captured."""
        return self.name in (STAGES, ALL)


def chosen() -> Mode:
    """Return what STAGESCOPE_VERL says; `all` where it says nothing, or nothing known."""
    name = os.environ.get(VARIABLE, ALL).strip().lower() or ALL
    if name not in _MODES:
        _log.warning("%s is %r: one of %s is expected; taken as %r", VARIABLE, name, _MODES, ALL)
        name = ALL
    return Mode(name)


def wants_float32() -> bool:
    """Say whether verl's own numbers are to be upcast; by default none of them is changed."""
    return os.environ.get(FLOAT32, "").strip().lower() in ("1", "true", "yes", "on")
