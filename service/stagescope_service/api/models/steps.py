"""Answers about one step: stages by rank, stuck ranks, scalars, dumps, kept files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.api.models.common import (
    AttemptHeading,
    BegunAgainIn,
    Complete,
    DumpRow,
    GapText,
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
    """By the device's own events, where they are enabled."""
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
    """Unix seconds: since the first rank began the stage; null: no rank did."""
    waited_seconds: float | None


class Stages(StepHeading, Page[StageRow | AbsentStage]):
    """The stages of a step by rank."""

    complete: Complete
    missing: list[Missing]
    gap: GapText
    begun_again: BegunAgainIn
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

    begun_again: BegunAgainIn


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
    """Whether all of them are in the same part."""
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
    """Why they were requested."""
    request_id: str
    wall: float | None
    """Unix seconds of the request."""
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
    """A rank that did not answer."""

    role: Role | None  # type: ignore[assignment]
    """Null: there is no such rank."""
    reason: str


class TakenStacks(AttemptHeading):
    """The stacks of the ranks that answered in time."""

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
    tensors: dict[str, list[object]] | None
    """Name -> [dtype, shape, rows of a packed one]."""
    policy_version: int | None
    node_id: NodeId | None
    path: str
    wall: float | None
    """Unix seconds: when it was written."""
    deleted_wall: float | None
    """Unix seconds: when retention deleted it."""


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
    """Payloads and files that it holds now; it also holds later ones."""
    bytes: int
    gone: int
    """Payloads that had left the ring before."""
    reasons: list[str]
    """Why something is not pinned."""


class Unpin(StepHeading):
    """The result of removing a pin."""

    unpinned: bool
    reason: str | None
    """Why not."""
