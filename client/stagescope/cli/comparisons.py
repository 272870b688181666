"""Two attempts or runs held against each other."""

from __future__ import annotations

import click

from stagescope.changes import Changes
from stagescope.cli.questions import question
from stagescope.session import Session


@question(
    click.argument("a", metavar="RUN[@ATTEMPT]"),
    click.argument("b", metavar="RUN[@ATTEMPT]"),
)
def diff(session: Session, a: str, b: str) -> Changes:
    """What changed between two attempts or runs: code, options, packages, places."""
    return session.diff(a, b)
