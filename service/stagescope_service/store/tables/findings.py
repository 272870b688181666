"""What the service noticed, what was lost, and the rules that it looks by."""

from __future__ import annotations

from typing import TypedDict

from sqlalchemy import Column, Index

from stagescope_service.store.columns import Flag, Int, Json, Real, StrictJson, Text
from stagescope_service.store.tables.declare import (
    WorkRow,
    columns,
    key,
    partial_index,
    place,
    table,
)

findings = table(
    "findings",
    key("finding_id", Text),
    Column("run", Text),
    *columns(Int, "attempt_id step"),
    *columns(Text, "stage role"),
    Column("rank", Int),
    *columns(Text, "kind severity message"),
    Column("evidence", StrictJson()),
    Column("advice", Text),
    *columns(Real, "first_wall last_wall"),
    Column("count", Int),
    # Since when it is no longer so; null where it still is, or never ends.
    Column("over_wall", Real),
    Index(None, "attempt_id", "step"),
    Index(None, "run"),
)


class FindingRow(TypedDict):
    """A row of `findings`."""

    finding_id: str
    run: str | None
    attempt_id: int | None
    step: int | None
    stage: str | None
    role: str | None
    rank: int | None
    kind: str | None
    severity: str | None
    message: str | None
    evidence: Json
    advice: str | None
    first_wall: float | None
    last_wall: float | None
    count: int | None
    over_wall: float | None


losses = table(
    "losses",
    key("loss_id", Text),
    Column("run", Text),
    Column("attempt_id", Int),
    Column("role", Text),
    *columns(Int, "rank step"),
    *columns(Text, "stage kind reason"),
    *columns(Int, "count bytes"),
    Column("wall", Real),
    Index(None, "attempt_id", "step"),
    Index(None, "run"),
)


class LossRow(TypedDict):
    """A row of `losses`."""

    loss_id: str
    run: str | None
    attempt_id: int | None
    role: str | None
    rank: int | None
    step: int | None
    stage: str | None
    kind: str | None
    reason: str | None
    count: int | None
    bytes: int | None
    wall: float | None


stacks = table(
    "stacks",
    key("incarnation", Text),
    key("request_id", Text),
    *place(),
    *columns(Text, "source state reason by"),
    *columns(Real, "wall deadline_wall answered_wall"),
    Column("threads", StrictJson()),
    Column("truncated", Flag()),
    Index(None, "attempt_id", "step"),
    Index(None, "request_id"),
    partial_index("ix_stacks_asked", "incarnation", where="state = 'asked'"),
)


class StackRow(WorkRow):
    """A row of `stacks`."""

    incarnation: str
    request_id: str
    source: str | None
    state: str | None
    reason: str | None
    by: str | None
    wall: float | None
    deadline_wall: float | None
    answered_wall: float | None
    threads: Json
    truncated: bool | None


trigger_rules = table(
    "trigger_rules",
    key("revision", Int),
    Column("wall", Real),
    *columns(Text, "by source digest"),
    # With the URLs of webhooks, secrets included: answers show hosts alone.
    *columns(StrictJson(), "document since"),
)


class TriggerRulesRow(TypedDict):
    """A row of `trigger_rules`."""

    revision: int
    wall: float | None
    by: str | None
    source: str | None
    digest: str | None
    document: Json
    since: Json


firings = table(
    "firings",
    key("attempt_id", Int),
    key("step", Int),
    key("rule", Text),
    Column("run", Text),
    Column("revision", Int),
    *columns(Text, "stage role"),
    *columns(Int, "rank round"),
    Column("message", Text),
    *columns(StrictJson(), "evidence actions"),
    *columns(Real, "wall acted_wall withdrawn_wall"),
    Index(None, "run"),
)


class FiringRow(TypedDict):
    """A row of `firings`."""

    attempt_id: int
    step: int
    rule: str
    run: str | None
    revision: int | None
    stage: str | None
    role: str | None
    rank: int | None
    round: int | None
    message: str | None
    evidence: Json
    actions: Json
    wall: float | None
    acted_wall: float | None
    withdrawn_wall: float | None
