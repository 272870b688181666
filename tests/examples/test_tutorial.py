"""docs/tutorial.md: its commands, run in order, print the lines that the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from tests.support.cluster import eventually
from tests.support.command_line import Home
from tests.support.ray_nodes import short_directory

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs/tutorial.md"
ELSEWHERE: Final = r"make |source |cd |export "
"""Commands that this environment has done already."""
SHOWN: Final = {
    "stagescope series": r"not finite at steps 6",
    "stagescope doctor": r"^Log-probs under the mask are not finite, actor 1, since step 6",
    "stagescope ranks": r"^actor +1 .*suspect",
    "stagescope tokens": r"^ *\d+ .* nan .* s6g8-0 .* 1",
    "stagescope sample": r"^ *0 .* nan .* not finite ",
    "stagescope capture": r"^step \d+: complete, 2 ranks collected",
    "stagescope non-finite": r"model\.layers\.1\.mlp\.down_proj",
}
"""Beginning of a command -> the line of its output that the reader's next step rests on."""


class Step(NamedTuple):
    """A command of the page with the output that the page shows."""

    command: str
    output: str


def steps() -> list[Step]:
    fenced = re.findall(r"^```console\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    parts = [part for block in fenced for part in re.split(r"^\$ ", block, flags=re.M)[1:]]
    found = [part.partition("\n") for part in parts]
    return [Step(re.split(r"\s+# ", command)[0].strip(), output) for command, _, output in found]


class Walk:
    """A user who has installed stagescope, with a home of their own."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "training.log"
        self.home = Home(directory / "home", directory)
        self.training: subprocess.Popen[bytes] | None = None
        self._checkpoints = directory / "checkpoints"

    def run(self, step: Step) -> str:
        """Run a command and return its output; the training goes on in the background."""
        words = shlex.split(step.command)
        if words[0] == "python":
            self._train(words[1:])
            return self.log.read_text()
        assert words[0] == "stagescope", step.command
        extra = ["--port", "0"] if words[1] == "serve" else []
        done = self.home.call(*words[1:], *extra)
        assert done.returncode == 0, f"{step.command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _train(self, words: list[str]) -> None:
        file = self.home.file()
        assert file is not None
        address = self.home.json("serve")["address"]
        words = [address if word == "HOST:PORT" else word for word in words]
        with self.log.open("w") as log:
            self.training = subprocess.Popen(
                [sys.executable, *words, "--checkpoint-dir", str(self._checkpoints)],
                cwd=ROOT / "workers", env=self.home.environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        eventually(self._has_done_8_steps, seconds=150)

    def _has_done_8_steps(self) -> bool:
        assert self.training is not None
        assert self.training.poll() is None, self.log.read_text()
        return "\nstep 8:" in self.log.read_text()

    def close(self) -> None:
        """End what was started."""
        if self.training is not None and self.training.poll() is None:
            self.training.terminate()
            self.training.wait(60)
        self.home.call("stop")


@pytest.fixture
def walk() -> Iterator[Walk]:
    with short_directory() as directory:
        walk = Walk(directory)
        try:
            yield walk
        finally:
            walk.close()


def test_the_commands_of_the_tutorial_print_what_it_shows(walk: Walk) -> None:
    shown = dict.fromkeys(SHOWN, False)
    for step in steps():
        if re.match(ELSEWHERE, step.command):
            continue
        output = walk.run(step)
        for beginning, line in SHOWN.items():
            if step.command.startswith(beginning):
                assert re.search(line, step.output, re.M), f"the page: {step.command}"
                assert re.search(line, output, re.M), f"{step.command} printed:\n{output}"
                shown[beginning] = True
    assert all(shown.values()), shown
