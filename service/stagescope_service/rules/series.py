"""The values of a rule in one step, one per series."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from stagescope_service.rules import names
from stagescope_service.rules.document import Rule
from stagescope_service.rules.facts import StepFacts
from stagescope_service.statistics.cell import Cell
from stagescope_service.statistics.mismatch import Metrics, publish, publish_cell
from stagescope_service.statistics.step_summary import StepSummary
from stagescope_service.store.tables import ScalarRow
from stagescope_wire.nonfinite import Json, JsonObject

NAMED: Final = "named"
"""Key of the packed series in the evidence of a stored firing, for a restarted coordinator; readers
see the plain numbers."""

FEW: Final = 4.0
"""Tokens that carry a mean, below which its standard error is not known."""

Float64 = npt.NDArray[np.float64]


class SeriesKey(NamedTuple):
    """The identity of a value: a metric, and the slice unless it is of the full step."""

    metric: str
    stage: str | None = None
    role: str | None = None
    rank: int | None = None
    round: int | None = None


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of a rule in a step: [n] by series, and those of the noise floor (NaN if none).

    `errors` are the standard errors of the values over the values, NaN where they are unknown.
    """

    series: tuple[SeriesKey, ...]
    values: Float64
    noise: Float64
    errors: Float64

    def same_as(self, other: Values) -> bool:
        """Return whether the values are equal, after a step was aggregated again."""
        return self.series == other.series and all(
            np.array_equal(one, two, equal_nan=True)
            for one, two in (
                (self.values, other.values),
                (self.noise, other.noise),
                (self.errors, other.errors),
            )
        )

    def sharing(self, other: Values | None) -> Values:
        """Return the same values, sharing the series of another step if equal, to save memory."""
        if other is None or self.series != other.series:
            return self
        return dataclasses.replace(self, series=other.series)


class _Slice(NamedTuple):
    """A part of a step's tokens that a rule looks at."""

    key: tuple[str | None, int | None, int | None]
    """Role, rank and round."""
    metrics: Metrics
    cell: Cell


class Publisher:
    """Publishes each of a step's summaries and cells once, however many rules look at it."""

    def __init__(self, facts: StepFacts) -> None:
        self.facts = facts
        self._published: dict[tuple[int, int | None], Metrics] = {}

    def values(self, rule: Rule) -> Values:
        """Return the values of a rule; empty if nothing was measured."""
        found: dict[SeriesKey, tuple[float, float, float]] = {}
        if not rule.of_stages:
            found.update(self._measured(rule))
        else:
            counts = self._scalars if rule.of_scalars else self._missing
            counts = self._seconds if rule.metric == names.STAGE_SECONDS else counts
            found = {key: (value, np.nan, np.nan) for key, value in counts(rule).items()}
        series = tuple(sorted(found, key=lambda one: tuple(map(str, one))))
        columns = np.array([found[one] for one in series], np.float64).reshape(-1, 3)
        return Values(series, *(columns[:, at].copy() for at in range(3)))

    # --- from the statistics ------------------------------------------------------------------
    def _measured(self, rule: Rule) -> Iterator[tuple[SeriesKey, tuple[float, float, float]]]:
        """Yield each series with its value, its noise floor and its standard error."""
        every = rule.by == "stage" and rule.stage is None
        for stage in self.facts.stages if every else [rule.stage]:
            step_summary = self.facts.of_stage(stage)
            if step_summary is None:
                continue
            floors: dict[object, Metrics] = {}
            if rule.when.noise_ratio is not None:
                noise = self.facts.noise(step_summary.stage)
                floors = (
                    {}
                    if noise is None
                    else {each.key: each.metrics for each in self._slices(rule, noise)}
                )
            for each in self._slices(rule, step_summary):
                floor = floors.get(each.key, {})
                of_stage = step_summary.stage if rule.by == "stage" else None
                for metric in _matching(rule.metric, each.metrics):
                    error = math.nan
                    if rule.when.standard_errors is not None:
                        # A mean of few large tokens is as uncertain as they are.
                        tokens = each.cell.carrying(*names.MEANS[metric])
                        error = 1.0 / math.sqrt(tokens) if tokens >= FEW else math.nan
                    # A pattern's names differ by stream, and the noise floor has different streams.
                    values = (each.metrics[metric], floor.get(metric, math.nan), error)
                    yield SeriesKey(metric, of_stage, *each.key), values
            if rule.lists_only_bad:  # 0, so that a streak ends where no rank has any
                yield SeriesKey(rule.metric), (0.0, math.nan, math.nan)

    def _slices(self, rule: Rule, step_summary: StepSummary) -> Iterator[_Slice]:
        """Yield the slices of a rule that have tokens.

        For one staleness only the numbers that a cell holds are known, unless every token has that
        staleness.
        """
        summary = step_summary.summary
        is_sliced = rule.staleness is not None and summary.is_staleness_known
        is_part = is_sliced and bool((summary.staleness.keys != rule.staleness).any())
        if rule.by == "round":
            for number, cell in summary.rounds.items() if not is_part else ():
                if cell.masked:
                    yield self._of_cell(step_summary, (None, None, number), number, cell)
        elif rule.by == "rank":
            for at, row in enumerate(step_summary.ranks):
                if row.cell.masked > (row.cell.tokens if rule.lists_only_bad else 0):
                    yield self._of_cell(step_summary, (row.role, row.rank, None), -2 - at, row.cell)
        elif is_sliced and (is_part or not len(summary.staleness.keys)):
            found = summary.staleness.get(cast(int, rule.staleness))
            if found is not None and found.masked:
                yield _Slice((None, None, None), publish_cell(found, summary.pair), found)
        elif summary.total.masked:
            key = (id(step_summary), None)
            if key not in self._published:
                self._published[key] = publish(summary)
            yield _Slice((None, None, None), self._published[key], summary.total)

    def _of_cell(
        self,
        step_summary: StepSummary,
        key: tuple[str | None, int | None, int | None],
        at: int,
        cell: Cell,
    ) -> _Slice:
        """Return a slice whose cell is published once; `at` is unique in the summary."""
        own = (id(step_summary), at)
        if own not in self._published:
            self._published[own] = publish_cell(cell, step_summary.summary.pair)
        return _Slice(key, self._published[own], cell)

    # --- from the stage events ----------------------------------------------------------------
    def _seconds(self, rule: Rule) -> dict[SeriesKey, float]:
        """Return the seconds of the slowest rank of each stage, or of each rank if `by` is rank."""
        slowest: dict[SeriesKey, float] = {}
        for (stage, role, rank), seconds in self.facts.seconds.items():
            if rule.stage in (None, stage):
                own = (role, rank) if rule.by == "rank" else (None, None)
                key = SeriesKey(rule.metric, stage, *own)
                slowest[key] = max(seconds, slowest.get(key, 0.0))
        return slowest

    def _scalars(self, rule: Rule) -> dict[SeriesKey, float]:
        """Return the number of non-finite values of each scalar: 0 if none, like `_missing`."""
        found = Counter(scalar_series(rule, row) for row in bad_scalars(rule, self.facts))
        return dict(found) or {SeriesKey(rule.metric, rule.stage): 0.0}

    def _missing(self, rule: Rule) -> dict[SeriesKey, float]:
        """Return the number of missing ranks; by rank, 1 for each stage that it did not end.

        0 if none is missing, so that a streak ends there.
        """
        rows = [row for row in self.facts.missing if rule.stage in (None, row["stage"])]
        keys = {(row["stage"], row["role"], row["rank"]) for row in rows}
        if rule.by == "rank" and keys:
            return {SeriesKey(rule.metric, *key): 1.0 for key in keys}
        if rule.by == "stage" and keys:
            counts = Counter(stage for stage, *_ in keys)
            return {SeriesKey(rule.metric, stage): count for stage, count in counts.items()}
        return {SeriesKey(rule.metric, rule.stage): len({key[1:] for key in keys})}


