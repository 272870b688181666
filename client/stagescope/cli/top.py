"""`stagescope top`: a run live in the terminal, on a screen of its own."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import click

from stagescope import terminal
from stagescope.cli.common import NAMED_RUN, RUN, main, with_named_run
from stagescope.session import attach
from stagescope.terminal import FiniteFloat
from stagescope.top import RunReader, RunSnapshot, screen
from stagescope_wire import discovery
from stagescope_wire.errors import StagescopeError
from stagescope_wire.render import Line

_TONES: Final = {"title": {"bold": True}, "good": {"fg": "green"}, "bad": {"fg": "red"},
                 "dim": {"dim": True}}  # fmt: skip
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[2J"
"""The alternate screen, without a cursor."""
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_QUIT: Final = ("q", "Q", "\x03", "\x1b")
_LATE: Final = 5.0
"""Seconds after which an answer that has not come is a problem."""


@main.command()
@NAMED_RUN
@RUN
@click.option(
    "--every", type=FiniteFloat(min=0.2), default=1.0, show_default=True, metavar="SECONDS",
    help="Seconds between two requests.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Print one screen and end, as without a terminal.")
@click.option("--url", help="The service, such as http://head:8700.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the token.")
@click.option(
    "--timeout", type=FiniteFloat(min=0.1), default=10.0, metavar="SECONDS",
    show_default=True, help="Deadline of each call.",
)  # fmt: skip
def top(
    every: float, once: bool, url: str | None, token_file: Path | None, timeout: float,
    **named: str | None,
) -> None:  # fmt: skip
    """A run live: its steps and verdicts, which ranks wait, findings, captures; q quits."""
    run = with_named_run(named)["run"]
    token = None if token_file is None else discovery.read_token(token_file)
    with attach(url, token=token, timeout=timeout, link_text=terminal.command_of) as session:
        reader = RunReader(session, str(session.step("latest").run) if run is None else run)
        first = reader.read()
        if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            size = shutil.get_terminal_size((80, 24))
            for line in screen(first, width=size.columns, height=size.lines)[:-1]:
                click.echo(_styled(line))
            return
        _Screen(reader, first, every).show()


def _styled(line: Line) -> str:
    tone = _TONES.get(line.tone, {})
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return line.text
    return click.style(line.text, **tone)  # type: ignore[arg-type]  # bools and colours by name


class _Screen:
    """Asks in a thread, and draws where something changed: keys work while the service hangs."""

    def __init__(self, reader: RunReader, first: RunSnapshot, every: float) -> None:
        self._reader = reader
        self._every = every
        self._snapshot = first
        self._problem = ""
        self._ended = threading.Event()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._suspend = False

    def show(self) -> None:
        """Show the run until the user quits, then restore the terminal."""
        with self._signals(), _screen_of_its_own() as (enter, leave):
            asking = threading.Thread(target=self._ask, name="top", daemon=True)
            asking.start()
            try:
                self._draw()
                while not self._ended.is_set():
                    ready, _, _ = select.select([sys.stdin, self._woken], [], [])
                    if self._woken in ready:
                        os.read(self._woken, 4096)
                    if sys.stdin in ready and not self._keys():
                        break
                    if self._suspend:
                        self._suspend = False
                        leave()
                        os.kill(os.getpid(), signal.SIGSTOP)
                        enter()
                    self._draw()
            finally:
                self._ended.set()

    def _keys(self) -> bool:
        """Read keys; return True unless one of them quits."""
        keys = os.read(sys.stdin.fileno(), 64).decode("utf-8", "replace")
        # An escape alone quits; with more behind it, it is an arrow or the like.
        return bool(keys) and not any(
            key in _QUIT and (key != "\x1b" or keys == "\x1b") for key in keys
        )

    def _ask(self) -> None:
        while not self._ended.wait(self._every):
            timer = threading.Timer(_LATE, self._set_problem, ("the service has not answered yet",))
            timer.daemon = True
            timer.start()
            try:
                self._snapshot, self._problem = self._reader.read(), ""
            except StagescopeError as error:
                self._problem = error.wrong
            finally:
                timer.cancel()
            self._notify()

    def _set_problem(self, text: str) -> None:
        self._problem = text
        self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(OSError):  # full: it will draw anyway
            os.write(self._wake, b"x")

    def _draw(self) -> None:
        size = shutil.get_terminal_size((80, 24))
        lines = screen(self._snapshot, width=size.columns, height=size.lines, problem=self._problem)
        # Overwrite the screen in one piece, so that nothing flickers.
        text = "\x1b[K\n".join(map(_styled, lines))
        sys.stdout.write(f"\x1b[H{text}\x1b[K\x1b[J")
        sys.stdout.flush()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Redraw when the window's size changes; end and suspend as other programs do."""

        def resized(number: int, frame: FrameType | None) -> None:
            self._notify()

        def end(number: int, frame: FrameType | None) -> None:
            self._ended.set()
            self._notify()

        def suspend(number: int, frame: FrameType | None) -> None:
            self._suspend = True
            self._notify()

        # SIGINT, too: a KeyboardInterrupt that is raised while memory is collected is lost.
        handlers = {
            signal.SIGWINCH: resized, signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGINT: end,
            signal.SIGTSTP: suspend,
        }  # fmt: skip
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _screen_of_its_own() -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Have the alternate screen and single keys; yields what enters and what leaves it."""
    descriptor = sys.stdin.fileno()
    mode = termios.tcgetattr(descriptor)

    def enter() -> None:
        tty.setcbreak(descriptor)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()

    def leave() -> None:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()

    enter()
    try:
        yield enter, leave
    finally:
        leave()
