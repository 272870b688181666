"""Queries for runs, attempts, steps, stages and processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict, cast

import sqlalchemy as sa
from typing_extensions import Unpack

from stagescope_service.store.queries import overview
from stagescope_service.store.queries.overview import (
    DescribedAttempt,
    ListedAttempt,
    ListedRun,
    ListedStep,
    SupersededSteps,
    TrainingAttempt,
)
from stagescope_service.store.queries.reader import (
    LIMIT,
    Filter,
    RankFilter,
    Reader,
    all_rows,
    conditions,
    of_few,
)
from stagescope_service.store.tables import (
    STEP_ROWS,
    TABLES,
    ProcessColumns,
    ProcessRow,
    RunRow,
    StageRow,
    StepRow,
    stages,
    step_rows,
)
from stagescope_service.store.tables.training import REMOVABLE
from stagescope_wire.names import display_name as as_display_name
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import PART_FIELDS, PartColumns


class RemovableStep(TypedDict):
    """A step whose rows may be removed."""

    attempt_id: int
    step: int
    parts_mark: int | None
    rows_removed: bool | None


class PartTiming(PartColumns):
    """The begin times and the longest duration of a part of a stage, over its ranks."""

    step: int
    role: str
    stage: str
    first: float | None
    """Unix seconds of the service's clock, as `last`."""
    last: float | None
    longest: float | None
    """Monotonic seconds."""


class StageSeconds(NamedTuple):
    """The seconds that a part of a stage took, by the clock of its process."""

    step: int
    stage: str
    role: str
    rank: int
    seconds: float


class DiedAttempt(TypedDict):
    """An attempt that did not finish."""

    attempt_id: int
    run: str
    number: int
    ended_wall: float
    end_reason: str


