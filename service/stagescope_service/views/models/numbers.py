"""Answers about the numbers of a step: metrics, rounds, ranks, tokens, and what they rest on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired

from stagescope_service.fields import Attempt, Number, Rank, Role, Row, Stage, Step
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.common import (
    ABSENT,
    BegunAgainIn,
    Complete,
    GapText,
    Layout,
    Missing,
    Model,
    Page,
    StepHeading,
)


class Coverage(Row):
    """Coverage of the numbers: tokens + all tokens_left_out = tokens_sent, else a finding."""

    payloads_announced: int
    """Number of payloads of the whole step, in any state."""
    payloads_ingested: int
    """Number of payloads that were read."""
    payloads_lost: int
    """Number of payloads that were announced and will not arrive."""
    payloads_dropped: int
    """Number of payloads that their processes dropped."""
    payloads_refused: int
    """Number of payloads that could not be used."""
    payloads_pending: int
    """Number of payloads that are announced and not read yet."""
    tokens: int
    """Number of tokens that count: under the mask, with both values finite."""
    masked_tokens: int
    """Number of tokens under the mask of the parts that count, the non-finite ones too."""
    tokens_sent: int | None
    """Number of tokens under the mask in the stage's payloads that were read."""
    tokens_left_out: dict[str, int]
    """Reason -> number of tokens that do not count for it."""
    tokens_unaccounted: int | None
    """Number of tokens of tokens_sent that are neither in tokens nor in tokens_left_out: 0 unless
    the aggregation is wrong."""
    sequences: int
    """Number of sequences: samples, or rows where these have no id."""
    empty_rows: int
    """Number of rows without a model token; they are left out of means over sequences."""
    parts_counted: int
    """Number of parts (a stage's part on a rank) that count."""
    parts_left_out: dict[str, int]
    """Reason -> number of parts that do not count for it."""
    duplicates_left_out: int
    """Number of tokens that arrived more than once; they count once."""
    parts_to_restate: int
    """Number of parts that must be read again, because their rows were identified later."""
    fragmented_sequences: int
    """Number of fragments of sequences whose order in their sequence is not known."""
    ignored_tensors: NotRequired[list[str]]
    """Tensors with more than 4096 distinct rounds, turns or versions. Rounds of `response_mask`
    from 4096 on count as one, and `per_round/total_rounds` as 4096; the others are not used.
    Absent: none."""


class CheckRow(Row):
    """A check of the streams that found a problem."""

    code: Annotated[str, Field(examples=["shifted"])]
    """Name of the check."""
    verdict: Literal["ok", "suspect", "unknown"]
    """`suspect`: it found a problem; `unknown`: too little to decide; `ok` only beside streams that
    are `exact`."""
    text: str
    """Result of the check, as a sentence."""


Comparable = Annotated[
    str,
    Field(
        description="Whether the two streams can be compared: `comparable`, `exact`, `suspect`, "
        "`not measured` or `unknown`. With `not measured` they are equal, and one may be a copy or "
        "a token is finite in neither. With `unknown` no check failed, and one could not be made "
        "or decided (`comparability` says which).",
        examples=["comparable"],
    ),
]
Cause = Annotated[
    str | None, Field(description="The likeliest cause of `suspect`.", examples=["shifted"])
]
StepComparable = Annotated[
    str,
    Field(
        description="`comparable` of the whole step: tokens that are `comparable` by themselves "
        "may lie in a step that is `suspect`.",
        examples=["suspect"],
    ),
]


class Streams(Model):
    """Whether the two streams of a step can be compared."""

    comparable: Comparable
    cause: Cause
    comparability: list[CheckRow]
    """Results of the checks of the step's streams."""


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
    """How many payloads, tokens and parts the numbers rest on, and what they lack."""
    comparable: Comparable
    cause: Cause
    step_comparable: StepComparable
    step_cause: Cause
    comparability: list[CheckRow]
    """The checks that found something, the likeliest cause first."""


