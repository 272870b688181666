"""Runs, their attempts and processes, and the steps and stages that these went through."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Column, Index

from stagescope_service.store.columns import Blob, Flag, Int, Real, StrictJson, Text
from stagescope_service.store.tables.declare import (
    columns,
    key,
    layout,
    partial_index,
    place,
    table,
)

runs = table(
    "runs", key("run", Text), Column("created_wall", Real), Column("settings", StrictJson())
)

attempts = table(
    "attempts",
    key("attempt_id", Int),
    Column("run", Text),
    Column("number", Int),
    Column("key", Text),
    *columns(Real, "opened_wall ended_wall"),
    Column("end_reason", Text),
    *columns(Int, "resumed_from_step first_step last_closed_step"),
    Column("fingerprint", StrictJson()),
    Column("unkeyed", Flag()),
    sa.UniqueConstraint("run", "key"),
    sa.UniqueConstraint("run", "number"),
)

processes = table(
    "processes",
    key("incarnation", Text),
    Column("attempt_id", Int),
    Column("role", Text),
    *columns(Int, "rank world_size data_rank"),
    Column("node_id", Text),
    Column("pid", Int),
    *layout(),
    *columns(StrictJson(), "settings hello"),
    *columns(Real, "first_wall last_wall clock_offset clock_error finished_wall lapsed_wall"),
    *columns(Int, "dropped_events dropped_payloads dropped_bytes"),
    # Which reports are in these counts, so that none counts twice after a restart either.
    Column("dropped_seqs", StrictJson()),
    *columns(Flag(), "raw unkeyed"),
    *columns(Int, "max_step plan_revision"),
    Index(None, "attempt_id"),
    partial_index(
        "ix_processes_live", "last_wall", where="finished_wall IS NULL AND lapsed_wall IS NULL"
    ),
)

steps = table(
    "steps",
    key("attempt_id", Int),
    key("step", Int),
    *columns(Real, "opened_wall closed_wall"),
    *columns(Text, "close_reason completeness"),
    *columns(StrictJson(), "expected missing"),
    Column("superseded_by", Int),
    Column("whole", Blob),
    Column("whole_wall", Real),
    Column("pinned", Flag()),
    # What the summary must hold, and what it was made of: where they differ, it is aggregated.
    *columns(Int, "parts_mark whole_mark"),
    partial_index("ix_steps_open", "attempt_id", where="closed_wall IS NULL"),
    partial_index("ix_steps_pinned", "attempt_id", where="pinned"),
    partial_index(
        "ix_steps_unformed", "attempt_id", where="coalesce(whole_mark, -1) <> parts_mark"
    ),
)

stages = table(
    "stages",
    key("incarnation", Text),
    key("work_key", Text),
    key("revision", Int),
    *place(),
    Column("begin_seq", Int),
    *columns(Real, "begin_wall begin_mono"),
    Column("end_seq", Int),
    *columns(Real, "end_wall end_mono"),
    Column("device_time", Flag()),
    *columns(Real, "device_seconds clock_offset clock_error"),
    *columns(Text, "status error_type error_message"),
    Column("superseded", Flag()),
    # `begin_wall` on the service's clock, and never ahead of it
    Column("begun_wall", Real),
    Index(None, "attempt_id", "step"),
    partial_index("ix_stages_open", "attempt_id", where="end_wall IS NULL"),
    # answers: whose training stage began last
    partial_index("ix_stages_begun", "begun_wall", where="stage <> 'rollout_generate'"),
)
