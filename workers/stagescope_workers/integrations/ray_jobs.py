"""Brings the variables of `stagescope run` to the workers of a Ray cluster that already runs.

They have the variables of `ray start` on their node, not those of the driver, so the driver's
runtime environment names them. A node that lacks the folder on PYTHONPATH ignores it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from stagescope_wire import proxies
from stagescope_workers.integrations import canary
from stagescope_workers.integrations.patches import Function, Patch, guarded, wrapper
from stagescope_workers.integrations.registry import VARIABLE, environment
from stagescope_workers.probe.lifecycle import watch_driver

_PATHS: Final = ("STAGESCOPE_HOME", "STAGESCOPE_TOKEN_FILE", "STAGESCOPE_DATA_DIR")
# No token, and no proxy with a password: Ray shows a job's variables to everybody with access to
# the job. The path of a token file is not a secret, and each process reads the file.
PASSED_VARIABLES: Final = (
    VARIABLE, "STAGESCOPE_RUN", "STAGESCOPE_ATTEMPT", "STAGESCOPE_URL", canary.VARIABLE,
    proxies.VARIABLE, *_PATHS,
)  # fmt: skip
_JOB_VARIABLE: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set in a driver that `ray job submit` started: JSON with the job's runtime environment."""


def patches() -> list[Patch]:
    """Return the one patch: `ray.init` names the variables in the job's runtime environment."""
    return [
        Patch("ray._private.worker", "init", wrap_init, "STAGESCOPE_* in Ray's workers"),
    ]


@wrapper
def wrap_init(function: Function, *args: Any, **kwargs: Any) -> object:
    """Wrap `ray.init`: it adds the variables to the runtime environment that it was given."""
    changed = kwargs
    with guarded("the report of what ends this driver"):
        watch_driver()  # Ray was imported after this package
    with guarded("the variables of Ray's workers"):
        changed = {**kwargs, "runtime_env": with_variables(kwargs.get("runtime_env"))}
    return function(*args, **changed)


def with_variables(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a runtime environment whose `env_vars` attach Ray's workers, too.

    Its own variables stay as they are; PYTHONPATH gets one more folder in front.
    """
    merged = {**(runtime_env or {})}
    own = {**(merged.get("env_vars") or {})}
    job = _job_variables()
    # A worker gets the job's PYTHONPATH only where the driver's runtime environment names none.
    base = own.get("PYTHONPATH", job.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")))
    ours = {"PYTHONPATH": environment({"PYTHONPATH": base})["PYTHONPATH"], **passed()}
    merged["env_vars"] = {**ours, **own, "PYTHONPATH": ours["PYTHONPATH"]}
    _rename_in_job(merged["env_vars"])
    return merged


def passed(names: Iterable[str] = PASSED_VARIABLES) -> dict[str, str]:
    """Return those of these variables that are set, and may be shown, with absolute paths."""
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    if "@" in found.get(proxies.VARIABLE, ""):
        del found[proxies.VARIABLE]
    for name in _PATHS:
        if name in found:
            found[name] = str(Path(found[name]).expanduser().absolute())
    return found


def _job_variables() -> dict[str, str]:
    config = json.loads(os.environ.get(_JOB_VARIABLE) or "{}")
    variables: dict[str, str] = (config.get("runtime_env") or {}).get("env_vars") or {}
    return variables


def _rename_in_job(variables: Mapping[str, str]) -> None:
    """Let the job's own runtime environment say the same: Ray refuses two that differ."""
    config = json.loads(os.environ.get(_JOB_VARIABLE) or "{}")
    job = (config.get("runtime_env") or {}).get("env_vars")
    if not job:
        return
    job.update({name: value for name, value in variables.items() if name in job})
    os.environ[_JOB_VARIABLE] = json.dumps(config)
