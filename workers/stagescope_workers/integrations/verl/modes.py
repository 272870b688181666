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
