"""The progress bar of `stagescope compare` and `compare-dumps`, which only a terminal shows."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
from tests.support.command_line import invoke
from tests.support.dump_files import nexrl_directory
from tests.support.pseudo_terminal import rest_of

from stagescope_service.statistics import jit, pairwise

COMMANDS = {
    "compare": ("{a}", "{b}"),
    "compare-dumps": ("--self_hosted_dir", "{a}", "--weaver_dir", "{b}"),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pairwise.warm(lambda: None)  # compiling would be reported
    directory = tmp_path_factory.mktemp("dumps")
    return {name: nexrl_directory(directory / name) for name in "ab"}


def on_a_terminal(*words: str) -> tuple[int, str, str]:
    """Run `stagescope WORDS` with a terminal as stderr; return its status and both texts."""
    terminal, stderr = pty.openpty()
    program = "from stagescope.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
    ) as process:  # fmt: skip
        os.close(stderr)
        seen = rest_of(terminal)
        assert process.stdout is not None
        output = process.stdout.read()
    return process.returncode, output, seen


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_shows_progress(command: str, dumps: dict[str, Path]) -> None:
    words = [word.format(**dumps) for word in COMMANDS[command]]
    status, output, seen = on_a_terminal(command, *words)
    assert status == 0
    assert output.startswith("\u2713 SAME")
    assert "comparing" not in output
    assert "comparing  [" in seen
    assert "100%" in seen
    # It advances in steps, on one line.
    assert len({line.rsplit("]", 1)[-1] for line in seen.split("\r") if "]" in line}) > 2
    assert seen.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_elsewhere_there_is_no_bar(command: str, dumps: dict[str, Path]) -> None:
    result = invoke(command, *(word.format(**dumps) for word in COMMANDS[command]))
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_failed_comparison_is_no_difference(
    dumps: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> object:
        raise MemoryError("no room")

    monkeypatch.setattr("stagescope_service.compare.pairing.tasks.compare_pair", full)
    result = invoke("compare", str(dumps["a"]), str(dumps["b"]))
    assert result.exit_code == 2
    assert "could not be compared: MemoryError: no room" in result.stderr
    monkeypatch.setattr("stagescope_service.compare.comparison.pairwise.warm", full)
    result = invoke("compare", str(dumps["a"]), str(dumps["b"]))
    assert result.exit_code == 2
    assert "the comparison broke off: MemoryError: no room" in result.stderr


def test_the_first_comparison_of_an_installation_says_that_it_compiles(
    dumps: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, warm = [0.0], pairwise.warm

    def cold(compiling: Callable[[], None]) -> None:
        with jit.announced(compiling):
            for loop in (lambda x: x + 1.0, lambda x: x - 1.0):
                numba.njit("float64(float64)")(loop)
        now[0] += 20.0
        warm(compiling)

    monkeypatch.setattr("stagescope_service.compare.comparison.pairwise.warm", cold)
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("stagescope_service.compare.comparison.time", clock)
    result = invoke("compare", str(dumps["a"]), str(dumps["b"]), "--json")
    assert result.exit_code == 0
    # Once for both loops; the reported seconds do not include it.
    assert [line for line in result.stderr.splitlines() if "compiling" in line] == [
        "compiling, once for an installation: half a minute or so ..."
    ]
    assert json.loads(result.stdout)["seconds"] == 0.0
