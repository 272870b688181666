"""`service.json`: where the service of a home is, for its clients, and what it started."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from stagescope_service.settings import Settings


def path_of(settings: Settings) -> Path:
    """Return the file's path."""
    return settings.home / "service.json"


def read(settings: Settings) -> dict[str, object]:
    """Return the fields of the file; {} where it cannot be read."""
    try:
        fields = json.loads(path_of(settings).read_text())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def change(settings: Settings, fields: Mapping[str, object]) -> None:
    """Set some fields and keep the others; the file has mode 0600 and is replaced atomically."""
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(path_of(settings), json.dumps({**read(settings), **fields}, indent=1))


@contextlib.contextmanager
def kept_on_failure(settings: Settings) -> Iterator[None]:
    """Restore the file if the block fails."""
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
    """Return the port that was bound last, where the settings allow any free one."""
    _, _, port = str(read(settings).get("url") or "").rpartition(":")
    return int(port) if settings.port == 0 and port.isdigit() else None


def page_address(settings: Settings) -> str | None:
    """Return the address that people open: the one of the settings, else the API's own.

    None while no API serves.
    """
    return settings.public_url or str(read(settings).get("url") or "") or None


def _write(path: Path, content: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
    os.replace(temporary, path)