class RunQueries(Reader):
    """Queries for runs, attempts, steps, stages and processes."""

    def runs(
        self, *, limit: int = LIMIT, offset: int = 0, hidden: bool = True, name: str | None = None
    ) -> list[ListedRun]:
        """Return the runs, the most recently active first, and experiments after them.

        Without `hidden` those that are hidden are left out. With `name` only those are returned
        that have this name, or that are shown with it.
        """
        query = overview.runs()
        if name is not None:
            table = TABLES["runs"].c
            shown = as_display_name(name) or ""
            query = query.where(sa.or_(table.run == name, table.display_name == shown))
        if not hidden:
            query = query.where(sa.func.coalesce(TABLES["runs"].c.hidden, sa.false()) == sa.false())
        return self._rows(ListedRun, query.limit(limit).offset(offset))

    def has_run(self, run: str) -> bool:
        """Return whether there is a run of this name."""
        return self._run(run) is not None

    def is_being_deleted(self, run: str) -> bool:
        """Return whether there is a run of this name that is being deleted."""
        row = self._run(run)
        return row is not None and row["deleting_wall"] is not None

    def _run(self, run: str) -> RunRow | None:
        return self._once(("run", run), lambda: self._one(RunRow, "runs", run=run))

    def runs_shown_as(self, display_name: str) -> list[str]:
        """Return the names of the runs with this display name."""
        table = TABLES["runs"].c
        shown = as_display_name(display_name) or ""
        return self._values(
            sa.select(table.run).where(table.display_name == shown).order_by(table.run)
        )

    def run_names(self) -> list[tuple[str, str | None]]:
        """Return the name and the display name of every run, the newest first."""
        table = TABLES["runs"].c
        newest = sa.func.coalesce(table.created_wall, 0.0).desc()
        return [
            (run, shown)
            for run, shown in self._tuples(
                sa.select(table.run, table.display_name).order_by(newest, table.run)
            )
        ]

    def display_name(self, run: str) -> str:
        """Return the text that people see for a run: its display name, else its name."""
        row = self._run(run)
        return run if row is None else row["display_name"] or run

    def run(self, run: str) -> ListedRun | None:
        """Return one run, or None."""
        return self._first(ListedRun, overview.runs(run))

    def live_runs(self) -> list[ListedRun]:
        """Return the live runs; processes that finished or lapsed do not count."""
        return [row for row in self._rows(ListedRun, overview.runs()) if row["live"]]

    def attempts(self, run: str | None = None) -> list[ListedAttempt]:
        """Return the attempts of a run, or of all runs, newest first."""
        found = self._once(
            ("attempts", run), lambda: self._rows(ListedAttempt, overview.attempts(run))
        )
        return [*found]

    def described_attempts(self, run: str) -> list[DescribedAttempt]:
        """Return the attempts of a run with their fingerprints, newest first."""
        return self._rows(DescribedAttempt, overview.attempts(run, with_fingerprint=True))

    def fingerprint(self, attempt_id: int) -> Json:
        """Return the fingerprint of an attempt, None where there is none."""
        table = TABLES["attempts"].c
        query = sa.select(table.fingerprint).where(table.attempt_id == attempt_id)
        return next(iter(self._values(query)), None)

    def died_attempts(
        self, reasons: Sequence[str], *, since: float, until: float, without: str
    ) -> list[DiedAttempt]:
        """Return the attempts that ended for one of the reasons, without a finding of a kind.

        Args:
            reasons: values of `end_reason`.
            since, until: when they ended, in Unix seconds.
            without: the kind of finding that they do not have.
        """
        table, findings = TABLES["attempts"].c, TABLES["findings"].c
        found = sa.exists().where(findings.attempt_id == table.attempt_id, findings.kind == without)
        query = (
            sa.select(table.attempt_id, table.run, table.number, table.ended_wall, table.end_reason)
            .where(table.end_reason.in_(list(reasons)))
            .where(table.ended_wall.between(since, until), ~found)
            .order_by(table.ended_wall.desc())
        )
        return self._rows(DiedAttempt, query.limit(LIMIT))

    def attempt(self, attempt_id: int) -> ListedAttempt | None:
        """Return one attempt, or None."""
        return self._first(ListedAttempt, overview.attempts(attempt_id=attempt_id))

    def find_attempt(self, run: str, number: int | None = None) -> ListedAttempt | None:
        """Return attempt `number` of a run (None: the newest), or None if there is none."""
        return self._first(ListedAttempt, overview.attempts(run, number=number))

    def training_attempt(self) -> TrainingAttempt | None:
        """Return the attempt of any run whose training stage began last, or None."""
        return self._first(TrainingAttempt, overview.training_attempt())

    def attempt_of_step(self, run: str, step: int) -> ListedAttempt | None:
        """Return the newest attempt of a run that has `step`, or None."""
        return self._first(ListedAttempt, overview.attempts(run, step=step))

    def steps(
        self,
        attempt_id: int | None = None,
        *,
        run: str | None = None,
        before: int | None = None,
        after: int | None = None,
        superseded: bool | None = None,
        measured: bool = False,
        limit: int = LIMIT,
    ) -> list[ListedStep]:
        """Return steps, newest first; with `after` the oldest first.

        Args:
            attempt_id: the attempt; None for all attempts of `run`.
            run: the run; None for all.
            before: only steps below this one: the last step of the previous page.
            after: only steps above this one.
            superseded: only steps that a later attempt resumed before; False: only the others.
            measured: only steps with numbers.
            limit: maximum number of steps.
        """
        query = overview.steps(attempt_id, run, before, after, superseded, measured)
        return self._rows(ListedStep, query.limit(limit))

    def superseded_steps(self, run: str) -> list[SupersededSteps]:
        """Return which steps later attempts of a run resumed before, by attempt."""
        return self._rows(SupersededSteps, overview.superseded_steps(run))

    def removable_steps(self, run: str, keep: int, *, limit: int = LIMIT) -> list[RemovableStep]:
        """Return the steps of a run whose rows may be removed, of each attempt the oldest first.

        Excludes the newest `keep` steps of the newest attempts, pinned ones, open ones, and those
        whose rows are removed.
        """
        table, left = TABLES["steps"].c, keep
        found: list[RemovableStep] = []
        for attempt in self.attempts(run):
            own = table.attempt_id == attempt["attempt_id"]
            removable = sa.and_(own, sa.text(REMOVABLE))
            (count,) = self._values(sa.select(sa.func.count()).where(removable))
            over, left = max(0, count - left), max(0, left - count)
            columns = (table.attempt_id, table.step, table.parts_mark, table.rows_removed)
            oldest = (
                sa.select(table.step).where(removable).order_by(table.step).limit(min(over, limit))
            )
            if over:
                chosen = table.step.in_(self._values(oldest))
                closed = table.closed_wall.is_not(None)
                query = sa.select(*columns).where(own, chosen, closed).order_by(table.step)
                found += self._rows(RemovableStep, query)
        return found[:limit]

    def has_removable_rows(self, attempt_id: int, step: int) -> bool:
        """Return whether a step has rows that `RemoveRows` would delete."""
        exists = (
            sa.exists(sa.select(TABLES[name].c.step).where(*step_rows(name, attempt_id, step)))
            for name in STEP_ROWS
        )
        return bool(self._values(sa.select(sa.or_(*exists)))[0])

    def step(self, attempt_id: int, step: int) -> StepRow | None:
        """Return one step with its blob `step_summary`, or None."""
        return self._one(StepRow, "steps", attempt_id=attempt_id, step=step)

    def newest_summary(self, run: str | None) -> StepRow | None:
        """Return the newest step of a run's newest attempt that has a step summary, with its blob.

        Args:
            run: the run; None for the one that trained last.
        """
        return self._first(StepRow, overview.newest_summary(run))

    def parts_mark(self, attempt_id: int, step: int) -> int | None:
        """Return `steps.parts_mark`, the mark that a step summary must reach, or None."""
        table = TABLES["steps"]
        chosen = (table.c.attempt_id == attempt_id) & (table.c.step == step)
        found = self._values(sa.select(table.c.parts_mark).where(chosen))
        return found[0] if found else None

    def stages(
        self,
        attempt_id: int,
        step: Filter = None,
        *,
        superseded: bool | None = False,
        limit: int = LIMIT,
        **filters: Unpack[RankFilter],
    ) -> list[StageRow]:
        """Return stages in the order of their begin, without superseded ones by default."""
        where = conditions(
            "stages",
            attempt_id=attempt_id,
            step=step,
            superseded=True if superseded else None,
            **filters,
        )
        if superseded is False:
            where.append(_not_superseded())
        order = "begin_wall rank work_key"
        return self._page(StageRow, "stages", where, order, limit)

    def stage_seconds(self, attempt_id: int, steps: Sequence[int]) -> list[StageSeconds]:
        """Return the seconds of each part of each stage of steps that ended, by step and begin."""
        table = TABLES["stages"].c
        place = (table.step, table.stage, table.role, table.rank)
        query = (
            sa.select(*place, (table.end_mono - table.begin_mono).label("seconds"))
            .where(table.attempt_id == attempt_id, table.step.in_(list(steps)), _not_superseded())
            .where(table.begin_mono.is_not(None), table.end_mono.is_not(None))
            .order_by(table.step, table.begin_wall, table.rank, table.work_key)
        )
        # Rows of SQLAlchemy: an object of our own would take as long as the query.
        return cast("list[StageSeconds]", self._tuples(query))

    def stage_statuses(self, attempt_id: int, step: int, stage: str) -> set[str]:
        """Return the statuses of a stage's parts in a step, of all ranks; `open`: not ended."""
        table = TABLES["stages"].c
        query = (
            sa.select(sa.func.coalesce(table.status, "open"))
            .where(table.attempt_id == attempt_id, table.step == step, table.stage == stage)
            .distinct()
        )
        return {*self._values(query)}

    def count_stages(
        self, attempt_id: int, step: int | None, *, stage: Filter = None
    ) -> dict[tuple[str, str, int], int]:
        """Return (stage, role, rank) -> the number of parts of the stage in a step.

        None counts the work without a step.
        """
        table = TABLES["stages"]
        where = [
            *conditions("stages", attempt_id=attempt_id, stage=stage),
            table.c.step == step,  # IS NULL, of None
            _not_superseded(),
        ]
        key = (table.c.stage, table.c.role, table.c.rank)
        found = self._tuples(sa.select(*key, sa.func.count()).where(*where).group_by(*key))
        return {(stage, role, rank): parts for stage, role, rank, parts in found}

    def replaced(self, attempt_id: int, step: Filter = None) -> set[tuple[str, int | None]]:
        """Return (incarnation, seq) of payloads whose stage was superseded."""
        columns = TABLES["stages"].c
        where = conditions("stages", attempt_id=attempt_id, step=step, superseded=True)
        chosen = sa.select(columns.incarnation, columns.end_seq).where(*where)
        return {(incarnation, seq) for incarnation, seq in self._tuples(chosen)}

    def open_stages(self, attempt_id: Filter = None) -> list[StageRow]:
        """Return stages that began and did not end, oldest first."""
        table = TABLES["stages"]
        where = [*of_few("stages", attempt_id), table.c.end_wall.is_(None)]
        where.append(sa.func.coalesce(table.c.status, "open") == "open")
        return self._page(StageRow, "stages", where, "begin_wall rank", LIMIT)

    def processes(
        self, attempt_id: Filter = None, *, role: Filter = None, rank: Filter = None
    ) -> list[ProcessColumns]:
        """Return the processes of an attempt by role, rank and time, also those that are gone."""
        where = conditions("processes", attempt_id=attempt_id, role=role, rank=rank)
        query = all_rows("processes", "role rank first_wall", without="hello settings")
        return self._rows(ProcessColumns, query.where(*where))

    def processes_with_settings(self, attempt_id: int) -> list[ProcessRow]:
        """Return the processes of an attempt with their `hello` and `settings`."""
        where = conditions("processes", attempt_id=attempt_id)
        return self._page(ProcessRow, "processes", where, "role rank first_wall")

    def settings_with(self, attempt_id: int, name: str) -> list[JsonObject]:
        """Return the settings of those processes of an attempt that reported one of this name."""
        settings = TABLES["processes"].c.settings
        where = conditions("processes", attempt_id=attempt_id)
        # By its text first: a trainer's whole configuration takes long to decode.
        mentioned = sa.type_coerce(settings, sa.Text).contains(f'"{name}"', autoescape=True)
        found = self._values(sa.select(settings).where(*where, mentioned))
        return [each for each in found if name in each]

    def settings_of_runs(self, prefix: str, name: str) -> list[JsonObject]:
        """Return the settings that processes of runs with a prefix reported under a name, the
        newest process first."""
        processes, attempts = TABLES["processes"].c, TABLES["attempts"].c
        mentioned = sa.type_coerce(processes.settings, sa.Text).contains(
            f'"{name}"', autoescape=True
        )
        query = (
            sa.select(processes.settings)
            .join(TABLES["attempts"], attempts.attempt_id == processes.attempt_id)
            .where(attempts.run.startswith(prefix, autoescape=True), mentioned)
            .order_by(sa.desc(processes.first_wall))
        )
        return [each[name] for each in self._values(query) if isinstance(each.get(name), dict)]

    def timings(self, attempt_id: int, steps: Sequence[int]) -> list[PartTiming]:
        """Return the begin times and durations of each part of steps, without superseded stages."""
        place = [stages.c[name] for name in ("step", "role", "stage", *PART_FIELDS)]
        begun = stages.c.begin_wall + sa.func.coalesce(stages.c.clock_offset, 0.0)
        query = sa.select(
            *place,
            sa.func.min(begun).label("first"),
            sa.func.max(begun).label("last"),
            sa.func.max(stages.c.end_mono - stages.c.begin_mono).label("longest"),
        ).where(
            stages.c.attempt_id == attempt_id, stages.c.step.in_(list(steps)), _not_superseded()
        )
        return self._rows(PartTiming, query.group_by(*place))


def _not_superseded() -> sa.ColumnElement[bool]:
    column = TABLES["stages"].c.superseded
    return column.is_(None) | (column == sa.false())  # null (unknown) is not superseded
