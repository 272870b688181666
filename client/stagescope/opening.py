"""Opens an archive of `stagescope bundle` for a session: a process of its own serves it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stagescope.discovery import ServiceLocation
from stagescope.versions import install_command
from stagescope.wire.errors import InvalidInput, MissingExtra

ARCHIVES: Final = (".tar.gz", ".tgz")
"""Endings of the file of a bundle."""

_PROGRAM: Final = "from stagescope.cli import main; main()"
_END_SECONDS: Final = 10.0


def is_bundle(url: str | Path) -> bool:
    """Return whether `attach` is given an archive, and no URL."""
    text = str(url)
    return "://" not in text and (text.endswith(ARCHIVES) or Path(text).is_file())


def open_bundle(path: str | Path, timeout: float) -> tuple[ServiceLocation, Callable[[], None]]:
    """Serve an archive on loopback, read only; return where, and what ends it.

    It ends with this process, too.

    Raises:
        InvalidInput: there is no such file, or it is no bundle.
        MissingExtra: the service's extra is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidInput(f"there is no file {str(path)!r:.200}", expected="a bundle, or a URL")
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, "attach", str(path), "--json", "--until-eof"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    errors: deque[str] = deque(maxlen=20)
    reading = threading.Thread(target=_read_errors, args=(process, errors), daemon=True)
    reading.start()
    deadline = threading.Timer(timeout, process.kill)  # a large archive takes its time to unpack
    deadline.daemon = True
    deadline.start()
    line = process.stdout.readline()
    deadline.cancel()
    try:
        found = json.loads(line)
        location = ServiceLocation(
            found["url"], f"the bundle {path.name}",
            read_token=found["token"], operate_token=found["token"],
        )  # fmt: skip
    except (ValueError, KeyError) as error:
        _end(process)
        reading.join(_END_SECONDS)
        text = " ".join(" ".join(errors).split())
        if "not installed" in text:
            raise MissingExtra(
                "a bundle is opened by the service's own code, which is not installed",
                advice=install_command("service"),
            ) from error
        reason = text.removeprefix("error: ") or f"it was not unpacked within {timeout:g} s"
        raise InvalidInput(f"{path} cannot be opened: {reason}") from error
    return location, lambda: _end(process)


def _read_errors(process: subprocess.Popen[str], errors: deque[str]) -> None:
    assert process.stderr is not None
    errors.extend(process.stderr)


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, which then removes what it unpacked."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.close()
