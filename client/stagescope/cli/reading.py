"""Commands for runs and steps: numbers, rounds, ranks, stages, losses, findings, kept files."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import click

from stagescope import terminal
from stagescope.answers import Metrics, Record
from stagescope.cli.common import (
    ATTEMPT,
    LIMIT,
    MEASURED,
    NAMED_RUN,
    RANK,
    ROLE,
    ROUND,
    RUN,
    STAGE,
    STEP,
    Option,
    OptionValue,
    comma_list,
    question,
    read_names,
    read_step,
    step_question,
)
from stagescope.comparison_report import Changes
from stagescope.session import Session, StepName
from stagescope.step import Step
from stagescope.table import Table
from stagescope_wire.batch import Batch
from stagescope_wire.errors import NotFound
from stagescope_wire.keep import SECTIONS
from stagescope_wire.names import unknown_name
from stagescope_wire.nonfinite import Json


@question()
def status(session: Session) -> Record:
    """Whether the service is ready; exit code 3 if not."""
    answer = session.status()
    if not answer.get("ready", True):
        click.get_current_context().meta["stagescope.exit_code"] = 3
    return answer


@question(LIMIT)
def runs(session: Session, limit: int) -> Table:
    """The runs that have reported."""
    return session.runs(limit=limit)


@question(NAMED_RUN, RUN, LIMIT)
def attempts(session: Session, **options: OptionValue) -> Table:
    """A run's attempts; with --json their fingerprints."""
    return session.attempts(**options)


@question(NAMED_RUN, RUN, ATTEMPT, LIMIT)
def steps(session: Session, **options: OptionValue) -> Table:
    """The steps, and how complete each is."""
    return session.steps(**options)


@question(NAMED_RUN, RUN, ATTEMPT)
def exact(session: Session, **options: OptionValue) -> Record:
    """In which steps trainer and rollout are equal in every token, and where they first are not."""
    return session.exact(**options)


@step_question(
    MEASURED,
    STAGE,
    ROLE,
    RANK,
    ROUND,
    click.option(
        "--only", metavar="A,B", help="Only metrics whose names match, such as 'per_round/*'."
    ),
)
def metrics(step: Step, only: str | None, **filters: OptionValue) -> Metrics:
    """A step's metrics, rollout against training."""
    answer = step.metrics(**filters)
    if only is None:
        return answer
    matching: set[str] = set()
    for pattern in comma_list(only):
        found = fnmatch.filter(answer, pattern)
        if not found:
            raise unknown_name(pattern, [*answer], what="metric of this step like")
        matching.update(found)
    return Metrics({n: value for n, value in answer.items() if n in matching}, answer.about)


@step_question(
    MEASURED,
    STAGE,
    ROLE,
    RANK,
    click.option(
        "--by",
        type=click.Choice(["round", "turn", "staleness"]),
        help="Rows [default: turn where turn_ids are recorded, else round].",
    ),
    LIMIT,
)
def rounds(step: Step, **filters: OptionValue) -> Table:
    """A step's mismatch round by round."""
    return step.rounds(**filters)


@step_question(
    MEASURED,
    click.option(
        "--by", default="place", show_default=True, help="What tells the tokens apart.",
        type=click.Choice(
            ["place", "end", "position", "probability", "lattice", "staleness", "engine"]
        ),
    ),
)  # fmt: skip
def anatomy(step: Step, **filters: OptionValue) -> Table:
    """A step's mismatch by what its tokens have in common: place in the round, engine, ..."""
    return step.anatomy(**filters)


@step_question(MEASURED, STAGE, ROLE, RANK, LIMIT)
def ranks(step: Step, **filters: OptionValue) -> Table:
    """A step's mismatch rank by rank."""
    return step.ranks(**filters)


@step_question(
    MEASURED,
    STAGE,
    ROLE,
    RANK,
    ROUND,
    click.option(
        "--kind", type=click.Choice(["worst", "nonfinite"]), help="Only these [default: both]."
    ),
    LIMIT,
)
def tokens(step: Step, **filters: OptionValue) -> Table:
    """A step's worst tokens, the worst first, then the non-finite ones."""
    return step.tokens(**filters)


@step_question(
    MEASURED,
    click.option(
        "--sort", type=click.Choice(["max_abs", "mean_abs", "tokens", "sample_uid"]),
        help="Order [default: max_abs].",
    ),
    ROLE,
    RANK,
    LIMIT,
)  # fmt: skip
def samples(step: Step, **filters: OptionValue) -> Table:
    """A step's samples with their mismatch, the worst first."""
    return step.samples(**filters)


@step_question(
    click.argument("step", callback=read_step, metavar="STEP|latest|measured|captured"),
    click.argument("sample_uid", metavar="SAMPLE"),
)
def sample(step: Step, sample_uid: str) -> Table:
    """The tokens of a sample: both log-probs, and what the loss did to each."""
    return step.sample(sample_uid)


@step_question(MEASURED, LIMIT)
def loss(step: Step, limit: int) -> Table:
    """How much of a step's mismatch sits in tokens that no gradient sees, and why."""
    return step.loss(limit=limit)


@step_question(STEP, STAGE, ROLE, RANK, LIMIT)
def stages(step: Step, **filters: OptionValue) -> Table:
    """Which ranks were in which stage of a step, and which have not arrived."""
    return step.stages(**filters)


