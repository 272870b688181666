"""Commands for captured operators and dumps, and for hangs, stacks, weights and devices."""

from __future__ import annotations

from typing import TypeAlias

import click

from stagescope.answers import Record
from stagescope.cli.common import (
    ATTEMPT,
    CAPTURE,
    CAPTURED,
    LIMIT,
    PART,
    RANK,
    ROLE,
    RUN,
    STAGE,
    STEP,
    OptionValue,
    optional_step,
    question,
    step_question,
)
from stagescope.operators import read_side
from stagescope.session import Session
from stagescope.step import Step
from stagescope.table import Table
from stagescope.terminal import FiniteFloat
from stagescope_wire.captures import read_ranks


@step_question(STEP, STAGE, ROLE, RANK, LIMIT)
def dumps(step: Step, **filters: OptionValue) -> Table:
    """msprobe's dumps of a step: path, size and state."""
    return step.dumps(**filters)


_Side: TypeAlias = dict[str, str | int]


def _read_side(_: click.Context, __: click.Parameter, value: str) -> _Side:
    return read_side(value)


def _of_run(side: _Side, run: str | None) -> _Side:
    """Return a side with the run of --run, unless it names one."""
    return side if run is None else {"run": run, **side}


@step_question(
    CAPTURED, STAGE, ROLE, RANK, PART, CAPTURE,
    click.option("--name", metavar="GLOB", help="Only such names: '*lm_head*', or part of a name."),
    click.option("--kind", help="Module, Functional, Torch, Tensor, ..."),
    click.option("--direction", help="forward, backward, parameters_grad, debug."),
    click.option("--section", help="input_args, output, parameters, grad, ..."),
    click.option("--dtype", help="Such as bfloat16."),
    click.option("--non-finite", is_flag=True, help="Only tensors with a NaN or an infinity."),
    LIMIT,
)  # fmt: skip
def operators(step: Step, **filters: OptionValue) -> Table:
    """The captured operator calls in execution order, with their tensors' statistics."""
    return step.operators(**filters)


@step_question(CAPTURED, STAGE, ROLE, PART, CAPTURE, LIMIT)
def non_finite(step: Step, **filters: OptionValue) -> Table:
    """The first operator with a NaN or an infinity, on each rank and over all."""
    return step.non_finite(**filters)


@step_question(CAPTURED, STAGE, ROLE, RANK, PART, CAPTURE, first=(click.argument("stack_id"),))
def stack(step: Step, stack_id: str, **filters: OptionValue) -> Record:
    """The Python frames that called an operator (its `stack_id`), innermost first."""
    return step.stack(stack_id, **filters)


@question(
    click.argument("a", metavar="step=N,rank=N,...", callback=_read_side),
    click.argument("b", metavar="rank=N,...", callback=_read_side),
    RUN,
    click.option("--factor", type=FiniteFloat(min=0), help="Threshold in eps [default: 4]."),
    click.option("--exact", is_flag=True, help="Every number must be equal."),
    click.option("--skip-sharded", is_flag=True, help="Skip shards."),
)
def divergence(
    session: Session, a: _Side, b: _Side, run: str | None, **options: OptionValue
) -> Record:
    """The first operator in which two dumps differ.

    Name a side by run, attempt, step, stage, role, rank, part and capture. The second side takes
    missing fields from the first: `stagescope divergence step=5,rank=0 rank=1`.
    """
    return session.divergence(_of_run(a, run), b, **options)


@question(
    click.argument("a", metavar="step=N,rank=N,...", callback=_read_side),
    click.argument("b", metavar="rank=N,...", callback=_read_side),
    click.option(
        "--wait", type=FiniteFloat(min=0), default=900.0, show_default=True, metavar="SECONDS"
    ),
    RUN,
    LIMIT,
)
def tensors(session: Session, a: _Side, b: _Side, run: str | None, **options: OptionValue) -> Table:
    """How the full tensors of two dumps differ, compared by msprobe (task tensor)."""
    return session.tensors(_of_run(a, run), b, **options)


@step_question(STEP, STAGE, ROLE, RANK, LIMIT)
def stuck(step: Step, **filters: OptionValue) -> Table:
    """Which ranks hold up the others, and since when."""
    return step.stuck(**filters)


@question(
    click.argument("step", required=False, metavar="[STEP|latest]"),
    RUN,
    ATTEMPT,
    ROLE,
    click.option("--ranks", default="all", show_default=True, metavar="0,4-7|all"),
    click.option(
        "--wait",
        type=FiniteFloat(min=0),
        default=5.0,
        show_default=True,
        help="Seconds to wait for their answers.",
    ),
    click.option("--all-threads", is_flag=True, help="All threads, not only the training threads."),
)
def stacks(
    session: Session,
    step: str | None,
    run: str | None,
    attempt: int | None,
    role: str | None,
    ranks: str,
    wait: float,
    all_threads: bool,
) -> Record:
    """The Python stacks of live ranks, taken now (needs the operate token); with STEP, as kept."""
    only = None if ranks == "all" else read_ranks(ranks)
    if not isinstance(only, list | None):
        raise click.BadParameter(f"{ranks!r} names no ranks", param_hint="--ranks")
    chosen = optional_step(session, step, run, attempt)
    if chosen is None:
        stacks = session.stacks(run, attempt, role=role, ranks=only, wait=wait)
    else:
        stacks = chosen.stacks(role=role)
        stacks = stacks if only is None else stacks.of_ranks(only)
    return stacks.all_threads() if all_threads else stacks


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
def weights(
    session: Session,
    step: str | None,
    version: int | None,
    run: str | None,
    attempt: int | None,
    verdict: str | None,
    limit: int,
) -> Table:
    """A step's weights, rollout against trainer; without STEP the versions and their verdicts."""
    if step is not None and version is not None:
        raise click.UsageError("give a STEP or a --version, not both")
    chosen = optional_step(session, step, run, attempt)
    if chosen is None and version is None and verdict is not None:
        raise click.UsageError("--verdict needs a STEP or a --version")
    if chosen is None:
        return session.weights(version, run=run, attempt=attempt, verdict=verdict, limit=limit)
    return chosen.weights(verdict=verdict, limit=limit)


@question(click.option("--run", help="Only this run (default: all)."), LIMIT)
def devices(session: Session, run: str | None, limit: int) -> Table:
    """The devices whose weights differed from their replicas', over attempts and runs."""
    return session.devices(run, limit=limit)
