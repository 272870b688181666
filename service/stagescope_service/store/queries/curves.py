"""Queries over all steps of a run at once, for figures: only the columns that a curve needs.

`steps` holds a blob of every step. SQLite finds a column behind the blob only by reading all of it.
The columns of these queries lie before the blob.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

import orjson
import sqlalchemy as sa
from typing_extensions import Unpack

from stagescope_service.store.queries.reader import Reader, StepWindow, between, in_window, is_kept
from stagescope_service.store.tables import TABLES, StepMarks
from stagescope_service.store.tables.compact import works

_QUOTABLE: Final = re.compile(r'[^"\\\x00-\x1f]+')


class CurveStep(NamedTuple):
    """A step of an attempt."""

    attempt_id: int
    step: int
    closed_wall: float | None
    completeness: str | None
    superseded_by: int | None


class StepMark(NamedTuple):
    """How far a step and its numbers have come: see `StepState`."""

    attempt_id: int
    step: int
    closed_wall: float | None
    completeness: str | None
    summary_wall: float | None
    parts_mark: int | None
    summary_mark: int | None
    rows_removed: bool | None
    has_summary: bool


_STEP_MARK: Final = StepMark._fields[:-1]


class StoredNumbers(NamedTuple):
    """Published numbers of steps as columns, each with one entry a step."""

    places: list[tuple[int, int]]
    """(attempt_id, step)."""
    several_versions: bool
    """Whether the tokens of any of the steps come from several policy versions."""
    values: list[tuple[float | str | None, ...]]
    """For each of the requested names; "nan", "inf" or "-inf" is a number that is not finite, None
    is not published."""


class PublishedNumbers(NamedTuple):
    """All published numbers of a step, and the checks of its streams."""

    attempt_id: int
    step: int
    summary_wall: float | None
    """As that of the step, unless the step was aggregated again."""
    verdict: str | None
    suspects: list[str] | None
    metrics: dict[str, Any]


class MarkedStep(NamedTuple):
    """Findings or dumps of one kind in a step."""

    attempt_id: int
    step: int
    kind: str
    severity: str
    times: int
    """Number of them."""
    text: str


class UnmeasuredStep(StepMarks):
    """A step without numbers, and whether it has a step summary of another version."""

    attempt_id: int
    step: int
    has_summary: bool


class CurveQueries(Reader):
    """Queries that return a little of every step."""

    def step_states(
        self, attempts: Sequence[int], *, limit: int | None = None, **window: Unpack[StepWindow]
    ) -> list[CurveStep]:
        """Return the steps of attempts, or the newest `limit`, ascending by step and attempt."""
        table = TABLES["steps"].c
        query = (
            sa.select(*(table[name] for name in CurveStep._fields))
            .where(*in_window("steps", attempts, **window))
            .order_by(table.step.desc(), table.attempt_id.desc())
            .limit(limit)
        )
        return [CurveStep(*row) for row in self._tuples(query)[::-1]]

    def stored_numbers(
        self,
        attempts: Sequence[int],
        names: Sequence[str],
        *,
        version: int,
        **window: Unpack[StepWindow],
    ) -> StoredNumbers:
        """Return some published numbers of the steps that have numbers, ascending by step.

        The numbers of a step that is being aggregated may be the previous ones.
        """
        table = TABLES["step_metrics"].c
        suspects = sa.type_coerce(table.suspects, sa.Text)
        query = (
            sa.select(table.attempt_id, table.step, suspects, *self._numbers(names))
            .where(
                *in_window("step_metrics", attempts, **window),
                table.version == version,
                table.metrics.is_not(None),
            )
            .order_by(table.step, table.attempt_id)
        )
        # Columns: an object a row would keep the garbage collector busy for longer than the query.
        columns = [*zip(*self._tuples(query), strict=True)]
        if not columns:
            return StoredNumbers([], False, [() for _ in names])
        attempt_ids, steps, suspected, *values = columns
        several = any('"versions"' in text for text in {*suspected} - {None})
        return StoredNumbers([*zip(attempt_ids, steps, strict=True)], several, values)

    def step_marks(
        self, attempts: Sequence[int], *, last: int | None = None
    ) -> Generator[StepMark, None, None]:
        """Return how far every step of attempts has come, in the order of `step_metrics`.

        Its numbers are not read, which takes less than half the time.
        """
        steps = TABLES["steps"]
        query = (
            sa.select(
                *(steps.c[name] for name in _STEP_MARK),
                is_kept(steps.c.step_summary).label("has_summary"),
            )
            .where(*in_window("steps", attempts, last=last))
            .order_by(steps.c.step.desc(), steps.c.attempt_id.desc())
        )
        # Rows of SQLAlchemy: an object of our own would take as long as the query.
        return cast("Generator[StepMark, None, None]", self._stream(query))

    def every_number(
        self, attempts: Sequence[int], *, version: int, **window: Unpack[StepWindow]
    ) -> Iterator[PublishedNumbers]:
        """Yield the published numbers of the steps that have numbers.

        Those of a step that is being aggregated may be the previous ones: see `summary_wall`.
        """
        table = TABLES["step_metrics"].c
        query = sa.select(
            table.attempt_id, table.step, table.summary_wall, table.verdict, table.suspects,
            sa.type_coerce(table.metrics, sa.Text),
        ).where(
            *in_window("step_metrics", attempts, **window),
            table.version == version,
            table.metrics.is_not(None),
        )  # fmt: skip
        for attempt_id, step, wall, verdict, suspects, text in self._tuples(query):
            yield PublishedNumbers(attempt_id, step, wall, verdict, suspects, orjson.loads(text))

    def newest_numbers(self, attempts: Sequence[int], *, version: int) -> dict[str, Any]:
        """Return all published numbers of the newest step of attempts that has some, else {}."""
        table = TABLES["step_metrics"].c
        query = (
            sa.select(table.metrics)
            .where(
                table.attempt_id.in_(list(attempts)),
                table.version == version,
                table.metrics.is_not(None),
            )
            .order_by(table.step.desc(), table.attempt_id.desc())
            .limit(1)
        )
        found = self._values(query)
        return dict(found[0]) if found else {}

    def unmeasured_steps(
        self, attempts: Sequence[int], *, version: int, **window: Unpack[StepWindow]
    ) -> list[UnmeasuredStep]:
        """Return the steps without numbers of this version, with the columns that say why."""
        steps, found = TABLES["steps"], TABLES["step_metrics"].c
        table = steps.c
        own = (found.attempt_id == table.attempt_id) & (found.step == table.step)
        names = ("attempt_id", "step", "closed_wall", "parts_mark", "summary_mark", "rows_removed")
        query = (
            sa.select(
                *(table[name] for name in names),
                is_kept(table.step_summary).label("has_summary"),
            )
            .where(
                *in_window("steps", attempts, **window),
                ~sa.exists().where(own, found.version == version, found.metrics.is_not(None)),
            )
            .order_by(table.step, table.attempt_id)
        )
        return self._rows(UnmeasuredStep, query)

    def findings_by_step(
        self, attempts: Sequence[int], **window: Unpack[StepWindow]
    ) -> list[MarkedStep]:
        """Return the findings of steps by kind and severity, each with one of the messages."""
        return self._marked("findings kind severity message", attempts, window)

    def dumps_by_step(
        self, attempts: Sequence[int], **window: Unpack[StepWindow]
    ) -> list[MarkedStep]:
        """Return the dumps of steps by capture (`kind`) and state (`severity`)."""
        return self._marked("dumps capture_id state stage", attempts, window)

    def _marked(self, names: str, attempts: Sequence[int], window: StepWindow) -> list[MarkedStep]:
        """Return marks, given the table and its columns that are `kind`, `severity` and `text`."""
        name, *of_mark, text = names.split()
        table = TABLES[name].c
        by = [table[column] for column in ("attempt_id", "step", *of_mark)]
        query = (
            sa.select(*by, sa.func.count(), sa.func.min(table[text]))
            .where(*in_window(name, attempts, **window), table.step.is_not(None))
            .group_by(*by)
            .order_by(table.step, table.attempt_id, by[2])
        )
        return [MarkedStep(*row) for row in self._tuples(query)]

    def steps_with_stage(
        self, attempts: Sequence[int], stage: str, **window: Unpack[StepWindow]
    ) -> list[int]:
        """Return the steps in which a stage began, ascending."""
        query = (
            sa.select(works.c.step)
            .where(
                works.c.attempt_id.in_(list(attempts)),
                works.c.stage == stage,
                works.c.step.is_not(None),
                *between(works.c.step, **window),
            )
            .distinct()
            .order_by(works.c.step)
        )
        return [int(row[0]) for row in self._tuples(query)]

    def slices(
        self, keys: Sequence[tuple[int, int]], *, version: int
    ) -> dict[tuple[int, int], bytes]:
        """Return (attempt_id, step) -> `slices` of those of the steps that have any."""
        table = TABLES["step_metrics"].c
        found: dict[tuple[int, int], bytes] = {}
        for attempt_id in sorted({attempt_id for attempt_id, _ in keys}):
            steps = [step for owner, step in keys if owner == attempt_id]
            query = sa.select(table.step, table.slices).where(
                table.attempt_id == attempt_id,
                table.step.in_(steps),
                table.version == version,
                table.slices.is_not(None),
            )
            found |= {(attempt_id, int(step)): blob for step, blob in self._tuples(query)}
        return found

    def _numbers(self, names: Sequence[str]) -> list[sa.ColumnElement[object]]:
        """Return the numbers of these names as columns; the database parses the JSON."""
        column = TABLES["step_metrics"].c.metrics
        # A name that no metric has stays without a value: paths of SQLite cannot quote every text.
        known = [name if _QUOTABLE.fullmatch(name) else "" for name in names]
        if self._path is None:
            document = sa.cast(column, sa.JSON)
            return [document[name] for name in known]
        text = sa.type_coerce(column, sa.Text)
        return [sa.func.json_extract(text, f'$."{name}"') for name in known]
