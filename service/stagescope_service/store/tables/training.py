"""Runs, their attempts and processes, and the steps and stages of these."""

from __future__ import annotations

from typing import Annotated, Final, TypedDict

import sqlalchemy as sa
from sqlalchemy import Column, Index

from stagescope_service.fields import RoleRank, Stage, one_of
from stagescope_service.store.columns import Blob, Flag, Int, Real, StrictJson, Text
from stagescope_service.store.tables.declare import (
    LayoutRow,
    StageWork,
    columns,
    key,
    layout,
    partial_index,
    place,
    table,
    view,
)
from stagescope_wire.nonfinite import Json

runs = table(
    "runs", key("run", Text), Column("created_wall", Real), Column("settings", StrictJson())
)


class RunRow(TypedDict):
    """A row of `runs`."""

    run: str
    created_wall: float | None
    settings: dict[str, Json] | None


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


class AttemptColumns(TypedDict):
    """The columns of `attempts` but the fingerprint, which is up to 100 kB of JSON."""

    attempt_id: int
    run: str
    number: int
    key: str
    opened_wall: float
    ended_wall: float | None
    end_reason: str | None
    resumed_from_step: int | None
    first_step: int | None
    last_closed_step: int | None
    unkeyed: bool | None


class AttemptRow(AttemptColumns):
    """A row of `attempts`."""

    fingerprint: dict[str, Json] | None


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
    # The reports in these counts, so that none counts twice, even after a restart.
    Column("dropped_seqs", StrictJson()),
    *columns(Flag(), "raw unkeyed"),
    *columns(Int, "max_step plan_revision"),
    Index(None, "attempt_id"),
    partial_index(
        "ix_processes_live", "last_wall", where="finished_wall IS NULL AND lapsed_wall IS NULL"
    ),
)


class ProcessColumns(LayoutRow):
    """The columns of `processes` but `settings` and `hello`, which are up to 100 kB of JSON."""

    incarnation: str
    attempt_id: int
    role: str
    rank: int
    world_size: int | None
    data_rank: int | None
    node_id: str | None
    pid: int | None
    first_wall: float | None
    last_wall: float | None
    clock_offset: float | None
    clock_error: float | None
    finished_wall: float | None
    lapsed_wall: float | None
    dropped_events: int | None
    dropped_payloads: int | None
    dropped_bytes: int | None
    dropped_seqs: list[int] | None
    raw: bool | None
    unkeyed: bool | None
    max_step: int | None
    plan_revision: int | None


class ProcessRow(ProcessColumns):
    """A row of `processes`."""

    settings: dict[str, Json] | None
    hello: dict[str, Json] | None


REMOVABLE: Final = "rows_removed IS NOT TRUE AND pinned IS NOT TRUE"

steps = table(
    "steps",
    key("attempt_id", Int),
    key("step", Int),
    *columns(Real, "opened_wall closed_wall"),
    *columns(Text, "close_reason completeness"),
    *columns(StrictJson(), "expected missing"),
    Column("superseded_by", Int),
    Column("step_summary", Blob),
    Column("summary_wall", Real),
    Column("pinned", Flag()),
    # The mark that the summary must reach and its own: if they differ, it is aggregated.
    *columns(Int, "parts_mark summary_mark"),
    # False while retention removes the step's rows, true afterwards; else null.
    Column("rows_removed", Flag()),
    partial_index("ix_steps_open", "attempt_id", where="closed_wall IS NULL"),
    partial_index("ix_steps_removable", "attempt_id", "step", where=REMOVABLE),
    partial_index("ix_steps_pinned", "attempt_id", where="pinned"),
    partial_index(
        "ix_steps_unformed", "attempt_id", where="coalesce(summary_mark, -1) <> parts_mark"
    ),
)


class UnfinishedRank(RoleRank):
    """A rank that has not ended a stage in which it was expected."""

    stage: Stage
    status: Annotated[str, one_of("not begun", "open", "unfinished")]
    """`unfinished`: it began the stage, and its process is gone."""


class StepMarks(TypedDict):
    """The columns of `steps` that say why a step has no numbers, or old ones."""

    closed_wall: float | None
    parts_mark: int | None
    summary_mark: int | None
    rows_removed: bool | None


class StepState(StepMarks):
    """The columns of `steps` that say how far a step and its numbers have come."""

    attempt_id: int
    step: int
    completeness: str | None
    superseded_by: int | None
    summary_wall: float | None


class StepColumns(StepState):
    """The columns of `steps` but the blob of the step summary."""

    opened_wall: float | None
    close_reason: str | None
    expected: dict[str, dict[str, list[int]]] | None
    """role -> stage -> ranks."""
    missing: list[UnfinishedRank] | None
    pinned: bool | None


class StepRow(StepColumns):
    """A row of `steps`."""

    step_summary: bytes | None


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


class StageRow(StageWork):
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
    status: str
    error_type: str | None
    error_message: str | None
    superseded: bool | None
    begun_wall: float | None
