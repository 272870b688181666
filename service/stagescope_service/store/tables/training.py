"""Runs, their attempts and processes, and the steps and stages that these went through."""

from __future__ import annotations

from typing import Final, TypedDict

import sqlalchemy as sa
from sqlalchemy import Column, Index

from stagescope_service.store.columns import Blob, Flag, Int, Json, Real, StrictJson, Text
from stagescope_service.store.tables.declare import (
    LayoutRow,
    WorkRow,
    columns,
    key,
    layout,
    partial_index,
    place,
    table,
    view,
)

runs = table(
    "runs", key("run", Text), Column("created_wall", Real), Column("settings", StrictJson())
)


class RunRow(TypedDict):
    """A row of `runs`."""

    run: str
    created_wall: float | None
    settings: Json


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


class AttemptRow(TypedDict):
    """A row of `attempts`."""

    attempt_id: int
    run: str
    number: int
    key: str
    opened_wall: float | None
    ended_wall: float | None
    end_reason: str | None
    resumed_from_step: int | None
    first_step: int | None
    last_closed_step: int | None
    fingerprint: Json
    unkeyed: bool | None


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


class ProcessRow(LayoutRow):
    """A row of `processes`."""

    incarnation: str
    attempt_id: int | None
    role: str | None
    rank: int | None
    world_size: int | None
    data_rank: int | None
    node_id: str | None
    pid: int | None
    settings: Json
    hello: Json
    first_wall: float | None
    last_wall: float | None
    clock_offset: float | None
    clock_error: float | None
    finished_wall: float | None
    lapsed_wall: float | None
    dropped_events: int | None
    dropped_payloads: int | None
    dropped_bytes: int | None
    dropped_seqs: Json
    raw: bool | None
    unkeyed: bool | None
    max_step: int | None
    plan_revision: int | None


REMOVABLE: Final = "rows_removed IS NOT TRUE AND pinned IS NOT TRUE"

steps = table(
    "steps",
    key("attempt_id", Int),
    key("step", Int),
    *columns(Real, "opened_wall closed_wall"),
    *columns(Text, "close_reason completeness"),
    *columns(StrictJson(), "expected missing"),
    Column("superseded_by", Int),
    # The step summary: Python calls it `step_summary`, the columns `whole`, `whole_wall` and
    # `whole_mark` keep the names of the first release.
    Column("whole", Blob),
    Column("whole_wall", Real),
    Column("pinned", Flag()),
    # What the summary must hold, and what it was made of: where they differ, it is aggregated.
    *columns(Int, "parts_mark whole_mark"),
    # Of a step whose rows retention removes: false while it does, true afterwards; else null.
    Column("rows_removed", Flag()),
    partial_index("ix_steps_open", "attempt_id", where="closed_wall IS NULL"),
    partial_index("ix_steps_removable", "attempt_id", "step", where=REMOVABLE),
    partial_index("ix_steps_pinned", "attempt_id", where="pinned"),
    partial_index(
        "ix_steps_unformed", "attempt_id", where="coalesce(whole_mark, -1) <> parts_mark"
    ),
)


class StepRow(TypedDict):
    """A row of `steps`."""

    attempt_id: int
    step: int
    opened_wall: float | None
    closed_wall: float | None
    close_reason: str | None
    completeness: str | None
    expected: Json
    missing: Json
    superseded_by: int | None
    whole: bytes | None
    whole_wall: float | None
    pinned: bool | None
    parts_mark: int | None
    whole_mark: int | None
    rows_removed: bool | None


stages = view(
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
)


class StageRow(WorkRow):
    """A row of `stages`."""

    incarnation: str
    work_key: str
    revision: int
    begin_seq: int | None
    begin_wall: float | None
    begin_mono: float | None
    end_seq: int | None
    end_wall: float | None
    end_mono: float | None
    device_time: bool | None
    device_seconds: float | None
    clock_offset: float | None
    clock_error: float | None
    status: str | None
    error_type: str | None
    error_message: str | None
    superseded: bool | None
    begun_wall: float | None
