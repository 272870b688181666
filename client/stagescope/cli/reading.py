"""Commands that read: runs, steps, findings, hangs, captured operators, weights, kept files."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from stagescope import terminal
from stagescope.answers import Metrics, Record
from stagescope.cli.common import (
    ATTEMPT,
    CAPTURE,
    CAPTURED,
    LIMIT,
    MEASURED,
    NAMED_RUN,
    PART,
    RANK,
    ROLE,
    ROUND,
    RUN,
    STAGE,
    STEP,
    STEP_NUMBER,
    Option,
    OptionValue,
    a_step,
    comma_list,
    question,
    read_names,
    read_step,
    session_command,
    set_exit_code,
    step_command,
)
from stagescope.operators import read_side
from stagescope.session import Session, StepName
from stagescope.step import Step
from stagescope.table import Table
from stagescope.terminal import RUN_NAME, FiniteFloat
from stagescope_wire.captures import read_ranks
from stagescope_wire.errors import NotFound
from stagescope_wire.keep import SECTIONS
from stagescope_wire.names import unknown_name
from stagescope_wire.nonfinite import Json

if TYPE_CHECKING:
    from stagescope_wire.batch import Batch


def _choice(name: str, words: str, text: str, default: str | None = None) -> Option:
    return click.option(
        name, type=click.Choice(words.split("|")), help=text, default=default,
        show_default=default is not None,
    )  # fmt: skip


def _only(what: str) -> Option:
    return click.option("--only", metavar="A,B", help=f"Only these {what}.")


_A_STEP: Final = click.argument("step", type=STEP_NUMBER)

session_command(
    Session.attempts, "A run's attempts; with --json their fingerprints.", NAMED_RUN, RUN, LIMIT
)
session_command(
    Session.steps,
    "The steps, and how complete each is.\n\nThe column `gap` says what a step's numbers lack, "
    "such as payloads that were lost with their process.",
    NAMED_RUN, RUN, ATTEMPT, LIMIT,
)  # fmt: skip
session_command(
    Session.exact,
    "In which steps trainer and rollout are equal in every token, and where they first are not."
    "\n\nCovers all active attempts, or one --attempt. A repeated step counts in the later one.",
    NAMED_RUN, RUN, ATTEMPT,
)  # fmt: skip
session_command(
    Session.lost, "Lost data: announced, but never arrived, with the reasons.",
    NAMED_RUN, RUN, ATTEMPT, _only("kinds: 'payload*'"), LIMIT,
)  # fmt: skip
session_command(
    Session.findings,
    "The problems that the service found, the most severe first; repeated ones are grouped.",
    NAMED_RUN, RUN, ATTEMPT, _only("severities or kinds: error, 'streams_*'"), LIMIT,
)  # fmt: skip
session_command(
    Session.finding,
    "One finding: what, where, what to try, and its evidence (ID as `findings` shows it).",
    click.argument("finding_id", metavar="ID"),
)  # fmt: skip
session_command(
    Session.pin, "Exempt the kept files of a step from deletion (needs the operate token).",
    _A_STEP, RUN, ATTEMPT,
)  # fmt: skip
session_command(
    Session.unpin, "Allow the files of a pinned step to be deleted (needs the operate token).",
    _A_STEP, RUN, ATTEMPT,
)  # fmt: skip
session_command(
    Session.diff, "Changes between two attempts or runs: code, options, packages, placement.",
    click.argument("a", metavar="RUN[@ATTEMPT]"), click.argument("b", metavar="RUN[@ATTEMPT]"),
)  # fmt: skip
session_command(
    Session.devices,
    "The devices whose weights differed from their replicas', over attempts and runs.",
    click.option("--run", type=RUN_NAME, help="Only this run (default: all)."), LIMIT,
)  # fmt: skip

step_command(
    Step.rounds, "A step's mismatch round by round.", MEASURED, STAGE, ROLE, RANK,
    _choice("--by", "round|turn|staleness",
            "Rows: segments of the mask, true turns (of recorded turn_ids), or staleness.",
            "round"),
    LIMIT,
)  # fmt: skip
step_command(
    Step.anatomy,
    "A step's mismatch by what its tokens have in common: place in the round, engine, ...",
    MEASURED,
    _choice("--by", "place|end|position|probability|lattice|routing|staleness|engine",
            "What distinguishes the tokens.", "place"),
)  # fmt: skip
step_command(
    Step.routing,
    "Whether rollout and trainer chose the same experts, and how much of the mismatch that is.",
    MEASURED, STAGE, ROLE, RANK, LIMIT,
)  # fmt: skip
step_command(Step.ranks, "A step's mismatch rank by rank.", MEASURED, STAGE, ROLE, RANK, LIMIT)
step_command(
    Step.tokens, "A step's worst tokens, the worst first, then the non-finite ones.",
    MEASURED, STAGE, ROLE, RANK, ROUND,
    _choice("--kind", "worst|nonfinite", "Only these [default: both]."), LIMIT,
)  # fmt: skip
step_command(
    Step.samples, "A step's samples with their mismatch, the worst first.", MEASURED,
    _choice("--sort", "max_abs|mean_abs|tokens|sample_uid", "Order [default: max_abs]."),
    ROLE, RANK, LIMIT,
)  # fmt: skip
step_command(
    Step.sample, "The tokens of a sample: both log-probs, and what the loss did to each.",
    a_step(), click.argument("sample_uid", metavar="SAMPLE"),
)  # fmt: skip
step_command(
    Step.gradient, "How much of a step's mismatch sits in tokens that no gradient sees, and why.",
    MEASURED, LIMIT,
)  # fmt: skip
step_command(
    Step.stages, "Which ranks were in which stage of a step, and which have not arrived.",
    STEP, STAGE, ROLE, RANK, LIMIT,
)  # fmt: skip
step_command(
    Step.scalars, "The scalars that ranks logged in a step.", STEP, STAGE, ROLE, RANK, LIMIT
)
step_command(
    Step.kept, "The files that are kept of a step: contents, size, state and path.",
    STEP, STAGE, ROLE, RANK,
    _choice("--section", "|".join(SECTIONS), "Only files with this section."), LIMIT,
)  # fmt: skip
step_command(
    Step.dumps, "msprobe's dumps of a step: path, size and state.", STEP, STAGE, ROLE, RANK, LIMIT
)
step_command(
    Step.operators,
    "The captured operator calls in execution order, with their tensors' statistics.",
    CAPTURED, STAGE, ROLE, RANK, PART, CAPTURE,
    click.option("--name", metavar="GLOB", help="Only such names: '*lm_head*', or part of a name."),
    click.option("--kind", help="Module, Functional, Torch, Tensor, ..."),
    click.option("--direction", help="forward, backward, parameters_grad, debug."),
    click.option("--section", help="input_args, output, parameters, grad, ..."),
    click.option("--dtype", help="Such as bfloat16."),
    click.option("--non-finite", is_flag=True, help="Only tensors with a NaN or an infinity."),
    LIMIT,
)  # fmt: skip
step_command(
    Step.non_finite, "The first operator with a NaN or an infinity, on each rank and over all.",
    CAPTURED, STAGE, ROLE, PART, CAPTURE, LIMIT,
)  # fmt: skip
step_command(
    Step.stack, "The Python frames that called an operator (its `stack_id`), innermost first.",
    click.argument("stack_id"), CAPTURED, STAGE, ROLE, RANK, PART, CAPTURE,
)  # fmt: skip


def _optional_step(
    session: Session, step: str | None, run: str | None, attempt: int | None
) -> Step | None:
    if step is None:
        return None
    word = read_step(click.get_current_context(), click.Argument(["step"]), step)
    return session.step(word, run=run, attempt=attempt)


@question()
def status(session: Session) -> Record:
    """Whether the service is ready; exit code 3 if not."""
    answer = session.status()
    if not answer.get("ready", True):
        set_exit_code(3)
    return answer


@question(
    MEASURED, STAGE, ROLE, RANK, ROUND,
    click.option(
        "--only", metavar="A,B", help="Only metrics whose names match, such as 'per_round/*'."
    ),
)  # fmt: skip
def metrics(
    session: Session, step: StepName, run: str | None, attempt: int | None, only: str | None,
    **filters: OptionValue,
) -> Metrics:  # fmt: skip
    """A step's metrics, rollout against training."""
    answer = session.step(step, run=run, attempt=attempt).metrics(**filters)
    if only is None:
        return answer
    matching: set[str] = set()
    for pattern in comma_list(only):
        found = fnmatch.filter(answer, pattern)
        if not found:
            raise unknown_name(pattern, [*answer], what="metric of this step like")
        matching.update(found)
    return Metrics({n: value for n, value in answer.items() if n in matching}, answer.about)


