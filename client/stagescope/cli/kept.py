"""What is kept of a step, and the pin that lets it stay."""

from __future__ import annotations

from typing import Any

import click

from stagescope.answers import Record
from stagescope.cli.questions import ATTEMPT, LIMIT, RANK, ROLE, RUN, STAGE, STEP, noun, question
from stagescope.frames import Table
from stagescope.keeping import SECTIONS
from stagescope.session import Session, StepWord


@question(
    STEP,
    RUN,
    ATTEMPT,
    STAGE,
    ROLE,
    RANK,
    click.option("--section", type=click.Choice(SECTIONS), help="Only files that hold it."),
    LIMIT,
)
def kept(session: Session, step: StepWord, **options: Any) -> Table:
    """The files that are kept of a step: what they hold, size, state and place."""
    return noun(session, step, options).kept(**options)


@question(click.argument("step", type=int), RUN, ATTEMPT)
def pin(session: Session, step: int, run: str | None, attempt: int | None) -> Record:
    """Let what is kept of a step stay (needs the operate token)."""
    return session.pin(step, run=run, attempt=attempt)


@question(click.argument("step", type=int), RUN, ATTEMPT)
def unpin(session: Session, step: int, run: str | None, attempt: int | None) -> Record:
    """Let what is held of a pinned step go when room is needed (needs the operate token)."""
    return session.unpin(step, run=run, attempt=attempt)
