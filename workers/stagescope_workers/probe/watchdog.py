"""The stages and stacks of a process, and a watchdog for calls that block its interpreter.

`faulthandler.dump_traceback_later` waits in a C thread, and writes the stacks of a process whose
interpreter is blocked. The background thread resets it for as long as it runs, so it fires only
where that thread did not run for `seconds`. `stagescope_wire.stacks` describes the file.

It is on by default, once a service was reached. A call that holds the lock leaves no other trace,
and a process that already hangs cannot switch it on. `init(watchdog=0)` and `STAGESCOPE_WATCHDOG=0`
switch it off, for two reasons. First, a process has one such timer. A training that uses
`faulthandler.dump_traceback_later` itself loses it to the watchdog, which cannot detect that the
timer is in use. Second, CPython reads stacks without the lock. This is safe while the process is
blocked. A crash is possible if it resumes at that very moment, after a SIGSTOP or the suspension of
a whole machine of more than `seconds`. So the default is long: a process that is blocked for five
minutes rarely resumes alone. `faulthandler.enable` is not used.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Final

from stagescope_wire.schema import FINISH, STACKS, Work
from stagescope_wire.stacks import (
    MAX_CHARACTERS,
    MAX_FRAMES,
    MAX_THREADS,
    PROBE,
    read_watchdog,
    watchdog_directory,
    watchdog_header,
)
from stagescope_workers import steady_clock
from stagescope_workers.probe.collectives import collect_collectives
from stagescope_workers.transport.outbox import Outbox


def collect_stacks(
    request_id: str,
    *,
    training: Collection[int],
    work: Mapping[str, object],
    only_training: bool = False,
) -> dict[str, object]:
    """Return the fields of a STACKS event with this process's current stacks and collectives.

    Args:
        request_id: id of the request that it answers.
        training: idents of the training threads; their stacks come first.
        work: work fields of the stage that they are in.
        only_training: leave out the other threads; without a stage, the main thread is the one.
    """
    frames = sys._current_frames()
    names = thread_names()
    idents = sorted(frames, key=lambda ident: (ident not in training, names.get(ident) or ""))
    if only_training:
        wanted = {*training} & frames.keys() or {threading.main_thread().ident or 0}
        idents = [ident for ident in idents if ident in wanted]
    threads: list[dict[str, object]] = []
    remaining, truncated = MAX_CHARACTERS, len(idents) > MAX_THREADS
    for ident in idents[:MAX_THREADS]:
        stack = _format_stack(frames[ident])
        if len(stack) > remaining:
            stack, truncated = stack[len(stack) - remaining :], True
        remaining -= len(stack)
        is_training = ident in training
        threads.append(
            {"name": names.get(ident), "ident": ident, "is_training": is_training, "stack": stack}
        )
    found: dict[str, object] = {
        "request_id": request_id, "source": PROBE, "threads": threads,
    }  # fmt: skip
    record = collect_collectives()
    if record is not None:
        found["collectives"] = record.wire()
    return {**work, **found, "truncated": truncated}


def thread_names() -> dict[int, str]:
    """Return ident -> name of the threads that Python knows."""
    return {each.ident: each.name for each in threading.enumerate() if each.ident is not None}


def _format_stack(innermost: FrameType) -> str:
    kept: list[tuple[FrameType, int]] = []
    for frame, line in traceback.walk_stack(innermost):
        if len(kept) == MAX_FRAMES:
            break
        kept.append((frame, line))
    summary = traceback.StackSummary.extract(iter(reversed(kept)))
    return "".join(summary.format()).rstrip("\n")


DEFAULT_SECONDS: Final = 300.0
_CHECK_SECONDS: Final = 1.0
"""Between two checks; the watchdog's file holds the threads and the stage of the last one."""

_log = logging.getLogger("stagescope.workers")

CurrentWork = Callable[[], tuple[Sequence[int], Mapping[str, object]]]
"""Returns the idents of the training threads and the work fields of their stage."""


