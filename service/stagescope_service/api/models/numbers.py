"""Answers about the numbers of a step: metrics, rounds, ranks, tokens, and what they rest on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.models.common import (
    ABSENT,
    BegunAgainIn,
    Complete,
    GapText,
    Layout,
    Missing,
    Model,
    Number,
    Page,
    Rank,
    Role,
    Stage,
    StepHeading,
)


class Coverage(Model):
    """Coverage of the numbers: tokens + all tokens_left_out = tokens_sent, else a finding."""

    payloads_announced: int
    """Of the whole step, in any state."""
    payloads_ingested: int
    payloads_lost: int
    payloads_dropped: int
    payloads_refused: int
    payloads_pending: int
    """Announced, and not read yet."""
    tokens: int
    """Tokens that count."""
    masked_tokens: int
    """Tokens under the mask of the parts that count, the non-finite ones too."""
    tokens_sent: int | None
    """Tokens under the mask in the stage's payloads; null: aggregated by an earlier release."""
    tokens_left_out: dict[str, int]
    """Reason -> tokens."""
    tokens_unaccounted: int | None
    """What the sum lacks; null: aggregated by an earlier release."""
    sequences: int
    empty_rows: int
    """Rows without a model token; they are left out of means over sequences."""
    parts_counted: int
    parts_left_out: dict[str, int]
    """Reason -> parts."""
    duplicates_left_out: int
    """Tokens that arrived twice; they count once."""
    parts_to_restate: int
    """Parts that must be read again, because their rows were identified later."""
    fragmented_sequences: int
    """Sequences whose fragments have no known order."""


class CheckRow(Model):
    """A check of the streams that found a problem."""

    code: Annotated[str, Field(examples=["shifted"])]
    verdict: Literal["ok", "suspect", "unknown"]
    text: str


Comparable = Annotated[
    str,
    Field(
        description="Whether the two streams can be compared: `comparable`, `exact`, `suspect`, "
        "`not measured` (equal, and one may be a copy), `unknown` (too few tokens).",
        examples=["comparable"],
    ),
]
Cause = Annotated[
    str | None, Field(description="The likeliest cause of `suspect`.", examples=["shifted"])
]


class Numbers(StepHeading):
    """The fields that accompany a step's numbers."""

    complete: Complete
    missing: list[Missing]
    """Ranks that have not ended a stage of the step."""
    gap: GapText
    begun_again: BegunAgainIn
    stage: Stage
    """The stage that the numbers are taken from."""
    role: Annotated[str | None, Field(examples=["actor"])]
    """The role whose parts count; several are joined by commas."""
    pair: Annotated[list[str], Field(examples=[["old", "rollout"]], min_length=2, max_length=2)]
    """The streams p and q."""
    coverage: Coverage
    comparable: Comparable
    cause: Cause
    comparability: list[CheckRow]
    """The checks that found something, the likeliest cause first."""


class Stream(Model):
    """The attributes of a log-prob series; unknown ones are absent."""

    dtypes: list[str]
    """In which it arrived."""
    producer: str = ABSENT
    """Its producer: process, engine or stage."""
    engine: str = ABSENT
    engine_version: str = ABSENT
    dtype: str = ABSENT
    """As reported by its producer."""
    quantisation: str = ABSENT
    processed: bool = ABSENT
    """Whether they are of the processed distribution (temperature, top-k, top-p)."""
    temperature: float = ABSENT
    top_p: float = ABSENT
    top_k: int = ABSENT
    alignment: str = ABSENT
    routing: str = ABSENT
    extra: JsonObject = ABSENT


class RolloutIs(Model):
    """Whose importance weights `rollout_corr/rollout_is_*` describe."""

    rollout_is: str | None
    """The run's setting; null: none."""
    threshold: float | None
    batch_normalize: bool | None
    truncated: bool
    text: str


Published = Annotated[
    dict[str, Number],
    Field(
        description="Published name -> number; README and `statistics/mismatch.py` define them.",
        examples=[{"rollout_corr/kl": 0.0012, "training/rollout_probs_diff_mean": 0.0031}],
    ),
]


class Metrics(Numbers):
    """The published numbers of a step, or of a slice of it."""

    round: int | None
    """Null: of all rounds."""
    metrics: Published
    noise_floor: Published | None
    """The same of the trainer against itself; null: no recomputed log-probs."""
    nonfinite: dict[str, dict[str, int]]
    """Stream -> `nan`, `posinf`, `neginf` -> tokens under the mask."""
    streams: dict[str, Stream]
    rollout_is: RolloutIs
    differing: list[list[str]]
    """Payloads with the same row ids and different rows."""


class CellRow(Model):
    """The mismatch of some tokens: d = p - q in nats, of log-probs p (trainer), q (rollout)."""

    tokens: int
    """Tokens with both values finite."""
    masked_tokens: int
    """Tokens under the mask."""
    abs_diff_mean: Number
    """Of |d|, nats."""
    abs_diff_max: Number
    """Of |d|, nats."""
    abs_diff_sum: Number
    """Of |d|, nats."""
    diff_sum: Number
    """Of d, nats."""
    probs_diff_mean: Number
    """Of |e^p - e^q|."""
    probs_diff_max: Number
    """Of |e^p - e^q|."""
    kl: Number
    """Mean of q - p, nats (k1)."""
    k3_kl: Number
    """Mean of expm1(d) - d, nats."""
    pearson: Number
    """Of e^p and e^q."""
    mult_prob_error: Number
    """Mean of e^|d|."""
    ratio_mean: Number
    """Mean of e^d, d clamped to 20 nats."""
    calibration_z: Number
    """(ratio_mean - 1) over its standard error."""
    over_0_1: int = Field(alias="over_0.1")
    """Tokens with |d| over 0.1 nats."""
    over_0_5: int = Field(alias="over_0.5")
    """Tokens with |d| over 0.5 nats."""
    over_1: int
    """Tokens with |d| over 1 nat."""
    over_5: int
    """Tokens with |d| over 5 nats."""
    nonfinite: int
    """Values under the mask that are not finite, of both streams."""
    comparable: Comparable
    cause: Cause


class SliceRow(CellRow):
    """A round, a turn or a staleness, depending on `by`."""

    round: int = ABSENT
    """A mask segment, from 0."""
    turn: int = ABSENT
    """As given by the caller."""
    staleness: int = ABSENT
    """Trainer version - the tokens' own version."""


class Rounds(Numbers, Page[SliceRow]):
    """The mismatch by round, turn or staleness."""

    by: Literal["round", "turn", "staleness"]
    whole: CellRow
    """Of all tokens."""


class RankRow(CellRow, Layout):
    """A rank's own numbers, and where it ran."""

    stage: Stage
    role: Role
    rank: Rank
    parts: int
    """How many parts it handed over."""
    parts_counted: int
    """How many of them count in the step's numbers; 0 where a replica counts instead."""


class Ranks(Numbers, Page[RankRow]):
    """The mismatch by rank."""


class TokenRow(Model):
    """One token."""

    kind: Literal["worst", "nonfinite"]
    abs_diff: float | None
    """|p - q| in nats; null where one is not finite."""
    p: Number
    """The trainer's log-prob, nats."""
    q: Number
    """The rollout's."""
    round: int
    turn: int | None
    """Null: the caller gave no turns."""
    token_id: int | None
    """Null: no responses were handed over."""
    sample_uid: str | None
    row: int
    """Of the payload."""
    position: int
    """Of the row's tokens, from 0, or as given in `positions`."""
    role: Role | None
    rank: Rank | None


class Tokens(Numbers, Page[TokenRow]):
    """The worst tokens, then those that are not finite."""
