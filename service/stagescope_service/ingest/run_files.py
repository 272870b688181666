"""Deletes the files of a run on one node; what is gone already is no error."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from stagescope_service.ingest.kept_files import tidy
from stagescope_service.store.artifacts import attempt_directory, confine
from stagescope_wire.errors import Forbidden
from stagescope_wire.schema import DUMP_MARKER


class RunFiles(NamedTuple):
    """The files of a run, as the catalogue knows them."""

    run: str
    attempt_ids: list[int]
    keys: list[str]
    """The keys of its attempts: each has a directory below the data directory."""
    dumps: list[str]
    """Directories of its captures' dumps, some of them outside the data directory."""
    others: list[str]
    """Files below the data directory: bundles, and copies of operator tables."""


class RemovedFiles(NamedTuple):
    """What was deleted on a node."""

    files: int
    bytes: int
    problems: list[str]
    """Why something is still there."""


def remove_files(data_dir: Path, files: RunFiles) -> RemovedFiles:
    """Delete the directories of a run's attempts, its dumps, and other files of it.

    Only directories of its attempts are deleted below the data directory, and outside it only
    those that a capture made.
    """
    own = [attempt_directory(data_dir, files.run, key) for key in files.keys]
    made = [path for path in map(Path, files.dumps) if (path / DUMP_MARKER).is_file()]
    removed: list[int] = []
    problems: list[str] = []
    for path in (*own, *made, *_inside(data_dir, files.others)):
        try:
            removed += _remove(path)
        except OSError as error:  # noqa: PERF203 - the others go all the same
            problems.append(f"{path}: {error.strerror or error}")
    for path in made:
        tidy(path.parent, data_dir)
    with contextlib.suppress(OSError):
        attempt_directory(data_dir, files.run, "").parent.rmdir()
    return RemovedFiles(len(removed), sum(removed), problems)


def _inside(data_dir: Path, paths: Iterable[str]) -> Sequence[Path]:
    found = []
    for path in paths:
        with contextlib.suppress(Forbidden):
            found.append(confine(path, [data_dir]))
    return found


def _remove(path: Path) -> list[int]:
    """Delete a file or a directory; return the sizes of the files in bytes.

    Raises:
        OSError: something cannot be deleted.
    """
    if not path.is_dir() or path.is_symlink():
        try:
            size = path.lstat().st_size
            path.unlink()
        except FileNotFoundError:
            return []
        return [size]
    sizes = [
        os.lstat(os.path.join(directory, name)).st_size
        for directory, _, names in os.walk(path)
        for name in names
    ]
    shutil.rmtree(path)
    return sizes