class Watchdog:
    """The one watchdog of a process: every probe in it feeds it, the last to close removes it.

    No method raises or waits.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._file: tuple[IO[str], Path] | None = None
        self._checked_at = self._armed_at = -math.inf  # by the monotonic clock
        self._armed_wall = 0.0
        self._written_bytes = 0
        self._written_state: tuple[object, ...] = ()
        self._users = 0
        self._failed = False

    @property
    def path(self) -> str | None:
        """Its file; None where it is off or could not be made."""
        return None if self._file is None else str(self._file[1])

    @property
    def interval(self) -> float:
        """How often it must be fed, in seconds."""
        return min(self.seconds / 3, _CHECK_SECONDS) if self._file is not None else math.inf

    @property
    def is_used(self) -> bool:
        """Whether an open probe feeds it."""
        return self._users > 0

    def open(self) -> None:
        """Register one more probe; create the file for the first one."""
        with self._lock, self._guarded():
            self._users += 1
            if self._file is None and not self._failed and self.seconds > 0:
                self._file = _create_file()

    def feed(self, current_work: CurrentWork) -> dict[str, object] | None:
        """Record that the background thread runs and what training does; reset the timer if due.

        Returns:
            The fields of a STACKS event where the timer has fired: the process was blocked, and
            has resumed.
        """
        if self._file is None or time.monotonic() - self._checked_at < self.interval:
            return None
        with self._lock, self._guarded():
            if self._file is not None:
                return self._check(*self._file, current_work)
        return None

    def close(self) -> None:
        """Unregister one probe; after the last one, stop, and remove a file without a dump."""
        with self._lock, self._guarded():
            self._users -= 1
            if self._users <= 0 and self._file is not None:
                self._remove(*self._file)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            _log.warning("the watchdog is off in this process: %r", error)
            self._failed, self._file = True, None

    def _check(
        self, file: IO[str], path: Path, current_work: CurrentWork
    ) -> dict[str, object] | None:
        now = time.monotonic()
        fired = os.fstat(file.fileno()).st_size > self._written_bytes
        due = fired or now - self._armed_at >= self.seconds / 3
        if due:
            # This comes before anything that lets another thread run. It replaces the timer without
            # a pause, so it also sees a call that holds the interpreter lock from here on.
            # It starts a C thread, so it is not reset more often.
            faulthandler.dump_traceback_later(self.seconds, repeat=False, file=file)
            self._armed_at = now
        stacks = read_watchdog(path) if fired else None
        training, work = current_work()
        state = (thread_names(), training, work)
        if due or state != self._written_state:
            self._armed_wall = steady_clock.now()[0] if due else self._armed_wall
            self._written_state = state
            self._write(file, state)
        self._checked_at = now
        return stacks

    def _write(
        self, file: IO[str], state: tuple[Mapping[int, str], Sequence[int], Mapping[str, object]]
    ) -> None:
        threads, training, work = state
        header = watchdog_header(
            armed=self._armed_wall, threads=threads, training=training, work=work
        )
        file.seek(0)
        file.truncate()
        file.write(header)
        file.flush()  # faulthandler appends to it, perhaps at this very moment: not file.tell()
        self._written_bytes = len(header.encode())

    def _remove(self, file: IO[str], path: Path) -> None:
        if self._armed_wall:
            faulthandler.cancel_dump_traceback_later()
        self._file = None
        file.close()
        if read_watchdog(path) is None:
            path.unlink(missing_ok=True)


def _create_file() -> tuple[IO[str], Path]:
    directory = watchdog_directory(tempfile.gettempdir())
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.is_symlink() or directory.lstat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")
    _remove_stale(directory)
    path = directory / f"{os.getpid()}-{secrets.token_hex(16)}.txt"
    # 'x': never an existing file, nor a link that another user has created.
    return open(path, "x", opener=_private), path  # faulthandler keeps it open


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


_STALE_SECONDS: Final = 86400.0


def _remove_stale(directory: Path) -> None:
    """Remove the files of killed processes: a living one writes its file many times a minute."""
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


_process_watchdog: Watchdog | None = None
_making = threading.Lock()


def open_watchdog(seconds: float) -> Watchdog:
    """Return the open watchdog of this process, which uses the first probe's `seconds`."""
    global _process_watchdog
    with _making:
        if _process_watchdog is None or not _process_watchdog.is_used:
            _process_watchdog = Watchdog(seconds)
        _process_watchdog.open()
        return _process_watchdog


