"""The catalogue's queries over several tables."""

from __future__ import annotations

import functools
from typing import Any, Final, TypedDict

import sqlalchemy as sa
from typing_extensions import Required

from stagescope_service.fields import Attempt, Row, Run, Step
from stagescope_service.store import tables
from stagescope_service.store.queries.reader import conditions, is_kept
from stagescope_service.store.snapshot import ANNOUNCED, Query
from stagescope_service.store.tables import (
    AttemptColumns,
    StepColumns,
    StepState,
    artifacts,
    dumps,
    findings,
    losses,
    payloads,
    processes,
    stages,
)
from stagescope_service.store.tables.compact import training_begins
from stagescope_wire.names import EXPERIMENT
from stagescope_wire.nonfinite import Json


class SupersededSteps(TypedDict):
    """The steps of an attempt that a later attempt resumed before."""

    attempt: int
    count: int
    first: int
    last: int


class RunRow(Row):
    """A run, with its newest attempt."""

    run: Run
    display_name: str
    """The run's name for people: as the training gave it. `run` is made of it, if it is another."""
    live: bool
    """Whether one of its attempts has a live process."""
    attempt: Attempt | None
    """Number of the newest attempt; null: it has none."""
    attempt_key: str | None
    """Key of the newest attempt; null: it has none."""
    attempts: int
    """Number of its attempts."""
    last_closed_step: Step | None
    """The trainer's highest closed step in the newest attempt; null: none."""
    created_wall: float | None
    """Unix seconds: when the run was first reported."""
    last_wall: float | None
    """Unix seconds: when one of its processes last reported."""
    settings: dict[str, Json] | None
    """The run's settings, as its processes reported them."""
    hidden: bool | None
    """Whether lists leave it out; null: no."""
    deleting_wall: float | None
    """Unix seconds: since when it is being deleted; null: it is not."""


class ListedRun(RunRow):
    """A run as its query returns it."""

    attempt_id: int | None
    """Id of the newest attempt; null: the run has none."""
    first_step: int | None
    """The lowest step of the newest attempt; null: none."""


class ListedAttempt(AttemptColumns):
    """An attempt with the activity of its processes."""

    last_wall: float
    processes: int
    live: bool


class DescribedAttempt(ListedAttempt):
    """An attempt with the activity of its processes and its fingerprint."""

    fingerprint: dict[str, Json] | None


class TrainingAttempt(AttemptColumns):
    """An attempt, and the training stage of it that began last."""

    begin_wall: float
    step: int | None


class StepOverview(StepState):
    """The progress of a step and its numbers."""

    has_summary: bool
    """Whether it has a step summary."""


class ListedStep(StepOverview, StepColumns):
    """A step without its blob, with its attempt and its lost data."""

    run: str
    attempt: int
    """The attempt's number."""
    lost: int
    """Number of rows of lost data of the step."""


class Count(TypedDict, total=False):
    """A row of a Prometheus metric: its labels, and a count."""

    run: Required[str | None]
    count: Required[int]
    bytes: int | None
    role: str
    stage: str
    kind: str
    severity: str
    state: str


_ALIVE: Final = sa.and_(processes.c.finished_wall.is_(None), processes.c.lapsed_wall.is_(None))


_ATTEMPT: Final = [column for column in tables.attempts.columns if column.name != "fingerprint"]
"""A fingerprint is up to 100 kB of JSON."""


_OF_RUN: Final = "of_run"
"""The parameter with the run's name."""


@functools.cache
def _activity(*, of_run: bool = False) -> sa.Subquery:
    """Select per attempt the time of its last contact and its number of processes and live ones.

    With `of_run` only the processes of one run are read, not those of all runs.

    `last_wall` is on the service's clock if the sender's clock offset is known, `heard_wall` is
    restricted to processes whose offset is known.
    """
    on_ours = processes.c.last_wall + sa.func.coalesce(processes.c.clock_offset, 0.0)
    is_ours = processes.c.clock_offset.is_not(None) | (processes.c.raw == sa.true())
    own = sa.select(tables.attempts.c.attempt_id).where(
        tables.attempts.c.run == sa.bindparam(_OF_RUN)
    )
    return (
        sa.select(
            processes.c.attempt_id,
            sa.func.max(on_ours).label("last_wall"),
            sa.func.max(sa.case((is_ours, on_ours))).label("heard_wall"),
            sa.func.count().label("processes"),
            sa.func.sum(sa.case((_ALIVE, 1), else_=0)).label("alive"),
        )
        .where(*([processes.c.attempt_id.in_(own)] if of_run else []))
        .group_by(processes.c.attempt_id)
        .subquery()
    )


