"""What a measurement returns: typed figures, and checks with their outcome."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from enum import Enum
from typing import ClassVar, NamedTuple


class Outcome(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_POSSIBLE = "not possible here"


class Figure(NamedTuple):
    """How a field of a result is shown: `Annotated[float, Figure("what it is", "unit")]`."""

    label: str
    unit: str


@dataclasses.dataclass(frozen=True)
class Check:
    """A statement, whether it holds here, and the figures that decided it."""

    statement: str
    outcome: Outcome
    reason: str


def check(statement: str, holds: bool, reason: str) -> Check:
    return Check(statement, Outcome.PASSED if holds else Outcome.FAILED, reason)


def not_possible(statement: str, reason: str) -> Check:
    return Check(statement, Outcome.NOT_POSSIBLE, reason)


def as_fast(statement: str, ratio: float, limit: float, *, is_accelerator: bool) -> Check:
    """Check a ratio of times; on the host other programs share the cores, so nothing is judged."""
    figures = f"x{ratio:.3f}, limit x{limit:.2f}"
    if is_accelerator:
        return check(statement, ratio <= limit, figures)
    return not_possible(statement, f"{figures}; on the host other programs share the cores")


def spread(values: Sequence[float]) -> float:
    """Return the distance of the quartiles over the median: what a repeated measurement varies."""
    quartiles = statistics.quantiles(values, n=4)
    return (quartiles[2] - quartiles[0]) / statistics.median(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The base of each measurement's result; fields with a `Figure` are printed."""

    title: ClassVar[str]
    checks: tuple[Check, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure(Result):
    """A measurement that did not come about."""

    title: ClassVar[str] = "Not measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much a trial does."""

    copy_bytes: tuple[int, ...]
    weight_bytes: int
    width: int
    """Of the model whose step is timed."""
    rows: int
    tokens: int
    repeats: int
    steps: int
    step_seconds: float
    load_seconds: float


FULL = Effort(
    copy_bytes=(1 << 20, 16 << 20, 128 << 20), weight_bytes=512 << 20, width=1024, rows=64,
    tokens=2048, repeats=9, steps=40, step_seconds=0.15, load_seconds=60.0,
)  # fmt: skip
QUICK = Effort(
    copy_bytes=(1 << 16, 4 << 20), weight_bytes=16 << 20, width=128, rows=8,
    tokens=512, repeats=3, steps=12, step_seconds=0.03, load_seconds=6.0,
)  # fmt: skip
