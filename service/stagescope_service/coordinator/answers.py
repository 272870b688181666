"""The coordinator's replies: to ranks, and to commands that people give through the API."""

from __future__ import annotations

from typing import Annotated, TypedDict

from pydantic import Field
from typing_extensions import NotRequired

from stagescope_service.core.hangs.stack_requests import RankRequest
from stagescope_service.fields import Attempt, Row, Run, Step, Wall, described_by, one_of
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


class Deleted(Row):
    """What a run took, and how far its deletion is."""

    run: Run
    deleted: bool
    """Whether it is gone; false: nothing is deleted (a dry run), or the deletion goes on."""
    attempts: int
    """Number of its attempts."""
    steps: int
    """Number of its steps."""
    catalogue_rows: int
    """Number of rows of the catalogue that it took."""
    files: int
    """Number of files that it took on the disks; before its deletion, that the catalogue knows."""
    bytes: int
    """Their size in bytes."""
    previous_catalogue_bytes: int | None
    """Size of the catalogue on disk in bytes before its deletion; null: a database server has it,
    and uses the space again."""
    catalogue_bytes: int | None
    """Size of the catalogue on disk in bytes now; null: a database server has it."""
    left: list[str]
    """What is still on a disk, and why."""
    problem: str | None
    """Why the deletion has to wait; it is tried again. Null: it does not."""


class WebhookTest(Row):
    """The result of a test message to a rule's webhook."""

    rule: str
    """Name of the rule."""
    host: str
    """Host of the webhook."""
    format: Annotated[str, one_of("json", "slack", "feishu", "dingtalk", "wecom")]
    """Format of the message."""
    delivered: bool
    """Whether the other side accepted it."""
    answer: Annotated[str, Field(examples=["200, code 0: success", "404 no_service"])]
    """The other side's answer; empty: none."""
    reason: str
    """Why the message did not arrive; empty: it did."""
    run: Run | None
    """Run of the firing that the message tells; null: it tells a made-up one, since the rule has
    not fired yet."""
    attempt: Attempt | None
    """Its attempt; null: a made-up firing."""
    step: Step | None
    """Its step; null: a made-up firing."""
    link: str | None
    """The link in the message: to the step's page, or to the page; null: the address of the page
    is unknown."""


class Drained(Row):
    """Whether everything that was announced is read."""

    run: Run | None
    """Null: any run."""
    drained: bool
    """Whether no payload is pending and, with an attempt key, its attempts are known and no rank is
    missing."""
    pending: int
    """Number of payloads that are still to be read."""
    known: bool
    """Whether the run, or an attempt of the key, ever reported anything."""
    missing: list[Annotated[str, Field(examples=["actor rank 3"])]]
    """Ranks of these attempts that never reported, or did not finish."""
    lost: NotRequired[list[Annotated[str, Field(examples=["actor rank 3: payloads 2"])]]]
    """Ranks with events or payloads that were dropped, refused or lost, and how many."""


class LoadStatus(Row):
    """How the coordinator keeps up with events."""

    waiting_events: int
    """Number of events that were received and not committed yet."""
    pushed_back: int
    """Number of batches, since the coordinator's start, that senders must send again because the
    queue was full."""
    lag_seconds: float | None
    """Mean age, in seconds, of the newest event of each batch on arrival, over the last 5 seconds;
    null: none arrived in them."""
    pause_seconds: float
    """Seconds between batches that senders are requested to leave; 0 where the coordinator keeps
    up."""
