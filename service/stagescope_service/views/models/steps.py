"""Answers about one step: stages by rank, stuck ranks, scalars, dumps, kept files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.fields import NodeId, Number, Part, Rank, Role, Row, Stage, Step, Wall
from stagescope_service.store.tables import Thread
from stagescope_service.views.models.common import (
    AttemptHeading,
    BegunAgainIn,
    Complete,
    DumpRow,
    GapText,
    Missing,
    Model,
    Page,
    RowsGap,
    StepHeading,
)
from stagescope_service.views.models.findings import FindingRow
from stagescope_wire.collectives.rows import BlockedCollective


class StageRow(Row):
    """One part of a stage on one rank."""

    stage: Stage
    role: Role
    rank: Rank
    part: Part
    status: Annotated[str, Field(examples=["open", "ok", "failed", "unfinished"])]
    """`open`, `ok`, `failed` or `unfinished` (it began, and its process is gone)."""
    seconds: float | None
    """Monotonic seconds of the process; null while it is open."""
    begin_wall: float | None
    """Unix seconds, on the service's clock where the offset is known."""
    end_wall: float | None
    """Unix seconds, as `begin_wall`."""
    open_seconds: float | None
    """Seconds that it has been open, by the service's clock; null: it is not."""
    device_seconds: float | None
    """Seconds by the device's own events, where they are enabled; null: they are not."""
    clock_error: float | None
    """Largest error of `begin_wall` and `end_wall` in seconds."""
    policy_version: int | None
    """Version of the policy that it worked with; null: not reported."""
    error_type: str | None
    """Class of the exception that ended it; null: none did."""
    error_message: str | None
    """Text of that exception."""
    incarnation: str
    """The process: random, another after each start."""
    revision: int | None
    """Order of repeated reports of one part by one process; the highest one answers. It is the
    sequence number of its begin, or Unix microseconds for raw calls."""
    superseded: bool
    """Whether a newer incarnation or report replaced it."""


class AbsentStage(Model):
    """A rank that is expected in a stage and has not begun it."""

    stage: Stage
    role: Role
    rank: Rank
    part: None
    """Always null: no part was begun."""
    status: Literal["not begun"]
    """Says that the rank has not begun the stage."""
    seconds: None
    """Always null."""
    begin_wall: None
    """Always null."""
    end_wall: None
    """Always null."""
    waited_since: float | None
    """Unix seconds: since the first rank began the stage; null: no rank did."""
    waited_seconds: float | None
    """Seconds since `waited_since`; null: no rank began the stage."""


class Stages(StepHeading, Page[StageRow | AbsentStage]):
    """The stages of a step by rank."""

    complete: Complete
    missing: list[Missing]
    """Ranks that have not ended a stage in which they are expected."""
    gap: GapText
    begun_again: BegunAgainIn
    expected: dict[str, dict[str, list[int]]]
    """role -> stage -> ranks."""
    wall: Wall


class ScalarRow(Row):
    """One number that a rank handed over."""

    name: Annotated[str, Field(examples=["loss"])]
    """Name of the scalar, as the rank logged it."""
    value: Number | None
    """The value, in the unit in which the rank logged it."""
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
    gap: RowsGap


class Dumps(StepHeading, Page[DumpRow]):
    """msprobe's dumps of a step."""


class StuckRow(Row):
    """A rank that holds up the others of its role."""

    step: Step | None
    """The trainer's step; null: it was in none by its last report."""
    stage: Annotated[str, Field(examples=["actor_update"])]
    """The stage that holds it up; empty where it is in none."""
    role: Role
    rank: Rank
    part: Part
    status: Annotated[str, Field(examples=["not ended", "not begun"])]
    """Missing progress in the stage, as far as it reported: `not begun` or `not ended`. The value
    `between stages` means that its process does not respond and was last in no stage."""
    process: Annotated[str, Field(examples=["live", "silent", "gone", "unheard"])]
    """`live`: it polls; `silent`: it does not, and its lease holds; `gone`: its lease ran out;
    `unheard`: it never reported."""
    seconds: float
    """Seconds that it has been quiet, or awaited where it never reported."""
    limit_seconds: float
    """Seconds of quiet after which it counts as stuck."""
    usual_seconds: float | None
    """Median seconds of its role's earlier steps: that the stage took, or that its last rank began
    it after the first; null: not known."""
    history_steps: int
    """Number of earlier steps on which that rests."""
    ranks: int
    """Number of ranks of its role."""
    ranks_begun: int
    """Number of ranks that began this part."""
    ranks_ended: int
    """Number of ranks that ended this part."""
    whole_role: bool
    """Whether all of them are in the same part."""
    since_wall: Wall
    host: str | None
    """Name of its host; null: unknown."""
    pid: int | None
    """Process id on its host; null: unknown."""
    node_id: NodeId | None
    """Ray's id of its node; null: unknown."""