def attempts(
    run: str | None = None,
    *,
    attempt_id: int | None = None,
    number: int | None = None,
    step: int | None = None,
    with_fingerprint: bool = False,
) -> Query:
    """Select attempts, newest first: the columns of `ListedAttempt` or `DescribedAttempt`."""
    where = conditions("attempts", run=run, attempt_id=attempt_id, number=number)
    if step is not None:
        # Not by IN: steps are found by attempt and step, and SQLite would read those of all runs.
        own = tables.steps.c.attempt_id == tables.attempts.c.attempt_id
        where.append(sa.exists().where(own, tables.steps.c.step == step))
    query = _attempts(with_fingerprint=with_fingerprint, of_run=run is not None).where(*where)
    return query if run is None else query.params({_OF_RUN: run})


@functools.cache
def _attempts(*, with_fingerprint: bool, of_run: bool) -> Query:
    activity = _activity(of_run=of_run)
    return (
        sa.select(
            *(tables.attempts.columns if with_fingerprint else _ATTEMPT),
            sa.func.coalesce(activity.c.last_wall, tables.attempts.c.opened_wall).label(
                "last_wall"
            ),
            sa.func.coalesce(activity.c.processes, 0).label("processes"),
            _live(activity).label("live"),
        )
        .outerjoin(activity, activity.c.attempt_id == tables.attempts.c.attempt_id)
        .order_by(tables.attempts.c.run, tables.attempts.c.number.desc())
    )


def _live(activity: sa.Subquery) -> sa.ColumnElement[bool]:
    return sa.and_(
        tables.attempts.c.ended_wall.is_(None), sa.func.coalesce(activity.c.alive, 0) > 0
    )


def newest_summary(run: str | None) -> Query:
    """Select the step with the newest step summary of a run, or of any run."""
    table, attempt, other = tables.steps, tables.attempts, tables.steps.alias()
    newest = (
        sa.select(other.c.step)
        .where(other.c.attempt_id == attempt.c.attempt_id, is_kept(other.c.step_summary))
        .order_by(other.c.step.desc())
        .limit(1)
        .scalar_subquery()
    )
    # Its key first: the blobs of all that are sorted would be read.
    key = (
        sa.select(table.c.attempt_id, table.c.step)
        .join(attempt, attempt.c.attempt_id == table.c.attempt_id)
        .where(table.c.step == newest)
        .order_by(table.c.opened_wall.desc() if run is None else attempt.c.number.desc())
        .limit(1)
    )
    key = key if run is None else key.where(attempt.c.run == run)
    return sa.select(table).where(sa.tuple_(table.c.attempt_id, table.c.step).in_(key))


def runs(run: str | None = None) -> Query:
    """Select runs, the most recently active first, then experiments: the columns of `ListedRun`."""
    query = _runs()
    return query if run is None else query.where(tables.runs.c.run == run)


