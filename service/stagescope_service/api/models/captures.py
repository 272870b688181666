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
    Json,
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


class Order(Model):
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
    source: Annotated[str, Field(examples=["http"])]
    by: str
    """Who requested it: header `X-Stagescope-User`, which token, from where; or which trigger."""
    created: float
    """Unix seconds."""


class Gap(RoleRank):
    """A rank that learned late, or failed."""

    step: Step | None
    stage: Stage | None
    state: str


class Estimate(Model):
    """A rank's estimate of a capture's cost; unknown values are absent or null."""

    role: Role | None
    rank: Rank | None
    step: Step | None
    stage: Stage | None
    node_id: str | None
    error: str | None
    """Why it cannot estimate."""
    bytes: int | None = ABSENT
    seconds: float | None = ABSENT
    basis: str = ABSENT
    """`measured` (earlier dumps), `model` (its size) or `unknown`."""
    tokens: int | None = ABSENT
    assumed: bool = ABSENT
    """Whether the number of tokens is assumed, because the rank did not report it."""
    free_bytes: int | None = ABSENT
    """On the rank's disk."""
    reserve_bytes: int | None = ABSENT
    """Kept free on it."""
    collective_timeout: float | None = ABSENT
    """Seconds after which the ranks that wait give up; null: not known."""


class Agreement(Model):
    """The agreement of ranks on a capture."""

    phase: State
    number: int
    """Counts the requests: a step that some rank missed may be agreed again."""
    revision: int
    """A rank that acknowledges this revision of the plan knows the capture."""
    attempt_id: int | None
    """The catalogue's key of the attempt whose ranks were requested."""
    asked_wall: float
    """Unix seconds."""
    agreed_wall: float | None
    """Unix seconds."""
    start: Step | None
    """The step on which it starts; null: not fixed."""
    round_trip: float | None
    """Seconds from the request to the last acknowledgement."""
    step_seconds: float | None
    """How long a step takes."""
    steps: Json
    """The steps that are captured: numbers, or `{every, start, count}`; null: not fixed."""
    missed_steps: list[int]
    """Requested steps that had begun already."""
    members: list[RoleRank]
    """The requested ranks."""
    without: list[RoleRank]
    """Ranks that had not acknowledged when it was agreed on or given up."""
    missed: list[Gap]
    """Ranks that learned late, or failed, since."""
    again_left: int
    """How often it may be agreed again."""
    reason: str | None
    """Why it ended."""
    estimates: list[Estimate]


class OrderedCapture(Order):
    """A requested capture, and its agreement among ranks."""

    agreement: Agreement


class PlannedCapture(OrderedCapture):
    """A capture of the plan."""

    state: State | None
    """As of `GET /captures/{capture_id}`."""


class Plan(Model):
    """The captures in force."""

    revision: int
    captures: list[PlannedCapture]


class NewCapture(OrderedCapture):
    """A capture that was requested."""

    notes: list[str]
    """Hints for the user, such as which ranks have not acknowledged."""


class CaptureRow(Model):
    """A capture as the catalogue holds it."""

    capture_id: str
    run: Run | None
    """Null: every run."""
    spec: OrderedCapture
    state: State
    by: str
    created_wall: float
    """Unix seconds."""
    removed_wall: float | None
    """Unix seconds: when it was withdrawn or ended; null: it is in force."""
    removed_by: str | None
    """`service` where it ended."""
    revision: int
    """Of the plan."""


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
    host: str | None
    pid: int | None


class RankGap(RoleRank):
    """A rank that did not collect a step."""

    state: Annotated[str, Field(examples=["missed", "failed", "no report", "not asked"])]


class CapturedStep(Model):
    """The result of one step of a capture."""

    step: Step
    attempt: int | None
    state: Literal["waiting", "partial", "complete", "empty"]
    """`empty`: the step is over, and no rank did these stages in it."""
    collected: int
    """Ranks that have collected it."""
    waiting: list[RoleRank]
    """Ranks that may still."""
    gaps: list[RankGap]


class CaptureDump(DumpRow):
    """A dump of a capture."""

    attempt: int | None
    step: Step


class Capture(Model):
    """The progress of a capture."""

    capture_id: str
    run: Run | None
    """Null: every run."""
    attempt: Attempt | None
    """The run's newest."""
    state: State
    reason: str | None
    """Why it ended."""
    order: Order
    agreement: Agreement
    created_wall: float
    """Unix seconds."""
    removed_wall: float | None
    """Unix seconds."""
    removed_by: str | None
    ranks: list[AskedRank]
    unmatched_ranks: list[int]
    """Requested ranks that no requested role has: nothing is collected from them."""
    steps: list[CapturedStep]
    dumps: list[CaptureDump]
