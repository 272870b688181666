"""Histograms of |d|: OpenTelemetry's base-2 exponential histogram, scale 3, sparse.

Bucket i holds (2^(i/8), 2^((i+1)/8)]; its midpoint is within 4.5 % of every value in it. Zeros
are counted separately (`Field.EQUAL`). Bucket -512 also holds all smaller values, 511 all larger
ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from stagescope_service.statistics.cell import Int64

_SPAN: Final = 1 << 10
"""Number of buckets: -512 to 511."""


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Sparse counts by (round, bucket), both ascending; int64 arrays of one length."""

    rounds: Int64
    buckets: Int64
    counts: Int64

    @classmethod
    def merge(cls, histograms: Sequence[Histogram]) -> Histogram:
        """Add histograms of disjoint tokens."""
        if not histograms:
            return cls(*(np.empty(0, np.int64) for _ in range(3)))
        rounds = np.concatenate([h.rounds for h in histograms])
        buckets = np.concatenate([h.buckets for h in histograms])
        counts = np.concatenate([h.counts for h in histograms])
        if not counts.size:
            return cls(rounds, buckets, counts)
        # Each histogram is sorted already: a stable sort merges them.
        order = np.argsort(rounds * _SPAN + buckets, kind="stable")
        rounds, buckets, counts = rounds[order], buckets[order], counts[order]
        is_new = (np.diff(rounds, prepend=-1) != 0) | (np.diff(buckets, prepend=_SPAN) != 0)
        first = np.flatnonzero(is_new)
        return cls(rounds[first], buckets[first], np.add.reduceat(counts, first))

    def of_round(self, number: int) -> Histogram:
        """Return the counts of one round."""
        here = self.rounds == number
        return Histogram(self.rounds[here], self.buckets[here], self.counts[here])

    def collapsed(self) -> Histogram:
        """Return the counts of all rounds together, as round 0."""
        return Histogram.merge([dataclasses.replace(self, rounds=np.zeros_like(self.rounds))])

    def quantile(self, share: float, *, zeros: int, largest: float) -> float:
        """Return the `share` quantile of |d|: the midpoint of the bucket that contains it.

        Args:
            share: From 0 to 1.
            zeros: Number of values that are exactly 0.
            largest: The maximum, an upper bound of the result.

        Returns:
            The quantile; NaN if there are no values.
        """
        counts = self.counts
        total = zeros + int(counts.sum())
        if not total:
            return math.nan
        # The smallest value that is >= at least `share` of all values.
        rank = max(1, math.ceil(share * total))
        if rank <= zeros:
            return 0.0
        order = np.argsort(self.buckets, kind="stable")
        reached = zeros + np.cumsum(counts[order])
        bucket = int(self.buckets[order][int(np.searchsorted(reached, rank))])
        return min(midpoint(bucket), largest)


def midpoint(bucket: int) -> float:
    """Return the value in a bucket with the smallest relative distance to both bounds."""
    low, high = bounds(bucket)
    return 2.0 * low * high / (low + high)


def bounds(bucket: int) -> tuple[float, float]:
    """Return the (exclusive lower, inclusive upper) bound of a bucket."""
    return 2.0 ** (bucket / 8), 2.0 ** ((bucket + 1) / 8)
