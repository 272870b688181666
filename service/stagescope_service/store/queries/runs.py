"""Queries for runs, attempts, steps, stages and processes."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from stagescope.wire.nonfinite import Json, JsonObject
from stagescope.wire.schema import PART_FIELDS
from stagescope_service.store.contract import Row
from stagescope_service.store.queries import overview
from stagescope_service.store.queries.reader import LIMIT, Filter, Reader, conditions, of_few
from stagescope_service.store.snapshot import Query
from stagescope_service.store.tables import TABLES, stages
from stagescope_service.store.tables.training import REMOVABLE
from stagescope_service.store.upsert import STEP_ROWS, step_rows


def timings(attempt_id: int, steps: Sequence[int]) -> Query:
    """Select `first` and `last` begin and `longest` duration per step, role, stage and part.

    `first` and `last` are Unix seconds of the service's clock, `longest` is monotonic seconds;
    superseded stages are excluded.
    """
    place = [stages.c[name] for name in ("step", "role", "stage", *PART_FIELDS)]
    begun = stages.c.begin_wall + sa.func.coalesce(stages.c.clock_offset, 0.0)
    return (
        sa.select(
            *place,
            sa.func.min(begun).label("first"),
            sa.func.max(begun).label("last"),
            sa.func.max(stages.c.end_mono - stages.c.begin_mono).label("longest"),
        )
        .where(
            stages.c.attempt_id == attempt_id,
            stages.c.step.in_(list(steps)),
            sa.func.coalesce(stages.c.superseded, sa.false()) == sa.false(),
        )
        .group_by(*place)
    )


class RunQueries(Reader):
    """Queries for runs, attempts, steps, stages and processes."""

    def runs(self, *, limit: int = LIMIT, offset: int = 0) -> list[Row]:
        """Return the runs, the most recently active first.

        Each has `attempts` (their number), `attempt_id`, `attempt` and `attempt_key` of the newest,
        `last_wall` (the last contact with any of its processes) and `live`.
        """
        return self._rows(overview.runs().limit(limit).offset(offset))

    def has_run(self, run: str) -> bool:
        """Return whether there is a run of this name."""
        return self._one("runs", run=run) is not None

    def run(self, run: str) -> Row | None:
        """Return one run in the form of `runs`, or None."""
        return self._first(overview.runs(run))

    def live_runs(self, since: float = 0.0) -> list[Row]:
        """Return the live runs in the form of `runs`, with a last contact at `since` or later.

        Processes that finished or lapsed do not count.
        """
        return [
            row
            for row in self._rows(overview.runs())
            if row["live"] and (row["last_wall"] or 0.0) >= since
        ]

    def attempts(self, run: str | None = None, *, with_fingerprint: bool = False) -> list[Row]:
        """Return attempts, newest first, with `last_wall`, `processes` and `live`.

        Args:
            run: of this run; None for all.
            with_fingerprint: with the column `fingerprint`, up to 100 kB of JSON an attempt.
        """
        return self._rows(overview.attempts(run, with_fingerprint=with_fingerprint))

    def fingerprint(self, attempt_id: int) -> Json:
        """Return the fingerprint of an attempt, None where there is none."""
        table = TABLES["attempts"].c
        found = self._rows(sa.select(table.fingerprint).where(table.attempt_id == attempt_id))
        fingerprint: Json = found[0]["fingerprint"] if found else None
        return fingerprint

    def attempt(self, attempt_id: int) -> Row | None:
        """Return one attempt in the form of `attempts`, or None."""
        return self._first(overview.attempts(attempt_id=attempt_id))

    def find_attempt(self, run: str, number: int | None = None) -> Row | None:
        """Return attempt `number` of a run (None: the newest), or None if there is none."""
        return self._first(overview.attempts(run, number=number))

    def training_attempt(self) -> Row | None:
        """Return the attempt of any run whose training stage began last, or None."""
        return self._first(overview.training_attempt())

    def attempt_of_step(self, run: str, step: int) -> Row | None:
        """Return the newest attempt of a run that has `step`, or None."""
        return self._first(overview.attempts(run, step=step))

    def steps(
        self,
        attempt_id: int | None = None,
        *,
        run: str | None = None,
        before: int | None = None,
        limit: int = LIMIT,
    ) -> list[Row]:
        """Return steps, newest first, with `run`, `attempt`, `losses`, `has_whole` (not the blob).

        Args:
            attempt_id: the attempt; None for all attempts of `run`.
            run: the run; None for all.
            before: only steps below this one: the last step of the previous page.
            limit: maximum number of steps.
        """
        return self._rows(overview.steps(attempt_id, run, before).limit(limit))

    def removable_steps(self, run: str, keep: int, *, limit: int = LIMIT) -> list[Row]:
        """Return the steps of a run whose rows may be removed, of each attempt the oldest first.

        Excludes the newest `keep` steps of the newest attempts, pinned ones, open ones, and those
        whose rows are removed.

        Returns:
            `attempt_id`, `step`, `parts_mark`, `rows_removed` of each.
        """
        table, left = TABLES["steps"].c, keep
        found: list[Row] = []
        for attempt in self._rows(overview.attempts(run)):
            own = [table.attempt_id == attempt["attempt_id"], sa.text(REMOVABLE)]
            count = int(self._rows(sa.select(sa.func.count().label("n")).where(*own))[0]["n"])
            over, left = max(0, count - left), max(0, left - count)
            columns = (table.attempt_id, table.step, table.parts_mark, table.rows_removed)
            oldest = sa.select(table.step).where(*own).order_by(table.step).limit(min(over, limit))
            if over:
                chosen = table.step.in_([row["step"] for row in self._rows(oldest)])
                closed = table.closed_wall.is_not(None)
                query = sa.select(*columns).where(own[0], chosen, closed).order_by(table.step)
                found += self._rows(query)
        return found[:limit]

    def has_removable_rows(self, attempt_id: int, step: int) -> bool:
        """Return whether a step has rows that `RemoveRows` would delete."""
        exists = (
            sa.exists(sa.select(TABLES[name].c.step).where(*step_rows(name, attempt_id, step)))
            for name in STEP_ROWS
        )
        return bool(self._rows(sa.select(sa.or_(*exists).label("found")))[0]["found"])

    def step(self, attempt_id: int, step: int) -> Row | None:
        """Return one step with its blob `whole`, or None."""
        return self._one("steps", attempt_id=attempt_id, step=step)

    def newest_whole(self, run: str | None) -> Row | None:
        """Return the newest step of a run's newest attempt that has a step summary, with its blob.

        Args:
            run: the run; None for the one that trained last.
        """
        return self._first(overview.newest_summary(run))

    def parts_mark(self, attempt_id: int, step: int) -> int | None:
        """Return `steps.parts_mark`, the mark that a step summary must reach, or None."""
        table = TABLES["steps"]
        chosen = (table.c.attempt_id == attempt_id) & (table.c.step == step)
        found = self._rows(sa.select(table.c.parts_mark).where(chosen))
        return found[0]["parts_mark"] if found else None

    def stages(
        self,
        attempt_id: int,
        step: Filter = None,
        *,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        policy_version: Filter = None,
        superseded: bool | None = False,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return stages in the order of their begin, without superseded ones by default."""
        where = conditions("stages", {**locals(), "superseded": True if superseded else None})
        if superseded is False:
            where.append(_not_superseded())
        return self._page("stages", where, "begin_wall rank work_key", limit, offset)

    def count_stages(
        self, attempt_id: int, step: int, *, stage: Filter = None
    ) -> dict[tuple[str, str, int], int]:
        """Return (stage, role, rank) -> the number of parts of the stage in a step."""
        table = TABLES["stages"]
        where = [*conditions("stages", locals()), _not_superseded()]
        key = (table.c.stage, table.c.role, table.c.rank)
        query = sa.select(*key, sa.func.count().label("parts")).where(*where).group_by(*key)
        rows = self._rows(query)
        return {(row["stage"], row["role"], row["rank"]): int(row["parts"]) for row in rows}

    def replaced(self, attempt_id: int, step: Filter = None) -> set[tuple[str, int | None]]:
        """Return (incarnation, seq) of payloads whose stage was superseded."""
        columns = TABLES["stages"].c
        where = conditions("stages", {"attempt_id": attempt_id, "step": step, "superseded": True})
        chosen = sa.select(columns.incarnation, columns.end_seq).where(*where)
        return {(row["incarnation"], row["end_seq"]) for row in self._rows(chosen)}

    def open_stages(self, attempt_id: Filter = None, *, limit: int = LIMIT) -> list[Row]:
        """Return stages that began and did not end, oldest first."""
        table = TABLES["stages"]
        where = [*of_few("stages", attempt_id), table.c.end_wall.is_(None)]
        where.append(sa.func.coalesce(table.c.status, "open") == "open")
        return self._page("stages", where, "begin_wall rank", limit, 0)

    def processes(
        self,
        attempt_id: Filter = None,
        *,
        role: Filter = None,
        rank: Filter = None,
        with_hello: bool = False,
    ) -> list[Row]:
        """Return the processes of an attempt by role, rank and time: also those that are gone.

        Args:
            attempt_id: of this attempt.
            role: of this role.
            rank: of this rank.
            with_hello: with the columns `hello` and `settings`, up to 100 kB of JSON a process.
        """
        where = conditions("processes", {"attempt_id": attempt_id, "role": role, "rank": rank})
        left_out = "" if with_hello else "hello settings"
        return self._page("processes", where, "role rank first_wall", without=left_out)

    def settings_with(self, attempt_id: int, name: str) -> list[JsonObject]:
        """Return the settings of those processes of an attempt that reported one of this name."""
        settings = TABLES["processes"].c.settings
        where = conditions("processes", {"attempt_id": attempt_id})
        # By its text first: a trainer's whole configuration takes long to decode.
        mentioned = sa.type_coerce(settings, sa.Text).contains(f'"{name}"', autoescape=True)
        rows = self._rows(sa.select(settings).where(*where, mentioned))
        return [row["settings"] for row in rows if name in row["settings"]]

    def timings(self, attempt_id: int, steps: Sequence[int]) -> list[Row]:
        """Return the begin times and durations of each part of steps; see `timings`."""
        return self._rows(timings(attempt_id, steps))


def _not_superseded() -> sa.ColumnElement[bool]:
    column = TABLES["stages"].c.superseded
    return column.is_(None) | (column == sa.false())  # null (unknown) is not superseded
