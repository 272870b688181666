"""NexRL's mock rollout worker as its documentation describes it: a replay by (group_id, run_id).

NexRL 1.4 documents that `rollout_worker.type: mock` with `trajectory_load_path` gives each task the
trajectory of its (group_id, run_id). But its code puts all of them into the pool at the first task
of each worker. It uses synthetic trajectories where the file is missing or cannot be read. It never
sets `_max_sequence_length`, which putting a trajectory reads.

Here each task gets its own trajectory. A missing one ends the replay with an error that says what
to do. stagescope raises in a training only here, and only if `trajectory_load_path` is set.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import re
import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from stagescope_workers.integrations.configuration import lookup
from stagescope_workers.integrations.patches import Function, wrapper

FORMATS: Final = ("pt", "jsonl")
_FIELDS: Final = ("tokens", "loss_mask", "reward", "is_val")
_STEP: Final = re.compile(r"step_(\d+)\Z")
_SHOWN: Final = 3

Key = tuple[str, int]
"""(group_id, run_id)."""


class ReplayError(ValueError):
    """A replay that cannot be what its configuration says."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One recorded trajectory, in built-in types.

    Attributes:
        tokens, loss_mask, reward, is_val, extra_fields: As in NexRL's `Trajectory`.
    """

    tokens: list[int]
    loss_mask: list[int]
    reward: float
    is_val: bool
    extra_fields: dict[str, Any]

    @property
    def key(self) -> Key:
        """The key of the task whose trajectory this is."""
        return str(self.extra_fields["group_id"]), int(self.extra_fields["run_id"])


def read_recorded(path: Path, format: str) -> list[list[Recorded]]:
    """Read the training's trajectories of a dump: a list for each file, steps in order.

    Args:
        path: `trajectory/step_N.pt`, or the directory with those of all steps.
        format: 'pt' or 'jsonl', as `trajectory_format`.

    Raises:
        ReplayError: a file is missing, cannot be read, or lacks anything that a replay needs.
    """
    if format not in FORMATS:
        raise ReplayError(f"trajectory_format is {format!r}: expected {' or '.join(FORMATS)}")
    read = _read_pt if format == "pt" else _read_jsonl
    return [_recorded(file, read(file)) for file in _files(path, format)]


def _files(path: Path, format: str) -> list[Path]:
    if path.is_dir():
        found = [file for file in path.iterdir() if file.suffix == f".{format}"]
        steps = {file: _STEP.match(file.stem) for file in found}
        known = [(int(match[1]), file) for file, match in steps.items() if match]
        if not known:
            raise ReplayError(
                f"trajectory_load_path {path} has no step_N.{format}: name NexRL's directory "
                "debug_dump/trajectory, or one of its files"
            )
        return [file for _, file in sorted(known)]
    if not path.is_file():
        raise ReplayError(
            f"trajectory_load_path {path} does not exist here (working directory {Path.cwd()}): "
            "without stagescope NexRL would train on synthetic trajectories instead"
        )
    return [path]


def _read_pt(file: Path) -> object:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ReplayError(
            f"{file} cannot be read as trajectory_format 'pt': {error!r:.300} (files are read "
            "without executing anything in them: plain tensors, numbers and texts)"
        ) from None


def _read_jsonl(file: Path) -> object:
    try:
        text = file.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise ReplayError(
            f"{file} cannot be read as trajectory_format 'jsonl': {error!r:.300}"
        ) from None
    if not all(isinstance(line, Mapping) for line in lines):
        raise ReplayError(f"{file} has lines that are no JSON objects")
    return {"trajectories": [row for line in lines for row in line.get("trajectories", [])]}


def _recorded(file: Path, data: object) -> list[Recorded]:
    given = data.get("trajectories") if isinstance(data, Mapping) else None
    if not isinstance(given, Sequence) or not given:
        raise ReplayError(f"{file} has no trajectories: it is no file of dump_options.trajectory")
    problems: Counter[str] = Counter()
    found = []
    for row in given:
        try:
            found.append(_one(row))
        except ReplayError as error:  # noqa: PERF203 - all of a file's are said at once
            problems[str(error)] += 1
    if problems:
        texts = "; ".join(f"{count} {text}" for text, count in problems.most_common(_SHOWN))
        raise ReplayError(f"{file}: of {len(given)} trajectories, {texts}")
    training = [one for one in found if not one.is_val]
    if not training:
        raise ReplayError(f"{file} has trajectories of a validation alone")
    return training


def _one(row: object) -> Recorded:
    if not isinstance(row, Mapping):
        raise ReplayError("are no objects")
    missing = [name for name in _FIELDS if row.get(name) is None]
    if missing:
        raise ReplayError(f"lack {', '.join(missing)}")
    extra = {str(name): plain(value) for name, value in (row.get("extra_fields") or {}).items()}
    missing = [name for name in ("group_id", "run_id") if extra.get(name) in (None, "")]
    if missing:
        raise ReplayError(
            f"lack {' and '.join(missing)}, which a task needs to find its trajectory"
        )
    tokens, mask = plain(row["tokens"]), plain(row["loss_mask"])
    if len(tokens) != len(mask):
        raise ReplayError("have a loss_mask that is not as long as their tokens")
    if not str(extra["run_id"]).lstrip("-").isdecimal():
        raise ReplayError("have a run_id that is no number")
    return Recorded(
        tokens=[int(token) for token in tokens],
        loss_mask=[int(value) for value in mask],
        reward=float(plain(row["reward"])),
        is_val=bool(plain(row["is_val"])),
        extra_fields=extra,
    )


def plain(value: Any) -> Any:
    """Return a value with tensors as numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


