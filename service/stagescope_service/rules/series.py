"""The values of a rule in one step, one per series."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope.wire.nonfinite import Json, JsonObject
from stagescope_service.rules import names
from stagescope_service.rules.document import Rule
from stagescope_service.rules.facts import Facts
from stagescope_service.statistics.cell import Cell
from stagescope_service.statistics.mismatch import Metrics, publish, publish_cell
from stagescope_service.statistics.step_summary import StepSummary
from stagescope_service.store.tables import ScalarRow

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


class Publisher:
    """Publishes each of a step's summaries and cells once, however many rules look at it."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._published_steps: dict[int, Metrics] = {}
        self._cells: dict[tuple[int, int], Metrics] = {}

    def values(self, rule: Rule) -> Values:
        """Return the values of a rule; empty if nothing was measured."""
        found = dict(self._stages(rule) if rule.of_stages else self._measured(rule))
        series = tuple(sorted(found, key=lambda one: tuple(map(str, one))))
        pairs = np.array([found[one] for one in series], np.float64).reshape(-1, 2)
        errors = np.full(len(series), np.nan)
        if rule.when.standard_errors is not None:
            errors = np.array([self._error(rule, one) for one in series], np.float64)
        return Values(series, pairs[:, 0].copy(), pairs[:, 1].copy(), errors)

    # --- from the statistics ------------------------------------------------------------------
    def _measured(self, rule: Rule) -> Iterator[tuple[SeriesKey, tuple[float, float]]]:
        for stage, step_summary in self._chosen(rule).items():
            noise = self.facts.noise.get(stage)
            for slice_key, published in self._published(rule, step_summary):
                floor = None if noise is None else dict(self._published(rule, noise)).get(slice_key)
                of_stage = step_summary.stage if rule.by == "stage" else None
                for metric in _matching(rule.metric, published):
                    key = SeriesKey(metric, of_stage, *slice_key)
                    # A pattern's names differ by stream, and the noise floor has different streams.
                    value = np.nan if floor is None else floor.get(metric, np.nan)
                    yield key, (published[metric], value)
            if rule.lists_only_bad:  # 0, so that a streak ends where no rank has any
                yield SeriesKey(rule.metric), (0.0, np.nan)

    def _error(self, rule: Rule, series: SeriesKey) -> float:
        """Return the standard error of a mean of |x| over the mean; NaN where it is unknown.

        Tokens are as many as carry the sum: a mean of few large ones is as uncertain as theirs.
        """
        step_summary = self._chosen(rule).get(rule.stage or series.stage)
        if step_summary is None:
            return math.nan
        summary = step_summary.summary
        cell: Cell | None
        if series.round is not None:
            cell = summary.rounds.get(series.round)
        elif series.rank is not None:
            of_rank = (
                row.cell
                for row in step_summary.ranks
                if (row.role, row.rank) == (series.role, series.rank)
            )
            cell = next(of_rank, None)
        elif rule.staleness is not None and summary.is_staleness_known:
            cell = summary.staleness.get(rule.staleness)
        else:
            cell = summary.total
        tokens = 0.0 if cell is None else cell.carrying(*names.MEANS[series.metric])
        return 1.0 / math.sqrt(tokens) if tokens >= FEW else math.nan

    def _chosen(self, rule: Rule) -> Mapping[str | None, StepSummary]:
        summaries = self.facts.summaries
        if rule.stage is not None:
            return {rule.stage: summaries[rule.stage]} if rule.stage in summaries else {}
        if rule.by == "stage":
            return {
                stage: step_summary
                for stage, step_summary in summaries.items()
                if stage is not None
            }
        return {None: summaries[None]} if None in summaries else {}

    def _published(
        self, rule: Rule, step_summary: StepSummary
    ) -> Iterator[tuple[tuple[str | None, int | None, int | None], Metrics]]:
        """Yield ((role, rank, round), metrics) of the slices of a rule."""
        summary = step_summary.summary
        if rule.by == "round":
            is_sliced = rule.staleness is not None and summary.is_staleness_known
            if is_sliced and (summary.staleness.keys != rule.staleness).any():
                return  # no cell holds the tokens of a round that have one staleness
            for number, cell in summary.rounds.items():
                if cell.masked:
                    yield (None, None, number), self._cell_metrics(step_summary, number, cell)
        elif rule.by == "rank":
            for at, row in enumerate(step_summary.ranks):
                if row.cell.masked > (row.cell.tokens if rule.lists_only_bad else 0):
                    yield (
                        (row.role, row.rank, None),
                        self._cell_metrics(step_summary, -1 - at, row.cell),
                    )
        elif rule.staleness is None or not summary.is_staleness_known:
            if summary.total.masked:
                yield (None, None, None), self._step_metrics(step_summary)
        else:
            yield from self._of_staleness(rule.staleness, step_summary)

    def _of_staleness(
        self, age: int, step_summary: StepSummary
    ) -> Iterator[tuple[tuple[None, None, None], Metrics]]:
        """Yield the numbers of the tokens of one staleness.

        Numbers that no cell holds (rounds, sequences) are only included if every token has that
        staleness.
        """
        slices = step_summary.summary.staleness
        cell = slices.get(age)
        if cell is None or not cell.masked:
            return
        if all(key == age for key in slices.keys.tolist()):
            yield (None, None, None), self._step_metrics(step_summary)
        else:
            yield (None, None, None), publish_cell(cell, step_summary.summary.pair)

    def _step_metrics(self, step_summary: StepSummary) -> Metrics:
        if id(step_summary) not in self._published_steps:
            self._published_steps[id(step_summary)] = publish(step_summary.summary)
        return self._published_steps[id(step_summary)]

    def _cell_metrics(self, step_summary: StepSummary, number: int, cell: Cell) -> Metrics:
        key = (id(step_summary), number)
        if key not in self._cells:
            self._cells[key] = publish_cell(cell, step_summary.summary.pair)
        return self._cells[key]

    # --- from the stage events ----------------------------------------------------------------
    def _stages(self, rule: Rule) -> Iterator[tuple[SeriesKey, tuple[float, float]]]:
        if rule.metric == names.MISSING_RANKS:
            yield from ((key, (count, np.nan)) for key, count in self._missing(rule).items())
            return
        if rule.of_scalars:
            yield from ((key, (count, np.nan)) for key, count in self._scalars(rule).items())
            return
        slowest: dict[SeriesKey, float] = {}
        for (stage, role, rank), seconds in self.facts.seconds.items():
            if rule.stage not in (None, stage):
                continue
            by_rank = rule.by == "rank"
            key = SeriesKey(
                rule.metric, stage, role if by_rank else None, rank if by_rank else None
            )
            slowest[key] = max(seconds, slowest.get(key, 0.0))
        yield from ((key, (seconds, np.nan)) for key, seconds in slowest.items())

    def _scalars(self, rule: Rule) -> dict[SeriesKey, float]:
        """Return the number of non-finite values of each scalar: 0 if none, like `_missing`."""
        found: dict[SeriesKey, float] = {}
        for row in bad_scalars(rule, self.facts):
            key = scalar_series(rule, row)
            found[key] = found.get(key, 0.0) + 1.0
        return found or {SeriesKey(rule.metric, rule.stage): 0.0}

    def _missing(self, rule: Rule) -> dict[SeriesKey, float]:
        """Return the number of missing ranks; by rank, 1 for each stage that it did not end.

        0 if none is missing, so that a streak ends there.
        """
        stages: dict[str, set[tuple[str, int]]] = {}
        for row in self.facts.missing:
            if rule.stage in (None, row["stage"]):
                stages.setdefault(row["stage"], set()).add((row["role"], row["rank"]))
        if rule.by == "rank" and stages:
            return {
                SeriesKey(rule.metric, stage, *rank_key): 1.0
                for stage, of in stages.items()
                for rank_key in of
            }
        if rule.by == "stage" and stages:
            return {SeriesKey(rule.metric, stage): float(len(of)) for stage, of in stages.items()}
        everybody = set[tuple[str, int]]().union(*stages.values())
        return {SeriesKey(rule.metric, rule.stage): float(len(everybody))}


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


def bad_scalars(rule: Rule, facts: Facts) -> list[ScalarRow]:
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