def scalar_series(rule: Rule, row: ScalarRow) -> SeriesKey:
    """Return the series of a non-finite scalar."""
    of_rank = (row["role"], row["rank"]) if rule.by == "rank" else (None, None)
    stage = row["stage"] if rule.by in ("stage", "rank") else rule.stage
    return SeriesKey(names.NONFINITE_SCALAR + row["name"], stage, *of_rank)


PackedSeries = Sequence[Json]
"""[metric, stage, role, round, spans of ranks]; a span is [first, last], None: without a rank."""


def pack(series: Iterable[SeriesKey]) -> list[PackedSeries]:
    """Return series in the stored form of a firing."""
    found: dict[tuple[str, str | None, str | None, int | None], list[int]] = {}
    packed: list[PackedSeries] = []
    for one in series:
        key = (one.metric, one.stage, one.role, one.round)
        if one.rank is None:
            packed.append([*key, None])
        else:
            found.setdefault(key, []).append(one.rank)
    for key in sorted(found, key=lambda key: tuple(map(str, key))):
        spans: list[list[int]] = []
        for rank in sorted(found[key]):
            if spans and spans[-1][1] == rank - 1:
                spans[-1][1] = rank
            else:
                spans.append([rank, rank])
        packed.append([*key, spans])
    return packed


def shown(evidence: JsonObject) -> dict[str, Json]:
    """Return the evidence of a stored firing without its packed series."""
    return {name: value for name, value in evidence.items() if name != NAMED}


def unpack(packed: Iterable[PackedSeries]) -> frozenset[SeriesKey]:
    """Return the series that `pack` encoded."""
    found: set[SeriesKey] = set()
    for metric, stage, role, number, spans in packed:
        if spans is None:
            found.add(SeriesKey(metric, stage, role, None, number))
        for first, last in spans or ():
            ranks = range(first, last + 1)
            found.update(SeriesKey(metric, stage, role, rank, number) for rank in ranks)
    return frozenset(found)


def bad_scalars(rule: Rule, facts: StepFacts) -> list[ScalarRow]:
    """Return the scalars of a step that a rule counts, in the order of their logging."""
    pattern = names.scalar_of(rule.metric)
    return [
        row
        for row in facts.scalars
        if rule.stage in (None, row["stage"]) and fnmatch.fnmatchcase(row["name"], pattern)
    ]


def _matching(metric: str, published: Metrics) -> list[str]:
    if names.is_pattern(metric):
        return fnmatch.filter(published, metric)
    return [metric] if metric in published else []
