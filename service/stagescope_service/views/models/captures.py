"""Answers about captures: requests, their agreement among ranks, and their results."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stagescope_service.core.captures.agreement import Agreement
from stagescope_service.fields import Attempt, RoleRank, Row, Run, Step, one_of
from stagescope_service.store.catalogue import DumpCost
from stagescope_service.store.tables.service import CaptureColumns, CaptureState
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.common import AttemptHeading, DumpRow, Model, Page
from stagescope_wire.captures import CAPTURE_FIELDS


def _capture_field(name: str) -> Any:  # as pydantic.Field
    return Field(description=CAPTURE_FIELDS[name])


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


class RequestedCapture(RequestedFields):
    """A requested capture, and its agreement among ranks."""

    agreement: Agreement
    """The agreement of ranks on it."""


class PlannedCapture(RequestedCapture):
    """A capture of the plan."""

    state: CaptureState | None
    """As in `GET /captures/{capture_id}`."""


class Plan(Model):
    """The active captures."""

    revision: int
    """Revision of the plan: each change makes a higher one."""
    captures: list[PlannedCapture]
    """The active captures."""


class NewCapture(RequestedCapture):
    """A capture that was requested."""

    notes: list[str]
    """Hints for the user, such as which ranks have not acknowledged."""
    warnings: list[str]
    """Those of `notes` about a run, stage or tensor that nothing has yet: it may be misspelt."""


class CaptureRow(CaptureColumns):
    """A capture as the catalogue holds it."""

    attempt: Attempt | None
    """Number of the attempt whose ranks agreed on it; null: not agreed on yet, or no run."""
    spec: RequestedCapture
    """The request, and the agreement on it."""


class Captures(Model, Page[CaptureRow]):
    """Captures, newest first."""


class CaptureCost(DumpCost):
    """The largest cost of one rank in one step, over the newest complete dumps of this kind."""

    attempt: Attempt


class CaptureCosts(AttemptHeading, Page[CaptureCost]):
    """What earlier dumps of a run cost; no rows: it has none."""


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
    """State of its dumps: the worst of them, or `no report` where some are missing. A rank that was
    left out is `not asked`. One that does the stage only outside of steps is `without a step`. For
    tensors that the service keeps: `not kept` (they came before the request was active, or there
    was no room). Otherwise it is the state of a payload that did not arrive, such as `lost`, or of
    a stage that the rank did not end."""


class CapturedStep(Row):
    """The result of one step of a capture."""

    step: Step
    attempt: int | None
    """Number of the attempt; null: not known."""
    state: Annotated[str, one_of("waiting", "partial", "complete", "empty")]
    """`empty`: the step is over, and no rank did these stages in it, or recorded what was to be
    kept."""
    collected: int
    """Number of ranks that have collected it, or whose tensors are kept."""
    waiting: list[RoleRank]
    """Ranks that may still collect it."""
    gaps: list[RankGap]
    """Ranks that did not collect it."""
    gap: str | None
    """Why it is not known any more what was kept of it; null: it is."""
    unrecorded: list[str]
    """Names to keep that no rank recorded, where others were recorded."""


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
    state: CaptureState
    reason: str | None
    """Why it ended."""
    order: RequestedFields
    """What was requested."""
    agreement: Agreement
    """The agreement of ranks on it."""
    created_wall: float
    """Unix seconds."""
    removed_wall: float | None
    """Unix seconds: when it was withdrawn or ended; null: it is active."""
    removed_by: str | None
    """Who withdrew it; `service` where it ended; null: it is active."""
    ranks: list[AskedRank]
    """The requested ranks."""
    unmatched_ranks: list[int]
    """Requested ranks that no requested role has: nothing is collected from them."""
    steps: list[CapturedStep]
    """The result of each step, by attempt and step."""
    dumps: list[CaptureDump]
    """Every dump that it made."""
    unread_dumps: int
    """Number of dumps whose operators are not read yet; wait for 0 before you ask for them."""
