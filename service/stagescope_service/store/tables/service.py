"""What the service keeps: files, registered engines, who ordered what, values of its own."""

from __future__ import annotations

from sqlalchemy import Column, Index

from stagescope.schema import PART_FIELDS
from stagescope_service.store.columns import Flag, Int, Real, StrictJson, Text
from stagescope_service.store.tables.declare import columns, key, table

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
