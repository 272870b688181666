"""Tables of the canary: what each side scored of a version, and the verdict on each pair."""

from __future__ import annotations

from typing import Any, TypedDict

from sqlalchemy import Index

from stagescope_service.fields import Row, Step
from stagescope_service.store.tables.declare import table


class CanaryRow(TypedDict):
    """A row of `canaries`."""

    incarnation: str
    seq: int
    attempt_id: int
    step: int | None
    version: int
    side: str
    source: str
    role: str
    rank: int
    wall: float
    seconds: float | None
    problem: str
    checks: list[Any]
    settings: dict[str, Any]
    arms: bytes
    """Compressed JSON: arm -> its rows and log-probs."""


canaries = table(
    "canaries",
    CanaryRow,
    "incarnation seq",
    Index(None, "attempt_id", "version"),
    Index(None, "attempt_id", "step"),
)


class CanarySequence(Row):
    """One sequence in two arms: d is the difference of the log-probs of a token."""

    tokens: int
    """Number of compared tokens: both arms have a finite log-prob after the same tokens."""
    unscored: int
    """Number of tokens that one arm alone scored, or that follow different tokens."""
    not_finite: int
    """Number of tokens with a log-prob that is NaN or infinite in one arm."""
    mean: float | None
    """Mean \\|d\\|, in nats; null: no token is compared."""
    max: float | None
    """Largest \\|d\\|, in nats; null: no token is compared."""
    position: int | None
    """Position of the token with the largest \\|d\\| in the sequence, from 0."""
    token_id: int | None
    """Its token id."""
    first: float | None
    """Its log-prob in the first arm, in nats."""
    second: float | None
    """Its log-prob in the second arm, in nats."""
    parts_at: int | None
    """Position of the first token that the arms do not share; null: they share all tokens."""


class CanaryPair(Row):
    """Two arms of a version, compared."""

    pair: str
    """The two arms: `trainer vs engine`, `decode vs prefill`, `cached vs uncached`, `adapter vs
    base` or `engine twice`. `engine vs engines` compares with the median of three or more engines.
    `engine vs before` compares with an earlier version of the same weights. `difference vs before`
    is the part of the difference from the trainer that an earlier version had, too. Its `slope` is
    the correlation."""
    verdict: str
    """`differs`, `equal` (an adapter that changes nothing), `agrees` or `not compared`."""
    cause: str | None
    """The likeliest cause, as a code; null: nothing is wrong."""
    tokens: int
    """Number of compared tokens."""
    mean: float | None
    """Mean \\|d\\|, in nats; null: no token is compared."""
    max: float | None
    """Largest \\|d\\|, in nats; null: no token is compared."""
    bound: float | None
    """Mean \\|d\\| in nats above which the pair differs (`adapter vs base`: up to which it is
    equal). Where earlier versions had noise, the worst token does not count."""
    bound_of: str
    """What the bound was derived from: `earlier versions`, `other engines`, `rounding`, `first
    versions` or `engine twice`."""
    usual: float | None
    """Median of mean \\|d\\| in the earlier versions that it is compared with, in nats; null: there
    are none."""
    compared_with: int
    """Number of these versions."""
    error: float | None
    """Standard error of the mean, in nats; null: fewer than two tokens."""
    slope: float | None
    """Slope of the first arm's log-probs on the second's (a ratio), where a line explains the
    difference as another temperature does; null: it does not."""
    unscored: int
    """Number of tokens that one arm alone scored, or that follow different tokens."""
    not_finite: int
    """Number of tokens with a log-prob that is NaN or infinite in one arm."""
    odd_sequences: list[int]
    """The sequences that alone are above their bound, from 0."""


class CanaryEngine(Row):
    """An engine instance in one version of the weights."""

    version: int
    """The policy version."""
    source: str
    """Name of the engine instance; empty: only the trainer has scored the version."""
    step: Step | None
    """The trainer's step at which the version was scored, the highest of several; null: unknown."""
    causes: list[str]
    """The likeliest causes of what is wrong, as codes; empty: nothing is."""
    problem: str
    """Why arms are missing; empty: none is."""
    seconds: float | None
    """Seconds that the engine's scoring took; null: unknown."""
    wall: float
    """Unix seconds: when the last record of the version was made."""


class CanaryVerdictRow(CanaryEngine, CanaryPair):
    """A row of `canary_verdicts`."""

    attempt_id: int
    sequences: list[CanarySequence]
    rows: str
    """Digest of the fixed sequences; versions with others are not compared."""
    scores: str
    """Digest of the engine's log-probs of them."""
    trained: str
    """Digest of the trainer's."""
    records: int


canary_verdicts = table("canary_verdicts", CanaryVerdictRow, "attempt_id version source pair")
