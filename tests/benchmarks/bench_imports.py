"""CPU of processes that mostly import: a command, and the API until its first answer.

Run: `python -m tests.benchmarks.bench_imports`. The reference of the same run is a process that
imports only the libraries without which neither works.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.service.http.test_first_answer import PROGRAM
from tests.support.api import Rank, service

ROUNDS: Final = 7
COMMAND: Final = "import sys; from stagescope.cli import main; main(sys.argv[1:])"
AS_THE_ACTOR: Final = "import gc, ray; gc.disable()\n"
"""The API's actor imports Ray before it, and searches for no garbage until it is prepared."""


def seconds(program: str, words: Sequence[str], environment: Mapping[str, str]) -> float:
    """CPU seconds of a Python process, of the user and of the system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", program, *words],
        env=dict(environment), check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Print CPU seconds, ratios and whether the bounds are met."""
    out = sys.stdout
    with tempfile.TemporaryDirectory() as home, service(Path(home), recorded=False) as live:
        Rank(live).begin("actor_update", 1)
        environment = {**os.environ, **live.environment("read"), "HOME": home}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        found: dict[str, tuple[str, Sequence[str], str, float | None]] = {
            "import click, httpx": ("import click, httpx", (), "", None),
            "stagescope runs": (COMMAND, ("runs",), "import click, httpx", 0.2),
            "import ray, fastapi, sqlalchemy, numpy": (
                "import ray, fastapi, sqlalchemy, numpy", (), "", None,
            ),
            "the API's first answers": (
                AS_THE_ACTOR + PROGRAM, (home,), "import ray, fastapi, sqlalchemy, numpy", 1.5,
            ),
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in found}
        for number in range(ROUNDS + 1):
            for name, (program, words, _, _) in found.items():
                taken = seconds(program, words, environment)
                if number:  # the first one writes bytecode
                    times[name].append(taken)
    middle = {name: statistics.median(each) for name, each in times.items()}
    out.write(f"{'':<42}{'CPU s':>8}{'best':>8}{'ratio':>8}\n")
    for name, (_, _, reference, wanted) in found.items():
        ratio = middle[name] / middle[reference or name]
        out.write(f"{name:<42}{middle[name]:>8.3f}{min(times[name]):>8.3f}{ratio:>8.1f}\n")
        if wanted is not None:
            said = "met" if middle[name] <= wanted else "MISSED"
            out.write(f"goal: at most {wanted} s of CPU: {said}\n")


if __name__ == "__main__":
    main()
