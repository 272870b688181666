"""Questions about runs and steps: numbers, rounds, ranks, stages, losses, findings."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import click

from stagescope import terminal
from stagescope.answers import Metrics, Record
from stagescope.batch import Batch
from stagescope.changes import Changes
from stagescope.cli.common import (
    ATTEMPT,
    LIMIT,
    MEASURED,
    RANK,
    ROLE,
    ROUND,
    RUN,
    STAGE,
    STEP,
    noun,
    question,
    words,
)
from stagescope.frames import Table, meant
from stagescope.session import Session, StepName
from stagescope.wire.errors import NotFound
from stagescope.wire.keep import SECTIONS


@question()
def status(session: Session) -> Record:
    """Whether the service is ready; exit code 3 if not."""
    found = session.status()
    if not found.get("ready", True):
        click.get_current_context().meta["stagescope.exit_code"] = 3
    return found


@question(LIMIT)
def runs(session: Session, limit: int) -> Table:
    """The runs that have reported."""
    return session.runs(limit=limit)


@question(RUN, LIMIT)
def attempts(session: Session, run: str | None, limit: int) -> Table:
    """A run's attempts; with --json their fingerprints."""
    return session.attempts(run, limit=limit)


@question(RUN, ATTEMPT, LIMIT)
def steps(session: Session, run: str | None, attempt: int | None, limit: int) -> Table:
    """The steps, and how complete each is."""
    return session.steps(run, attempt, limit=limit)


@question(click.argument("run", required=False, metavar="[RUN]"), ATTEMPT)
def exact(session: Session, run: str | None, attempt: int | None) -> Record:
    """In which steps trainer and rollout are bitwise equal, and where they first are not."""
    return session.exact(run, attempt)


@question(
    MEASURED,
    RUN,
    ATTEMPT,
    STAGE,
    ROLE,
    RANK,
    ROUND,
    click.option("--only", metavar="GLOB", help="Only metrics with such a name: 'per_round/*'."),
)
def metrics(session: Session, step: StepName, only: str | None, **place: Any) -> Metrics:
    """A step's metrics, rollout against training."""
    filters = {name: place.pop(name) for name in ("stage", "role", "rank", "round")}
    found = session.step(step, **place).metrics(**filters)
    if only is None:
        return found
    kept = {name: value for name, value in found.items() if fnmatch.fnmatchcase(name, only)}
    if not kept:
        close = meant(only.strip("*"), [*found])
        raise NotFound(
            f"no metric of this step matches {only!r}",
            expected="" if close else f"one of {', '.join(found)}",
            advice=f"did you mean {' or '.join(close)}?" if close else "",
        )
    return Metrics(kept, found.about)


@question(
    MEASURED,
    RUN,
    ATTEMPT,
    STAGE,
    ROLE,
    RANK,
    click.option(
        "--by", type=click.Choice(["round", "turn", "staleness"]), help="Rows [default: round]."
    ),
    LIMIT,
)
def rounds(session: Session, step: StepName, **options: Any) -> Table:
    """A step's mismatch round by round."""
    return noun(session, step, options).rounds(**options)


@question(MEASURED, RUN, ATTEMPT, STAGE, ROLE, RANK, LIMIT)
def ranks(session: Session, step: StepName, **options: Any) -> Table:
    """A step's mismatch rank by rank."""
    return noun(session, step, options).ranks(**options)


@question(
    MEASURED, RUN, ATTEMPT, STAGE, ROLE, RANK, ROUND,
    click.option(
        "--kind", type=click.Choice(["worst", "nonfinite"]), help="Only these [default: both]."
    ),
    LIMIT,
)  # fmt: skip
def tokens(session: Session, step: StepName, **options: Any) -> Table:
    """A step's worst tokens, the worst first, then those that are not finite."""
    return noun(session, step, options).tokens(**options)


@question(STEP, RUN, ATTEMPT, STAGE, ROLE, RANK, LIMIT)
def stages(session: Session, step: StepName, **options: Any) -> Table:
    """Who was in which stage of a step, and who has not arrived."""
    return noun(session, step, options).stages(**options)


@question(STEP, RUN, ATTEMPT, STAGE, ROLE, RANK, LIMIT)
def scalars(session: Session, step: StepName, **options: Any) -> Table:
    """The scalars that ranks handed over in a step."""
    return noun(session, step, options).scalars(**options)


