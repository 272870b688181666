"""Commands that bring what is known elsewhere: into one file, or into a tracker's run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import click

from stagescope import terminal
from stagescope.answers import Record
from stagescope.cli.common import (
    ATTEMPT,
    NAMED_RUN,
    RUN,
    STEP_NAMES,
    question,
    read_step,
    set_exit_code,
)
from stagescope.forwarding import PREFIX
from stagescope.saving import ReportFormat
from stagescope.session import Session, StepName
from stagescope.table import Table
from stagescope.terminal import RUN_NAME, FiniteFloat
from stagescope_wire.names import safe_name

_WAIT = click.option(
    "--wait", type=FiniteFloat(min=1), default=300.0, show_default=True, metavar="SECONDS",
    help="How long the service may take.",
)  # fmt: skip


@question(
    NAMED_RUN,
    RUN,
    click.option("--step", type=click.IntRange(min=0), help="That step in detail."),
    ATTEMPT,
    click.option(
        "--output", "-o", type=click.Path(path_type=Path), metavar="FILE.html|.json|.md",
        help="Its ending says which; - prints it [default: RUN.html or RUN-stepN.html, here].",
    ),
    click.option(
        "--format", "kind", type=click.Choice(["html", "json", "md"]),
        help="Instead of an ending; of - Markdown is the default.",
    ),
    _WAIT,
)  # fmt: skip
def report(
    session: Session, run: str | None, step: int | None, attempt: int | None, output: Path | None,
    kind: ReportFormat | None, wait: float,
) -> Record:  # fmt: skip
    """Save what is known of a run, or of a step, as one file: verdicts, tables, figures, advice."""
    named = str(session.step("latest").run) if run is None else run

    def save(path: Path, kind: ReportFormat | None) -> Record:
        with terminal.progress("report") as update:
            return session.save_report(
                path, named, step=step, attempt=attempt, format=kind, timeout=wait,
                on_progress=update,
            )  # fmt: skip

    if output == Path("-"):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "report")
            save(path, kind or "md")
            click.echo(path.read_text("utf-8"), nl=False)
        click.get_current_context().exit()
    return save(output or _default_name(named, attempt, step, kind or "html"), kind)


def _default_name(run: str, attempt: int | None, step: int | None, ending: str) -> Path:
    """Return a name in the working directory, as the service gives to what a browser saves."""
    of_attempt = "" if attempt is None else f"-{attempt}"
    of_step = "" if step is None else f"-step{step}"
    return Path(f"{safe_name(run)}{of_attempt}{of_step}.{ending}")


@question(
    click.argument("run", type=RUN_NAME, metavar="RUN"),
    click.argument("step", callback=read_step, metavar=STEP_NAMES),
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
    session: Session, run: str, step: StepName, attempt: int | None, output: Path,
    without_tensors: bool, limit_bytes: int | None, wait: float,
) -> Record:  # fmt: skip
    """Save a step as one archive without secrets, to be opened elsewhere by `stagescope attach`."""
    if not isinstance(step, int):
        chosen = session.step(step, run=run, attempt=attempt)
        step, attempt = chosen.step, chosen.attempt
    with terminal.progress("bundle") as update:
        return session.save_bundle(
            output, run, step, attempt=attempt, tensors=not without_tensors,
            limit_bytes=limit_bytes, timeout=wait, on_progress=update,
        )  # fmt: skip


@question(
    NAMED_RUN,
    RUN,
    click.option(
        "--to", "targets", multiple=True, required=True, metavar="KIND:ADDRESS",
        help="tensorboard:DIR, mlflow:RUN_ID[@URI], trackio:PROJECT/RUN, "
        "wandb:ENTITY/PROJECT/RUN_ID, swanlab:WORKSPACE/PROJECT/RUN_ID, otlp:http://HOST:4318; "
        "may be given several times.",
    ),
    click.option("--follow", is_flag=True, help="Go on as steps close, until interrupted."),
    click.option(
        "--every", type=FiniteFloat(min=0.2), default=5.0, show_default=True, metavar="SECONDS",
        help="Seconds between two requests, with --follow.",
    ),
    click.option(
        "--prefix", default=PREFIX, show_default=True, help="Before each name."
    ),
    click.option("--from", "from_step", type=click.IntRange(min=0), default=0, metavar="STEP",
                 help="The first step."),
    click.option("--anew", is_flag=True, help="Write again what was written already."),
    click.option(
        "--page-url", metavar="URL", help="Where others open the page (default: the service's URL)."
    ),
)  # fmt: skip
def forward(
    session: Session, run: str | None, targets: tuple[str, ...], follow: bool, every: float,
    prefix: str, from_step: int, anew: bool, page_url: str | None,
) -> Table:  # fmt: skip
    """Write a run's closed steps and findings into runs of trackers, its stages into traces.

    The command remembers what it wrote. A second call writes only what is new or has changed.
    """
    from stagescope.forwarding import forwarder

    # MLflow's client tries for minutes by default; what fails here is tried again anyway.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    named = str(session.step("latest").run) if run is None else run
    with terminal.interruption() if follow else contextlib.nullcontext() as stopped:
        outcome = forwarder.forward(
            session, named, targets, prefix=prefix,
            from_step=from_step, anew=anew, page_url=page_url, every=every if follow else None,
            stopped=stopped, report=lambda line: click.echo(line, err=True),
        )  # fmt: skip
    if any(outcome["problem"]):
        set_exit_code(1)
    return outcome
