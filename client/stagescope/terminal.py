"""The output of the command line: answers on stdout, errors on stderr, and exit codes."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import click

from stagescope import link_text
from stagescope_wire import nonfinite, render
from stagescope_wire.errors import (
    Forbidden,
    InvalidInput,
    MissingExtra,
    NotFound,
    NotReady,
    StagescopeError,
    Unauthorized,
    Unreachable,
)
from stagescope_wire.links import Link, with_links
from stagescope_wire.versions import install_command

EXIT_CODES: Final[Mapping[int, str]] = {
    0: "an answer was given", 1: "the service, or this command, failed",
    2: "the command was not understood",
    3: "the service cannot be reached, does not answer in time, or is not ready",
    4: "there is no such run, step or name",
    5: "the access token is missing or wrong, or does not allow this",
}  # fmt: skip

_CODES: Final[tuple[tuple[type[StagescopeError], int], ...]] = (
    (Unreachable, 3), (NotReady, 3), (NotFound, 4), (Unauthorized, 5), (Forbidden, 5),
    (InvalidInput, 2),
)  # fmt: skip


class Displayable(Protocol):
    """An answer with a heading and lines: a Table, Metrics or Record."""

    @property
    def heading(self) -> str:
        """A title, on one line; "" if the lines begin with it."""
        ...

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the content as lines of text."""
        ...


def report(error: StagescopeError) -> None:
    """Print an error on stderr: what is wrong, and below it what is expected and what to do."""
    click.echo(f"{style('error:', fg='red', err=True)} {_plain(error.wrong)}", err=True)
    expected = f"expected {error.expected}" if error.expected else ""
    advised = with_links(error.advice, error.see, command_of)
    hint = "; ".join(part for part in (expected, advised) if part)
    if hint:
        click.echo(f"  {_plain(hint)}", err=True)


def command_of(link: Link) -> str:
    """Return the command of the running command line that gives the answer of a link."""
    root = click.get_current_context().find_root()
    commands = root.command.list_commands(root) if isinstance(root.command, click.Group) else []
    return link_text.command(link, commands)


def exit_code(error: StagescopeError) -> int:
    """Return the exit code of `error`."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), 1)


def width() -> int:
    """Return the width of the terminal in columns; 80 without a terminal."""
    return max(shutil.get_terminal_size((80, 24)).columns, 40)


def style(text: str, *, err: bool = False, fg: str | None = None, bold: bool | None = None) -> str:
    """Return `text` styled if the stream is a terminal and NO_COLOR is not set."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, fg=fg, bold=bold)


def shows_both() -> bool:
    """Return whether stdout and stderr are terminals: a line of one need not be on the other."""
    return sys.stdout.isatty() and sys.stderr.isatty()


_WIDE: Final = 1_000_000


def show(answer: Displayable, *, wide: bool = False) -> None:
    """Print an answer for a reader; with `wide` all columns of a table, without shortening."""
    columns = width()
    for line in render.wrapped("", answer.heading, columns) if answer.heading else ():
        click.echo(style(line, bold=True))
    for line in answer.lines(width=_WIDE if wide else columns):
        click.echo(line)


def show_json(value: object) -> None:
    """Print strict JSON: non-finite numbers are the strings "nan", "inf" and "-inf"."""
    click.echo(nonfinite.dumps(value))


# --- progress -------------------------------------------------------------------------------
_PROGRESS_AFTER: Final = 1.0
"""Seconds after which a command shows its progress."""
_PROGRESS_EVERY: Final = 0.2
_BAR: Final = 24
IS_JSON: Final = "stagescope.json"
"""Key of click's `meta`: the command prints only JSON."""


class ProgressLine:
    """How far a command is; called with what is done and all of it, in any unit."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._done, self._total = 0, 0
        self._text = ""
        self._began = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Set the progress; a total of 0 means that it is unknown."""
        self._done, self._total = done, total

    def say(self, text: str) -> None:
        """Set a text that says how far it is."""
        self._text = text

    def line(self) -> str:
        """Return a line that says so."""
        text = f"{self._label}  {time.monotonic() - self._began:.0f} s"
        text += f"  {self._text}" if self._text else ""
        if self._total <= 0:
            return text
        share = min(self._done / self._total, 1.0)
        filled = int(share * _BAR)
        return f"{text}  [{'#' * filled}{'-' * (_BAR - filled)}] {share:.0%}"


@contextlib.contextmanager
def progress(label: str, *, hidden: bool = False) -> Iterator[ProgressLine]:
    """Show the block's progress if it runs longer than a second and stderr is a terminal.

    With `hidden`, and in a command that prints JSON, nothing is shown.
    """
    state = ProgressLine(label)
    context = click.get_current_context(silent=True)
    if hidden or not sys.stderr.isatty() or (context and context.meta.get(IS_JSON)):
        yield state
        return
    ended = threading.Event()

    def show() -> None:
        shown = 0
        pause = _PROGRESS_AFTER
        while not ended.wait(pause):
            pause = _PROGRESS_EVERY
            columns = shutil.get_terminal_size((80, 24)).columns
            line = state.line()[: columns - 1]
            sys.stderr.write(f"\r{line.ljust(shown)}")
            sys.stderr.flush()
            shown = len(line)
        if shown:
            sys.stderr.write(f"\r{' ' * shown}\r")
            sys.stderr.flush()

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield state
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def interruption() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, so that a command ends at a point of its own."""
    ended = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: ended.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


INTERRUPTED: Final = 130
"""Exit code of a process that Ctrl-C ended."""


@contextlib.contextmanager
def ending_at_once(said: Callable[[], str]) -> Iterator[None]:
    """End the process at the first Ctrl-C in the block, without waiting for its threads.

    Use it for a command whose files are whole at any time: no `finally` runs.

    Args:
        said: returns the line that is printed on stderr.
    """

    def end(number: int, frame: object) -> None:
        del number, frame
        with contextlib.suppress(OSError):  # `sys.stderr` may be in the middle of a write
            os.write(2, f"{said()}\n".encode())
        os._exit(INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def needs_extra(error: ImportError, extra: str) -> MissingExtra:
    """Return the error of a command whose extra is not installed."""
    return MissingExtra(
        f"this command needs {error.name or 'a library'}, which is not installed",
        advice=install_command(extra),
    )


def _plain(text: str) -> str:
    return " ".join(render.printable(line) for line in text.rstrip("\n").split("\n"))


_LARGEST: Final = 1e9
"""Seconds: what no thread can wait for is an error when it is read."""


class _RunName(click.types.StringParamType):
    """The name of a run; a blank one is refused, since an unset variable would mean another run."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name as it is given."""
        text = str(super().convert(value, param, ctx))
        if not text.strip():
            self.fail(
                "the name of the run is empty; is a variable of your shell unset?", param, ctx
            )
        return text


RUN_NAME: Final = _RunName()


class FiniteFloat(click.FloatRange):
    """A number in a range, of a clock's size: `nan` and `inf`, which `float` reads, are in none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        if abs(number) > _LARGEST:
            self.fail(f"{value} is larger than {_LARGEST:g}", param, ctx)
        return number