@question(
    click.argument("metric"),
    RUN,
    ATTEMPT,
    click.option(
        "--by", type=click.Choice(["rank", "round", "staleness"]), help="A series for each."
    ),
    click.option("--stage", help="Scalars: only of this stage."),
    ROLE,
    RANK,
    click.option("--from", "from_step", type=int, metavar="STEP", help="The first step."),
    click.option("--to", "to_step", type=int, metavar="STEP", help="The last step."),
    click.option("--superseded", is_flag=True, help="Also steps that were done again."),
    click.option("--table", is_flag=True, help="A row a step, in the place of sparklines."),
    click.option(
        "--limit", type=click.IntRange(min=1), default=10_000, show_default=True,
        help="Most steps, the newest.",
    ),
)  # fmt: skip
def series(session: Session, metric: str, table: bool, **options: Any) -> Table:
    """One number over the steps of a run: a metric or a scalar, whole or by rank or round."""
    found = session.series(metric, **options)
    return Table.of(found) if table else found


def _only(what: str) -> Any:
    return click.option("--only", metavar="A,B", help=f"Only these {what}.")


@question(RUN, ATTEMPT, _only("kinds: 'payload*'"), LIMIT)
def losses(session: Session, **options: Any) -> Table:
    """What was announced and never arrived, with the reasons."""
    return session.losses(**options)


@question(RUN, ATTEMPT, _only("severities or kinds: error, 'streams_*'"), LIMIT)
def findings(session: Session, **options: Any) -> Table:
    """What the service noticed to be wrong, the most severe first; what lasts is said once."""
    return session.findings(**options).saying(terminal.in_commands)


@question(click.argument("finding_id", metavar="ID"))
def finding(session: Session, finding_id: str) -> Record:
    """One finding whole: what, where, what to try, and its evidence (ID as `findings` shows it)."""
    return session.finding(finding_id).saying(terminal.in_commands)


class _Shown(Record):
    """What a batch holds; its arrays are in the file."""

    __slots__ = ("_batch",)

    def __init__(self, batch: Batch, path: Path | None) -> None:
        tensors = {n: [t.dtype, list(t.values.shape)] for n, t in batch.tensors.items()}
        fields: dict[str, Any] = {
            **batch.source,
            "rows": batch.rows,
            "tensors": tensors,
            "strings": [*batch.strings],
            "stages": {stage: len(batch.parts_of(stage)) for stage in batch.stages()},
            "gaps": [{"kind": gap.kind, "message": gap.message} for gap in batch.gaps],
            "output": None if path is None else str(path),
        }
        super().__init__(fields, title=batch.heading)
        self._batch = batch

    def lines(self, *, width: int = 80) -> list[str]:
        """Return what the batch itself says, and where it was written."""
        output = self["output"]
        written = [] if output is None else [f"written to {output}"]
        return [*self._batch.lines(width=width), *written]


def _words(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
    return None if value is None else words(value)


@question(
    MEASURED,
    RUN,
    ATTEMPT,
    click.option("--output", "-o", type=click.Path(path_type=Path), help="Write it here."),
    click.option("--names", callback=_words, metavar="A,B", help="Only these tensors."),
    click.option("--stages", callback=_words, metavar="A,B", help="Only these stages."),
)
def batch(session: Session, step: StepName, output: Path | None, **options: Any) -> Record:
    """A step's exact data, as one safetensors file (`stagescope.Batch.load` reads it)."""
    place = {"run": options.pop("run"), "attempt": options.pop("attempt")}
    try:
        found = session.step(step, **place)
    except NotFound:
        if step != "measured":
            raise
        found = session.step("latest", **place)  # its tensors are there without numbers, too
    if output is None:
        return _Shown(found.batch(**options), None)
    return _Shown(found.save_batch(output, **options), output)


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
def kept(session: Session, step: StepName, **options: Any) -> Table:
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


@question(
    click.argument("a", metavar="RUN[@ATTEMPT]"),
    click.argument("b", metavar="RUN[@ATTEMPT]"),
)
def diff(session: Session, a: str, b: str) -> Changes:
    """What changed between two attempts or runs: code, options, packages, places."""
    return session.diff(a, b)
