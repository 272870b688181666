"""The state that a new coordinator reads at its start."""

from __future__ import annotations

from typing import Any, Final, TypeAlias, TypeVar, cast

import sqlalchemy as sa

from stagescope_service.store.contract import Snapshot
from stagescope_service.store.tables import (
    AttemptRow,
    CaptureRow,
    DumpRow,
    FindingRow,
    MetaRow,
    OperatorTableRow,
    PayloadRow,
    ProcessRow,
    RunRow,
    StackRow,
    StageRow,
    StepColumns,
    attempts,
    captures,
    compact,
    dumps,
    findings,
    meta,
    operators,
    payloads,
    processes,
    runs,
    stacks,
    stages,
    steps,
)
from stagescope_service.store.tables.service import UNREAD_DUMP
from stagescope_wire.nonfinite import JsonObject

Query: TypeAlias = "sa.Select[*tuple[Any, ...]]"
"""A query of any columns; `rows` gets the type of its rows."""

R = TypeVar("R")

ANNOUNCED: Final = sa.text(f"payloads.state_id = {compact.ANNOUNCED}")
"""The condition that a payload is announced, in the text of its partial index."""

USED_NUMBERS: Final = "used_numbers"
"""Key of `meta`: the highest attempt_id and revision of the plan when a run was last deleted."""

_STEP_COLUMNS: Final = [column for column in steps.columns if column.name != "step_summary"]


def rows(
    row: type[R], connection: sa.Connection, query: Query, parameters: JsonObject | None = None
) -> list[R]:
    """Return a query's rows as plain dicts.

    Args:
        row: the type of the rows, a TypedDict with the selected columns.
        connection: in a transaction.
        query: the query.
        parameters: the values of its parameters, if it has any.
    """
    found = connection.execute(query, parameters)
    names = [*found.keys()]
    return [cast("R", dict(zip(names, values, strict=True))) for values in found]


def newest_attempts() -> Query:
    """Select the attempt_id of each run's newest attempt."""
    # attempt_id grows with time, but a run's attempts are ordered by number.
    numbered = sa.select(
        attempts.c.attempt_id,
        sa.func.row_number()
        .over(partition_by=attempts.c.run, order_by=attempts.c.number.desc())
        .label("place"),
    ).subquery()
    return sa.select(numbered.c.attempt_id).where(numbered.c.place == 1)


def read_snapshot(connection: sa.Connection, closed_steps: int) -> Snapshot:
    """Read a `Snapshot` inside the caller's transaction.

    Args:
        connection: in a read transaction, so that all tables share one snapshot.
        closed_steps: number of closed steps to read per attempt.
    """
    newest = newest_attempts()
    live = sa.select(attempts.c.attempt_id).where(
        attempts.c.ended_wall.is_(None) | attempts.c.attempt_id.in_(newest)
    )
    known = {row["key"]: row["value"] for row in rows(MetaRow, connection, sa.select(meta))}
    used = known.get(USED_NUMBERS) or {}
    chosen = _chosen_steps(closed_steps).subquery()
    # By IN: in a join, SQLite reads all stages of an attempt to find those of a few steps.
    kept = sa.select(chosen).where(chosen.c.attempt_id.in_(live))
    is_open = stages.c.end_wall.is_(None) & sa.func.coalesce(stages.c.status, "open").in_(["open"])
    kept_stages = [
        # Separate selects instead of one OR: each then uses an index.
        sa.select(stages).where(is_open),
        sa.select(stages).where(_of_step(stages).in_(kept), sa.not_(is_open)),
        # Work without a step is in no chosen step; its process may merely have been inactive.
        sa.select(stages).where(
            stages.c.end_wall.is_(None),
            stages.c.status == "unfinished",
            stages.c.step.is_(None),
            stages.c.attempt_id.in_(live),
        ),
    ]
    kept_payloads = [
        sa.select(payloads).where(ANNOUNCED),
        sa.select(payloads).where(_of_step(payloads).in_(kept), payloads.c.state != "announced"),
    ]
    return Snapshot(
        runs=rows(RunRow, connection, sa.select(runs)),
        attempts=rows(AttemptRow, connection, sa.select(attempts).order_by(attempts.c.attempt_id)),
        processes=rows(ProcessRow, connection, _processes(live)),
        steps=rows(
            StepColumns,
            connection,
            sa.select(*_STEP_COLUMNS).where(_of_step(steps).in_(sa.select(chosen))),
        ),
        stages=[row for query in kept_stages for row in rows(StageRow, connection, query)],
        payloads=[row for query in kept_payloads for row in rows(PayloadRow, connection, query)],
        captures=rows(CaptureRow, connection, sa.select(captures)),
        findings=rows(
            FindingRow,
            connection,
            sa.select(findings).where(
                findings.c.attempt_id.is_(None) | findings.c.attempt_id.in_(newest)
            ),
        ),
        last_attempt_id=_largest(connection, attempts.c.attempt_id, used.get("attempt_id")),
        last_revision=_largest(connection, captures.c.revision, used.get("revision")),
        meta=known,
        unaggregated=[(attempt, step) for attempt, step in connection.execute(_not_aggregated())],
        armed=rows(DumpRow, connection, sa.select(dumps).where(_text("state = 'armed'"))),
        asked_stacks=rows(StackRow, connection, sa.select(stacks).where(_text("state = 'asked'"))),
        undigested=rows(
            OperatorTableRow,
            connection,
            sa.select(operators).where(_text(UNREAD_DUMP)),
        ),
    )


def _largest(connection: sa.Connection, column: sa.Column[int], used: int | None) -> int:
    return max(connection.scalar(sa.select(sa.func.max(column))) or 0, used or 0)


def _text(condition: str) -> sa.TextClause:
    """Return the condition of a partial index; it must match the index's text exactly."""
    return sa.text(condition)  # a literal column of this type would end in "= 1"


def _of_step(table: sa.Table) -> sa.Tuple:
    return sa.tuple_(table.c.attempt_id, table.c.step)


def _not_aggregated() -> Query:
    due = _text("coalesce(summary_mark, -1) <> parts_mark")
    return sa.select(steps.c.attempt_id, steps.c.step).where(due, steps.c.closed_wall.is_not(None))


def _processes(live: Query) -> Query:
    gone = processes.c.finished_wall.is_not(None) | processes.c.lapsed_wall.is_not(None)
    unread = sa.select(payloads.c.incarnation).where(ANNOUNCED)
    return (
        sa.select(processes)
        .where(
            sa.not_(gone) | processes.c.attempt_id.in_(live) | processes.c.incarnation.in_(unread)
        )
        .order_by(processes.c.first_wall)
    )


def _chosen_steps(closed_steps: int) -> Query:
    """Select (attempt_id, step) of open steps and of the last `closed_steps` closed ones."""
    place = (
        sa.func.row_number()
        .over(partition_by=steps.c.attempt_id, order_by=steps.c.step.desc())
        .label("place")
    )
    closed = (
        sa.select(steps.c.attempt_id, steps.c.step, place)
        .where(steps.c.closed_wall.is_not(None))
        .subquery()
    )
    last = sa.select(closed.c.attempt_id, closed.c.step).where(closed.c.place <= closed_steps)
    still_open = sa.select(steps.c.attempt_id, steps.c.step).where(steps.c.closed_wall.is_(None))
    union = sa.union_all(still_open, last).subquery()
    return sa.select(union.c.attempt_id, union.c.step)
