"""Questions whose commands belong to other packages, or print while they work."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import click

from stagescope.answers import Record
from stagescope.cli.common import Answer, Question
from stagescope.comparison_report import ComparisonReport
from stagescope.session import Session
from stagescope_wire.errors import InvalidInput, Unreachable

_SECONDS: Final = 1800.0
"""Longest bisect, in seconds; what it did is kept, so the same call continues."""


class _Output(Record):
    """What a command printed."""

    __slots__ = ("_printed",)

    def __init__(self, printed: str) -> None:
        super().__init__({}, title="")
        self._printed = printed

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the lines that were printed."""
        return self._printed.split("\n")


def _compare(session: Session, *, a: str, b: str, c: str | None) -> ComparisonReport:
    return session.compare(a, b, c)


def _bisect(
    session: Session, *, target: str, engine: str | None, model: str | None,
    checkpoint: str | None, limit: int, dry_run: bool,
) -> Answer:  # fmt: skip
    if engine is None and model is None:
        raise InvalidInput("nothing scores the tokens again", expected="engine, model, or both")
    given = {"--engine": engine, "--model": model, "--checkpoint": checkpoint, "--limit": limit}
    words = [f"{name}={value}" for name, value in given.items() if value is not None]
    words += ["--dry-run"] if dry_run else []
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stagescope", "bisect", *words, "--", target],
            env={**os.environ, **session.environment()},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unreachable(
            f"bisect did not end within {_SECONDS:.0f} s",
            advice="call it again: it continues with the arms that are done",
        ) from None
    if done.returncode not in (0, 1) or not done.stdout:
        raise InvalidInput(
            f"bisect ended with {done.returncode}: {done.stderr.strip()[-2000:]}",
            expected="a kept step, and an engine or a model that can be opened",
        )
    return _Output(done.stdout)


def _side(name: str, *, required: bool = True) -> click.Argument:
    return click.Argument([name], required=required, metavar="RUN[@ATTEMPT][:STEP]")


COMPARE: Final = Question(
    "compare",
    click.Command(
        "compare",
        params=[_side("a"), _side("b"), _side("c", required=False)],
        help="Whether two or three kept steps, attempts or runs are the same, and where they "
        "differ first.",
    ),
    _compare,
)
BISECT: Final = Question(
    "bisect",
    click.Command(
        "bisect",
        params=[
            click.Argument(["target"], metavar="RUN:STEP"),
            click.Option(["--engine"], help="URL of the engine that served the rollout."),
            click.Option(["--model"], help="Directory of the model, where this server runs."),
            click.Option(["--checkpoint"], help="Directory of the trainer's weights in that step."),
            click.Option(
                ["--limit"], type=click.IntRange(min=1), default=16, help="Most trajectories."
            ),
            click.Option(["--dry-run"], is_flag=True, help="Only say what each arm costs."),
        ],
        help="Find what makes the mismatch of a kept step: score its tokens again, one component "
        "swapped at a time. Takes minutes; call it with dry_run first.",
    ),
    _bisect,
)
