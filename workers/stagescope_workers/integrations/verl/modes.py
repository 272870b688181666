"""STAGESCOPE_VERL: how much of verl is watched."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stagescope_workers.integrations.verl.guard import guarded

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


Function = Callable[..., Any]

_PATHS: Final = ("STAGESCOPE_HOME", "STAGESCOPE_TOKEN_FILE")
# No token: Ray shows a job's variables to whoever may look at the job. Where a token lies is no
# secret, and each process reads it there.
CARRIED: Final = (
    VARIABLE, FLOAT32, "STAGESCOPE_RUN", "STAGESCOPE_ATTEMPT", "STAGESCOPE_URL", *_PATHS
)  # fmt: skip


def run_runtime_env(function: Function) -> Function:
    """Return `get_ppo_ray_runtime_env` with the plugin's variables among verl's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        environment = function(*args, **kwargs)
        with guarded("the variables of the job's processes"):
            held = environment["env_vars"]
            for name in CARRIED:
                value = os.environ.get(name)
                if value is not None:
                    absolute = str(Path(value).expanduser().absolute())
                    held.setdefault(name, absolute if value and name in _PATHS else value)
        return environment

    return run