@question(
    click.argument("metric", required=False), RUN, ATTEMPT,
    _choice("--by", "rank|round|staleness", "One series for each."),
    click.option("--stage", help="Scalars: only of this stage."), ROLE, RANK,
    click.option("--from", "from_step", type=STEP_NUMBER, metavar="STEP", help="The first step."),
    click.option("--to", "to_step", type=STEP_NUMBER, metavar="STEP", help="The last step."),
    click.option("--superseded", is_flag=True, help="Include steps that were repeated."),
    click.option("--table", is_flag=True, help="Show one row per step instead of sparklines."),
    click.option(
        "--limit", type=click.IntRange(min=1), default=10_000, show_default=True,
        help="Most steps, the newest.",
    ),
)  # fmt: skip
def series(session: Session, metric: str | None, table: bool, **options: OptionValue) -> Table:
    """A metric or a scalar over the steps of a run, in total or by rank or round.

    Without METRIC: the names that a run has. Gaps are shown with their reasons, and steps that
    were repeated within their attempt are marked.
    """
    if metric is None:
        return session.metric_names(options["run"])
    answer = session.series(metric, **options)
    return Table.from_table(answer) if table else answer


@question(
    NAMED_RUN, RUN, ATTEMPT,
    click.option("--step", type=STEP_NUMBER, help="Look at the steps up to this one alone."),
    click.option("--all", "everything", is_flag=True, help="Say what was not measured, and why."),
)  # fmt: skip
def doctor(session: Session, everything: bool, **options: OptionValue) -> Table:
    """Diagnose a run: what is wrong, since when, how sure that is, and what to do next."""
    with terminal.progress("doctor"):
        found = session.doctor(**options)
    return found.all() if everything else found


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
    with terminal.progress("batch") as update:
        if output is None:
            return _BatchSummary(chosen.batch(names=names, stages=stages), None)
        saved = chosen.save_batch(output, names=names, stages=stages, on_progress=update)
    return _BatchSummary(saved, output)


