"""Answers about one step: metrics, rounds, ranks, tokens, stages, hangs, scalars, dumps, files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stagescope_service.api.models.common import (
    ABSENT,
    AttemptHeading,
    Complete,
    DumpRow,
    GapText,
    Layout,
    Missing,
    Model,
    NodeId,
    Number,
    Page,
    Part,
    Rank,
    Role,
    RoleRank,
    Stage,
    Step,
    StepHeading,
    Wall,
)
from stagescope_service.api.models.runs import FindingRow


# --- numbers ------------------------------------------------------------------------------
class Coverage(Model):
    """What the numbers cover: tokens + all of tokens_left_out = tokens_sent, or a finding says."""

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
    """Tokens under the mask in the payloads of the stage; null: an earlier release formed it."""
    tokens_left_out: dict[str, int]
    """Reason -> tokens."""
    tokens_unaccounted: int | None
    """What the sum lacks; null: an earlier release formed it."""
    sequences: int
    empty_rows: int
    """Rows without a model token; they are left out of means over sequences."""
    parts_counted: int
    parts_left_out: dict[str, int]
    """Reason -> parts."""
    duplicates_left_out: int
    """Tokens that came twice, and count once."""
    parts_to_restate: int
    """Parts that are to be read anew, since their rows were told apart later."""
    fragmented_sequences: int
    """Sequences of which it is not known in which order their fragments stand."""


class CheckRow(Model):
    """A question that was asked before the numbers are trusted, and found something."""

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
    """What every answer about a step's numbers says beside them."""

    complete: Complete
    missing: list[Missing]
    """Who has not ended a stage of the step."""
    gap: GapText
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
    """What is known of a log-prob series; the unknown is absent."""

    dtypes: list[str]
    """In which it arrived."""
    producer: str = ABSENT
    """Who computed it: process, engine or stage."""
    engine: str = ABSENT
    engine_version: str = ABSENT
    dtype: str = ABSENT
    """As its producer says it."""
    quantisation: str = ABSENT
    processed: bool = ABSENT
    """Whether they are of the processed distribution (temperature, top-k, top-p)."""
    temperature: float = ABSENT
    top_p: float = ABSENT
    top_k: int = ABSENT
    alignment: str = ABSENT
    routing: str = ABSENT
    extra: dict[str, Any] = ABSENT


class RolloutIs(Model):
    """Whose importance weights `rollout_corr/rollout_is_*` describe."""

    rollout_is: str | None
    """What the run says of it; null: nothing."""
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
    """Payloads that say they hold the same rows, and do not."""


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
    """A round, a turn or a staleness; it has the field that was asked for by `by`."""

    round: int = ABSENT
    """A mask segment, from 0."""
    turn: int = ABSENT
    """As the caller says it."""
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
    """How many of them count in the step's numbers; 0 where a replica does in its place."""


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
    """Null: the caller said no turns."""
    token_id: int | None
    """Null: no responses were handed over."""
    sample_uid: str | None
    row: int
    """Of the payload."""
    position: int
    """Of the row's tokens, from 0, or as `positions` said."""
    role: Role | None
    rank: Rank | None


class Tokens(Numbers, Page[TokenRow]):
    """The worst tokens, then those that are not finite."""


# --- who is where -------------------------------------------------------------------------
class StageRow(Model):
    """One part of a stage on one rank."""

    stage: Stage
    role: Role
    rank: Rank
    part: Part
    status: Annotated[str, Field(examples=["open", "ok", "failed", "unfinished"])]
    seconds: float | None
    """Monotonic seconds of the process; null while it is open."""
    begin_wall: float | None
    """Unix seconds, on the service's clock where the offset is known."""
    end_wall: float | None
    """Unix seconds, as `begin_wall`."""
    open_seconds: float | None
    """How long it has been open; null: it is not."""
    device_seconds: float | None
    """By the device's own events, where it was asked for."""
    clock_error: float | None
    """Seconds by which `begin_wall` and `end_wall` may be wrong."""
    policy_version: int | None
    error_type: str | None
    error_message: str | None
    incarnation: str
    """The process."""
    revision: int | None
    """Of the plan that the rank had applied."""
    superseded: bool
    """Whether a newer incarnation or report replaced it."""


class AbsentStage(Model):
    """A rank that is expected in a stage and has not begun it."""

    stage: Stage
    role: Role
    rank: Rank
    part: None
    status: Literal["not begun"]
    seconds: None
    begin_wall: None
    end_wall: None
    waited_since: float | None
    """Unix seconds: since the first rank began the stage; null: nobody did."""
    waited_seconds: float | None


