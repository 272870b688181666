"""What the service keeps: files, registered engines, who ordered what, values of its own."""

from __future__ import annotations

from sqlalchemy import Column, Index

from stagescope.wire.schema import PART_FIELDS
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


artifacts = table(
    "artifacts",
    key("artifact_id", Text),
    Column("incarnation", Text),
    *columns(Int, "seq attempt_id step"),
    *columns(Text, "stage role"),
    Column("rank", Int),
    *columns(Text, "kind node_id path"),
    Column("bytes", Int),
    Column("checksum", Text),
    *columns(Flag(), "shared pinned"),
    *columns(Real, "wall deleted_wall"),
    *columns(Int, f"policy_version {' '.join(PART_FIELDS)}"),
    # Of a kept file: section -> names, and tensor -> [dtype, shape, rows or None].
    *columns(StrictJson(), "sections tensors"),
    Index(None, "attempt_id", "step"),
)

engines = table(
    "engines",
    key("name", Text),
    *columns(Text, "url kind model version run by note"),
    Column("wall", Real),
    Column("settings", StrictJson()),
)

audit = table(
    "audit",
    Column("audit_id", Int, primary_key=True, autoincrement=True),
    Column("wall", Real),
    *columns(Text, "by action"),
    Column("detail", StrictJson()),
)

meta = table("meta", key("key", Text), Column("value", StrictJson()))