@functools.cache
def _runs() -> Query:
    activity, run = _activity(), tables.attempts.c.run

    def largest(column: sa.ColumnElement[Any]) -> sa.Over[Any]:
        return sa.func.max(column).over(partition_by=run)

    ranked = (
        sa.select(
            tables.attempts,
            activity.c.last_wall,
            _live(activity).label("live"),
            sa.func.row_number()
            .over(partition_by=run, order_by=tables.attempts.c.number.desc())
            .label("place"),
            sa.func.count().over(partition_by=run).label("attempts"),
            largest(activity.c.last_wall).label("run_last_wall"),
            largest(activity.c.heard_wall).label("run_heard_wall"),
            largest(sa.case((_live(activity), 1), else_=0)).label("run_live"),
        )
        .outerjoin(activity, activity.c.attempt_id == tables.attempts.c.attempt_id)
        .subquery()
    )
    last = sa.func.coalesce(
        ranked.c.run_last_wall, ranked.c.opened_wall, tables.runs.c.created_wall
    )
    # A sender with unknown offset may be ahead; `begun_wall` is never after the arrival.
    active = sa.func.coalesce(ranked.c.run_heard_wall, _last_begun(ranked.c.attempt_id), last)
    return (
        sa.select(
            *(column for column in tables.runs.columns if column.name != "display_name"),
            sa.func.coalesce(tables.runs.c.display_name, tables.runs.c.run).label("display_name"),
            sa.func.coalesce(ranked.c.attempts, 0).label("attempts"),
            ranked.c.attempt_id,
            ranked.c.number.label("attempt"),
            ranked.c.key.label("attempt_key"),
            ranked.c.first_step,
            ranked.c.last_closed_step,
            last.label("last_wall"),
            (sa.func.coalesce(ranked.c.run_live, 0) == 1).label("live"),
        )
        .outerjoin(ranked, sa.and_(ranked.c.run == tables.runs.c.run, ranked.c.place == 1))
        .order_by(
            sa.case((tables.runs.c.run.startswith(EXPERIMENT, autoescape=True), 1), else_=0),
            sa.func.coalesce(active, 0.0).desc(),
            tables.runs.c.run,
        )
    )


def _last_begun(attempt_id: sa.ColumnElement[int]) -> sa.ScalarSelect[float]:
    """Select the latest begin of a stage of an attempt's highest step, on the service's clock."""
    other = stages.alias()
    # Ordered, not max(): the first one found by the index of works is the highest.
    top = (
        sa.select(other.c.step)
        .where(other.c.attempt_id == attempt_id, other.c.step.is_not(None))
        .order_by(other.c.step.desc())
        .limit(1)
        .correlate_except(other)
    )
    return (
        sa.select(sa.func.max(stages.c.begun_wall))
        .where(stages.c.attempt_id == attempt_id, stages.c.step == top.scalar_subquery())
        .scalar_subquery()
    )


@functools.cache
def training_attempt() -> Query:
    """Select the attempt whose training stage began last: the columns of `TrainingAttempt`.

    By the service's clock: otherwise a sender whose clock is ahead would always be the last.
    """
    return (
        sa.select(*_ATTEMPT, training_begins.c.begin_wall, training_begins.c.step)
        .join(training_begins, training_begins.c.attempt_id == tables.attempts.c.attempt_id)
        .order_by(training_begins.c.begun_wall.desc())
    )


def pinned_steps(run: str | None) -> Query:
    """Select run, attempt and step of the steps whose payloads are pinned, newest first."""
    attempts, pinned = tables.attempts, tables.steps
    query = (
        sa.select(attempts.c.run, attempts.c.number.label("attempt"), pinned.c.step)
        .join(attempts, attempts.c.attempt_id == pinned.c.attempt_id)
        .where(sa.text("steps.pinned"))  # the text of the partial index
        .order_by(pinned.c.attempt_id.desc(), pinned.c.step.desc())
    )
    return query if run is None else query.where(attempts.c.run == run)


def _last_current() -> sa.ScalarSelect[int]:
    """Select the step from which the newest later attempts of an attempt's run repeat its steps.

    The SQL form of `Lineage.repeated_by`; null: no later attempt resumed.
    """
    later = tables.attempts.alias("later")
    return (
        sa.select(sa.func.min(later.c.resumed_from_step))
        .where(later.c.run == tables.attempts.c.run)
        .where(later.c.number > tables.attempts.c.number)
        .correlate(tables.attempts)
        .scalar_subquery()
    )


def superseded_steps(run: str) -> Query:
    """Select the columns of `SupersededSteps`, by attempt: only of those that have some."""
    step, attempts = tables.steps.c.step, tables.attempts
    return (
        sa.select(
            attempts.c.number.label("attempt"), sa.func.count().label("count"),
            sa.func.min(step).label("first"), sa.func.max(step).label("last"),
        )
        .select_from(attempts)
        .join(tables.steps, tables.steps.c.attempt_id == attempts.c.attempt_id)
        .where(attempts.c.run == run, step > _last_current())
        .group_by(attempts.c.number)
        .order_by(attempts.c.number)
    )  # fmt: skip


