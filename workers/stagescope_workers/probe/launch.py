"""What the launcher of a process says of this start: a later start of a rank says something else.

It is no attempt key. Programs that belong together may have launchers of their own (a rollout
server beside `torchrun`, each node's `torchrun`), and still are of one attempt. The service
compares a rank with its own incarnation before: where the launcher started it again, it started all
its ranks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_WORLD: Final = "WORLD_SIZE"


def launch_text(
    environ: Mapping[str, str], world_size: int | None, *, in_ray: bool = False
) -> str | None:
    """Return a text that each start of this process's launcher has of its own; None: unknown.

    Args:
        environ: the process's variables.
        world_size: of its role. A launcher of fewer ranks starts some of the role's ranks alone.
        in_ray: whether it is a worker of a Ray cluster, whose variables are those of `ray start`.
    """
    if in_ray:
        return _of_ray_train()
    found = (_of_slurm(environ, world_size), _of_jobset(environ), _of_torchrun(environ, world_size))
    return "; ".join(each for each in found if each) or None


def _of_torchrun(environ: Mapping[str, str], world_size: int | None) -> str | None:
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None or not _is_whole(environ.get(_WORLD), world_size):
        return None
    # A run id may be used again: it is "none" where none was given. The folder of a worker's error
    # file is new with each torchrun and restart: .../RUN_ID_xxxxxxxx/attempt_1/0/error.json.
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    folder = "" if file is None else f", {'/'.join(Path(file).parts[-4:-2])}"
    return f"torchrun {run_id}, restart {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}{folder}"


def _of_slurm(environ: Mapping[str, str], world_size: int | None) -> str | None:
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    step = environ.get("SLURM_STEP_ID")
    # Each node's task may be a launcher itself.
    is_whole = _is_whole(environ.get("SLURM_STEP_NUM_TASKS"), world_size)
    is_launcher = "TORCHELASTIC_RUN_ID" in environ and _is_whole(environ.get(_WORLD), world_size)
    named = "" if step is None or not (is_whole or is_launcher) else f".{step}"
    return f"Slurm job {job}{named}, restart {environ.get('SLURM_RESTART_COUNT', '0')}"


def _of_jobset(environ: Mapping[str, str]) -> str | None:
    # As far as the pod's manifest hands them on: JobSet puts them into annotations.
    name, attempt = environ.get("JOBSET_NAME"), environ.get("JOBSET_RESTART_ATTEMPT")
    return None if attempt is None else f"JobSet {name or ''}, restart {attempt}"


def _of_ray_train() -> str | None:
    """Return the placement group of a worker of Ray Train, which each start of them makes anew."""
    with contextlib.suppress(Exception):
        train = sys.modules.get("ray.train")
        if train is not None and train.get_context().get_world_size():
            group = sys.modules["ray"].util.get_current_placement_group()
            return None if group is None else f"Ray Train, placement group {group.id.hex()}"
    return None


def _is_whole(count: str | None, world_size: int | None) -> bool:
    return world_size is None or count == str(world_size)
