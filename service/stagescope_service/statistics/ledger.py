"""Which positions of which sample have counted already."""

from __future__ import annotations

import bisect
import dataclasses

from stagescope_service.statistics.summary import Summary

Key = tuple[str, str]
"""sample_uid, and the context-parallel rank where positions inside the sample are not known."""

Interval = tuple[int, int]
"""Half open."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a summary's fragments would count again.

    `skips` are (row, first, last) stretches that counted before; `everything` is whether nothing
    new is left.
    """

    skips: tuple[tuple[int, int, int], ...]
    everything: bool


class Ledger:
    """Disjoint, sorted intervals of positions by sample."""

    def __init__(self) -> None:
        self._intervals: dict[Key, list[Interval]] = {}

    def claim(self, summary: Summary, cp_rank: object) -> Claim:
        """Take a summary's coverage in, and say what of it was there before."""
        sequences = summary.sequences
        skips: list[tuple[int, int, int]] = []
        fresh = 0
        for index, first, last in sequences.cover.tolist():
            # Context-parallel parts all begin at 0 where nobody said where they begin.
            part = "" if cp_rank is None or sequences.placed[index, 0] else str(cp_rank)
            key = (sequences.samples[index], part)
            again = self._add(self._intervals.setdefault(key, []), first, last)
            fresh += (last - first) - sum(b - a for a, b in again)
            skips.extend((int(sequences.row[index]), a, b) for a, b in again)
        return Claim(tuple(skips), everything=fresh == 0 and bool(skips))

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