@step_question(STEP, STAGE, ROLE, RANK, LIMIT)
def scalars(step: Step, **filters: OptionValue) -> Table:
    """The scalars that ranks logged in a step."""
    return step.scalars(**filters)


@question(
    click.argument("metric", required=False),
    RUN,
    ATTEMPT,
    click.option(
        "--by", type=click.Choice(["rank", "round", "staleness"]), help="One series for each."
    ),
    click.option("--stage", help="Scalars: only of this stage."),
    ROLE,
    RANK,
    click.option("--from", "from_step", type=int, metavar="STEP", help="The first step."),
    click.option("--to", "to_step", type=int, metavar="STEP", help="The last step."),
    click.option("--superseded", is_flag=True, help="Include steps that were repeated."),
    click.option("--table", is_flag=True, help="Show one row per step instead of sparklines."),
    click.option(
        "--limit", type=click.IntRange(min=1), default=10_000, show_default=True,
        help="Most steps, the newest.",
    ),
)  # fmt: skip
def series(session: Session, metric: str | None, table: bool, **options: OptionValue) -> Table:
    """A metric or a scalar over the steps of a run, in total or by rank or round.

    Without METRIC: the names that a run has.
    """
    if metric is None:
        return session.metric_names(options["run"])
    answer = session.series(metric, **options)
    return Table.from_table(answer) if table else answer


def _only(what: str) -> Option:
    return click.option("--only", metavar="A,B", help=f"Only these {what}.")


@question(RUN, ATTEMPT, _only("kinds: 'payload*'"), LIMIT)
def losses(session: Session, **options: OptionValue) -> Table:
    """Lost data: announced, but never arrived, with the reasons."""
    return session.losses(**options)


@question(RUN, ATTEMPT, _only("severities or kinds: error, 'streams_*'"), LIMIT)
def findings(session: Session, **options: OptionValue) -> Table:
    """The problems that the service found, the most severe first; repeated ones are grouped."""
    return session.findings(**options)


@question(
    NAMED_RUN,
    RUN,
    ATTEMPT,
    click.option("--step", type=int, help="Look at the steps up to this one alone."),
    click.option("--all", "everything", is_flag=True, help="Say what was not measured, and why."),
)
def doctor(session: Session, everything: bool, **options: OptionValue) -> Table:
    """Diagnose a run: what is wrong, since when, how sure that is, and what to do next."""
    with terminal.progress("doctor"):
        found = session.doctor(**options)
    return found.all() if everything else found


@question(click.argument("finding_id", metavar="ID"))
def finding(session: Session, finding_id: str) -> Record:
    """One finding: what, where, what to try, and its evidence (ID as `findings` shows it)."""
    return session.finding(finding_id)


class _BatchSummary(Record):
    """The fields of a batch without its arrays, which are in the file."""

    __slots__ = ("_batch",)

    def __init__(self, batch: Batch, path: Path | None) -> None:
        tensors = {n: [t.dtype, list(t.values.shape)] for n, t in batch.tensors.items()}
        fields: dict[str, Json] = {
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
        """Return the lines of the batch, and the path it was written to."""
        output = self["output"]
        written = [] if output is None else [f"written to {output}"]
        return [*self._batch.lines(width=width), *written]


@question(
    MEASURED,
    RUN,
    ATTEMPT,
    click.option("--output", "-o", type=click.Path(path_type=Path), help="Write it to this file."),
    click.option("--names", callback=read_names, metavar="A,B", help="Only these tensors."),
    click.option("--stages", callback=read_names, metavar="A,B", help="Only these stages."),
)
def batch(
    session: Session, step: StepName, output: Path | None, names: OptionValue, stages: OptionValue,
    **options: OptionValue,
) -> Record:  # fmt: skip
    """A step's exact data, as one safetensors file (`stagescope.Batch.load` reads it)."""
    try:
        chosen = session.step(step, **options)
    except NotFound:
        if step != "measured":
            raise
        chosen = session.step("latest", **options)  # it has tensors, no numbers
    if output is None:
        with terminal.progress("batch"):
            return _BatchSummary(chosen.batch(names=names, stages=stages), None)
    with terminal.progress("batch") as update:
        saved = chosen.save_batch(output, names=names, stages=stages, on_progress=update)
    return _BatchSummary(saved, output)


@step_question(
    STEP,
    STAGE,
    ROLE,
    RANK,
    click.option("--section", type=click.Choice(SECTIONS), help="Only files with this section."),
    LIMIT,
)
def kept(step: Step, **filters: OptionValue) -> Table:
    """The files that are kept of a step: contents, size, state and path."""
    return step.kept(**filters)


@question(click.argument("step", type=int), RUN, ATTEMPT)
def pin(session: Session, **options: OptionValue) -> Record:
    """Exempt the kept files of a step from deletion (needs the operate token)."""
    return session.pin(**options)


@question(click.argument("step", type=int), RUN, ATTEMPT)
def unpin(session: Session, **options: OptionValue) -> Record:
    """Allow the files of a pinned step to be deleted again (needs the operate token)."""
    return session.unpin(**options)


@question(
    click.argument("a", metavar="RUN[@ATTEMPT]"), click.argument("b", metavar="RUN[@ATTEMPT]")
)
def diff(session: Session, a: str, b: str) -> Changes:
    """Changes between two attempts or runs: code, options, packages, placement."""
    return session.diff(a, b)
