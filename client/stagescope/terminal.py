"""What the command line says: answers on stdout, errors on stderr, and its exit codes."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Container, Mapping
from typing import Any, Final, Protocol

import click

from stagescope import render
from stagescope.wire import nonfinite
from stagescope.wire.errors import (
    Forbidden,
    InvalidInput,
    MissingExtra,
    NotFound,
    NotReady,
    StagescopeError,
    Unauthorized,
    Unreachable,
)

_PATH: Final = re.compile(
    r"(?<![\w./])(?:GET )?/(?:(?P<kind>[a-z]+)/(?P<of>[^\s/;,]+)/)?(?P<noun>[a-z-]+)"
    r"(?:\?(?P<query>\w+=\w+(?:&\w+=\w+)*))?(?![\w/?])"
)
_CAPTURE: Final = re.compile(r"(?<![\w./])/captures/(?P<of>[^\s/;,]+)")


def for_command_line(text: str, commands: Container[str]) -> str:
    """Return `text` with the commands that answer what its paths of the API answer.

    Usage:
        >>> for_command_line("see /steps/5/stages, /losses", {"stages", "losses"})
        'see `stagescope stages 5`, `stagescope losses`'

    Args:
        text: an error's advice.
        commands: what `stagescope` knows; what looks like a path of something else stays.
    """

    def command(path: re.Match[str]) -> str:
        noun, kind, of = path["noun"], path["kind"], path["of"]
        if noun not in commands or kind not in (None, "runs", "steps"):
            return path[0]
        which = {None: "", "runs": f" --run {of}", "steps": f" {of}"}[kind]
        asked = [word.split("=") for word in (path["query"] or "").split("&") if word]
        options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in asked)
        return f"`stagescope {noun}{which}{options}`"

    return _PATH.sub(command, _CAPTURE.sub(r"`stagescope progress \g<of>`", text))


EXIT_CODES: Final[Mapping[int, str]] = {
    0: "an answer was given",
    1: "the service, or this command, failed",
    2: "the command was not understood",
    3: "the service cannot be reached, or is not ready",
    4: "what was asked for is not there",
    5: "the token is missing, wrong, or may not do this",
}

_CODES: Final[tuple[tuple[type[StagescopeError], int], ...]] = (
    (Unreachable, 3),
    (NotReady, 3),
    (NotFound, 4),
    (Unauthorized, 5),
    (Forbidden, 5),
    (InvalidInput, 2),
)


class Shown(Protocol):
    """An answer with a heading and lines: a Table, Metrics or Record."""

    @property
    def heading(self) -> str:
        """What it is, on one line."""
        ...

    def lines(self, *, width: int = 80) -> list[str]:
        """Return it as lines of text."""
        ...


def report(error: StagescopeError) -> None:
    """Print what was wrong on stderr, and below it what was expected and what to do."""
    click.echo(f"{style('error:', fg='red', err=True)} {_plain(error.wrong)}", err=True)
    expected = f"expected {error.expected}" if error.expected else ""
    hint = "; ".join(part for part in (expected, in_commands(error.advice)) if part)
    if hint:
        click.echo(f"  {_plain(hint)}", err=True)


def in_commands(text: str) -> str:
    """Return advice with the commands that stand for the API's paths in it."""
    root = click.get_current_context().find_root()
    known = root.command.list_commands(root) if isinstance(root.command, click.Group) else []
    return for_command_line(text, known)


def exit_code(error: StagescopeError) -> int:
    """Return the exit code that stands for `error`."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), 1)


def width() -> int:
    """Return the columns to fill: the terminal's, 80 where there is none."""
    return max(shutil.get_terminal_size((80, 24)).columns, 40)


def style(text: str, *, err: bool = False, **styles: Any) -> str:
    """Return `text` styled where a terminal that wants colours shows it."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, **styles)


_WIDE: Final = 1_000_000


def show(answer: Shown, *, wide: bool = False) -> None:
    """Print an answer for a reader; with `wide` a table's columns are all shown, and whole."""
    columns = width()
    for line in render.wrapped("", answer.heading, columns):
        click.echo(style(line, bold=True))
    for line in answer.lines(width=_WIDE if wide else columns):
        click.echo(line)


def show_json(value: Any) -> None:
    """Print strict JSON: non-finite numbers are the strings "nan", "inf" and "-inf"."""
    click.echo(nonfinite.dumps(value))


def needs_extra(error: ImportError, extra: str) -> MissingExtra:
    """Return the error of a command whose extra is not installed."""
    return MissingExtra(
        f"this command needs {error.name or 'a library'}, which is not installed",
        advice=f"pip install 'stagescope[{extra}]'",
    )


def _plain(text: str) -> str:
    return " ".join(render.printable(line) for line in text.splitlines())
