"""Which positions of which sample have counted already."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from stagescope_service.statistics.identity import Place
from stagescope_service.statistics.summary import Summary

Key = tuple[str, str]
"""Name of the sample, and the context-parallel rank where positions inside it are not known."""

Interval = tuple[int, int]
"""Half open."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a summary's fragments would count again.

    Attributes:
        skips: (row, first, last) stretches that counted before.
        fresh: tokens that did not.
    """

    skips: tuple[tuple[int, int, int], ...]
    fresh: int

    @property
    def everything(self) -> bool:
        """Whether nothing new is left."""
        return self.fresh == 0 and bool(self.skips)

    @property
    def repeated(self) -> int:
        """Tokens that counted before."""
        return sum(last - first for _, first, last in self.skips)


class Ledger:
    """Disjoint, sorted intervals of positions by sample."""

    def __init__(self) -> None:
        self._intervals: dict[Key, list[Interval]] = {}

    def claim(self, summary: Summary, cp_rank: object, places: Sequence[Place]) -> Claim:
        """Take a summary's coverage in, and say what of it was there before.

        Args:
            summary: of one part.
            cp_rank: its context-parallel rank, None where samples are whole.
            places: where each of its sequences counts.
        """
        sequences = summary.sequences
        skips: list[tuple[int, int, int]] = []
        fresh = 0
        for index, first, last in sequences.cover.tolist():
            place, row = places[index], int(sequences.row[index])
            if place.dropped:
                skips.append((row, first, last))
                continue
            # Context-parallel parts all begin at 0 where nobody said where they begin.
            part = "" if cp_rank is None or sequences.placed[index, 0] else str(cp_rank)
            there = self._intervals.setdefault((place.sample, part), [])
            again = self._add(there, first + place.shift, last + place.shift)
            fresh += (last - first) - sum(b - a for a, b in again)
            skips.extend((row, a - place.shift, b - place.shift) for a, b in again)
        return Claim(tuple(skips), fresh)

    @staticmethod
    def _add(there: list[Interval], first: int, last: int) -> list[Interval]:
        """Put first..last among disjoint intervals; return what was there of it."""
        begin = max(0, bisect.bisect_left(there, (first, first)) - 1)
        end = begin
        again, low, high = [], first, last
        while end < len(there) and there[end][0] <= last:
            a, b = there[end]
            if b < first:
                begin += 1
            else:
                if max(a, first) < min(b, last):
                    again.append((max(a, first), min(b, last)))
                low, high = min(low, a), max(high, b)
            end += 1
        there[begin:end] = [(low, high)]
        return again