_Side: TypeAlias = dict[str, str | int]


def _read_side(context: click.Context, parameter: click.Parameter, value: str) -> _Side:
    return read_side(value)


def _of_run(side: _Side, run: str | None) -> _Side:
    """Return a side with the run of --run, unless it names one."""
    return side if run is None else {"run": run, **side}


_A: Final = click.argument("a", metavar="step=N,rank=N,...", callback=_read_side)
_B: Final = click.argument("b", metavar="rank=N,...", callback=_read_side)


@question(
    _A, _B, RUN,
    click.option(
        "--factor", type=FiniteFloat(min=0),
        help="Threshold in eps [default: 4; between devices 100, between layouts 8, float32 100].",
    ),
    click.option("--exact", is_flag=True, help="Every number must be equal."),
    click.option("--skip-sharded", is_flag=True, help="Skip shards."),
    click.option(
        "--shard", "shards", multiple=True, metavar="PATTERN=AXIS:HOW",
        help="How tensors of several ranks are put together: HOW is a dimension from 0, sum, mean, "
        "same or skip.",
    ),
)  # fmt: skip
def divergence(
    session: Session, a: _Side, b: _Side, run: str | None, **options: OptionValue
) -> Record:
    """The first operator in which two dumps differ.

    Name a side by run, attempt, step, stage, role, rank, part and capture. The second side takes
    missing fields from the first: `stagescope divergence step=5,rank=0 rank=1`.

    `ranks=all` puts the tensors of all ranks together: `stagescope divergence
    run=tp2,step=5,ranks=all run=tp1`. `layout=dp2tp2` gives the layout, outermost axis first, where
    the ranks did not report it.
    """
    return session.divergence(_of_run(a, run), b, **options)


