"""The bar of `stagescope compare` and `compare-dumps`: on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.command_line import invoke
from tests.support.dump_files import nexrl_directory

COMMANDS = {
    "compare": ("{a}", "{b}"),
    "compare-dumps": ("--self_hosted_dir", "{a}", "--weaver_dir", "{b}"),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("dumps")
    return {name: nexrl_directory(directory / name) for name in "ab"}


def on_a_terminal(*words: str) -> tuple[int, str, str]:
    """Run `stagescope WORDS` with a terminal as stderr; return its status and both texts."""
    terminal, stderr = pty.openpty()
    try:
        program = "from stagescope.cli import main; main()"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
        with subprocess.Popen(
            [sys.executable, "-c", program, *words],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
        ) as process:  # fmt: skip
            os.close(stderr)
            seen = b""
            with contextlib.suppress(OSError):  # the other end is closed
                while more := os.read(terminal, 4096):
                    seen += more
            assert process.stdout is not None
            said = process.stdout.read()
        return process.returncode, said, seen.decode()
    finally:
        os.close(terminal)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_shows_how_far_it_is(command: str, dumps: dict[str, Path]) -> None:
    words = [word.format(**dumps) for word in COMMANDS[command]]
    status, said, seen = on_a_terminal(command, *words)
    assert status == 0
    assert said.startswith("\u2713 SAME")
    assert "comparing" not in said
    assert "comparing  [" in seen
    assert "100%" in seen
    # It went on by steps, on one line.
    assert len({line.rsplit("]", 1)[-1] for line in seen.split("\r") if "]" in line}) > 2
    assert seen.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_elsewhere_there_is_no_bar(command: str, dumps: dict[str, Path]) -> None:
    told = invoke(command, *(word.format(**dumps) for word in COMMANDS[command]))
    assert (told.exit_code, told.stderr) == (0, "")


def test_what_broke_off_is_no_difference(
    dumps: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> object:
        raise MemoryError("no room")

    monkeypatch.setattr("stagescope_service.compare.pairing.shards.compare_pair", full)
    told = invoke("compare", str(dumps["a"]), str(dumps["b"]))
    assert told.exit_code == 2
    assert "could not be compared: MemoryError: no room" in told.stderr
    monkeypatch.setattr("stagescope_service.compare.comparison.pairwise.warm", full)
    told = invoke("compare", str(dumps["a"]), str(dumps["b"]))
    assert told.exit_code == 2
    assert "the comparison broke off: MemoryError: no room" in told.stderr