def _forget() -> None:
    # A forked child has no timer, and the file belongs to its parent.
    global _process_watchdog, _making
    _process_watchdog, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


_MAX_OPEN: Final = 1024
_MAX_ANSWERED: Final = 256


class StageTracker:
    """Knows which thread is in which stage; answers requests for stacks, feeds the watchdog.

    The training thread calls `enter` and `leave`, which cost one entry of a dict; the background
    thread calls the other methods.
    """

    def __init__(self, outbox: Outbox, *, watchdog_seconds: float) -> None:
        self._outbox = outbox
        self._seconds = watchdog_seconds
        self._open_stages: dict[int, tuple[int, Work]] = {}
        self._last_ended: tuple[int, Work] | None = None
        self._answered: dict[str, None] = {}
        self._watchdog: Watchdog | None = None
        self._closed = False

    def enter(self, seq: int, work: Work) -> None:
        """Note that this thread has begun a stage; `seq` is its BEGIN event's."""
        self._open_stages[seq] = (threading.get_ident(), work)

    def leave(self, seq: int | None) -> None:
        """Note that a stage has ended."""
        if seq is not None:
            self._last_ended = self._open_stages.pop(seq, self._last_ended)

    @property
    def oldest(self) -> Work | None:
        """The open stage that was begun first; None where none is open."""
        return next((work for _, work in [*self._open_stages.values()]), None)

    def current_work(self) -> tuple[Sequence[int], Mapping[str, object]]:
        """Return the idents of the training threads, and the work that was begun last.

        Between two stages, the thread of the last one is the training thread.
        """
        open_stages = [*self._open_stages.items()]
        for seq, _ in open_stages[:-_MAX_OPEN]:  # begun and never ended
            self._open_stages.pop(seq, None)
        if open_stages:
            idents = dict.fromkeys(ident for _, (ident, _) in reversed(open_stages))
            return [*idents], open_stages[-1][1][1].fields()
        last = self._last_ended
        return ([], {}) if last is None else ([last[0]], {"step": last[1].step})

    def answer_requests(self, requests: Iterable[Mapping[str, object]]) -> None:
        """Carry out the requests in the answer to a poll, each of them once."""
        for request in requests:
            request_id = request.get("request_id")
            if request.get("what") not in {STACKS, FINISH} or not isinstance(request_id, str):
                continue
            if request_id in self._answered:
                continue
            self._answered[request_id] = None
            if len(self._answered) > _MAX_ANSWERED:
                del self._answered[next(iter(self._answered))]
            if request["what"] == FINISH:  # after all waiting events; a later event revokes it
                self._outbox.put(FINISH, {})
                continue
            training, work = self.current_work()
            only_training = request.get("only_training") is True
            stacks = collect_stacks(
                request_id, training=training, work=work, only_training=only_training
            )
            self._outbox.put(STACKS, stacks)

    def start_watchdog(self) -> str | None:
        """Open this process's watchdog; return the path of its file, None where it is off."""
        if self._watchdog is None and not self._closed:
            self._watchdog = open_watchdog(self._seconds)
        return None if self._watchdog is None else self._watchdog.path

    def feed_watchdog(self) -> float:
        """Tell the watchdog that the background thread runs; report stacks that it wrote.

        Returns the seconds after which to call this again.
        """
        watchdog = self._watchdog
        if watchdog is None:
            return math.inf
        stacks = watchdog.feed(self.current_work)
        if stacks is not None:
            self._outbox.put(STACKS, stacks)
        return watchdog.interval

    def close(self) -> None:
        """Release the watchdog."""
        self._closed = True
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.close()
