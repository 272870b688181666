"""The query behind the lists of runs: a little of every run, whatever its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from stagescope_service.store.queries.curves import CurveQueries
from stagescope_service.store.tables import TABLES
from stagescope_service.store.tables.compact import scalar_names


class StepSample(NamedTuple):
    """Two numbers of a step; "nan", "inf" or "-inf" is one that is not finite, None is unknown."""

    metric: float | str | None
    scalar: float | str | None
    """The mean over its ranks."""


class SampledAttempt(NamedTuple):
    """The numbers that are wanted of an attempt."""

    attempt_id: int
    steps: list[int]
    scalar: str | None
    """None: no scalar."""


class SparklineQueries(CurveQueries):
    """Queries for lists of runs."""

    def open_kinds(self, runs: Sequence[str]) -> dict[tuple[str, str], int]:
        """Return (run, severity) -> the number of kinds of its findings that are not over."""
        table = TABLES["findings"].c
        query = (
            sa.select(table.run, table.severity, sa.func.count(table.kind.distinct()))
            .where(table.run.in_(list(runs)), table.over_wall.is_(None))
            .group_by(table.run, table.severity)
        )
        return {(run, severity): count for run, severity, count in self._tuples(query)}

    def step_samples(
        self, wanted: Sequence[SampledAttempt], *, metric: str, version: int
    ) -> list[dict[int, StepSample]]:
        """Return a published number and a scalar of some steps of each attempt."""
        numbers, scalars = TABLES["step_metrics"].c, TABLES["scalars"].c
        measured = sa.select(numbers.step, *self._numbers([metric])).where(
            numbers.attempt_id == sa.bindparam("own"),
            numbers.step.in_(sa.bindparam("chosen", expanding=True)),
            numbers.version == version,
        )
        logged = (
            sa.select(scalars.step, sa.func.avg(scalars.value), sa.func.max(scalars.nonfinite))
            .where(
                scalars.attempt_id == sa.bindparam("own"),
                scalars.step.in_(sa.bindparam("chosen", expanding=True)),
                scalars.name == sa.bindparam("scalar"),
            )
            .group_by(scalars.step)
        )
        found: list[dict[int, StepSample]] = []
        with self._reading() as connection:
            for each in wanted:
                own = {"own": each.attempt_id, "chosen": each.steps}
                values = {row[0]: row[-1] for row in connection.execute(measured, own)}
                means: dict[int, float | str | None] = {}
                if each.scalar is not None:
                    rows = connection.execute(logged, {**own, "scalar": each.scalar})
                    means = {row[0]: row[2] or row[1] for row in rows}
                found.append({s: StepSample(values.get(s), means.get(s)) for s in each.steps})
        return found

    def scalars_of(self, attempts: Sequence[int]) -> dict[int, list[str]]:
        """Return attempt_id -> the names of its scalars."""
        query = sa.select(scalar_names.c.attempt_id, scalar_names.c.name).where(
            scalar_names.c.attempt_id.in_(list(attempts)), scalar_names.c.last_step.is_not(None)
        )
        found: dict[int, list[str]] = {}
        for attempt_id, name in self._tuples(query):
            found.setdefault(attempt_id, []).append(name)
        return found
