"""The tables of the catalogue: every column from day one, null where unknown.

Keys are natural, so that writing a row twice changes nothing. There are no foreign keys: events
arrive in any order, and a stage may be known before its process has said hello. Times end in
`_wall` (Unix seconds of the service's clock where an offset is known) or `_mono` (the process's
monotonic clock, seconds). Changing anything here needs a migration; a test holds the two equal.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import Column, Index

from stagescope.schema import LAYOUT_COLUMNS, PART_FIELDS
from stagescope_service.store.columns import Blob, Flag, Int, Real, StrictJson, Text

metadata: Final = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_INT_LAYOUT: Final = ("_rank", "_size", "_index")


def _key(name: str, kind: Any) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


def _columns(kind: Any, names: str) -> list[Column[Any]]:
    return [Column(name, kind) for name in names.split()]


def _layout() -> list[Column[Any]]:
    return [Column(name, Int if name.endswith(_INT_LAYOUT) else Text) for name in LAYOUT_COLUMNS]


def _place(*extra: str) -> list[Column[Any]]:
    """Return the columns that say which work of which rank a row is about."""
    return [
        *_columns(Int, "attempt_id step policy_version"),
        *_columns(Text, "stage role"),
        Column("rank", Int),
        *(Column(name, Int) for name in (*PART_FIELDS, *extra)),
    ]


def _table(name: str, *parts: Any) -> sa.Table:
    # With a rowid: WITHOUT ROWID repeats these long keys in every index, and was half as fast.
    return sa.Table(name, metadata, *parts, sqlite_strict=True)


meta = _table("meta", _key("key", Text), Column("value", StrictJson()))

runs = _table(
    "runs", _key("run", Text), Column("created_wall", Real), Column("settings", StrictJson())
)

attempts = _table(
    "attempts",
    _key("attempt_id", Int),
    Column("run", Text),
    Column("number", Int),
    Column("key", Text),
    *_columns(Real, "opened_wall ended_wall"),
    Column("end_reason", Text),
    *_columns(Int, "resumed_from_step first_step last_closed_step"),
    Column("fingerprint", StrictJson()),
    Column("unkeyed", Flag()),
    sa.UniqueConstraint("run", "key"),
    sa.UniqueConstraint("run", "number"),
)

processes = _table(
    "processes",
    _key("incarnation", Text),
    Column("attempt_id", Int),
    Column("role", Text),
    *_columns(Int, "rank world_size data_rank"),
    Column("node_id", Text),
    Column("pid", Int),
    *_layout(),
    *_columns(StrictJson(), "settings hello"),
    *_columns(Real, "first_wall last_wall clock_offset clock_error finished_wall lapsed_wall"),
    *_columns(Int, "dropped_events dropped_payloads dropped_bytes"),
    # Which reports are in these counts, so that none counts twice after a restart either.
    Column("dropped_seqs", StrictJson()),
    *_columns(Flag(), "raw unkeyed"),
    *_columns(Int, "max_step plan_revision"),
    Index(None, "attempt_id"),
    Index(
        "ix_processes_live",
        "last_wall",
        sqlite_where=sa.text("finished_wall IS NULL AND lapsed_wall IS NULL"),
        postgresql_where=sa.text("finished_wall IS NULL AND lapsed_wall IS NULL"),
    ),
)

steps = _table(
    "steps",
    _key("attempt_id", Int),
    _key("step", Int),
    *_columns(Real, "opened_wall closed_wall"),
    *_columns(Text, "close_reason completeness"),
    *_columns(StrictJson(), "expected missing"),
    Column("superseded_by", Int),
    Column("whole", Blob),
    Column("whole_wall", Real),
    Column("pinned", Flag()),
    # What the whole must hold, and what it was formed from: where they differ, it is to be formed.
    *_columns(Int, "parts_mark whole_mark"),
    Index(
        "ix_steps_open",
        "attempt_id",
        sqlite_where=sa.text("closed_wall IS NULL"),
        postgresql_where=sa.text("closed_wall IS NULL"),
    ),
    Index(
        "ix_steps_pinned",
        "attempt_id",
        sqlite_where=sa.text("pinned"),
        postgresql_where=sa.text("pinned"),
    ),
    Index(
        "ix_steps_unformed",
        "attempt_id",
        sqlite_where=sa.text("coalesce(whole_mark, -1) <> parts_mark"),
        postgresql_where=sa.text("coalesce(whole_mark, -1) <> parts_mark"),
    ),
)

stages = _table(
    "stages",
    _key("incarnation", Text),
    _key("work_key", Text),
    _key("revision", Int),
    *_place(),
    Column("begin_seq", Int),
    *_columns(Real, "begin_wall begin_mono"),
    Column("end_seq", Int),
    *_columns(Real, "end_wall end_mono"),
    Column("device_time", Flag()),
    *_columns(Real, "device_seconds clock_offset clock_error"),
    *_columns(Text, "status error_type error_message"),
    Column("superseded", Flag()),
    Index(None, "attempt_id", "step"),
    Index(
        "ix_stages_open",
        "attempt_id",
        sqlite_where=sa.text("end_wall IS NULL"),
        postgresql_where=sa.text("end_wall IS NULL"),
    ),
    Index(  # answers: whose training stage began last
        "ix_stages_training",
        "begin_wall",
        sqlite_where=sa.text("stage <> 'rollout_generate'"),
        postgresql_where=sa.text("stage <> 'rollout_generate'"),
    ),
)

scalars = _table(
    "scalars",
    _key("incarnation", Text),
    _key("work_key", Text),
    _key("name", Text),
    *_place(),
    # SQLite stores NaN as NULL, so a value that is not finite is named in a column of its own.
    Column("value", Real),
    Column("nonfinite", Text),
    Column("wall", Real),
    Index(None, "attempt_id", "step"),
)

payloads = _table(
    "payloads",
    _key("incarnation", Text),
    _key("seq", Int),
    *_place(),
    *_columns(Text, "work_key state reason"),
    *_columns(StrictJson(), "tensors meta"),
    Column("bytes", Int),
    Column("node_id", Text),
    *_columns(Real, "announced_wall settled_wall"),
    Column("digest", Text),
    Column("consumed_step", Int),
    Index(None, "attempt_id", "step"),
    Index(
        "ix_payloads_announced",
        "node_id",
        sqlite_where=sa.text("state = 'announced'"),
        postgresql_where=sa.text("state = 'announced'"),
    ),
    Index(  # answers: which rollouts of a version may a step have consumed
        "ix_payloads_stepless",
        "attempt_id",
        "policy_version",
        sqlite_where=sa.text("step IS NULL"),
        postgresql_where=sa.text("step IS NULL"),
    ),
)

summaries = _table(
    "summaries",
    _key("incarnation", Text),
    _key("seq", Int),
    _key("pair", Text),
    *_place("data_rank"),
    Column("summary", Blob),
    Index(None, "attempt_id", "step"),
)

streams = _table(
    "streams",
    _key("attempt_id", Int),
    _key("stream", Text),
    _key("role", Text),
    _key("stage", Text),
    *_columns(Text, "producer engine engine_version dtype"),
    Column("dtypes", StrictJson()),
    Column("quantisation", Text),
    Column("processed", Flag()),
    *_columns(Real, "temperature top_p"),
    Column("top_k", Int),
    *_columns(Text, "alignment routing"),
    Column("extra", StrictJson()),
)

samples = _table(
    "samples",
    _key("attempt_id", Int),
    _key("clock", Text),
    _key("sample_uid", Text),
    *_columns(Int, "step policy_version"),
    Column("group_id", Text),
    Column("sample_index", Int),
    *_columns(Text, "split data_source prompt_hash tokens_hash"),
    Column("policy_versions", StrictJson()),
    Column("consumed_step", Int),
    Column("reward", Real),
    *_columns(Int, "tokens rounds"),
    Index(None, "attempt_id", "step"),
)

findings = _table(
    "findings",
    _key("finding_id", Text),
    Column("run", Text),
    *_columns(Int, "attempt_id step"),
    *_columns(Text, "stage role"),
    Column("rank", Int),
    *_columns(Text, "kind severity message"),
    Column("evidence", StrictJson()),
    Column("advice", Text),
    *_columns(Real, "first_wall last_wall"),
    Column("count", Int),
    # Since when it is no longer so; null where it still is, or never ends.
    Column("over_wall", Real),
    Index(None, "attempt_id", "step"),
    Index(None, "run"),
)

captures = _table(
    "captures",
    _key("capture_id", Text),
    Column("run", Text),
    Column("spec", StrictJson()),
    *_columns(Text, "state by"),
    *_columns(Real, "created_wall removed_wall"),
    Column("removed_by", Text),
    Column("revision", Int),
)

dumps = _table(
    "dumps",
    _key("incarnation", Text),
    _key("work_key", Text),
    _key("capture_id", Text),
    *_place(),
    *_columns(Text, "path node_id state"),
    *_columns(Int, "bytes files"),
    Column("seconds", Real),
    *_columns(Text, "task level error"),
    *_columns(StrictJson(), "overrides estimate"),
    Column("wall", Real),
    Index(None, "attempt_id", "step"),
    Index(
        "ix_dumps_armed",
        "incarnation",
        sqlite_where=sa.text("state = 'armed'"),
        postgresql_where=sa.text("state = 'armed'"),
    ),
)

operators = _table(
    "operators",
    _key("incarnation", Text),
    _key("work_key", Text),
    _key("capture_id", Text),
    *_place(),
    *_columns(Text, "node_id dump_path"),
    Column("announced_wall", Real),
    # What was announced last, and what was digested: where they differ, it is to be digested.
    *_columns(Int, "mark digested_mark"),
    Column("truncated", Flag()),
    *_columns(Text, "state reason path checksum task level"),
    *_columns(Int, "bytes calls rows non_finite_rows truncated_at"),
    *_columns(Flag(), "done certain"),
    *_columns(StrictJson(), "first_non_finite summary"),
    Column("wall", Real),
    Index(None, "attempt_id", "step"),
    Index(
        "ix_operators_undigested",
        "node_id",
        sqlite_where=sa.text("coalesce(digested_mark, -1) <> mark"),
        postgresql_where=sa.text("coalesce(digested_mark, -1) <> mark"),
    ),
)

artifacts = _table(
    "artifacts",
    _key("artifact_id", Text),
    Column("incarnation", Text),
    *_columns(Int, "seq attempt_id step"),
    *_columns(Text, "stage role"),
    Column("rank", Int),
    *_columns(Text, "kind node_id path"),
    Column("bytes", Int),
    Column("checksum", Text),
    *_columns(Flag(), "shared pinned"),
    *_columns(Real, "wall deleted_wall"),
    *_columns(Int, f"policy_version {' '.join(PART_FIELDS)}"),
    # Of a kept file: section -> names, and tensor -> [dtype, shape, rows or None].
    *_columns(StrictJson(), "sections tensors"),
    Index(None, "attempt_id", "step"),
)

losses = _table(
    "losses",
    _key("loss_id", Text),
    Column("run", Text),
    Column("attempt_id", Int),
    Column("role", Text),
    *_columns(Int, "rank step"),
    *_columns(Text, "stage kind reason"),
    *_columns(Int, "count bytes"),
    Column("wall", Real),
    Index(None, "attempt_id", "step"),
    Index(None, "run"),
)

stacks = _table(
    "stacks",
    _key("incarnation", Text),
    _key("request_id", Text),
    *_place(),
    *_columns(Text, "source state reason by"),
    *_columns(Real, "wall deadline_wall answered_wall"),
    Column("threads", StrictJson()),
    Column("truncated", Flag()),
    Index(None, "attempt_id", "step"),
    Index(None, "request_id"),
    Index(
        "ix_stacks_asked",
        "incarnation",
        sqlite_where=sa.text("state = 'asked'"),
        postgresql_where=sa.text("state = 'asked'"),
    ),
)

trigger_rules = _table(
    "trigger_rules",
    _key("revision", Int),
    Column("wall", Real),
    *_columns(Text, "by source digest"),
    # With the URLs of webhooks, secrets included: answers show hosts alone.
    *_columns(StrictJson(), "document since"),
)

firings = _table(
    "firings",
    _key("attempt_id", Int),
    _key("step", Int),
    _key("rule", Text),
    Column("run", Text),
    Column("revision", Int),
    *_columns(Text, "stage role"),
    *_columns(Int, "rank round"),
    Column("message", Text),
    *_columns(StrictJson(), "evidence actions"),
    *_columns(Real, "wall acted_wall withdrawn_wall"),
    Index(None, "run"),
)

weights = _table(
    "weights",
    _key("incarnation", Text),
    _key("seq", Int),
    *_columns(Int, "attempt_id step version"),
    *_columns(Text, "side kind role"),
    Column("rank", Int),
    Column("wall", Real),
    # Eight bytes a tensor, in the order of the manifest, which the versions have in common.
    Column("checksums", Blob),
    *_columns(Text, "manifest device_kind"),
    Column("device_index", Int),
    Column("device_serial", Text),
    Index(None, "attempt_id", "version"),
    Index(None, "attempt_id", "step"),
)

weight_manifests = _table("weight_manifests", _key("manifest", Text), Column("tensors", Blob))

weight_verdicts = _table(
    "weight_verdicts",
    _key("attempt_id", Int),
    _key("version", Int),
    *_columns(Int, "step records agree differ missing not_comparable replicas_differ"),
    Column("complete", Flag()),
    *_columns(StrictJson(), "ranks names"),
    Column("wall", Real),
)

odd_replicas = _table(
    "odd_replicas",
    _key("attempt_id", Int),
    _key("version", Int),
    _key("side", Text),
    _key("role", Text),
    _key("rank", Int),
    Column("run", Text),
    Column("step", Int),
    *_columns(Text, "device host node_id device_kind"),
    Column("device_index", Int),
    Column("device_serial", Text),
    Column("is_outvoted", Flag()),
    *_columns(Int, "replicas tensors"),
    Column("names", StrictJson()),
    Column("wall", Real),
    Index(None, "device"),
)

engines = _table(
    "engines",
    _key("name", Text),
    *_columns(Text, "url kind model version run by note"),
    Column("wall", Real),
    Column("settings", StrictJson()),
)

audit = _table(
    "audit",
    Column("audit_id", Int, primary_key=True, autoincrement=True),
    Column("wall", Real),
    *_columns(Text, "by action"),
    Column("detail", StrictJson()),
)

TABLES: Final = metadata.tables
