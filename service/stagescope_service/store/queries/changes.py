"""The query for rows that change while trainings run: the newest rows of each noun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import sqlalchemy as sa

from stagescope_service.store.queries.reader import Reader, order_of
from stagescope_service.store.snapshot import Query, rows
from stagescope_service.store.tables import (
    TABLES,
    attempts,
    audit,
    canary_verdicts,
    dumps,
    findings,
    losses,
    processes,
    step_metrics,
    steps,
)

ChangedRow: TypeAlias = dict[str, Any]  # of several tables, compared and never looked into
_MAX_ATTEMPTS: Final = 32
_NEWEST_ATTEMPTS: Final = 8
"""Attempts that are read even if they ended long ago."""
_MAX_STEPS: Final = 64
"""Newest steps of an attempt that are read; earlier ones hardly ever change."""
_MAX_FINDINGS: Final = 64
_MARKED_ATTEMPTS: Final = 3
_MAX_CAPTURES: Final = 64
_MAX_ACTIONS: Final = 32
_OF_RUN: Final = ("change_run", "delete_run", "run_deleted")
"""Actions whose details name a run, and are short."""


class Recent(NamedTuple):
    """The newest rows of attempts that may change, of one snapshot."""

    attempts: list[ChangedRow]
    """Columns of `attempts`, the newest first."""
    steps: list[ChangedRow]
    """`attempt_id`, `step`, `closed_wall`, `completeness`, `parts_mark` (of open steps),
    `aggregated_wall`, and of the step summary `summary_wall` and `verdict`; the newest first."""
    findings: list[ChangedRow]
    """Columns of `findings`, the last seen first."""
    captures: list[ChangedRow]
    """Columns of `captures`, the last requested first. Active ones have `acknowledged` (live
    processes of the run that applied its revision) and `dumps` (state -> number)."""
    actions: list[ChangedRow]
    """`audit_id`, `action` and `run` (or None) of the audit; the newest first."""


class ChangeQueries(Reader):
    """The query that a watcher repeats."""

    def recent(self, since: float) -> Recent:
        """Return the newest rows of attempts that did not end before `since` (Unix seconds).

        Every part of it reads few rows by a key or an index, and no blob, however long a run is.
        """
        with self._reading() as connection:
            running = rows(dict[str, Any], connection, _attempts(since))
            ids = [int(row["attempt_id"]) for row in running]
            found = [row for each in ids for row in rows(dict[str, Any], connection, _steps(each))]
            requested = rows(dict[str, Any], connection, _captures())
            if any(row["removed_wall"] is None for row in requested):
                known = rows(dict[str, Any], connection, _revisions(ids))
                made = rows(dict[str, Any], connection, _dumps(ids, [row["step"] for row in found]))
                _add_progress(requested, running, known, made)
            # One query an attempt: those of several at once would all be sorted.
            by_attempt = (rows(dict[str, Any], connection, _findings(each)) for each in ids)
            seen = [row for each in by_attempt for row in each]
            seen.sort(key=lambda row: (-(row["last_wall"] or 0.0), row["finding_id"]))
            done = rows(dict[str, Any], connection, _actions())
            for row in done:
                row["run"] = (row.pop("detail") or {}).get("run")
            return Recent(running, found, seen[:_MAX_FINDINGS], requested, done)

    def change_mark(self, attempt_ids: Sequence[int]) -> str:
        """Return a text that changes when steps, findings, losses, dumps or canaries do.

        Only the newest rows are read, so that it costs as much after 100 000 steps. What changes
        only earlier ones leaves it as it is, and so do late scalars and samples of closed steps,
        and files that are dropped.

        Args:
            attempt_ids: of these, the newest `_MARKED_ATTEMPTS` are looked at for their steps and
                findings.
        """
        ids = [*attempt_ids]
        count, newest, total = sa.func.count, sa.func.max, sa.func.sum
        loss, dump, canary = losses.c, dumps.c, canary_verdicts.c
        queries: list[Query] = [
            sa.select(count(), count(loss.step)).where(loss.attempt_id.in_(ids)),
            sa.select(count(), newest(dump.wall)).where(dump.attempt_id.in_(ids)),
            sa.select(newest(canary.wall), total(canary.records)).where(canary.attempt_id.in_(ids)),
        ]
        for attempt_id in sorted(ids)[-_MARKED_ATTEMPTS:]:
            step = _steps(attempt_id).subquery().c
            finding = _findings(attempt_id).subquery().c
            partial = total(sa.case((step.completeness == "partial", 1)))
            walls = (newest(step.closed_wall), newest(step.summary_wall))
            queries += [
                sa.select(newest(step.step), count(step.closed_wall), *walls, partial),
                sa.select(count(), count(finding.over_wall), newest(finding.last_wall)),
            ]
        with self._reading() as connection:
            return repr([tuple(connection.execute(query).one()) for query in queries])


def _attempts(since: float) -> Query:
    table = attempts.c
    # By their ids too: an imported attempt has the clock of its training.
    newest = sa.select(sa.func.max(table.attempt_id) - _NEWEST_ATTEMPTS).scalar_subquery()
    may_change = sa.or_(
        table.ended_wall.is_(None), table.ended_wall > since, table.attempt_id > newest
    )
    names = "attempt_id run number ended_wall end_reason resumed_from_step"
    return _newest("attempts", names, "-attempt_id", _MAX_ATTEMPTS).where(may_change)


def _steps(attempt_id: int) -> Query:
    table, summary = steps.c, step_metrics.c
    # A column after the blob `step_summary` is read only where there is no blob yet.
    mark = sa.case((table.closed_wall.is_(None), table.parts_mark)).label("parts_mark")
    same = sa.and_(summary.attempt_id == table.attempt_id, summary.step == table.step)
    return (
        sa.select(
            table.attempt_id, table.step, table.closed_wall, table.completeness, mark,
            table.summary_wall.label("aggregated_wall"), summary.summary_wall, summary.verdict,
        )
        .outerjoin(step_metrics, same)
        .where(table.attempt_id == attempt_id)
        .order_by(table.step.desc())
        .limit(_MAX_STEPS)
    )  # fmt: skip


def _findings(attempt_id: int) -> Query:
    names = "finding_id run attempt_id step kind severity message last_wall over_wall"
    query = _newest("findings", names, "-last_wall finding_id", _MAX_FINDINGS)
    return query.where(findings.c.attempt_id == attempt_id)


def _captures() -> Query:
    names = "capture_id run state revision created_wall removed_wall"
    return _newest("captures", names, "-created_wall", _MAX_CAPTURES)


def _actions() -> Query:
    table = audit.c
    detail = sa.case((table.action.in_(_OF_RUN), table.detail)).label("detail")
    newest = table.audit_id.desc()
    return sa.select(table.audit_id, table.action, detail).order_by(newest).limit(_MAX_ACTIONS)


def _newest(name: str, columns: str, order: str, most: int) -> Query:
    table = TABLES[name]
    query = sa.select(*(table.c[column] for column in columns.split()))
    return query.order_by(*order_of(table, order)).limit(most)


def _revisions(ids: list[int]) -> Query:
    """Select the number of live processes by attempt and applied revision of the plan."""
    table = processes.c
    alive = table.finished_wall.is_(None) & table.lapsed_wall.is_(None)
    by = (table.attempt_id, table.plan_revision)
    return (
        sa.select(*by, sa.func.count().label("count"))
        .where(table.attempt_id.in_(ids), alive)
        .group_by(*by)
    )


def _dumps(ids: list[int], newest_steps: list[Any]) -> Query:
    table = dumps.c
    by = (table.capture_id, table.state)
    where = [table.attempt_id.in_(ids), table.step >= min(newest_steps, default=0)]
    return sa.select(*by, sa.func.count().label("count")).where(*where).group_by(*by)


def _add_progress(
    requested: list[ChangedRow],
    running: list[ChangedRow],
    known: list[ChangedRow],
    made: list[ChangedRow],
) -> None:
    """Add the progress of each capture to its row."""
    run_of = {row["attempt_id"]: row["run"] for row in running}
    for row in requested:
        row["acknowledged"] = sum(
            each["count"]
            for each in known
            if row["run"] in (None, run_of[each["attempt_id"]])
            and (each["plan_revision"] or 0) >= (row["revision"] or 0)
        )
        row["dumps"] = {
            each["state"]: each["count"] for each in made if each["capture_id"] == row["capture_id"]
        }
