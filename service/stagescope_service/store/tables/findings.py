"""Findings, losses, stacks, and the rules and firings of triggers."""

from __future__ import annotations

from typing import Annotated, TypedDict

from pydantic import Field
from sqlalchemy import Index
from typing_extensions import NotRequired

from stagescope_service.fields import Rank, Role, Row, Run, Stage, Step
from stagescope_service.store.tables.declare import RankWork, partial_index, table
from stagescope_wire.nonfinite import Json


class FindingInBrief(Row):
    """Something wrong that the service found."""

    finding_id: str
    """Id of the finding."""
    step: Step | None
    """The trainer's step; null: it is about none, or about several."""
    stage: Stage | None
    """The stage's name; null: it is about none, or about several."""
    role: Role | None
    """The role; null: it is about none, or about several."""
    rank: Rank | None
    """The rank in its role, from 0; null: it is about none, or about several."""
    kind: Annotated[str, Field(examples=["stage_stuck"])]
    """Name of the kind of problem."""
    severity: Annotated[str, Field(examples=["error", "warning", "info"])]
    """`error`, `warning` or `info`."""
    message: str
    """The problem and its place."""
    evidence: dict[str, Json] | None
    """The evidence, in the form of its kind; non-finite numbers are `nan`, `inf`, `-inf`."""
    first_wall: float
    """Unix seconds: when it was seen first."""
    last_wall: float
    """Unix seconds: when it was seen last."""
    count: int | None
    """Number of times that it was seen; null: once."""
    over_wall: float | None
    """Unix seconds: since when it is over; null: it persists, or it cannot end."""


class FindingColumns(FindingInBrief):
    """A finding without its attempt and its links."""

    run: Run | None
    """The run's name; null: it is about none."""
    advice: str
    """Things to try, and the paths of things to look at."""


class FindingRow(FindingColumns):
    """A row of `findings`."""

    attempt_id: int | None
    see: list[Json] | None
    """Things to look at, a list of `Link.to_json`; null: none, or the advice names them."""


findings = table(
    "findings",
    FindingRow,
    "finding_id",
    # A run may have some in each of its steps. Lists are in the order of `last_wall`: without it
    # in the index of steps, SQLite takes the other one, and reads all findings for those of a step.
    Index(None, "attempt_id", "last_wall"),
    Index(None, "attempt_id", "step", "last_wall"),
    Index(None, "attempt_id", "kind", "last_wall"),
    Index(None, "run", "last_wall"),
    Index(None, "run", "step", "last_wall"),
    Index(None, "run", "kind", "severity", "count"),
)


class LossInBrief(Row):
    """Data that was announced and never arrived, or was dropped."""

    loss_id: str
    """Id of the loss."""
    role: Role | None
    """Role of the rank that lost it; null: unknown."""
    rank: Rank | None
    """The rank that lost it, in its role, from 0; null: unknown."""
    step: Step | None
    """The trainer's step; null: it has none, or it is unknown."""
    stage: Stage | None
    """The stage's name; null: it has none, or it is unknown."""
    kind: Annotated[str, Field(examples=["payload", "event", "stage"])]
    """The lost data: `payload`, `stage`, `dump`, `event` or `scalar`."""
    reason: str | None
    """Why it did not arrive."""
    count: int | None
    """Number of payloads, stages, dumps, events or scalars that were lost; null: one."""
    bytes: int | None
    """Size in bytes of the lost data; null or 0: unknown."""
    wall: float
    """Unix seconds: when the service found it, or, by the rank's clock, when the rank reported
    it."""


class LossColumns(LossInBrief):
    """A loss without its attempt."""

    run: Run | None
    """The run's name; null: unknown."""


class LossRow(LossColumns):
    """A row of `losses`."""

    attempt_id: int | None


losses = table("losses", LossRow, "loss_id", Index(None, "attempt_id", "step"), Index(None, "run"))


