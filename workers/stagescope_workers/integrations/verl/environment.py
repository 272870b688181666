"""The variables that set the plugin, brought to every process of the job.

A job that joins a cluster is not run by the shell that started it: verl hands Ray the variables
that its other processes need, and these go with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stagescope_workers.integrations.verl.guard import guarded
from stagescope_workers.integrations.verl.modes import FLOAT32, VARIABLE

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
