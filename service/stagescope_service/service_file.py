"""`service.json`: tells clients of a home where its service is, and the service what it started."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stagescope_service.settings import Settings


def path_of(settings: Settings) -> Path:
    """Return the file's place."""
    return settings.home / "service.json"


def read(settings: Settings) -> dict[str, Any]:
    """Return what is known; nothing where there is no such file."""
    try:
        known = json.loads(path_of(settings).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def change(settings: Settings, fields: Mapping[str, Any]) -> None:
    """Set some fields and keep the others; the file has mode 0600 and is replaced whole."""
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(path_of(settings), json.dumps({**read(settings), **fields}, indent=1))


@contextlib.contextmanager
def kept_on_failure(settings: Settings) -> Iterator[None]:
    """Put the file back as it was where what is done meanwhile fails."""
    path = path_of(settings)
    before = path.read_text() if path.exists() else None
    try:
        yield
    except BaseException:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            _write(path, before)
        raise


def last_port(settings: Settings) -> int | None:
    """Return the port that was bound before, where any free one was asked for."""
    _, _, port = str(read(settings).get("url") or "").rpartition(":")
    return int(port) if settings.port == 0 and port.isdigit() else None


def _write(path: Path, content: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
    os.replace(temporary, path)
