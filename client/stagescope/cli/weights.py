"""Whether a weight sync arrived, and which devices were the odd one out."""

from __future__ import annotations

from typing import Any

import click

from stagescope.cli.questions import (
    ATTEMPT,
    LIMIT,
    RUN,
    noun,
    question,
    read_step,
)
from stagescope.frames import Table
from stagescope.session import Session


@question(
    click.argument("step", required=False, metavar="[STEP|latest]"),
    click.option("--version", type=int, help="The weights of this policy version."),
    RUN,
    ATTEMPT,
    click.option(
        "--verdict",
        type=click.Choice(
            ["differs", "missing", "replicas differ", "not comparable", "not compared", "agrees"]
        ),
        help="Only weights of this verdict.",
    ),
    LIMIT,
)
def weights(session: Session, step: str | None, version: int | None, **options: Any) -> Table:
    """A step's weights, rollout against trainer; without STEP the versions and their verdicts."""
    if step is None:
        return session.weights(version, **options)
    if version is not None:
        raise click.UsageError("give a STEP or a --version, not both")
    word = read_step(click.get_current_context(), click.Argument(["step"]), step)
    return noun(session, word, options).weights(**options)


@question(click.option("--run", help="Only this run (default: all)."), LIMIT)
def devices(session: Session, run: str | None, limit: int) -> Table:
    """The devices whose weights were not their replicas', over attempts and runs."""
    return session.devices(run, limit=limit)