def steps(
    attempt_id: int | None,
    run: str | None,
    before: int | None,
    after: int | None = None,
    superseded: bool | None = None,
    measured: bool = False,
) -> Query:
    """Select steps, newest first: the columns of `ListedStep`; those after a step, oldest first."""
    lost = (
        sa.select(sa.func.count())
        .where(losses.c.attempt_id == tables.steps.c.attempt_id)
        .where(losses.c.step == tables.steps.c.step)
        .scalar_subquery()
    )
    query = sa.select(
        *(column for column in tables.steps.columns if column.name != "step_summary"),
        is_kept(tables.steps.c.step_summary).label("has_summary"),
        lost.label("lost"),
        tables.attempts.c.run,
        tables.attempts.c.number.label("attempt"),
    ).outerjoin(tables.attempts, tables.attempts.c.attempt_id == tables.steps.c.attempt_id)
    step, attempt = tables.steps.c.step, tables.steps.c.attempt_id
    query = query.order_by(step.desc() if after is None else step, attempt.desc())
    where = conditions("steps", attempt_id=attempt_id) + conditions("attempts", run=run)
    where += [step < before] if before is not None else []
    where += [step > after] if after is not None else []
    where += [is_kept(tables.steps.c.step_summary)] if measured else []
    if superseded is not None:
        discarded = sa.func.coalesce(step > _last_current(), sa.false())
        where.append(discarded if superseded else sa.not_(discarded))
    return query.where(*where)


def counts() -> dict[str, Query]:
    """Return the queries behind /metrics: labels and `count`, each over an index or few rows.

    * `processes_live` (run, role), `stages_open` (run, stage), `steps_open` (run)
    * `payloads_announced` (run): announced and not yet ingested or lost; also `bytes`
    * `losses` (run, kind), `findings` (run, kind, severity), `dumps` (run, state), `attempts` (run)
    * `files` (run, kind): kept files and those of the ring; also `bytes`
    """
    count = sa.func.count().label("count")
    run = tables.attempts.c.run

    def by_run(
        table: sa.Table,
        *labels: sa.Column[str],
        where: sa.ColumnElement[bool] | sa.TextClause | None = None,
        sums: tuple[sa.Label[int], ...] = (),
    ) -> Query:
        # Grouped by attempt first: otherwise every row would be joined before it is counted.
        inner = sa.select(table.c.attempt_id, *labels, count, *sums)
        inner = inner if where is None else inner.where(where)
        grouped = inner.group_by(table.c.attempt_id, *labels).subquery()
        names = [grouped.c[label.name] for label in labels]
        added = [sa.func.sum(grouped.c[item.name]).label(item.name) for item in (count, *sums)]
        return (
            sa.select(run, *names, *added)
            .join(tables.attempts, tables.attempts.c.attempt_id == grouped.c.attempt_id)
            .group_by(run, *names)
            .order_by(run, *names)
        )

    there = artifacts.c.kind.in_(("kept", "ring")) & artifacts.c.deleted_wall.is_(None)
    size = sa.func.coalesce(sa.func.sum(artifacts.c.bytes), 0).label("bytes")
    is_open = stages.c.end_wall.is_(None) & (sa.func.coalesce(stages.c.status, "open") == "open")
    lost = sa.func.sum(sa.func.coalesce(losses.c.count, 1)).label("count")
    seen = sa.func.sum(sa.func.coalesce(findings.c.count, 1)).label("count")
    return {
        "processes_live": by_run(processes, processes.c.role, where=_ALIVE),
        "stages_open": by_run(stages, stages.c.stage, where=is_open),
        "steps_open": by_run(tables.steps, where=tables.steps.c.closed_wall.is_(None)),
        "payloads_announced": by_run(
            payloads, where=ANNOUNCED, sums=(sa.func.sum(payloads.c.bytes).label("bytes"),)
        ),
        "losses": sa.select(losses.c.run, losses.c.kind, lost).group_by(
            losses.c.run, losses.c.kind
        ),
        "findings": sa.select(findings.c.run, findings.c.kind, findings.c.severity, seen).group_by(
            findings.c.run, findings.c.kind, findings.c.severity
        ),
        "dumps": by_run(dumps, dumps.c.state),
        "files": by_run(artifacts, artifacts.c.kind, where=there, sums=(size,)),
        "attempts": sa.select(run, count).group_by(run).order_by(run),
    }
