"""What the operators did that a capture recorded, and where two dumps differ."""

from __future__ import annotations

from typing import Any

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
    noun,
    question,
    read_step,
)
from stagescope.frames import Table
from stagescope.operators import read_side
from stagescope.session import Session, StepName
from stagescope.wire.captures import read_ranks


@question(STEP, RUN, ATTEMPT, STAGE, ROLE, RANK, LIMIT)
def dumps(session: Session, step: StepName, **options: Any) -> Table:
    """msprobe's dumps of a step: place, size and state."""
    return noun(session, step, options).dumps(**options)


def _read_side(_: click.Context, __: click.Parameter, value: str) -> dict[str, Any]:
    return read_side(value)


@question(
    CAPTURED, RUN, ATTEMPT, STAGE, ROLE, RANK, PART, CAPTURE,
    click.option("--name", metavar="GLOB", help="Only such names: '*lm_head*', or a part of one."),
    click.option("--kind", help="Module, Functional, Torch, Tensor, ..."),
    click.option("--direction", help="forward, backward, parameters_grad, debug."),
    click.option("--section", help="input_args, output, parameters, grad, ..."),
    click.option("--dtype", help="Such as bfloat16."),
    click.option("--non-finite", is_flag=True, help="Only tensors with a NaN or an infinity."),
    LIMIT,
)  # fmt: skip
def operators(session: Session, step: StepName, **options: Any) -> Table:
    """What the operators did that a capture recorded, in execution order."""
    return noun(session, step, options).operators(**options)


@question(CAPTURED, RUN, ATTEMPT, STAGE, ROLE, PART, CAPTURE, LIMIT)
def non_finite(session: Session, step: StepName, **options: Any) -> Table:
    """The first operator with a NaN or an infinity, on each rank and over all."""
    return noun(session, step, options).non_finite(**options)


@question(click.argument("stack_id"), CAPTURED, RUN, ATTEMPT, STAGE, ROLE, RANK, PART, CAPTURE)
def stack(session: Session, step: StepName, stack_id: str, **options: Any) -> Record:
    """The Python frames from which an operator was called (its `stack_id`), innermost first."""
    return noun(session, step, options).stack(stack_id, **options)


@question(
    click.argument("a", metavar="step=N,rank=N,...", callback=_read_side),
    click.argument("b", metavar="rank=N,...", callback=_read_side),
    click.option("--factor", type=click.FloatRange(min=0), help="Threshold in eps [default: 4]."),
    click.option("--exact", is_flag=True, help="Every number must be equal."),
    click.option("--skip-sharded", is_flag=True, help="Leave out shards."),
)
def divergence(session: Session, a: Any, b: Any, **options: Any) -> Record:
    """The first operator in which two dumps differ.

    A side is named by run, attempt, step, stage, role, rank, part and capture; what the second
    leaves out is as in the first: `stagescope divergence step=5,rank=0 rank=1`.
    """
    return session.divergence(a, b, **options)


@question(
    click.argument("a", metavar="step=N,rank=N,...", callback=_read_side),
    click.argument("b", metavar="rank=N,...", callback=_read_side),
    click.option(
        "--wait", type=click.FloatRange(min=0), default=900.0, show_default=True, metavar="SECONDS"
    ),
    LIMIT,
)
def tensors(session: Session, a: Any, b: Any, **options: Any) -> Table:
    """How the full tensors of two dumps differ, compared by msprobe (task tensor)."""
    return session.tensors(a, b, **options)


@question(STEP, RUN, ATTEMPT, STAGE, ROLE, RANK, LIMIT)
def stuck(session: Session, step: StepName, **options: Any) -> Table:
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
