"""Reads the trajectories that NexRL's `DataDumper` wrote, for a replay: every one, or an error."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

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
        raise ReplayError(f"lack {' and '.join(missing)}, by which a task finds its trajectory")
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
