"""Runs, their attempts and processes, and the steps and stages of these."""

from __future__ import annotations

from typing import Annotated, Final, TypedDict

import sqlalchemy as sa
from sqlalchemy import Index

from stagescope_service.fields import RoleRank, Stage, one_of
from stagescope_service.store.tables.declare import LayoutRow, StageWork, partial_index, table, view
from stagescope_wire.nonfinite import Json


class RunRow(TypedDict):
    """A row of `runs`."""

    run: str
    display_name: str | None
    """The text that people see for the run; null: its name."""
    created_wall: float | None
    settings: dict[str, Json] | None
    hidden: bool | None
    """Lists leave it out."""
    deleting_wall: float | None
    """Since when it is being deleted; null: it is not."""


runs = table("runs", RunRow, "run")


SILENT: Final = "its processes fell silent"
INTERRUPTED: Final = "it was interrupted"
"""Why an attempt ended: not all of its processes said that they had finished."""
ENDED: Final = "attempt ended"
"""Why a step was closed: its attempt ended."""


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


attempts = table(
    "attempts",
    AttemptRow,
    "attempt_id",
    sa.UniqueConstraint("run", "key"),
    sa.UniqueConstraint("run", "number"),
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
    """The reports in these counts, so that none counts twice, even after a restart."""
    raw: bool | None
    unkeyed: bool | None
    max_step: int | None
    plan_revision: int | None


class ProcessRow(ProcessColumns):
    """A row of `processes`."""

    settings: dict[str, Json] | None
    hello: dict[str, Json] | None


processes = table(
    "processes",
    ProcessRow,
    "incarnation",
    Index(None, "attempt_id"),
    partial_index(
        "ix_processes_live", "last_wall", where="finished_wall IS NULL AND lapsed_wall IS NULL"
    ),
)


REMOVABLE: Final = "rows_removed IS NOT TRUE AND pinned IS NOT TRUE"


class UnfinishedRank(RoleRank):
    """A rank that has not ended a stage in which it was expected."""

    stage: Stage
    status: Annotated[str, one_of("not begun", "open", "unfinished")]
    """`unfinished`: it began the stage, and its process is gone."""


class StepMarks(TypedDict):
    """The columns of `steps` that say why a step has no numbers, or old ones."""

    closed_wall: float | None
    parts_mark: int | None
    """The mark that the summary must reach."""
    summary_mark: int | None
    """The summary's own mark: if the two differ, it is aggregated."""
    rows_removed: bool | None
    """False while retention removes the step's rows, true afterwards; else null."""


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


steps = table(
    "steps",
    StepRow,
    "attempt_id step",
    partial_index("ix_steps_open", "attempt_id", where="closed_wall IS NULL"),
    partial_index("ix_steps_removable", "attempt_id", "step", where=REMOVABLE),
    partial_index("ix_steps_pinned", "attempt_id", where="pinned"),
    partial_index(
        "ix_steps_unformed", "attempt_id", where="coalesce(summary_mark, -1) <> parts_mark"
    ),
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
    """`begin_wall` on the service's clock, and never ahead of it."""


stages = view("stages", StageRow, "incarnation work_key revision")
