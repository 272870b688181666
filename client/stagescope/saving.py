"""Save what the service makes as one file, reports and bundles; open the archive of a bundle."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

from stagescope.answers import Record
from stagescope.connection import Connection, segment
from stagescope.transport import Params, given
from stagescope_wire.atomic_file import atomic_file
from stagescope_wire.discovery import ServiceLocation
from stagescope_wire.errors import InvalidInput, MissingExtra
from stagescope_wire.versions import install_command

ARCHIVES: Final = (".tar.gz", ".tgz")
"""Endings of the file of a bundle."""

_PROGRAM: Final = "from stagescope.cli import main; main()"
_END_SECONDS: Final = 10.0


def is_bundle(url: str | Path) -> bool:
    """Return whether `attach` is given an archive, and no URL."""
    text = str(url)
    return "://" not in text and (text.endswith(ARCHIVES) or Path(text).is_file())


def open_bundle(path: str | Path, timeout: float) -> tuple[ServiceLocation, Callable[[], None]]:
    """Serve an archive on loopback, read only; return its location, and a function that ends it.

    It also ends with this process.

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


ReportFormat = Literal["html", "json", "md"]
FORMATS: Final[Mapping[str, ReportFormat]] = {
    ".html": "html", ".htm": "html", ".json": "json", ".md": "md",
}  # fmt: skip
"""Ending of a file -> format of the report."""

OnProgress = Callable[[int, int], object]
"""Called with the bytes that have arrived, and all."""


def _ignore(done: int, total: int) -> None:
    pass


class FileRequests(Connection):
    """Reports and bundles, as files."""

    def save_report(
        self, path: str | Path, run: str, *, step: int | None = None, attempt: int | None = None,
        format: ReportFormat | None = None, timeout: float = 120.0,
        on_progress: OnProgress = _ignore,
    ) -> Record:  # fmt: skip
        """Save a report about a run or one of its steps: verdicts, tables, figures, advice.

        Usage:
            >>> session.save_report("report.html", "qwen3-8b")          # one file for a browser
            >>> session.save_report("step5.md", "qwen3-8b", step=5)     # for a pull request

        Args:
            path: ends in .html, .json or .md, or `format` is given.
            run: its name.
            step: that step in detail; default: the whole run.
            attempt: only this attempt; default: the current attempts.
            format: html, json or md; default: the one that the path's ending names.
            timeout: most seconds that the service may need.
            on_progress: called as bytes arrive.

        Raises:
            InvalidInput: the path's ending is unknown, or does not match `format`.
            NotFound: there is no such run or step.
        """
        path = Path(path)
        named = FORMATS.get(path.suffix.lower())
        kind = format or named
        if kind is None:
            raise InvalidInput(f"{str(path)!r} names no format", expected=".html, .json or .md")
        if named not in (None, kind):
            raise InvalidInput(
                f"{str(path)!r} does not end in .{kind}", expected=f"an ending .{kind}"
            )
        of = given(run=run, attempt=attempt, step=step, format=kind)
        size = self._save("report", of, path, timeout, on_progress)
        return Record({**of, "path": str(path), "bytes": size}, title=f"report of {run}")

    def save_bundle(
        self, path: str | Path, run: str, step: int, *, attempt: int | None = None,
        tensors: bool = True, limit_bytes: int | None = None, timeout: float = 600.0,
        on_progress: OnProgress = _ignore,
    ) -> Record:  # fmt: skip
        """Save a step as one archive without secrets, to look at it elsewhere.

        `stagescope attach PATH` and `stagescope.attach(PATH)` open it, without a service.

        Args:
            path: the archive, such as step5.tar.gz.
            run: its name.
            step: the trainer's step.
            attempt: its number; default: the newest that has the step.
            tensors: with the step's tensors: log-probs, and prompts and responses as token ids.
            limit_bytes: most bytes of its files; the manifest names what does not fit.
            timeout: most seconds that the service may need.
            on_progress: called as bytes arrive.

        Raises:
            InvalidInput: the path does not end in .tar.gz or .tgz.
            NotFound: there is no such run or step.
        """
        path = Path(path)
        if not path.name.lower().endswith(ARCHIVES):
            raise InvalidInput(
                f"{str(path)!r} is not the name of an archive", expected=" or ".join(ARCHIVES)
            )
        of = given(run=run, attempt=attempt, step=step)
        params = {**of, "tensors": tensors, "limit_bytes": limit_bytes}
        size = self._save("bundle", params, path, timeout, on_progress)
        fields = {**of, "path": str(path), "bytes": size}
        return Record(fields, title=f"bundle of {run}, step {step}")

    def _save(
        self, noun: str, params: Params, path: Path, timeout: float, on_progress: OnProgress
    ) -> int:
        """Download a report or bundle of a run to a file; return its bytes."""
        query = {name: value for name, value in params.items() if name != "run"}
        route = f"/runs/{segment(params['run'], 'run')}/{noun}"
        received = 0
        with atomic_file(path) as file:

            def write(chunk: bytes, size: int) -> None:
                nonlocal received
                file.write(chunk)
                received += len(chunk)
                on_progress(received, size)

            self.download(route, query, write, timeout=timeout)
        return received
