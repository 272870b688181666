"""The paths of an attempt's files below data_dir, and checks of paths that callers name.

`{data_dir}/{run}/{attempt key}/step_{N}/{stage}[/part]`, also used for msprobe's dumps of our own
captures, so that all files of a step are in one directory.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from stagescope_service.store.tensorfile import disk_errors, sync_directory
from stagescope_wire.errors import Forbidden, NotFound
from stagescope_wire.names import safe_name
from stagescope_wire.schema import DUMP_MARKER, Part

_KEPT: Final = re.compile(r"_rank\d{1,9}_[0-9a-f]{12}_\d+\.safetensors\Z")


def attempt_directory(data_dir: Path, run: str, key: str) -> Path:
    """Return `{data_dir}/{run}/{attempt key}`."""
    return data_dir / safe_name(run) / safe_name(key)


def step_directory(
    data_dir: Path, run: str, key: str, step: int | None, stage: str, part: Part | None = None
) -> Path:
    """Return `{data_dir}/{run}/{attempt key}/step_{N}/{stage}[/part]`; creates nothing.

    An unknown step is `step_unknown`; the first part has no directory of its own.
    """
    directory = attempt_directory(data_dir, run, key)
    directory = directory / f"step_{'unknown' if step is None else step}" / safe_name(stage)
    return directory if part is None or part == Part() else directory / str(part)


def kept_path(directory: Path, role: str, rank: int, incarnation: str, seq: int) -> Path:
    """Return the file of one payload's kept tensors.

    The name contains the payload's identity: attempts whose keys are equal after cleaning, or a
    recreated rank, never overwrite each other.
    """
    identity = hashlib.sha256(incarnation.encode(errors="surrogatepass")).hexdigest()[:12]
    return directory / f"{safe_name(role)}_rank{rank}_{identity}_{seq}.safetensors"


def is_kept_path(path: Path) -> bool:
    """Return whether a file's name has the form of `kept_path`."""
    return _KEPT.search(path.name) is not None


def make_directory(directory: Path) -> None:
    """Create a directory and its parents so that they survive a power failure.

    Raises:
        OSError: the directory cannot be created.
    """
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


def ring_directory(data_dir: Path, node_id: str) -> Path:
    """Return `{data_dir}/ring/{node}`."""
    return data_dir / "ring" / safe_name(node_id)


def confine(path: str | Path, roots: Iterable[str | Path]) -> Path:
    """Resolve `path` and check that it is inside one of `roots`, or inside a capture's dump.

    A dump's directory contains a file that requires write permission there (`DUMP_MARKER`), so a
    training's own `save_path` needs no root. Directories without it are refused.

    Args:
        path: absolute, or relative to the first root. It need not exist.
        roots: directories. Symbolic links in them and in `path` are resolved before the check,
            so a link to the outside is refused.

    Raises:
        Forbidden: outside every root, or not a valid path.
    """
    allowed = [Path(root).resolve() for root in roots]
    try:
        if "\0" in str(path) or not allowed:
            raise ValueError("a NUL in it" if allowed else "no root is allowed")
        found = (allowed[0] / path).resolve()
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise Forbidden(f"path {str(path)!r:.200} cannot be used: {error}") from error
    if not any(found.is_relative_to(root) for root in allowed) and not _is_in_dump(found):
        raise Forbidden(
            f"path {str(path)!r:.200} lies outside the directories that may be used",
            expected=f"a path in {', '.join(map(str, allowed))}",
            advice="add a root to the service's allowed_roots",
        )
    return found


def _is_in_dump(path: Path) -> bool:
    """Return whether a resolved path is, or is inside, a directory that a capture created."""
    for directory in (path, *path.parents[:2]):  # a tensor's file is one level below
        try:
            mode = (directory / DUMP_MARKER).lstat().st_mode
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(mode):
            return True
    return False


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex.

    Raises:
        StoreError: the file cannot be read.
    """
    found = hashlib.sha256()
    with disk_errors(path), path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def read_piece(path: Path, offset: int, size: int) -> bytes:
    """Return up to `size` bytes of a file from `offset`; none at its end.

    Raises:
        NotFound: there is no such file.
        StoreError: the file cannot be read.
    """
    with disk_errors(path):
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError as error:
            raise NotFound(f"there is no file {path}") from error
