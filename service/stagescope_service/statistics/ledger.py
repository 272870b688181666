"""Bookkeeping of the sample positions that have been counted."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from stagescope_service.statistics.identity import RowIdentity
from stagescope_service.statistics.summary import Summary

Key = tuple[str, str]
"""Name of the sample, and the context-parallel rank if positions inside it are unknown."""

Interval = tuple[int, int]
"""Half open."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """The part of a summary that was counted before.

    Attributes:
        skips: (row, first, last) stretches that were counted before.
        fresh: number of tokens that were not.
    """

    skips: tuple[tuple[int, int, int], ...]
    fresh: int

    @property
    def is_all_repeated(self) -> bool:
        """Whether there is no new token."""
        return self.fresh == 0 and bool(self.skips)

    @property
    def repeated(self) -> int:
        """Number of tokens that were counted before."""
        return sum(last - first for _, first, last in self.skips)


class Ledger:
    """Disjoint, sorted intervals of counted positions by sample."""

    def __init__(self) -> None:
        self._intervals: dict[Key, list[Interval]] = {}

    def claim(self, summary: Summary, cp_rank: object, places: Sequence[RowIdentity]) -> Claim:
        """Add a summary's coverage and return the part of it that was counted before.

        Args:
            summary: The summary of one part.
            cp_rank: Its context-parallel rank, None if samples are not split.
            places: The place of each of its sequences.
        """
        sequences = summary.sequences
        skips: list[tuple[int, int, int]] = []
        fresh = 0
        for index, first, last in sequences.cover.tolist():
            place, row = places[index], int(sequences.row[index])
            if place.dropped:
                skips.append((row, first, last))
                continue
            # Context-parallel parts without an offset all begin at 0.
            part = "" if cp_rank is None or sequences.placed[index, 0] else str(cp_rank)
            present = self._intervals.setdefault((place.sample, part), [])
            repeated = self._add(present, first + place.shift, last + place.shift)
            fresh += (last - first) - sum(b - a for a, b in repeated)
            skips.extend((row, a - place.shift, b - place.shift) for a, b in repeated)
        return Claim(tuple(skips), fresh)

    @staticmethod
    def _add(present: list[Interval], first: int, last: int) -> list[Interval]:
        """Add first..last to disjoint intervals; return the stretches that were present before."""
        begin = max(0, bisect.bisect_left(present, (first, first)) - 1)
        end = begin
        repeated, low, high = [], first, last
        while end < len(present) and present[end][0] <= last:
            a, b = present[end]
            if b < first:
                begin += 1
            else:
                if max(a, first) < min(b, last):
                    repeated.append((max(a, first), min(b, last)))
                low, high = min(low, a), max(high, b)
            end += 1
        present[begin:end] = [(low, high)]
        return repeated
