"""What the operators did that a capture recorded, and where two dumps differ."""

from __future__ import annotations

from typing import Any

import click

from stagescope.answers import Record
from stagescope.cli.questions import (
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
)
from stagescope.frames import Table
from stagescope.operators import read_side
from stagescope.session import Session, StepWord


@question(STEP, RUN, ATTEMPT, STAGE, ROLE, RANK, LIMIT)
def dumps(session: Session, step: StepWord, **options: Any) -> Table:
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
def operators(session: Session, step: StepWord, **options: Any) -> Table:
    """What the operators did that a capture recorded, in execution order."""
    return noun(session, step, options).operators(**options)


@question(CAPTURED, RUN, ATTEMPT, STAGE, ROLE, PART, CAPTURE, LIMIT)
def non_finite(session: Session, step: StepWord, **options: Any) -> Table:
    """The first operator with a NaN or an infinity, on each rank and over all."""
    return noun(session, step, options).non_finite(**options)


@question(click.argument("stack_id"), CAPTURED, RUN, ATTEMPT, STAGE, ROLE, RANK, PART, CAPTURE)
def stack(session: Session, step: StepWord, stack_id: str, **options: Any) -> Record:
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
