"""The tables that grow with every rank and step, and the views under which their rows are read.

Values that many rows have in common are stored once, and a row refers to them by small integers.
`works` has the work of a row, `senders` the rank that did it, and `clocks` the offset of the rank's
clock. `texts` has texts. The rows of a work lie together, so a step's rows are found by its works
and need no index of their own. The views `stages`, `scalars`, `payloads` and `artifacts` have the
logical columns, and the ids too, for queries that need them.

Some columns hold a difference: `begin_after` is `begin_seq - revision`, mostly 0, which takes no
space in SQLite. `reserved` keeps the space that the end of a stage or payload needs later. So a row
does not grow inside a full page, which would leave pages half empty.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import Column, Index, event
from sqlalchemy.schema import SchemaItem

from stagescope_service.store.tables.declare import (
    Blob,
    Flag,
    Int,
    Real,
    Text,
    columns,
    key,
    metadata,
    partial_index,
)
from stagescope_wire.schema import PART_FIELDS

INGESTED: Final = 0
ANNOUNCED: Final = 1
KNOWN_TEXTS: Final = ("ingested", "announced", "ok", "ring", "kept", "open", "unfinished", "failed")
"""Texts with fixed ids, from 0: the first two take no space, and indexes name ids of states."""


COMPACT: Final[set[str]] = set()
"""The names of these tables, which are read through the views."""


def _table(name: str, *parts: SchemaItem, **options: Any) -> sa.Table:
    COMPACT.add(name)
    return sa.Table(name, metadata, *parts, sqlite_strict=True, **options)


def _compact(name: str, *parts: SchemaItem) -> sa.Table:
    return _table(name, *parts, sqlite_with_rowid=False)


texts = _table("texts", key("text_id", Int), Column("text", Text), sa.UniqueConstraint("text"))

works = _table(
    "works",
    key("work_id", Int),
    *columns(Int, "attempt_id step policy_version"),
    Column("stage", Text),
    *columns(Int, " ".join(PART_FIELDS)),
    Column("work_key", Text),
    Index(None, "attempt_id", "step"),
    Index(None, "work_key"),
)

senders = _table(
    "senders",
    key("sender_id", Int),
    Column("incarnation", Text),
    Column("attempt_id", Int),
    Column("role", Text),
    Column("rank", Int),
    Index(None, "incarnation"),
)

clocks = _table("clocks", key("clock_id", Int), *columns(Real, "clock_offset clock_error"))

scalar_names = _table(
    "scalar_names", key("attempt_id", Int), key("name", Text), Column("last_step", Int)
)
"""The names of an attempt's scalars; `last_step` is the last step with one, null if none has any.

It only advances with the scalars, so a query must check that one still exists.
"""

training_begins = _table(
    "training_begins", key("attempt_id", Int), *columns(Real, "begun_wall begin_wall"),
    Column("step", Int),
)  # fmt: skip
"""The training stage (any but rollout_generate) that began last, by attempt."""

stage_rows = _compact(
    "stage_rows",
    key("work_id", Int),
    key("sender_id", Int),
    key("revision", Int),
    Column("begin_after", Int),
    *columns(Real, "begin_wall begin_mono"),
    Column("end_after", Int),
    *columns(Real, "end_wall end_mono"),
    Column("device_time", Flag()),
    Column("device_seconds", Real),
    *columns(Int, "clock_id status_id"),
    *columns(Text, "error_type error_message"),
    Column("superseded", Flag()),
    Column("begun_wall", Real),
    Column("reserved", Blob),
    partial_index("ix_stage_rows_open", "work_id", where="end_wall IS NULL"),
    partial_index("ix_stage_rows_superseded", "work_id", where="superseded"),
)

scalar_rows = _compact(
    "scalar_rows",
    key("work_id", Int),
    key("name_id", Int),
    key("sender_id", Int),
    Column("value", Real),
    Column("nonfinite_id", Int),
    Column("wall", Real),
)

payload_rows = _compact(
    "payload_rows",
    key("owner_id", Int),
    key("seq", Int),
    *columns(Int, "work_id sender_id state_id"),
    Column("reason", Text),
    Column("tensors_id", Int),
    Column("tensors", Text),
    Column("meta_id", Int),
    Column("meta", Text),
    *columns(Int, "bytes node"),
    *columns(Real, "announced_wall settled_wall"),
    Column("digest", Text),
    Column("consumed_step", Int),
    Column("reserved", Blob),
    Index(None, "work_id"),
    partial_index("ix_payload_rows_announced", "work_id", where=f"state_id = {ANNOUNCED}"),
    partial_index("ix_payload_rows_consumed", "consumed_step", where="consumed_step IS NOT NULL"),
)

artifact_rows = _compact(
    "artifact_rows",
    key("prefix_id", Int),
    key("owner_id", Int),
    key("number", Int),
    *columns(Int, "seq_after work_id sender_id kind_id node path_id"),
    Column("path", Text),
    Column("bytes", Int),
    Column("checksum", Text),
    *columns(Flag(), "shared pinned"),
    *columns(Real, "wall deleted_wall"),
    *columns(Text, "sections tensors"),
    Column("reserved", Blob),
    Index(None, "work_id"),
    partial_index("ix_artifact_rows_live", "kind_id", where="deleted_wall IS NULL"),
)

NO_OWNER: Final = -1
"""`owner_id` of an artifact whose id is not `prefix/owner/number`: the prefix is the whole id."""
PATH_MARK: Final = "{payload}"
"""Stands in an artifact's common path for `number~owner`."""

