"""What the service noticed, what was lost, and the rules that it looks by."""

from __future__ import annotations

from sqlalchemy import Column, Index

from stagescope_service.store.columns import Flag, Int, Real, StrictJson, Text
from stagescope_service.store.tables.declare import columns, key, partial_index, place, table

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

trigger_rules = table(
    "trigger_rules",
    key("revision", Int),
    Column("wall", Real),
    *columns(Text, "by source digest"),
    # With the URLs of webhooks, secrets included: answers show hosts alone.
    *columns(StrictJson(), "document since"),
)

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