class Thread(Row):
    """The stack of a thread."""

    name: str | None
    """Name of the thread, as Python has it; null: unknown."""
    ident: int | None
    """Python's id of the thread; null: unknown."""
    is_training: bool | None
    """Whether it is, or was last, inside a stage."""
    stack: str
    """The innermost frame last."""


class StackRow(RankWork):
    """A row of `stacks`."""

    incarnation: str
    request_id: str
    stage: str | None
    source: str | None
    state: str
    reason: str | None
    by: str | None
    wall: float | None
    deadline_wall: float | None
    answered_wall: float | None
    threads: list[Thread] | None
    truncated: bool | None


stacks = table(
    "stacks",
    StackRow,
    "incarnation request_id",
    Index(None, "attempt_id", "step"),
    Index(None, "request_id"),
    partial_index("ix_stacks_asked", "incarnation", where="state = 'asked'"),
)


class TriggerRulesRow(TypedDict):
    """A row of `trigger_rules`."""

    revision: int
    wall: float | None
    by: str | None
    source: str | None
    digest: str | None
    document: dict[str, Json]
    """With the URLs of webhooks, secrets included: answers show only hosts."""
    since: Json


trigger_rules = table("trigger_rules", TriggerRulesRow, "revision")


class PinnedOf(Row):
    """The result of pinning one step."""

    step: Step
    payloads: int
    """Number of payloads and kept files that the pin holds."""
    bytes: int
    """Size in bytes of the pinned data."""
    gone: int
    """Number of payloads that had left the rings before."""
    reasons: list[str]
    """Why something is not pinned."""


class FiredPins(Row):
    """The results of pins."""

    steps: list[PinnedOf]
    """The pins of each step, without steps that the attempt lacks."""


class FiredCapture(Row):
    """The result of a capture; both fields are absent if it does not apply."""

    capture_id: NotRequired[str]
    """Id of the capture that was requested."""
    refused: NotRequired[str]
    """Why it was not requested."""


class FiredWebhook(Row):
    """The result of a webhook."""

    host: str
    """Host of the webhook."""
    delivered: bool
    """Whether it accepted the message: it answered with a status from 200 to 299 and, if it is a
    chat tool, without an error in the body."""
    reason: str | None
    """Why it was not delivered."""


class FiredActions(Row):
    """The results of a firing's actions; actions outside its rule are absent."""

    pin: NotRequired[FiredPins]
    """The pinned data."""
    capture: NotRequired[FiredCapture]
    """Whether a capture was requested."""
    webhook: NotRequired[FiredWebhook]
    """Whether the webhook was called."""
    cools_since: NotRequired[Annotated[int, Field(examples=[5])]]
    """No action was taken: the rule cools down since its firing at this step."""


class FiringInBrief(Row):
    """A rule that fired at a step."""

    run: Run
    step: Step
    rule: str
    """Name of the rule."""
    stage: Stage | None
    """The stage that it is about; null: it is about none."""
    role: Role | None
    """Role of the ranks that it concerns; null: none, or several roles."""
    rank: Rank | None
    """The rank that it concerns, from 0; null: none, or several and none is worse."""
    round: int | None
    """Index of the round that it concerns, from 0; null: none."""
    message: str
    """The condition that fired, its place, and the value."""
    wall: float
    """Unix seconds: when it fired."""
    withdrawn_wall: float | None
    """Unix seconds: since when it is withdrawn, because the step was aggregated again with another
    result; null: it is valid."""


class FiringFacts(FiringInBrief):
    """A firing without its attempt and its actions."""

    revision: int | None
    """Revision of the rules."""
    evidence: dict[str, Json]
    """The numbers, what they were compared with, the token, the ranks concerned."""


class FiringColumns(FiringFacts):
    """A firing without its actions."""

    attempt_id: int


class FiringRow(FiringColumns):
    """A row of `firings`."""

    actions: FiredActions | None
    acted_wall: float | None


firings = table("firings", FiringRow, "attempt_id step rule", Index(None, "run"))
