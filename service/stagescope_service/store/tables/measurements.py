"""What ranks handed over, and what was read in it."""

from __future__ import annotations

from sqlalchemy import Column, Index

from stagescope_service.store.columns import Blob, Flag, Int, Real, StrictJson, Text
from stagescope_service.store.tables.declare import columns, key, partial_index, place, table

scalars = table(
    "scalars",
    key("incarnation", Text),
    key("work_key", Text),
    key("name", Text),
    *place(),
    # SQLite stores NaN as NULL, so a value that is not finite is named in a column of its own.
    Column("value", Real),
    Column("nonfinite", Text),
    Column("wall", Real),
    Index(None, "attempt_id", "step"),
    # answers: which scalars an attempt logged, and a scalar's values over its steps
    Index(None, "attempt_id", "name", "step"),
)

payloads = table(
    "payloads",
    key("incarnation", Text),
    key("seq", Int),
    *place(),
    *columns(Text, "work_key state reason"),
    *columns(StrictJson(), "tensors meta"),
    Column("bytes", Int),
    Column("node_id", Text),
    *columns(Real, "announced_wall settled_wall"),
    Column("digest", Text),
    Column("consumed_step", Int),
    Index(None, "attempt_id", "step"),
    partial_index("ix_payloads_announced", "node_id", where="state = 'announced'"),
    # answers: which rollouts of a version may a step have consumed
    partial_index("ix_payloads_stepless", "attempt_id", "policy_version", where="step IS NULL"),
)

summaries = table(
    "summaries",
    key("incarnation", Text),
    key("seq", Int),
    key("pair", Text),
    *place("data_rank"),
    Column("summary", Blob),
    Index(None, "attempt_id", "step"),
)

step_metrics = table(
    "step_metrics",
    key("attempt_id", Int),
    key("step", Int),
    Column("version", Int),
    # Of which aggregation of the step: where `steps.whole_wall` is another, the row is out of date.
    Column("whole_wall", Real),
    *columns(Text, "stage verdict"),
    *columns(StrictJson(), "suspects metrics"),
    Column("slices", Blob),
    # Null where an earlier release wrote the row: then the step summary says it.
    *columns(Int, "tokens masked_tokens unequal_tokens"),
)

streams = table(
    "streams",
    key("attempt_id", Int),
    key("stream", Text),
    key("role", Text),
    key("stage", Text),
    *columns(Text, "producer engine engine_version dtype"),
    Column("dtypes", StrictJson()),
    Column("quantisation", Text),
    Column("processed", Flag()),
    *columns(Real, "temperature top_p"),
    Column("top_k", Int),
    *columns(Text, "alignment routing"),
    Column("extra", StrictJson()),
)

samples = table(
    "samples",
    key("attempt_id", Int),
    key("clock", Text),
    key("sample_uid", Text),
    *columns(Int, "step policy_version"),
    Column("group_id", Text),
    Column("sample_index", Int),
    *columns(Text, "split data_source prompt_hash tokens_hash"),
    Column("policy_versions", StrictJson()),
    Column("consumed_step", Int),
    Column("reward", Real),
    *columns(Int, "tokens rounds"),
    Index(None, "attempt_id", "step"),
)


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
