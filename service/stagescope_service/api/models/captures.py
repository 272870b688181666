"""Answers about captures: requests, their agreement among ranks, and their results."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stagescope.wire.captures import CAPTURE_FIELDS
from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.models.common import (
    ABSENT,
    Attempt,
    DumpRow,
    Model,
    Page,
    Rank,
    Role,
    RoleRank,
    Run,
    Stage,
    Step,
)


def _capture_field(name: str) -> Any:  # as pydantic.Field
    return Field(description=CAPTURE_FIELDS[name])


State = Annotated[
    str,
    Field(
        description="`asked` (not every rank has acknowledged), `agreed`, `done`, `complete`, "
        "`partial`, `empty` (no rank did these stages in its steps), `given up`, `too late`, "
        "`refused` or `withdrawn`.",
        examples=["agreed"],
    ),
]


class RequestedFields(Model):
    """A requested capture, with all fields."""

    run: str | None = _capture_field("run")
    stages: list[str] | Literal["all"] = _capture_field("stages")
    roles: list[str] | None = _capture_field("roles")
    ranks: list[int] | Literal["all"] | dict[str, int] = _capture_field("ranks")
    steps: list[int] | Literal["all"] | dict[str, int | None] = _capture_field("steps")
    config: JsonObject | None = _capture_field("config")
    config_path: str | None = _capture_field("config_path")
    bench: JsonObject | None = _capture_field("bench")
    data_dir: str | None = _capture_field("data_dir")
    keep: list[str] = _capture_field("keep")
    parameters: list[str] = _capture_field("parameters")
    gradients: list[str] = _capture_field("gradients")
    limits: JsonObject | None = _capture_field("limits")
    force: bool = _capture_field("force")
    strict: bool = _capture_field("strict")
    timeout: float = _capture_field("timeout")
    late: Literal["wait", "go_on", "give_up"] = _capture_field("late")
    again: int = _capture_field("again")
    capture_id: str
    """Id of the capture."""
    source: Annotated[str, Field(examples=["http"])]
    """How it was requested: always `http`."""
    by: str
    """Who requested it: header `X-Stagescope-User`, which token, from where; or which trigger."""
    created: float
    """Unix seconds."""


class Gap(RoleRank):
    """A rank that learned late, or failed."""

    step: Step | None
    """The trainer's step; null: not known."""
    stage: Stage | None
    """The stage's name; null: not known."""
    state: str
    """State of its dump: `missed`, `failed` or `truncated`."""


class Estimate(Model):
    """A rank's estimate of a capture's cost; unknown values are absent or null."""

    role: Role | None
    """The role; null: not known."""
    rank: Rank | None
    """The rank in its role, from 0; null: not known."""
    step: Step | None
    """Always null: an estimate is of any one step."""
    stage: Stage | None
    """The stage that the estimate is of; null: not known."""
    node_id: str | None
    """Ray's id of the rank's node; null: unknown."""
    error: str | None
    """Why it cannot estimate."""
    bytes: int | None = ABSENT
    """Size in bytes of the dump of one step; 0 where `basis` is `unknown`."""
    seconds: float | None = ABSENT
    """Seconds that one step takes longer; 0 where `basis` is `unknown`."""
    basis: str = ABSENT
    """`measured` (earlier dumps), `model` (its size) or `unknown`."""
    tokens: int | None = ABSENT
    """Number of tokens in the stage for which it is estimated; null: not needed."""
    assumed: bool = ABSENT
    """Whether the number of tokens is assumed, because the rank did not report it."""
    free_bytes: int | None = ABSENT
    """Free bytes on the rank's disk, without the reserve; null: unknown."""
    reserve_bytes: int | None = ABSENT
    """Bytes that stay free on that disk."""
    collective_timeout: float | None = ABSENT
    """Seconds after which the ranks that wait give up; null: not known."""


class Agreement(Model):
    """The agreement of ranks on a capture."""

    phase: State
    number: int
    """Number of times that it was requested: a step that some rank missed may be agreed again."""
    revision: int
    """A rank that acknowledges this revision of the plan knows the capture."""
    attempt_id: int | None
    """The catalogue's id of the attempt whose ranks were requested; null: not agreed on yet."""
    asked_wall: float
    """Unix seconds of the request."""
    agreed_wall: float | None
    """Unix seconds of the agreement; null: there is none."""
    start: Step | None
    """The trainer's step from which on every rank knows it; null: not fixed."""
    round_trip: float | None
    """Seconds from the request to the last acknowledgement."""
    step_seconds: float | None
    """Median seconds from the begin of a step to that of the next; null: not known."""
    steps: Annotated[
        object,
        Field(
            description="The steps that are captured: their numbers, or `{every, start, count}`; "
            "null: not fixed."
        ),
    ]
    missed_steps: list[int]
    """Requested steps that had begun already, and are not captured."""
    members: list[RoleRank]
    """The requested ranks."""
    without: list[RoleRank]
    """Ranks that had not acknowledged when it was agreed on or given up."""
    missed: list[Gap]
    """Ranks that learned late, or failed, since."""
    again_left: int
    """Number of times that it may still be agreed again."""
    reason: str | None
    """Why it ended."""
    estimates: list[Estimate]
    """What the ranks estimate that it costs, by rank and stage; 64 at most, the largest."""