class Stages(StepHeading, Page[StageRow | AbsentStage]):
    """Who is in which stage."""

    complete: Complete
    missing: list[Missing]
    gap: GapText
    expected: dict[str, dict[str, list[int]]]
    """role -> stage -> ranks."""
    wall: Wall


class ScalarRow(Model):
    """One number that a rank handed over."""

    name: Annotated[str, Field(examples=["loss"])]
    value: Number | None
    stage: Stage | None
    """Null: of the step."""
    role: Role
    rank: Rank
    part: Part
    wall: float | None
    """Unix seconds of the rank's clock."""


class Scalars(StepHeading, Page[ScalarRow]):
    """Numbers that ranks handed over."""


class Dumps(StepHeading, Page[DumpRow]):
    """msprobe's dumps of a step."""


class StuckRow(Model):
    """A rank that holds up the others of its role."""

    step: Step
    stage: Annotated[str, Field(examples=["actor_update"])]
    """Empty where it is in none."""
    role: Role
    rank: Rank
    part: Part
    status: Annotated[str, Field(examples=["open", "not begun"])]
    process: Annotated[str, Field(examples=["live", "silent", "gone"])]
    seconds: float
    """How long it has been quiet."""
    limit_seconds: float
    """After how long it counts as stuck."""
    usual_seconds: float | None
    """How long its stage takes by its role's own past; null: that is not known."""
    history_steps: int
    """On how many earlier steps that rests."""
    ranks: int
    """Of its role."""
    ranks_begun: int
    """That began this part."""
    ranks_ended: int
    """That ended it."""
    whole_role: bool
    """Whether all of them stand in the same part."""
    since_wall: Wall
    host: str | None
    pid: int | None
    node_id: NodeId | None


class Stuck(StepHeading, Page[StuckRow]):
    """The ranks that hold up the others."""

    closed: bool
    """Whether the step is."""
    wall: Wall
    findings: list[FindingRow]
    """What was found of this step before, also what is over."""


class Thread(Model):
    """The stack of a thread."""

    name: str | None
    ident: int | None
    is_training: bool | None
    """Whether it is, or was last, inside a stage."""
    stack: str | None
    """The innermost frame last."""


class StackRow(Model):
    """The stacks of one process."""

    part: Part
    step: Step | None
    stage: Stage | None
    role: Role | None
    rank: Rank | None
    state: Literal["asked", "answered", "not answered"]
    source: Literal["probe", "watchdog"] | None
    reason: str | None
    """Why they were taken."""
    request_id: str
    wall: float | None
    """Unix seconds: when they were asked for."""
    answered_wall: float | None
    """Unix seconds."""
    truncated: bool | None
    """Whether some of it was left out."""
    threads: list[Thread] | None
    """Null: it has not answered."""
    incarnation: str
    """The process."""


class StepStacks(StepHeading, Page[StackRow]):
    """The stacks that were taken in a step, the newest first."""


class Stacks(AttemptHeading, Page[StackRow]):
    """The stacks that were taken in an attempt, the newest first."""


class NoStack(RoleRank):
    """A rank whose stacks did not come."""

    role: Role | None  # type: ignore[assignment]
    """Null: nobody has heard of such a rank."""
    reason: str


class TakenStacks(AttemptHeading):
    """The stacks of those who answered in time."""

    request_id: str
    rows: list[StackRow]
    not_answered: list[NoStack]


# --- kept files ---------------------------------------------------------------------------
class KeptFile(Model):
    """A file that is kept of a step."""

    stage: Stage | None
    role: Role | None
    rank: Rank | None
    part: Part
    sections: Annotated[list[str], Field(examples=[["trajectories", "log_probs"]])]
    """What it holds."""
    state: Literal["kept", "deleted", "missing", "unreachable", "pinned"]
    bytes: int | None
    checksum: str | None
    tensors: dict[str, list[Any]] | None
    """Name -> [dtype, shape, rows of a packed one]."""
    policy_version: int | None
    node_id: NodeId | None
    path: str
    wall: float | None
    """Unix seconds: when it was written."""
    deleted_wall: float | None
    """Unix seconds: when retention let it go."""


class Kept(StepHeading, Page[KeptFile]):
    """The files that are kept of a step."""

    pinned: bool
    files: int
    """Of what is not deleted, on all pages."""
    bytes: int
    """Of what is not deleted, on all pages."""


class Pin(StepHeading):
    """What a pin holds."""

    pinned: bool
    payloads: int
    """Payloads and files that it holds now; what comes later is held, too."""
    bytes: int
    gone: int
    """Payloads that had left the ring before."""
    reasons: list[str]
    """Why something is not pinned."""


class Unpin(StepHeading):
    """What became of taking a pin back."""

    unpinned: bool
    reason: str | None
    """Why not."""
