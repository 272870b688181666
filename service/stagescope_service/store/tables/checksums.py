"""The checksums of weights that ranks recorded, and what became of each version."""

from __future__ import annotations

from sqlalchemy import Column, Index

from stagescope_service.store.columns import Blob, Flag, Int, Real, StrictJson, Text
from stagescope_service.store.tables.declare import columns, key, table

weights = table(
    "weights",
    key("incarnation", Text),
    key("seq", Int),
    *columns(Int, "attempt_id step version"),
    *columns(Text, "side kind role"),
    Column("rank", Int),
    Column("wall", Real),
    # Eight bytes a tensor, in the order of the manifest, which the versions have in common.
    Column("checksums", Blob),
    *columns(Text, "manifest device_kind"),
    Column("device_index", Int),
    Column("device_serial", Text),
    Index(None, "attempt_id", "version"),
    Index(None, "attempt_id", "step"),
)

weight_manifests = table("weight_manifests", key("manifest", Text), Column("tensors", Blob))

weight_verdicts = table(
    "weight_verdicts",
    key("attempt_id", Int),
    key("version", Int),
    *columns(Int, "step records agree differ missing not_comparable replicas_differ"),
    Column("complete", Flag()),
    *columns(StrictJson(), "ranks names"),
    Column("wall", Real),
)

odd_replicas = table(
    "odd_replicas",
    key("attempt_id", Int),
    key("version", Int),
    key("side", Text),
    key("role", Text),
    key("rank", Int),
    Column("run", Text),
    Column("step", Int),
    *columns(Text, "device host node_id device_kind"),
    Column("device_index", Int),
    Column("device_serial", Text),
    Column("is_outvoted", Flag()),
    *columns(Int, "replicas tensors"),
    Column("names", StrictJson()),
    Column("wall", Real),
    Index(None, "device"),
)
