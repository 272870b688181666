"""A watchdog for calls that hold the interpreter lock: then no thread of Python runs, ours neither.

`faulthandler.dump_traceback_later` waits in a thread of C, and writes the stacks of a process whose
interpreter stands still. The background thread sets it anew for as long as it runs, so it goes off
only where that thread did not run for `seconds`. The file is described in `stagescope.wire.stacks`.

It is set by default, once a service was reached: a call that holds the lock leaves no other trace,
and nobody can switch it on in a process that hangs already. Two things speak against it, for which
`init(watchdog=0)` and `STAGESCOPE_WATCHDOG=0` are there. A process has one such timer: whoever uses
`faulthandler.dump_traceback_later` in the training loses it to us, and that it is in use cannot be
known. And CPython reads stacks without the lock, which is sound while the process stands still, but
not where it goes on at that very moment (after a SIGSTOP, or the pause of a whole machine, of more
than `seconds`): a crash is then possible. So the default is long: who stands still for five minutes
hardly goes on by itself. `faulthandler.enable` is not touched.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import secrets
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

from stagescope.wire.stacks import (
    MOST_CHARACTERS,
    MOST_FRAMES,
    MOST_THREADS,
    PROBE,
    read_watchdog,
    watchdog_directory,
    watchdog_header,
)


def take_stacks(
    request_id: str, *, training: Collection[int], work: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a STACKS event about this process, now.

    Args:
        request_id: of the request that it answers.
        training: idents of the training threads; their stacks come first.
        work: work fields of the stage that they are in.
    """
    frames = sys._current_frames()
    names = thread_names()
    order = sorted(frames, key=lambda ident: (ident not in training, names.get(ident) or ""))
    threads: list[dict[str, Any]] = []
    left, truncated = MOST_CHARACTERS, len(order) > MOST_THREADS
    for ident in order[:MOST_THREADS]:
        stack = _text(frames[ident])
        if len(stack) > left:
            stack, truncated = stack[len(stack) - left :], True
        left -= len(stack)
        threads.append(
            {
                "name": names.get(ident),
                "ident": ident,
                "is_training": ident in training,
                "stack": stack,
            }
        )
    return {
        **work,
        "request_id": request_id,
        "source": PROBE,
        "threads": threads,
        "truncated": truncated,
    }


def thread_names() -> dict[int, str]:
    """Return ident -> name of the threads that Python started or met."""
    return {each.ident: each.name for each in threading.enumerate() if each.ident is not None}


def _text(innermost: FrameType) -> str:
    """Return a stack as text, the innermost frame last."""
    kept: list[tuple[FrameType, int]] = []
    for frame, line in traceback.walk_stack(innermost):
        if len(kept) == MOST_FRAMES:
            break
        kept.append((frame, line))
    summary = traceback.StackSummary.extract(iter(reversed(kept)))
    return "".join(summary.format()).rstrip("\n")


DEFAULT_SECONDS: Final = 300.0
_PAUSE: Final = 1.0
"""Seconds between two looks; its file says the threads and the stage of the last one."""

_log = logging.getLogger("stagescope.workers")

Standing = Callable[[], tuple[Sequence[int], Mapping[str, Any]]]
"""Returns the idents of the training threads and the work fields of their stage."""


class Watchdog:
    """The one watchdog of a process: every probe in it feeds it, the last to leave removes it.

    No method raises or waits.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._path: Path | None = None
        self._looked = self._set = -math.inf
        self._armed = 0.0
        self._written = 0
        self._said: tuple[object, ...] = ()
        self._users = 0
        self._failed = False

    @property
    def path(self) -> str | None:
        """Its file; None where it is off or could not be made."""
        return None if self._path is None else str(self._path)

    @property
    def pause(self) -> float:
        """How often it is to be fed, seconds."""
        return min(self.seconds / 3, _PAUSE) if self._file is not None else math.inf

    @property
    def is_used(self) -> bool:
        """Whether a probe holds it."""
        return self._users > 0

    def open(self) -> None:
        """Make the file, unless it is there, for one more probe."""
        with self._lock:
            self._users += 1
            if self._file is None and not self._failed and self.seconds > 0:
                self._guarded(self._make)

    def feed(self, standing: Standing) -> dict[str, Any] | None:
        """Say that the background thread runs: note where training stands, set it anew if due.

        Returns:
            The fields of a STACKS event where it had gone off since: the process stood still, and
            goes on.
        """
        if self._file is None or time.monotonic() - self._looked < self.pause:
            return None
        found: list[dict[str, Any] | None] = []
        with self._lock:
            if self._file is not None:
                self._guarded(lambda: found.append(self._look(standing)))
        return found[0] if found else None

    def close(self) -> None:
        """Take leave of one probe; after the last one, stop, and remove a file without a dump."""
        with self._lock:
            self._users -= 1
            if self._users <= 0 and self._file is not None:
                self._guarded(self._remove)

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            _log.warning("the watchdog is off in this process: %r", error)
            self._failed, self._file, self._path = True, None, None

    def _make(self) -> None:
        directory = watchdog_directory(tempfile.gettempdir())
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
        if directory.is_symlink() or found.st_uid != os.getuid():
            raise PermissionError(f"{directory} belongs to somebody else")
        _sweep(directory)
        path = directory / f"{os.getpid()}-{secrets.token_hex(16)}.txt"
        # 'x': never an existing file, nor a link that somebody has put there.
        self._file = open(path, "x", opener=_private)  # noqa: SIM115 - faulthandler keeps it
        self._path = path

    def _look(self, standing: Standing) -> dict[str, Any] | None:
        file, path = self._file, self._path
        assert file is not None
        assert path is not None
        now = time.monotonic()
        went_off = os.fstat(file.fileno()).st_size > self._written
        due = went_off or now - self._set >= self.seconds / 3
        if due and self._armed:
            # First: while the file is read and written anew, nothing may go off into it.
            faulthandler.cancel_dump_traceback_later()
        found = read_watchdog(path) if went_off else None
        training, work = standing()
        said = (thread_names(), training, work)
        if due or said != self._said:
            self._armed = time.time() if due else self._armed
            self._said = said
            self._write(file, said)
        if due:
            # It starts a thread of C, which is why it is not done more often.
            faulthandler.dump_traceback_later(self.seconds, repeat=False, file=file)
            self._set = now
        self._looked = now
        return found

    def _write(
        self, file: IO[str], said: tuple[Mapping[int, str], Sequence[int], Mapping[str, Any]]
    ) -> None:
        threads, training, work = said
        file.seek(0)
        file.truncate()
        file.write(
            watchdog_header(armed=self._armed, threads=threads, training=training, work=work)
        )
        file.flush()  # what it writes comes behind it
        self._written = file.tell()

    def _remove(self) -> None:
        file, path = self._file, self._path
        assert file is not None
        assert path is not None
        if self._armed:
            faulthandler.cancel_dump_traceback_later()
        self._file = self._path = None
        file.close()
        if read_watchdog(path) is None:
            path.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


_STALE_SECONDS: Final = 86400.0


def _sweep(directory: Path) -> None:
    """Remove what killed processes left: a living one writes its file many times a minute."""
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


_of_process: Watchdog | None = None
_making = threading.Lock()


def open_watchdog(seconds: float) -> Watchdog:
    """Return the watchdog of this process, open; the first probe's `seconds` are in force."""
    global _of_process
    with _making:
        if _of_process is None or not _of_process.is_used:
            _of_process = Watchdog(seconds)
        _of_process.open()
        return _of_process


def _forget() -> None:
    # A forked child has no timer, and the file is its parent's.
    global _of_process, _making
    _of_process, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
