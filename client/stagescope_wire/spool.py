"""A spool: batches of events as files, for processes that cannot reach the service.

`STAGESCOPE_URL=file:///shared/spool` names the directory. Each process has a folder in it, named by
its incarnation. The folder has the body of each batch (`stagescope_wire.framing`) as
`00000001.events`, ..., and the newest sender as `sender.json`, which a live process keeps writing.
Every file is renamed into its place, so that a reader sees whole files only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from stagescope_wire.errors import InvalidInput

SENDER: Final = "sender.json"
ALIVE_SECONDS: Final = 5.0
"""How often a process writes its `sender.json`."""
_BATCH: Final = re.compile(r"(\d{8,18})\.events")
_FOLDER: Final = re.compile(r"[0-9a-f]{8,64}")


def directory_of(url: str | None) -> Path | None:
    """Return the directory that a `file://` URL names, absolute; None: another URL."""
    if not url or not url.startswith("file://"):
        return None
    return Path(unquote(urlsplit(url).path)).absolute()


def write(path: Path, data: bytes) -> None:
    """Write a file atomically, with mode 0600: it may hold tokens of prompts.

    Raises:
        OSError: it cannot be written; no part of it is left.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def batch_path(directory: Path, incarnation: str, number: int) -> Path:
    """Return the file of a process's batch; the first has number 1."""
    return directory / incarnation / f"{number:08}.events"


def batches(folder: Path, after: int = 0) -> Iterator[tuple[int, Path]]:
    """Yield number and path of a process's batches after the batch of a number, in order."""
    names = os.listdir(folder)
    found = [(int(match[1]), name) for name in names if (match := _BATCH.fullmatch(name))]
    for number, name in sorted(found):
        if number > after:
            yield number, folder / name


def folders(directory: Path) -> list[Path]:
    """Return the folders of processes in a spool; none if the directory is no spool.

    Raises:
        InvalidInput: this user may not read it.
    """
    try:
        with os.scandir(directory) as entries:
            found = [
                Path(entry.path)
                for entry in entries
                if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
        return sorted(each for each in found if (each / SENDER).is_file() or any(batches(each)))
    except PermissionError as error:
        raise InvalidInput(
            f"{error.filename} cannot be read by this user",
            expected="the user of the training, or root: only they can read its files",
        ) from error
