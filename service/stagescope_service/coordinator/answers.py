"""The coordinator's replies to ranks."""

from __future__ import annotations

from typing import Annotated, TypedDict

from pydantic import Field
from typing_extensions import NotRequired

from stagescope_service.core.hangs.stack_requests import RankRequest
from stagescope_service.fields import Row, Wall, described_by
from stagescope_wire.plan import SentPlan


class RankPlan(Row):
    """The plan as a rank receives it."""

    revision: int
    """Revision of the plan."""
    captures: list[dict[str, object]]
    """The captures that concern the run, with `phase`, `agreement` (its number) and `steps`."""
    keep: NotRequired[
        Annotated[object, Field(description="The keep policy of the run, from the settings' file.")]
    ]


class RecordedBatch(Row):
    """The result of a batch of events, after its commit."""

    coordinator: str
    """Its incarnation; ranks offer payloads without a receipt again to another one."""
    wall: Wall
    received: int
    """Number of events that were recorded."""
    refused: dict[int, str]
    """seq -> why that event was refused; it need not be sent again."""
    attempt_key: NotRequired[str]
    """Key of the process's attempt, if the process gave none."""
    refused_in_part: NotRequired[dict[int, str]]
    """seq -> the part of an event that was refused; the rest was recorded."""
    receipts: dict[int, str]
    """seq -> the state of its payload: `ingested`, `refused`, `lost` or `dropped`."""
    revision: int
    """Revision of the active plan."""
    plan: NotRequired[Annotated[SentPlan, described_by(RankPlan)]]
    """The plan, if another revision is active at the sender."""
    pause: NotRequired[float]
    """Seconds to wait before the next batch: the service is behind."""


class BatchAnswer(RecordedBatch):
    """Reply to a batch of events; the probe reads it."""

    relay: NotRequired[bool]
    """Present if ranks must call through the relay of their node."""


class News(Row):
    """Changes for a process."""

    coordinator: str
    """Its incarnation."""
    wall: Wall
    revision: int
    """Revision of the active plan."""
    plan: Annotated[SentPlan, described_by(RankPlan)] | None
    """Null: it has not changed."""
    receipts: dict[int, str]
    """seq -> the state of the payload, for the requested ones."""
    requests: list[RankRequest]
    """Requests that the process must answer."""
    poll_seconds: float
    """Seconds after which a poll ends."""
    page: NotRequired[str]
    """Address at which people open the page, in the answer to a poll with `wait` 0. Over HTTP only
    if the setting `public_url` names one: else it is the address of this request."""
    attempt_key: NotRequired[str]
    """Key of the process's attempt, if the process gave none."""


class PollAnswer(News):
    """Reply to a poll; the probe reads it."""

    relay: NotRequired[bool]
    """Present if ranks must call through the relay of their node."""


class NotReadyAnswer(TypedDict):
    """Reply that tells the caller to retry."""

    coordinator: str
    not_ready: str
    """Why."""
    pause: NotRequired[float]


class ErrorAnswer(TypedDict):
    """Reply to a relayed call that failed: its rank gets it as an error."""

    error: str
