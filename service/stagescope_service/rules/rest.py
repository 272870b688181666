"""A run's history without some ranks, or without an engine instance.

A large fault on one rank hides a smaller one that the other ranks show, and so does that of one
engine. What is left is computed from the parts of the newest steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from stagescope_service.rules.evidence import ABS_DIFF, Series
from stagescope_service.rules.facts import StepFacts
from stagescope_service.rules.history import READ, RunHistory
from stagescope_service.rules.pooled import STEPS as POOLED
from stagescope_service.rules.steps import CurrentStep
from stagescope_service.statistics.part import PartRecord
from stagescope_service.statistics.profile_bins import Bin, add_bins
from stagescope_service.statistics.step_metrics import Dimension, SliceKey, SliceMetrics
from stagescope_service.statistics.step_summary import StepSummary, assemble
from stagescope_service.store.catalogue import Catalogue
from stagescope_wire.errors import InvalidInput
from stagescope_wire.schema import RankKey

_STEPS: Final = 400
"""Newest steps of which the mean of the other ranks is computed."""
_TOKENS: Final = "counts/tokens"
_LARGEST: Final = "logprob_abs_diff/max"
_FAR: Final = "tail/abs_diff_over_0.5_count"
_Slices = list[tuple[CurrentStep, Mapping[SliceKey, float]]]


class OtherRanks(RunHistory):
    """The tokens of all ranks but some.

    Only the newest measured steps are read, the checks of `READ` of them. Of earlier steps only
    the mean |d| is known.

    Args:
        history: of all ranks.
        left_out: the ranks that do not count.
    """

    reads_every_step = False

    def __init__(self, history: RunHistory, left_out: frozenset[RankKey]) -> None:
        self._adopt(history)
        self._all, self._left_out = history, left_out
        self.facts = lru_cache(maxsize=2 * POOLED)(self._facts_of)

    @cached_property
    def measured(self) -> list[CurrentStep]:
        """The newest steps that have numbers of the other ranks, ascending."""
        steps = self._measured[-POOLED:]
        found = [step._replace(suspects=()) for step in steps[:-READ]]
        for step in steps[-READ:]:
            facts = self.read(step)
            if facts is not None:
                checks = facts.comparability
                failed = tuple(check.name for check in checks.suspects)
                found.append(step._replace(verdict=checks.verdict, suspects=failed))
        return found

    @property
    def ranks(self) -> frozenset[RankKey]:
        """The ranks that count, of the newest step."""
        newest = self.newest
        rows = () if newest is None else newest.summary.ranks
        return frozenset((row.role, row.rank) for row in rows)

    def metric(self, name: str) -> Series:
        """Return the mean |d| over the tokens of the other ranks; of other numbers nothing."""
        steps = self._measured[-_STEPS:] if name == ABS_DIFF else []
        sizes = dict(self._of_ranks(_TOKENS, steps))
        means: dict[tuple[int, int], float] = {}
        for step, own in self._of_ranks(name, steps):
            values = np.array([*own.values()])
            counts = np.array([sizes.get(step, {}).get(key, 0.0) for key in own])
            known = np.isfinite(values) & (counts > 0.0)
            if known.any():
                mean = float(np.average(values[known], weights=counts[known]))
                means[step.attempt_id, step.step] = mean
        return self._rows.series(name, means)

    def slices(
        self, by: Dimension, name: str, steps: Sequence[CurrentStep] | None = None
    ) -> _Slices:
        """Return a published number of the slices of the other ranks' tokens, ascending."""
        if by == "rank":
            return self._of_ranks(name, self.measured if steps is None else steps)
        chosen = self.measured[-READ:] if steps is None else steps
        read = ((step, self.read(step)) for step in chosen)
        return [
            (step, SliceMetrics.from_step_summary(facts.summary).column(by, name))
            for step, facts in read
            if facts is not None
        ]

    def _of_ranks(self, name: str, steps: Sequence[CurrentStep]) -> _Slices:
        return [
            (step, {key: value for key, value in own.items() if key not in self._left_out})
            for step, own in super().slices("rank", name, steps)
        ]

    def mean_staleness(self, steps: Sequence[int]) -> float:
        """Return the mean staleness of the tokens of all ranks."""
        return self._all.mean_staleness(steps)

    def _facts_of(self, step: CurrentStep) -> StepFacts:
        return _OtherRanksOfStep(self._catalogue, self.run, step, self._left_out)


class _OtherRanksOfStep(StepFacts):
    """The facts of a step without the tokens of some ranks."""

    def __init__(
        self, catalogue: Catalogue, run: str, step: CurrentStep, left_out: frozenset[RankKey]
    ) -> None:
        super().__init__(catalogue, run, step.attempt_id, step.attempt, step.step)
        self._left_out = left_out

    @cached_property
    def whole(self) -> StepSummary | None:
        """The statistics of the other ranks; None: they have none."""
        try:
            return assemble(self.parts())
        except InvalidInput:
            return None

    def parts(self, pair: tuple[str, str] | None = None) -> list[PartRecord]:
        """Return the report of each of the other ranks."""
        every = super().parts(pair)
        return [part for part in every if (part.role, part.rank) not in self._left_out]


class OtherEngines(RunHistory):
    """The mean |d| by rank of the tokens that other engine instances than one sampled.

    Only the newest `READ` measured steps are read.

    Args:
        history: of all engines.
        left_out: the engine instance.
    """

    reads_every_step = False

    def __init__(self, history: RunHistory, left_out: str) -> None:
        self._adopt(history)
        self._left_out = left_out

    def slices(
        self, by: Dimension, name: str, steps: Sequence[CurrentStep] | None = None
    ) -> _Slices:
        """Return a number of each rank, ascending; {} if its sums by engine do not give it."""
        chosen = self.measured[-READ:] if steps is None else steps
        return [(step, self._numbers(step, name) if by == "rank" else {}) for step in chosen]

    def _numbers(self, step: CurrentStep, name: str) -> dict[SliceKey, float]:
        bins: dict[SliceKey, list[Bin]] = {}
        facts = self.read(step)
        counted = () if facts is None else facts.summary.counted
        for part in () if facts is None else facts.parts():
            if part.key in counted:
                for engine, own in part.summary.of_engines().items():
                    if engine != self._left_out and own.tokens:
                        bins.setdefault((part.role, part.rank), []).append(own)
        return {key: _number(name, add_bins(own)) for key, own in bins.items()}


def _number(name: str, sums: Bin) -> float:
    """Return a published number of some sums, or a bound of it; NaN if it is unknown.

    The square root of the sum of squares is no smaller than the largest |d|. The tokens that are
    far off are as many as carry the mean.
    """
    numbers = {
        ABS_DIFF: sums.d_abs_sum / sums.tokens,
        _TOKENS: float(sums.tokens),
        _LARGEST: math.sqrt(sums.d_square_sum),
        _FAR: sums.carrying,
    }
    return numbers.get(name, math.nan)