_WORK: Final = (
    "w.attempt_id, w.step, w.policy_version, w.stage, s.role, s.rank, "
    "w.occurrence, w.epoch, w.minibatch, w.microbatch"
)
_JOINED: Final = "JOIN works w ON w.work_id = r.work_id JOIN senders s ON s.sender_id = r.sender_id"


def _text(column: str) -> str:
    return f"(SELECT t.text FROM texts t WHERE t.text_id = r.{column})"


_NONFINITE: Final = f"CASE WHEN r.nonfinite_id IS NOT NULL THEN {_text('nonfinite_id')} END"

VIEWS: Final = {
    "stages": (
        f"SELECT r.work_id, r.sender_id, s.incarnation, w.work_key, r.revision, {_WORK}, "
        "r.revision + r.begin_after AS begin_seq, r.begin_wall, r.begin_mono, "
        "r.revision + r.end_after AS end_seq, r.end_wall, r.end_mono, r.device_time, "
        "r.device_seconds, c.clock_offset, c.clock_error, "
        f"{_text('status_id')} AS status, r.error_type, r.error_message, r.superseded, "
        f"r.begun_wall FROM stage_rows r {_JOINED} LEFT JOIN clocks c ON c.clock_id = r.clock_id"
    ),
    "scalars": (
        f"SELECT r.work_id, r.name_id, r.sender_id, s.incarnation, w.work_key, n.text AS name, "
        f"{_WORK}, r.value, {_NONFINITE} AS nonfinite, r.wall "
        f"FROM scalar_rows r {_JOINED} JOIN texts n ON n.text_id = r.name_id"
    ),
    "payloads": (
        f"SELECT r.owner_id, r.work_id, r.sender_id, r.state_id, "
        f"{_text('owner_id')} AS incarnation, r.seq, {_WORK}, w.work_key, "
        f"{_text('state_id')} AS state, r.reason, "
        f"coalesce({_text('tensors_id')}, r.tensors) AS tensors, "
        f"coalesce({_text('meta_id')}, r.meta) AS meta, r.bytes, {_text('node')} AS node_id, "
        "r.announced_wall, r.settled_wall, r.digest, r.consumed_step "
        f"FROM payload_rows r {_JOINED}"
    ),
    "artifacts": (
        "SELECT r.prefix_id, r.owner_id, r.number, r.work_id, r.sender_id, r.kind_id, "
        f"CASE WHEN r.owner_id < 0 THEN {_text('prefix_id')} ELSE {_text('prefix_id')} || '/' || "
        f"{_text('owner_id')} || '/' || r.number END AS artifact_id, "
        "s.incarnation, r.number + r.seq_after AS seq, w.attempt_id, w.step, w.stage, s.role, "
        f"s.rank, {_text('kind_id')} AS kind, {_text('node')} AS node_id, "
        f"coalesce(r.path, replace({_text('path_id')}, '{PATH_MARK}', "
        f"r.number || '~' || {_text('owner_id')})) AS path, "
        "r.bytes, r.checksum, r.shared, r.pinned, r.wall, r.deleted_wall, w.policy_version, "
        "w.occurrence, w.epoch, w.minibatch, w.microbatch, r.sections, r.tensors "
        f"FROM artifact_rows r {_JOINED}"
    ),
}
"""Name -> the query of its view."""


@event.listens_for(metadata, "after_create")
def _create_views(target: sa.MetaData, connection: sa.Connection, **options: object) -> None:
    """Create the views, and the texts that have fixed ids."""
    for name, query in VIEWS.items():
        connection.execute(sa.text(f"CREATE VIEW {name} AS {query}"))
    rows = [{"text_id": at, "text": text} for at, text in enumerate(KNOWN_TEXTS)]
    connection.execute(texts.insert(), rows)
