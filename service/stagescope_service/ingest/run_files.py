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


def count_files(data_dir: Path, files: RunFiles) -> RemovedFiles:
    """Return what `remove_files` would delete."""
    own, made, others = _paths(data_dir, files)
    # A dump below an attempt's directory counts once.
    found = {each: size for path in (*own, *made, *others) for each, size in _sizes(path).items()}
    return RemovedFiles(len(found), sum(found.values()), [])


def _paths(
    data_dir: Path, files: RunFiles
) -> tuple[Sequence[Path], Sequence[Path], Sequence[Path]]:
    """Return the directories of a run's attempts, those that its captures made, and other files."""
    own = [attempt_directory(data_dir, files.run, key) for key in files.keys]
    made = [path for path in map(Path, files.dumps) if (path / DUMP_MARKER).is_file()]
    return own, made, _inside(data_dir, files.others)


def remove_files(data_dir: Path, files: RunFiles) -> RemovedFiles:
    """Delete the directories of a run's attempts, its dumps, and other files of it.

    Only directories of its attempts are deleted below the data directory, and outside it only
    those that a capture made.
    """
    own, made, others = _paths(data_dir, files)
    removed: list[int] = []
    problems: list[str] = []
    for path in (*own, *made, *others):
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


def _sizes(path: Path) -> dict[str, int]:
    """Return the files of a path, itself or those below it, with their sizes in bytes."""
    paths = [str(path)]
    if path.is_dir() and not path.is_symlink():
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    sizes = {}
    for each in paths:
        with contextlib.suppress(FileNotFoundError):
            sizes[each] = os.lstat(each).st_size
    return sizes


def _remove(path: Path) -> list[int]:
    """Delete a file or a directory; return the sizes of the files in bytes.

    Raises:
        OSError: something cannot be deleted.
    """
    sizes = [*_sizes(path).values()]
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return sizes
