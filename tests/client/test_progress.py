"""The line on stderr that says how far a command is."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from tests.support.pseudo_terminal import CHUNK, rest_of

from stagescope import terminal
from stagescope.cli import common

PROGRAM = """
import sys
import click
from stagescope import terminal

@click.command()
@click.option("--json", "as_json", is_flag=True)
def main(as_json):
    click.get_current_context().meta[terminal.IS_JSON] = as_json
    with terminal.progress("working") as update:
        update(3, 4)
        sys.stdin.readline()
    click.echo("done")
main()
"""


class Run:
    """A command whose stderr is a terminal."""

    def __init__(self, *words: str, columns: str = "80") -> None:
        self._controller, stderr = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": columns}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], stdin=subprocess.PIPE, stderr=stderr,
            stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        os.close(stderr)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        while text not in self.seen:
            self.seen += os.read(self._controller, CHUNK).decode()

    def end(self) -> str:
        """Let it go on; return its stdout."""
        output, _ = self.process.communicate("\n", 60)
        self.seen += rest_of(self._controller)
        return output


def test_a_terminal_shows_how_far_it_is() -> None:
    run = Run()
    run.wait_for("75%")
    assert run.end() == "done\n"
    first = run.seen.split("\r")[1]
    assert first.startswith("working  1 s  [##################------] 75%")
    # At the end the line is empty again.
    assert run.seen.endswith(f"\r{' ' * len(first)}\r")
    assert "\n" not in run.seen


def test_a_narrow_terminal_has_one_line_too() -> None:
    run = Run(columns="20")
    run.wait_for("working")
    run.end()
    assert all(len(line) < 20 for line in run.seen.split("\r"))


def test_json_has_none() -> None:
    run = Run("--json")
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(2.0)  # longer than it takes a line to appear
    run.end()
    assert run.seen == ""


def test_elsewhere_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("working") as update:
        update(1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [(0, 0, "x  0 s"), (1, 2, "x  0 s  [############------------] 50%"), (3, 2, "100%")],
)
def test_its_line(done: int, total: int, text: str) -> None:
    state = terminal.ProgressLine("x")
    state(done, total)
    assert state.line().endswith(text)


def test_commands_tell_it_that_they_print_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of a question has it from `common`, whatever it saves."""
    seen: list[object] = []

    def attach(*_: object, **__: object) -> object:
        import click

        seen.append(click.get_current_context().meta[terminal.IS_JSON])
        raise SystemExit(0)

    monkeypatch.setattr(common, "attach", attach)
    from tests.support.command_line import invoke

    invoke("runs", "--json")
    invoke("runs")
    assert seen == [True, False]