class RequestedCapture(RequestedFields):
    """A requested capture, and its agreement among ranks."""

    agreement: Agreement
    """The agreement of ranks on it."""


class PlannedCapture(RequestedCapture):
    """A capture of the plan."""

    state: State | None
    """As of `GET /captures/{capture_id}`."""


class Plan(Model):
    """The captures in force."""

    revision: int
    """Revision of the plan: each change makes a higher one."""
    captures: list[PlannedCapture]
    """The captures in force."""


class NewCapture(RequestedCapture):
    """A capture that was requested."""

    notes: list[str]
    """Hints for the user, such as which ranks have not acknowledged."""


class CaptureRow(Model):
    """A capture as the catalogue holds it."""

    capture_id: str
    """Id of the capture."""
    run: Run | None
    """Null: every run."""
    spec: RequestedCapture
    """What was requested, and the agreement on it."""
    state: State
    by: str
    """Who requested it, as in `spec`."""
    created_wall: float
    """Unix seconds."""
    removed_wall: float | None
    """Unix seconds: when it was withdrawn or ended; null: it is in force."""
    removed_by: str | None
    """Who withdrew it; `service` where it ended; null: it is in force."""
    revision: int
    """Revision of the plan from which on ranks know its present state."""


class Captures(Model, Page[CaptureRow]):
    """Captures, newest first."""


class AskedRank(RoleRank):
    """A rank that a capture requests."""

    acknowledged: bool
    """Whether it has applied the capture's latest revision."""
    there: bool
    """Whether its process is alive."""
    joined_later: bool
    """Whether it joined after the capture was agreed on."""
    last_wall: float | None
    """Unix seconds: when it last reported."""
    node: str | None
    """Ray's id of its node, or the name that its process gave; null: unknown."""
    host: str | None
    """Name of its host; null: unknown."""
    pid: int | None
    """Process id on its host; null: unknown."""


class RankGap(RoleRank):
    """A rank that did not collect a step."""

    state: Annotated[str, Field(examples=["missed", "failed", "no report", "not asked"])]
    """State of its dumps: the worst of them, `no report` where some are missing, `not asked` where
    it was left out, `without a step` where it does the stage as work that belongs to no step. Of
    tensors that the service keeps by itself: `not kept` (they came before the request was in force,
    or there was no room), the state of a payload that did not arrive, such as `lost`, or of a stage
    that the rank did not end."""


class CapturedStep(Model):
    """The result of one step of a capture."""

    step: Step
    attempt: int | None
    """Number of the attempt; null: not known."""
    state: Literal["waiting", "partial", "complete", "empty"]
    """`empty`: the step is over, and no rank did these stages in it, or recorded what was to be
    kept."""
    collected: int
    """Number of ranks that have collected it, or of which the tensors are kept."""
    waiting: list[RoleRank]
    """Ranks that may still."""
    gaps: list[RankGap]
    """Ranks that did not collect it."""
    gap: str | None
    """Why it is not known any more what was kept of it; null: it is."""
    unrecorded: list[str]
    """Names to keep of which nobody recorded anything, where others were recorded."""


class CaptureDump(DumpRow):
    """A dump of a capture."""

    attempt: int | None
    """Number of the attempt; null: not known."""
    step: Step


class Capture(Model):
    """The progress of a capture."""

    capture_id: str
    """Id of the capture."""
    run: Run | None
    """Null: every run."""
    attempt: Attempt | None
    """Number of the run's newest attempt; null: it has none."""
    state: State
    reason: str | None
    """Why it ended."""
    order: RequestedFields
    """What was requested."""
    agreement: Agreement
    """The agreement of ranks on it."""
    created_wall: float
    """Unix seconds."""
    removed_wall: float | None
    """Unix seconds: when it was withdrawn or ended; null: it is in force."""
    removed_by: str | None
    """Who withdrew it; `service` where it ended; null: it is in force."""
    ranks: list[AskedRank]
    """The requested ranks."""
    unmatched_ranks: list[int]
    """Requested ranks that no requested role has: nothing is collected from them."""
    steps: list[CapturedStep]
    """The result of each step, by attempt and step."""
    dumps: list[CaptureDump]
    """Every dump that it made."""