class Stuck(AttemptHeading, Page[StuckRow]):
    """The ranks that hold up the others."""

    step: Step | None
    """The requested step; null: no rank of the newest attempt has begun one yet."""
    superseded_by: int | None
    """Number of the newest attempt that repeats this step; null: none does."""
    closed: bool
    """Whether the step is closed."""
    wall: Wall
    note: str | None
    """Why no rank can be stuck: the step is closed, no process is left, or no step has begun. Or
    why no collective is named. Null: nothing to say."""
    collectives: list[BlockedCollective]
    """The collectives that cannot finish, the causes first; empty: none, or none was recorded."""
    findings: list[FindingRow]
    """Earlier findings about this step, also those that are over."""


class StackRow(Row):
    """The stacks of one process."""

    part: Part
    step: Step | None
    """The trainer's step of the stage that its training thread was in, else the highest that it had
    begun; null: none."""
    stage: Stage | None
    """The stage that its training thread was in; null: none, or it has not answered."""
    role: Role | None
    """Role of the process."""
    rank: Rank | None
    """Rank of the process in its role, from 0."""
    state: Literal["asked", "answered", "not answered"]
    """`asked`: its answer may come; `not answered`: its deadline has passed."""
    source: Literal["probe", "watchdog"] | None
    """`probe`: the process answered; `watchdog`: its watchdog wrote them, because no thread could
    run Python."""
    reason: str | None
    """Why they were requested."""
    request_id: str
    """Id of the request, or of the watchdog's file."""
    wall: float | None
    """Unix seconds of the request, or of the watchdog's file."""
    answered_wall: float | None
    """Unix seconds: when it answered; null: it has not."""
    truncated: bool | None
    """Whether some of it was left out."""
    threads: list[Thread] | None
    """Null: it has not answered."""
    incarnation: str
    """The process: random, another after each start."""


class StepStacks(StepHeading, Page[StackRow]):
    """The stacks that were taken in a step, the newest first."""


class Stacks(AttemptHeading, Page[StackRow]):
    """The stacks that were taken in an attempt, the newest first."""


class NoStack(Row):
    """A rank that did not answer."""

    role: Role | None
    """Null: there is no such rank."""
    rank: Rank
    reason: str
    """Why it did not answer."""


class TakenStacks(AttemptHeading):
    """The stacks of the ranks that answered in time."""

    request_id: str
    """Id of the request, for `GET /stacks`."""
    rows: list[StackRow]
    """The stacks of the processes that answered in time, by role and rank."""
    not_answered: list[NoStack]
    """The requested ranks that did not answer, or cannot."""


# --- kept files ---------------------------------------------------------------------------
class KeptFile(Row):
    """A file that is kept of a step."""

    stage: Stage | None
    """The stage that handed its content over; null: none."""
    role: Role | None
    """Role of the rank that handed it over; null: unknown."""
    rank: Rank | None
    """The rank that handed it over, from 0; null: unknown."""
    part: Part
    sections: Annotated[list[str], Field(examples=[["trajectories", "log_probs"]])]
    """What it holds."""
    state: Literal["kept", "deleted", "missing", "unreachable", "pinned"]
    """`deleted` by retention; `missing`: removed, but not by the service; `unreachable`: its node
    does not answer; `pinned`: a payload that the pin holds in the ring."""
    bytes: int | None
    """Size of the file in bytes."""
    checksum: str | None
    """SHA-256 of the file; null: none was computed."""
    tensors: dict[str, list[object]] | None
    """Name -> [dtype, shape, number of rows of a packed one, else null]."""
    policy_version: int | None
    """Version of the policy that made its content; null: not reported."""
    node_id: NodeId | None
    """Ray's id of the node on which it lies; null: unknown."""
    path: str
    """Path of the file on that node."""
    wall: float | None
    """Unix seconds: when it was written."""
    deleted_wall: float | None
    """Unix seconds: when retention deleted it."""


class Kept(StepHeading, Page[KeptFile]):
    """The files that are kept of a step."""

    pinned: bool
    """Whether the step is pinned."""
    files: int
    """Number of files that are not deleted, on all pages."""
    bytes: int
    """Size in bytes of the files that are not deleted, on all pages."""
    gap: RowsGap


class Pin(StepHeading):
    """The payloads and files that a pin holds."""

    pinned: bool
    """Whether the step is pinned now."""
    payloads: int
    """Number of payloads and files that it holds now; it also holds later ones."""
    bytes: int
    """Size in bytes of these payloads and files."""
    gone: int
    """Number of payloads that had left the ring before."""
    reasons: list[str]
    """Why something is not pinned."""


class Unpin(StepHeading):
    """The result of removing a pin."""

    unpinned: bool
    """Whether the pin was removed."""
    reason: str | None
    """Why not."""
