"""What was ordered of ranks, and what came of it."""

from __future__ import annotations

from sqlalchemy import Column, Index

from stagescope_service.store.columns import Flag, Int, Real, StrictJson, Text
from stagescope_service.store.tables.declare import columns, key, partial_index, place, table

captures = table(
    "captures",
    key("capture_id", Text),
    Column("run", Text),
    Column("spec", StrictJson()),
    *columns(Text, "state by"),
    *columns(Real, "created_wall removed_wall"),
    Column("removed_by", Text),
    Column("revision", Int),
)

dumps = table(
    "dumps",
    key("incarnation", Text),
    key("work_key", Text),
    key("capture_id", Text),
    *place(),
    *columns(Text, "path node_id state"),
    *columns(Int, "bytes files"),
    Column("seconds", Real),
    *columns(Text, "task level error"),
    *columns(StrictJson(), "overrides estimate"),
    Column("wall", Real),
    Index(None, "attempt_id", "step"),
    partial_index("ix_dumps_armed", "incarnation", where="state = 'armed'"),
)

operators = table(
    "operators",
    key("incarnation", Text),
    key("work_key", Text),
    key("capture_id", Text),
    *place(),
    *columns(Text, "node_id dump_path"),
    Column("announced_wall", Real),
    # What was announced last, and what was digested: where they differ, it is to be digested.
    *columns(Int, "mark digested_mark"),
    Column("truncated", Flag()),
    *columns(Text, "state reason path checksum task level"),
    *columns(Int, "bytes calls rows non_finite_rows truncated_at"),
    *columns(Flag(), "done certain"),
    *columns(StrictJson(), "first_non_finite summary"),
    Column("wall", Real),
    Index(None, "attempt_id", "step"),
    partial_index(
        "ix_operators_undigested", "node_id", where="coalesce(digested_mark, -1) <> mark"
    ),
)