class Stream(Model):
    """The attributes of a log-prob series in the step. An attribute is absent if it is unknown, or
    if ranks report different values."""

    dtypes: list[str]
    """The dtypes in which it arrived."""
    producer: str = ABSENT
    """Its producer: process, engine or stage."""
    engine: str = ABSENT
    """The inference engine that made it."""
    engine_version: str = ABSENT
    """Version of that engine."""
    dtype: str = ABSENT
    """The dtype in which it arrived in this step; absent: in several."""
    quantisation: str = ABSENT
    """The producer's quantisation of weights, as reported."""
    processed: bool = ABSENT
    """Whether they are of the processed distribution (temperature, top-k, top-p)."""
    temperature: float = ABSENT
    """Sampling temperature, a factor without unit: logits are divided by it."""
    top_p: float = ABSENT
    """Share of the probability that sampling was limited to (nucleus sampling), 0 to 1."""
    top_k: int = ABSENT
    """Number of likeliest tokens that sampling was limited to."""
    alignment: str = ABSENT
    """How its values are aligned with the tokens, as its producer reported it."""
    routing: str = ABSENT
    """How a mixture of experts was routed, as its producer reported it."""
    extra: JsonObject = ABSENT
    """Further attributes that its producer reported."""


class RolloutIs(Model):
    """The importance weights that `rollout_corr/rollout_is_*` describe."""

    rollout_is: str | None
    """The run's setting: `token` or `sequence`; null: none."""
    threshold: float | str | None
    """The run's setting `rollout_is_threshold`, a bound on the importance weights. Each weight is a
    ratio of probabilities. The bound is U, or the text `L_U` of a lower and an upper bound, or
    `inf`; null: not set."""
    batch_normalize: bool
    """The run's setting: whether it divides the weights by their mean."""
    truncated: bool
    """Whether the weights are limited by the threshold: true where `rollout_is` is set."""
    text: str
    """All of it as a sentence."""


Published = Annotated[
    dict[str, Number],
    Field(
        description="Published name -> number; docs/metrics.md defines them.",
        examples=[{"rollout_corr/kl": 0.0012, "training/rollout_probs_diff_mean": 0.0031}],
    ),
]


class Metrics(Numbers):
    """The published numbers of a step, or of a slice of it."""

    round: int | None
    """Index of the round that the numbers are of, from 0; null: all rounds."""
    metrics: Published
    units: dict[str, str]
    """Name -> unit (`nat`, `tokens`, `sequences`, `rows`) of the numbers that have one."""
    noise_floor: Published | None
    """The same, in the same units, of the trainer against itself; null: no recomputed log-probs."""
    nonfinite: dict[str, dict[str, int]]
    """Stream -> `nan`, `posinf`, `neginf` -> number of tokens under the mask."""
    streams: dict[str, Stream]
    """Name of a log-prob series -> its attributes."""
    rollout_is: RolloutIs
    """The importance weights that the numbers `rollout_corr/rollout_is_*` describe."""
    differing: list[list[str]]
    """Pairs of keys of payloads that should hold the same rows and give other numbers; the second
    of each counts."""


class Neighbour(Model):
    """A step beside another one in its run."""

    step: Step
    attempt: Attempt


class Unmeasured(Model):
    """Why a step, or a slice of it, has no numbers: the problem of `/steps/{step}/metrics`."""

    wrong: str
    """What is missing."""
    expected: str
    """What the numbers need; empty where it is not known."""
    advice: str
    """The advice, with the paths to look at; empty where there is none."""


class OneStep(StepHeading):
    """A step: its neighbours, and its numbers or why it has none."""

    earlier: Neighbour | None
    """The step before it that was reported, with or without numbers; null: there is none."""
    later: Neighbour | None
    """The step after it that was reported, with or without numbers; null: there is none."""
    repeats: list[int]
    """Numbers of the earlier attempts that have this step, the newest first."""
    numbers: Metrics | None
    """The answer of `/steps/{step}/metrics`; null: it has no numbers (yet)."""
    unmeasured: Unmeasured | None
    """Why it has no numbers; null: it has some."""


