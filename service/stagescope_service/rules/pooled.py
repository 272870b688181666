"""The newest steps as one: what the few tokens of a rank in each step do not show alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from stagescope_service.statistics import cell as cells
from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.checks import MANY
from stagescope_service.statistics.comparability import (
    Comparability,
    examine,
    examine_ranks,
    may_be_suspect,
)
from stagescope_service.statistics.part import RankRow
from stagescope_service.statistics.step_summary import StepSummary
from stagescope_service.statistics.summary import Summary, merge_produced
from stagescope_wire.schema import RankKey

TOKENS: Final = 512
"""Tokens of each rank that are enough for every check; steps before are not added."""
STEPS: Final = 10
"""Maximum number of steps that are added up."""
RANKS: Final = 256
"""Maximum number of ranks that are checked alone."""
_SHARE: Final = 0.5
"""Minimum share of the mean |d| of the later steps in a step that has a fault, too."""


@dataclasses.dataclass(frozen=True)
class PooledSteps:
    """The tokens of some of the newest steps.

    Attributes:
        summary: of all their tokens.
        ranks: the tokens of each rank, in all steps together.
        steps: each step with its own ranks, the newest first.
    """

    summary: Summary
    ranks: tuple[RankRow, ...]
    steps: tuple[tuple[int, tuple[RankRow, ...]], ...]

    @property
    def text(self) -> str:
        """Which steps they are."""
        last, first = self.steps[0][0], self.steps[-1][0]
        return f"step {last}" if first == last else f"steps {first} to {last} together"

    @cached_property
    def comparability(self) -> Comparability:
        """The checks of all tokens."""
        return examine(self.summary, self.ranks)

    @cached_property
    def of_ranks(self) -> dict[RankKey, Comparability]:
        """The checks of each rank's own tokens; {} if the ranks are too many."""
        if len(self.ranks) > RANKS:
            return {}
        found = examine_ranks(self.summary, self.ranks)
        return {(row.role, row.rank): one for row, one in zip(self.ranks, found, strict=True)}

    @cached_property
    def causes(self) -> dict[RankKey, str]:
        """The most likely cause of each rank whose own tokens have one."""
        if len(self.ranks) > RANKS or not may_be_suspect(self.summary, self.ranks).any():
            return {}
        return {rank: found.cause for rank, found in self.of_ranks.items() if found.cause}

    def begin(self, ranks: Sequence[RankKey]) -> int:
        """Return the step in which the mismatch of some ranks began.

        From this step on, without a break, it is at least half of what it is in the steps after it.

        Args:
            ranks: the ranks; (): all.
        """
        begin, tokens, total = self.steps[0][0], 0, 0.0
        for step, rows in self.steps:
            own = [row.cell for row in rows if not ranks or (row.role, row.rank) in ranks]
            count = sum(cell.tokens for cell in own)
            size = sum(float(cell[Field.D_ABS_SUM]) for cell in own)
            if count and tokens and not size / count >= _SHARE * total / tokens:
                break
            begin, tokens, total = step, tokens + count, total + size
        return begin

    @property
    def is_needed(self) -> bool:
        """Whether the newest step alone has too few tokens for the checks of its ranks."""
        tokens = [row.cell.tokens for row in self.steps[0][1]]
        return len(self.steps) > 1 and min(tokens, default=0) < MANY

    def ranks_with(self, checks: Sequence[str]) -> list[RankKey]:
        """Return the ranks whose own tokens have one of these causes."""
        return [rank for rank, cause in self.causes.items() if cause in checks]

    @property
    def ranks_with_any(self) -> list[RankKey]:
        """The ranks whose own tokens have any cause."""
        return [*self.causes]

    def ranks_alone_with(self, checks: Sequence[str]) -> list[RankKey]:
        """Return the same, if the tokens of every other rank fit and differ less, or differ much
        less; else none."""
        own = self.ranks_with(checks)
        if not own or len(own) < len(self.causes):
            return []
        others = [rank for rank in self.of_ranks if rank not in own]
        if not others:
            return []
        is_certain = all(self.of_ranks[each].verdict in ("comparable", "exact") for each in others)
        sizes = {(row.role, row.rank): row.cell.mean(Field.D_ABS_SUM) for row in self.ranks}
        least, largest = min(sizes[rank] for rank in own), max(sizes[rank] for rank in others)
        return own if least > (_LARGER if is_certain else _APART) * largest else []


_LARGER: Final = 1.25
"""Minimum ratio of mean |d| of ranks with a cause to that of ranks whose tokens fit."""
_APART: Final = 2.0
"""The same for ranks whose tokens are too few for a verdict."""


def pool(steps: Iterator[tuple[int, StepSummary]]) -> PooledSteps | None:
    """Add up steps, the newest first, until each rank has `TOKENS`; None: there is none.

    Steps of another pair of streams, or of other settings, end it.
    """
    taken: list[tuple[int, StepSummary]] = []
    for step, found in steps:
        if taken and not _is_alike(taken[0][1].summary, found.summary):
            break
        taken.append((step, found))
        if len(taken) == STEPS or _least_tokens(taken) >= TOKENS:
            break
    if not taken:
        return None
    summary = Summary.merge([found.summary for _, found in taken])
    of_steps = tuple((step, found.ranks) for step, found in taken)
    return PooledSteps(summary, _added([found for _, found in taken]), of_steps)


def _is_alike(one: Summary, other: Summary) -> bool:
    return (one.pair, one.settings) == (other.pair, other.settings)


def _least_tokens(taken: Sequence[tuple[int, StepSummary]]) -> int:
    tokens: Counter[RankKey] = Counter()
    for _, found in taken:
        for row in found.ranks:
            tokens[row.role, row.rank] += row.cell.tokens
    return min(tokens.values(), default=0)


def _added(found: Sequence[StepSummary]) -> tuple[RankRow, ...]:
    """Return each rank with its tokens of all steps."""
    by_rank: dict[RankKey, list[RankRow]] = {}
    begin = 0
    for step in found:
        for row in step.ranks:
            sources = tuple(begin + source for source in row.sources)
            own = dataclasses.replace(row, sources=sources)
            by_rank.setdefault((row.role, row.rank), []).append(own)
        begin += len(step.summary.sources)
    return tuple(
        rows[0]
        if len(rows) == 1
        else dataclasses.replace(
            rows[0],
            cell=Cell(cells.merge(np.stack([row.cell.vector for row in rows]))),
            parts=sum(row.parts for row in rows),
            counted_parts=sum(row.counted_parts for row in rows),
            produced=merge_produced(row.produced for row in rows),
            sources=tuple(source for row in rows for source in row.sources),
        )
        for _, rows in sorted(by_rank.items())
    )