_log = logging.getLogger("stagescope.integrations")

_MODULE: Final = "nexrl.mock.mock_rollout_worker"


Worker: TypeAlias = Any
"""Attributes read from NexRL's `MockRolloutWorker`: _max_sequence_length, _processed_count,
_put_trajectory."""


class TaskReplay:
    """The trajectories of a dump, by the task that requests them.

    With several files (a directory), the k-th request of a task gets the trajectory of the k-th
    file that has the task. With one file it always gets the same.

    Args:
        files: The trajectories of each file.
        source: Path of the dump, for messages.
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
                f"a task has no group_id and run_id ({', '.join(map(str, task))}). The data "
                "loader sets them if it repeats tasks: set data.rollout_repeat_n"
            )
        key = (str(group), int(run))
        passes, done = self._passes.get(key), self._done.get(key, 0)
        if passes is None:
            raise ReplayError(
                f"{self._source} has no trajectory of the task {key}; it has "
                f"{len(self._passes)}, such as {', '.join(map(str, list(self._passes)[:_SHOWN]))}. "
                "Replay with the data set, the batch size, the order and rollout_repeat_n of the "
                "run that was dumped. If it trains more than one step, give every step's file "
                "(the directory)"
            )
        if not self._single and done >= len(passes):
            raise ReplayError(
                f"{self._source} has {len(passes)} trajectories of the task {key}, one for each "
                "step that trained it, and it was asked for once more"
            )
        rows = passes[0 if self._single else done]
        return key, rows[self._put.get(key, 0) :]

    def note_put(self, key: Key) -> None:
        """Count a trajectory that the pool has accepted."""
        self._put[key] = self._put.get(key, 0) + 1

    def note_done(self, key: Key) -> None:
        """Count a task whose trajectories the pool has accepted."""
        self._put.pop(key, None)
        self._done[key] = self._done.get(key, 0) + 1


_replays: Final[weakref.WeakKeyDictionary[object, TaskReplay]] = weakref.WeakKeyDictionary()


@wrapper
def wrap_init(
    function: Function, worker: Worker, config: object, *args: Any, **kwargs: Any
) -> None:
    """Wrap `MockRolloutWorker.__init__`: with a path, its trajectories are all there or it fails.

    Raises (from the wrapper):
        ReplayError: the replay cannot be what the configuration says.
    """
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
            f"each step that trained it. {workers} workers cannot agree which one is next. Set "
            "rollout_worker.resource.num_workers to 1"
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


@wrapper
def wrap_load(function: Function, worker: Worker, *args: Any, **kwargs: Any) -> object:
    """Wrap `_load_trajectories`, which swallows its errors: they were read already, or refused."""
    if worker in _replays:
        return None
    return function(worker, *args, **kwargs)


@wrapper
def wrap_rollout(
    function: Function, worker: Worker, task: Mapping[str, Any], *args: Any, **kwargs: Any
) -> object:
    """Wrap `rollout(task)`: the task's trajectories go to the pool.

    Raises (from the wrapper):
        ReplayError: there are none of the task.
    """
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


def _trajectory(worker: Worker, row: Recorded) -> object:
    """Return NexRL's own object, new each time: the trainer pads trajectories in place."""
    # The worker's module knows NexRL's class under this name.
    module = sys.modules.get(_MODULE) or sys.modules[type(worker).__module__]
    return module.Trajectory(
        tokens=list(row.tokens),
        loss_mask=list(row.loss_mask),
        reward=row.reward,
        is_val=row.is_val,
        extra_fields=copy.deepcopy(row.extra_fields),
    )