@question(
    _A, _B, RUN, LIMIT,
    click.option(
        "--wait", type=FiniteFloat(min=0), default=900.0, show_default=True, metavar="SECONDS"
    ),
)  # fmt: skip
def tensors(session: Session, a: _Side, b: _Side, run: str | None, **options: OptionValue) -> Table:
    """How the full tensors of two dumps differ, compared by msprobe (task tensor)."""
    return session.tensors(_of_run(a, run), b, **options)


@question(STEP, STAGE, ROLE, RANK, LIMIT)
def stuck(
    session: Session, step: StepName, run: str | None, attempt: int | None, **ranks: OptionValue
) -> Table:
    """Which ranks hold up the others, and since when."""
    if step == "latest":  # of the newest attempt, even before its first step
        return session.stuck(run, attempt, **ranks)
    return session.step(step, run=run, attempt=attempt).stuck(**ranks)


@question(
    click.argument("step", required=False, metavar="[STEP|latest]"), RUN, ATTEMPT, ROLE,
    click.option("--ranks", default="all", show_default=True, metavar="0,4-7|all"),
    click.option(
        "--wait", type=FiniteFloat(min=0), default=5.0, show_default=True,
        help="Seconds to wait for their answers.",
    ),
    click.option("--all-threads", is_flag=True, help="All threads, not only the training threads."),
)  # fmt: skip
def stacks(
    session: Session, step: str | None, run: str | None, attempt: int | None, role: str | None,
    ranks: str, wait: float, all_threads: bool,
) -> Record:  # fmt: skip
    """The Python stacks of live ranks, taken now (needs the operate token); with STEP, as kept."""
    only = None if ranks == "all" else read_ranks(ranks)
    if not isinstance(only, list | None):
        raise click.BadParameter(f"{ranks!r} names no ranks", param_hint="--ranks")
    chosen = _optional_step(session, step, run, attempt)
    if chosen is None:
        stacks = session.stacks(run, attempt, role=role, ranks=only, wait=wait)
    else:
        stacks = chosen.stacks(role=role)
        stacks = stacks if only is None else stacks.of_ranks(only)
    return stacks.all_threads() if all_threads else stacks


@question(
    click.argument("step", required=False, metavar="[STEP|latest]"),
    click.option("--version", type=int, help="The weights of this policy version."), RUN, ATTEMPT,
    _choice("--verdict", "differs|missing|replicas differ|not comparable|not compared|agrees",
            "Only weights of this verdict."),
    LIMIT,
)  # fmt: skip
def weights(
    session: Session, step: str | None, version: int | None, run: str | None, attempt: int | None,
    verdict: str | None, limit: int,
) -> Table:  # fmt: skip
    """A step's weights, rollout against trainer; without STEP the versions and their verdicts."""
    if step is not None and version is not None:
        raise click.UsageError("give a STEP or a --version, not both")
    chosen = _optional_step(session, step, run, attempt)
    if chosen is None and version is None and verdict is not None:
        raise click.UsageError("--verdict needs a STEP or a --version")
    if chosen is None:
        return session.weights(version, run=run, attempt=attempt, verdict=verdict, limit=limit)
    return chosen.weights(verdict=verdict, limit=limit)


session_command(
    Session.canary,
    "How engines and trainer score the same tokens, by version; with VERSION by sequence.",
    NAMED_RUN, click.argument("version", required=False, type=int), RUN, ATTEMPT, LIMIT,
)  # fmt: skip
