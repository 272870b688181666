"""Commands that save what the service makes as one file, to be sent to others."""

from __future__ import annotations

from pathlib import Path

import click

from stagescope import terminal
from stagescope.answers import Record
from stagescope.cli.common import ATTEMPT, RUN, question
from stagescope.session import Session
from stagescope.terminal import FiniteFloat
from stagescope.wire.errors import InvalidInput

_WAIT = click.option(
    "--wait", type=FiniteFloat(min=1), default=300.0, show_default=True, metavar="SECONDS",
    help="How long the service may take.",
)  # fmt: skip


@question(
    click.argument("name", required=False, metavar="[RUN]"),
    RUN,
    click.option("--step", type=click.IntRange(min=0), help="That step in detail."),
    ATTEMPT,
    click.option(
        "--output", "-o", type=click.Path(path_type=Path), required=True,
        metavar="FILE.html|.json|.md", help="Its ending says which.",
    ),
    _WAIT,
)  # fmt: skip
def report(
    session: Session,
    name: str | None,
    run: str | None,
    step: int | None,
    attempt: int | None,
    output: Path,
    wait: float,
) -> Record:
    """Save what is known of a run, or of a step, as one file: verdicts, tables, figures, advice."""
    with terminal.progress("report") as update:
        return session.save_report(
            output, _run(session, name, run), step=step, attempt=attempt, timeout=wait,
            on_progress=update,
        )  # fmt: skip


@question(
    click.argument("run", metavar="RUN"),
    click.argument("step", type=click.IntRange(min=0)),
    ATTEMPT,
    click.option(
        "--output", "-o", type=click.Path(path_type=Path), required=True, metavar="FILE.tar.gz",
        help="The archive.",
    ),
    click.option(
        "--without-tensors", is_flag=True,
        help="Leave out the step's tensors: log-probs, and prompts and responses as token ids.",
    ),
    click.option(
        "--limit-bytes", type=click.IntRange(min=1 << 20), metavar="BYTES",
        help="Most bytes of its files; what does not fit is named [default: 2 GiB].",
    ),
    _WAIT,
)  # fmt: skip
def bundle(
    session: Session,
    run: str,
    step: int,
    attempt: int | None,
    output: Path,
    without_tensors: bool,
    limit_bytes: int | None,
    wait: float,
) -> Record:
    """Save a step as one archive without secrets, to be opened elsewhere by `stagescope attach`."""
    with terminal.progress("bundle") as update:
        return session.save_bundle(
            output, run, step, attempt=attempt, tensors=not without_tensors,
            limit_bytes=limit_bytes, timeout=wait, on_progress=update,
        )  # fmt: skip


def _run(session: Session, name: str | None, run: str | None) -> str:
    """Return the run that is named, else the one whose training stage began last."""
    if name and run and name != run:
        raise InvalidInput(f"two runs are named: {name} and {run}", expected="one of them")
    return name or run or str(session.step("latest").run)
