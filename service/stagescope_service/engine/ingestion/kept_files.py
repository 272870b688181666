"""The kept files on one node's disk: found, described, deleted. No Ray in here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope.errors import Forbidden, StagescopeError
from stagescope.schema import PART_FIELDS
from stagescope_service.engine.ingestion.keeping import artifact_row, tensor_specs
from stagescope_service.engine.instructions import PayloadKey
from stagescope_service.store.artifacts import confine, file_checksum, is_kept_path
from stagescope_service.store.kept import read_kept

Row = dict[str, Any]

_STAGES: Final = ("*/*/step_*/*", "*/*/step_*/*/*")
_UNFINISHED_SECONDS: Final = 3600.0
"""After so long nobody goes on writing a file."""


def find(data_dir: Path) -> list[str]:
    """Return the kept files below data_dir; what a crash left unfinished is removed."""
    found = []
    for path in _in_stages(data_dir):
        if path.suffix == ".tmp" and path.name.startswith("."):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _UNFINISHED_SECONDS:
                    path.unlink()
        elif is_kept_path(path):
            found.append(str(path))
    return found


def _in_stages(data_dir: Path) -> Iterator[Path]:
    for stage in _STAGES:
        for suffix in ("*.safetensors", ".*.tmp"):
            yield from data_dir.glob(f"{stage}/{suffix}")


def describe(paths: Sequence[str], node_id: str) -> list[tuple[Row, Row]]:
    """Return (row of artifacts, job) of each file that can be read; the job says whose it is."""
    found = []
    for path in map(Path, paths):
        with contextlib.suppress(StagescopeError, OSError, KeyError, TypeError, ValueError):
            found.append(_describe(path, node_id))
    return found


def _describe(path: Path, node_id: str) -> tuple[Row, Row]:
    kept = read_kept(path)
    job = _job(kept.job)
    stat = path.stat()
    key = PayloadKey(job["incarnation"], job["seq"])
    row = artifact_row(key, job, "kept", node_id, path, stat.st_size).row
    said = {
        "wall": stat.st_mtime,
        "checksum": f"sha256:{file_checksum(path)}",
        "sections": kept.sections,
        "tensors": tensor_specs(kept.tensors),
    }
    return {**row, **said}, job


def _job(job: Mapping[str, Any]) -> Row:
    """Return what a file says of itself, where that is of the right types."""
    texts = ("run", "attempt_key", "role", "stage", "incarnation")
    if not all(isinstance(job[name], str) for name in texts):
        raise TypeError(f"a job of {dict(job)!r:.200}")
    numbers = ("rank", "seq", "step", "policy_version", *PART_FIELDS)
    wrong = [name for name in numbers if type(job.get(name)) not in (int, type(None))]
    if wrong or not isinstance(job["seq"], int):
        raise TypeError(f"a job of {dict(job)!r:.200}")
    return dict(job)


def discard(data_dir: Path, paths: Sequence[str]) -> list[str]:
    """Delete kept files, and directories that are empty then; return those that are gone."""
    gone = []
    for name in paths:
        with contextlib.suppress(OSError, Forbidden):
            path = confine(name, [data_dir])
            if not is_kept_path(path):
                continue
            path.unlink(missing_ok=True)
            gone.append(name)
            _tidy(path.parent, data_dir)
    return gone


def _tidy(directory: Path, data_dir: Path) -> None:
    """Remove directories from the stage's part up to the step, as far as they are empty."""
    with contextlib.suppress(OSError):
        while directory.resolve() != data_dir.resolve():
            directory.rmdir()
            if directory.name.startswith("step_"):
                return
            directory = directory.parent
