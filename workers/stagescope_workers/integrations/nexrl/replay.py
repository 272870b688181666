"""NexRL's mock rollout worker as its documentation describes it: a replay by (group_id, run_id).

NexRL 1.4 documents that `rollout_worker.type: mock` with `trajectory_load_path` gives each task the
trajectory of its (group_id, run_id). Its code puts all of them into the pool at the first task of
each worker, whatever was asked for, falls back to synthetic trajectories where the file is missing
or cannot be read, and sets no `_max_sequence_length`, which putting a trajectory reads.

Here each task gets its own, and what is missing ends the replay with what to do about it: it is the
one place where stagescope raises in a training, and only where `trajectory_load_path` is set.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from stagescope_workers.integrations.configuration import lookup
from stagescope_workers.integrations.nexrl.replay_file import (
    Key,
    Recorded,
    ReplayError,
    read_recorded,
)
from stagescope_workers.integrations.patches import Function

_log = logging.getLogger("stagescope.integrations")

_SHOWN: Final = 3
_MODULE: Final = "nexrl.mock.mock_rollout_worker"


class Worker(Protocol):
    """What is read of NexRL's `MockRolloutWorker`."""

    _max_sequence_length: int
    _processed_count: int

    def _put_trajectory(self, trajectory: object, /) -> str: ...


class TaskReplay:
    """The trajectories of a dump, by the task that asks for them.

    With several files (a directory), the k-th time a task is asked it gets that of the k-th file
    that has it; with one file always the same.

    Args:
        files: Of each file, its trajectories.
        source: For messages.
    """

    def __init__(self, files: list[list[Recorded]], source: Path) -> None:
        self._source = source
        self._single = len(files) == 1
        self._passes: dict[Key, list[list[Recorded]]] = {}
        for rows in files:
            by_key: dict[Key, list[Recorded]] = {}
            for row in rows:
                by_key.setdefault(row.key, []).append(row)
            for key, found in by_key.items():
                self._passes.setdefault(key, []).append(found)
        self._done: dict[Key, int] = {}
        self._put: dict[Key, int] = {}

    @property
    def repeated(self) -> list[Key]:
        """The tasks that several files have."""
        return [key for key, passes in self._passes.items() if len(passes) > 1]

    def __len__(self) -> int:
        return sum(len(rows) for passes in self._passes.values() for rows in passes)

    def waiting(self, task: Mapping[str, Any]) -> tuple[Key, list[Recorded]]:
        """Return a task's key, and those of its trajectories that are not in the pool yet.

        Raises:
            ReplayError: the task names no group and run, or has no trajectory.
        """
        group, run = task.get("group_id"), task.get("run_id")
        if group in (None, "") or run is None:
            raise ReplayError(
                f"a task has no group_id and run_id ({', '.join(map(str, task))}): the data "
                "loader gives them where it repeats tasks (data.rollout_repeat_n)"
            )
        key = (str(group), int(run))
        passes, done = self._passes.get(key), self._done.get(key, 0)
        if passes is None:
            raise ReplayError(
                f"{self._source} has no trajectory of the task {key}; it has "
                f"{len(self._passes)}, such as {', '.join(map(str, list(self._passes)[:_SHOWN]))}. "
                "Replay with the data set, the batch size, the order and rollout_repeat_n of the "
                "run that was dumped, and with every step's file (the directory) if it trains "
                "more than one step"
            )
        if not self._single and done >= len(passes):
            raise ReplayError(
                f"{self._source} has {len(passes)} trajectories of the task {key}, one for each "
                "step that trained it, and it was asked for once more"
            )
        rows = passes[0 if self._single else done]
        return key, rows[self._put.get(key, 0) :]

    def note_put(self, key: Key) -> None:
        """Count a trajectory that the pool has taken."""
        self._put[key] = self._put.get(key, 0) + 1

    def note_done(self, key: Key) -> None:
        """Count a task whose trajectories the pool has taken."""
        self._put.pop(key, None)
        self._done[key] = self._done.get(key, 0) + 1


_replays: Final[weakref.WeakKeyDictionary[object, TaskReplay]] = weakref.WeakKeyDictionary()


def wrap_init(function: Function) -> Function:
    """Wrap `MockRolloutWorker.__init__`: with a path, its trajectories are all there or it fails.

    Raises (from the wrapper):
        ReplayError: the replay cannot be what the configuration says.
    """

    @functools.wraps(function)
    def run(worker: Worker, config: object, *args: object, **kwargs: object) -> None:
        path = lookup(config, "trajectory_load_path")
        if not path:
            function(worker, config, *args, **kwargs)
            return
        source = Path(str(path)).expanduser()
        format = str(lookup(config, "trajectory_format") or "jsonl")
        replay = TaskReplay(read_recorded(source, format), source)
        workers = int(lookup(config, "resource", "num_workers") or 1)
        if replay.repeated and workers > 1:
            raise ReplayError(
                f"{source} has several trajectories of a task ({replay.repeated[0]}), one for "
                f"each step that trained it, and {workers} workers would not know whose turn it "
                "is: set rollout_worker.resource.num_workers to 1"
            )
        limit = lookup(config, "max_sequence_length")
        if limit is None:
            raise ReplayError(
                "rollout_worker.max_sequence_length must be set: NexRL checks each trajectory "
                "against it"
            )
        _replays[worker] = replay
        function(worker, config, *args, **kwargs)
        if not hasattr(worker, "_max_sequence_length"):
            worker._max_sequence_length = limit
        _log.warning(
            "replays the %d trajectories of %s, each to the task of its (group_id, run_id)",
            len(replay),
            source,
        )

    return run


def wrap_load(function: Function) -> Function:
    """Wrap `_load_trajectories`, which swallows its errors: they were read already, or refused."""

    @functools.wraps(function)
    def run(worker: Worker, *args: object, **kwargs: object) -> object:
        if worker in _replays:
            return None
        return function(worker, *args, **kwargs)

    return run


def wrap_rollout(function: Function) -> Function:
    """Wrap `rollout(task)`: the task's trajectories go to the pool.

    Raises (from the wrapper):
        ReplayError: there are none of the task.
    """

    @functools.wraps(function)
    def run(worker: Worker, task: Mapping[str, Any], *args: object, **kwargs: object) -> object:
        replay = _replays.get(worker)
        if replay is None:
            return function(worker, task, *args, **kwargs)
        if getattr(worker, "_is_running_validate", False):
            raise ReplayError(
                "a dump has no trajectories of a validation: set validate.validate_before_train "
                "to false and validate.eval.validate_freq to 0 for a replay"
            )
        key, rows = replay.waiting(task)
        result = "success"
        for row in rows:
            result = worker._put_trajectory(_trajectory(worker, row))
            if result == "re-rollout":  # the same task comes again, when weights are in sync
                return result
            if result != "success":
                raise ReplayError(f"the pool answered {result!r} to the trajectory of {key}")
            replay.note_put(key)
            worker._processed_count += 1
        replay.note_done(key)
        return result

    return run


def _trajectory(worker: Worker, row: Recorded) -> object:
    """Return NexRL's own object, new each time: the trainer pads trajectories in place."""
    # The name by which the worker's module knows NexRL's class.
    module = sys.modules.get(_MODULE) or sys.modules[type(worker).__module__]
    return module.Trajectory(
        tokens=list(row.tokens),
        loss_mask=list(row.loss_mask),
        reward=row.reward,
        is_val=row.is_val,
        extra_fields=copy.deepcopy(row.extra_fields),
    )
