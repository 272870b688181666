"""The directories of captures: one for each, and no capture overwrites another.

* our captures: `{data_dir}/{run}/{attempt key}/step_{N}/{stage}[/part]/step0/rank{R}/`
* verl's own block: `{data_dir}/step_{N}/{stage}/...` for the first attempt that writes there (as
  verl does), `{data_dir}/attempt_{key}/step_{N}/{stage}/...` for later ones. The file
  `.stagescope-attempt` names the attempt that owns the directory.

`step0/rank{R}` is msprobe's part of the path. Where the directory exists already (two roles with
one stage name, a rank recreated in the same attempt) the dump goes to `again_1`, ....
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stagescope_wire.errors import CaptureError
from stagescope_wire.names import safe_name
from stagescope_wire.schema import DUMP_MARKER, Part

OWNER_FILE: Final = ".stagescope-attempt"
_MSPROBE_PATH: Final = re.compile(r"[A-Za-z0-9_.:/-]+\Z")
_MAX_TRIES: Final = 10_000


def stage_directory(root: Path, step: int | None, stage: str, part: Part) -> Path:
    """Return `{root}/step_{N}/{stage}[/part]`; an unknown step is `step_unknown`, as in verl."""
    directory = root / f"step_{'unknown' if step is None else step}" / safe_name(stage)
    return directory / str(part) if part != Part() else directory


def attempt_directory(data_dir: Path, *, run: str, attempt_key: str, verl: bool) -> Path:
    """Return the directory that holds the steps of this attempt.

    Raises:
        OSError: the directory cannot be created or its owner file cannot be written.
    """
    if not verl:
        return data_dir / safe_name(run) / safe_name(attempt_key)
    data_dir.mkdir(parents=True, exist_ok=True)
    owner = _claim(data_dir, {"run": run, "attempt_key": attempt_key})
    if owner.get("run") == run and owner.get("attempt_key") == attempt_key:
        return data_dir
    return data_dir / f"attempt_{safe_name(attempt_key)}"


def _claim(directory: Path, claim: dict[str, str]) -> dict[str, object]:
    """Mark `directory` as this attempt's unless it belongs to another one; return the owner.

    The file is created atomically (as a link to a complete one), so that a rank on another node
    never reads half a claim.
    """
    target = directory / OWNER_FILE
    if not target.exists():
        descriptor, temporary = tempfile.mkstemp(prefix=OWNER_FILE, dir=directory)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(claim, file)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(temporary, target)
        finally:
            Path(temporary).unlink()
    try:
        owner = json.loads(target.read_text(encoding="utf-8"))
    except ValueError:
        owner = None
    # A file with any other content shows that the directory belongs to someone else.
    return owner if isinstance(owner, dict) else {}


def check_path(directory: Path) -> None:
    """Refuse a path that msprobe refuses, with a message that says why.

    Raises:
        CaptureError: it has a character that msprobe does not accept, or is too long.
    """
    resolved = os.path.realpath(directory)
    if not _MSPROBE_PATH.match(resolved):
        bad = sorted(set(re.findall(r"[^A-Za-z0-9_.:/-]", resolved)))
        raise CaptureError(
            f"msprobe refuses the path {resolved!r} because of {', '.join(map(repr, bad))}",
            expected="only A-Z a-z 0-9 _ . : / - in the resolved path",
            advice="choose another data_dir",
        )
    # The longest name that msprobe adds below is a tensor's file, up to 255.
    if len(resolved) > 4096 - 300 or any(len(name) > 255 for name in resolved.split("/")):
        raise CaptureError(f"the path {resolved[:200]!r}... is too long for msprobe")


def claim_rank_directory(directory: Path, rank: int) -> tuple[Path, Path]:
    """Create a new directory for this rank's dump.

    Returns:
        The `dump_path` for msprobe and, inside it, `step0/rank{R}`, both existing.

    Raises:
        CaptureError: msprobe refuses the path.
        OSError: it cannot be created.
    """
    check_path(directory)
    for number in range(_MAX_TRIES):
        dump_path = directory / f"again_{number}" if number else directory
        (dump_path / "step0").mkdir(parents=True, exist_ok=True)
        files = dump_path / "step0" / f"rank{rank}"
        with contextlib.suppress(FileExistsError):
            files.mkdir()
            # The service reads a directory with this marker, also outside its allowed roots.
            (files / DUMP_MARKER).write_text("written by a capture of stagescope\n")
            return dump_path, files
    raise CaptureError(f"{directory} already has {_MAX_TRIES} dumps of rank {rank}")


def free_bytes(directory: Path) -> int | None:
    """Return the bytes that may be written there, or None where they cannot be read."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def measure(directory: Path) -> tuple[int, int]:
    """Return (bytes, files) below `directory`; files that vanish meanwhile are not counted."""
    total = files = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            if name == DUMP_MARKER:
                continue
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
                files += 1
    return total, files


def write_done(directory: Path, content: Mapping[str, object]) -> None:
    """Write DONE.json beside dump.json, atomically.

    Raises:
        OSError: the disk refuses.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=".done-", dir=directory)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, directory / "DONE.json")
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
