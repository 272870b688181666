"""Who is stuck, and with which stacks."""

from __future__ import annotations

from typing import Any

import click

from stagescope.answers import Record
from stagescope.captures import read_ranks
from stagescope.cli.questions import (
    ATTEMPT,
    LIMIT,
    RANK,
    ROLE,
    RUN,
    STAGE,
    STEP,
    noun,
    question,
    read_step,
)
from stagescope.frames import Table
from stagescope.session import Session, StepWord


@question(STEP, RUN, ATTEMPT, STAGE, ROLE, RANK, LIMIT)
def stuck(session: Session, step: StepWord, **options: Any) -> Table:
    """Which ranks hold up the others, and since when."""
    return noun(session, step, options).stuck(**options)


@question(
    click.argument("step", required=False, metavar="[STEP|latest]"),
    RUN,
    ATTEMPT,
    ROLE,
    click.option("--ranks", default="all", show_default=True, metavar="0,4-7|all"),
    click.option("--wait", default=5.0, show_default=True, help="Seconds that they may take."),
    click.option("--all-threads", is_flag=True, help="Not the training threads alone."),
)
def stacks(
    session: Session,
    step: str | None,
    ranks: str,
    wait: float,
    all_threads: bool,
    **options: Any,
) -> Record:
    """The Python stacks of live ranks, taken now (needs the operate token); with STEP, as kept."""
    only = None if ranks == "all" else read_ranks(ranks)
    if not isinstance(only, list | None):
        raise click.BadParameter(f"{ranks!r} names no ranks", param_hint="--ranks")
    if step is None:
        found = session.stacks(**options, ranks=only, wait=wait)
    else:
        word = read_step(click.get_current_context(), click.Argument(["step"]), step)
        found = noun(session, word, options).stacks(**options)
        found = found if only is None else found.of_ranks(only)
    return found.all_threads() if all_threads else found