class CellRow(Model):
    """The mismatch of some tokens: d = p - q in nats, of log-probs p (trainer), q (rollout)."""

    tokens: int
    """Number of tokens with both values finite."""
    masked_tokens: int
    """Number of tokens under the mask."""
    abs_diff_mean: Number
    """Mean of |d| in nats."""
    abs_diff_max: Number
    """Maximum of |d| in nats."""
    abs_diff_sum: Number
    """Sum of |d| in nats."""
    diff_sum: Number
    """Sum of d in nats."""
    probs_diff_mean: Number
    """Mean of |e^p - e^q|, a difference of probabilities, 0 to 1."""
    probs_diff_max: Number
    """Maximum of |e^p - e^q|, a difference of probabilities, 0 to 1."""
    kl: Number
    """Mean of q - p in nats (k1)."""
    k3_kl: Number
    """Mean of expm1(d) - d in nats."""
    pearson: Number
    """Pearson's correlation of e^p and e^q, -1 to 1."""
    mult_prob_error: Number
    """Mean of e^|d|, a ratio of probabilities, from 1."""
    ratio_mean: Number
    """Mean of e^d, a ratio of probabilities, with d clamped to +-20 nats."""
    calibration_z: Number
    """(ratio_mean - 1) as a number of its standard errors."""
    over_0_1: int = Field(alias="over_0.1")
    """Number of tokens with |d| over 0.1 nats."""
    over_0_5: int = Field(alias="over_0.5")
    """Number of tokens with |d| over 0.5 nats."""
    over_1: int
    """Number of tokens with |d| over 1 nat."""
    over_5: int
    """Number of tokens with |d| over 5 nats."""
    nonfinite: int
    """Number of values under the mask that are not finite, of both streams."""
    comparable: Comparable
    cause: Cause
    step_comparable: StepComparable


class SliceRow(CellRow):
    """A round, a turn or a staleness, depending on `by`."""

    round: int = ABSENT
    """Index of the round, a mask segment, from 0."""
    turn: int = ABSENT
    """Number of the true turn, as given by the caller in `turn_ids`."""
    staleness: int = ABSENT
    """Trainer version - the tokens' own version, in policy versions."""


class Rounds(Numbers, Page[SliceRow]):
    """The mismatch by round, turn or staleness."""

    by: Literal["round", "turn", "staleness"]
    """Property that separates the rows."""
    turns: int = ABSENT
    """How many true turns the tokens name, where `turn_ids` are recorded."""
    whole: CellRow
    """The same numbers of all tokens."""


class RankRow(CellRow, Layout):
    """A rank's own numbers, and where it ran."""

    stage: Stage
    role: Role
    rank: Rank
    parts: int
    """Number of parts that it handed over."""
    parts_counted: int
    """Number of them that count in the step's numbers; 0 where a replica counts instead."""


class Ranks(Numbers, Page[RankRow]):
    """The mismatch by rank."""


class TokenRow(Model):
    """One token."""

    kind: Literal["worst", "nonfinite"]
    """`worst`: one of the largest |p - q|; `nonfinite`: p or q is not finite."""
    abs_diff: float | None
    """|p - q| in nats; null where one is not finite."""
    p: Number
    """The trainer's log-prob in nats."""
    q: Number
    """The rollout's log-prob in nats."""
    round: int
    """Index of its round, from 0."""
    turn: int | None
    """Number of its true turn, as given in `turn_ids`; null: the caller gave no turns."""
    token_id: int | None
    """Its id in the tokenizer's vocabulary; null: no responses were handed over."""
    text: str | None
    """Its text, spaces included; null: see `texts_reason`."""
    sample_uid: str | None
    """Its sample: group_id + sample_index; null: the payload names no samples."""
    row: int
    """Index of its row in the payload, from 0."""
    position: int
    """Index among the row's tokens, from 0, or the value that `positions` gives."""
    role: Role | None
    """Role of the rank that handed it over; null: its process is not known."""
    rank: Rank | None
    """The rank that handed it over, from 0; null: its process is not known."""


class Tokens(Numbers, Page[TokenRow]):
    """The worst tokens, then those that are not finite."""

    texts_reason: str | None
    """Why the tokens have no texts; null: they have."""
