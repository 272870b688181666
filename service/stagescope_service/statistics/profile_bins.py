"""Profiles: sums of d by where a token stands, how probable it is, and how coarse its d is.

d = p - q. The bins of every dimension add up to all tokens under the mask, and profiles of disjoint
tokens add. Indexes count in powers of two, so that a bin is a contiguous stretch of tokens. Most
blocks lie inside one bin, whose sums the block's cell already has.

* `place`, `end`, `position`: tokens since the first one of the round, tokens until its last one,
  position in the sample. Bin 0 is index 0, bin b > 0 the indexes 2^(b-1) to 2^b - 1. `LAST` of
  `end` is the last token of the sample; `UNKNOWN` are the tokens of a round that may begin or end
  in another piece of the sample.
* `probability`: e^q by `CHANCES`; a bin holds its lower bound.
* `lattice`: the largest power of two that d is a multiple of. Values that were rounded to a
  narrow dtype differ by a small multiple of it.
* `routing`: the number of layers in which rollout and trainer chose other experts, in powers of two
  as indexes are; `UNKNOWN` are tokens that lack a route. Without routes it has no bins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.statistics.cell import Float64, Int64

Int16 = npt.NDArray[np.int16]

Dimension = Literal["place", "end", "position", "probability", "lattice", "routing"]
Edge = Literal["first", "last"]
"""The first or last tokens of rounds."""
DIMENSIONS: Final[tuple[Dimension, ...]] = (
    "place", "end", "position", "probability", "lattice", "routing",
)  # fmt: skip
BINS: Final = 66
LAST: Final = 64
UNKNOWN: Final = 65

CHANCES: Final = (1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
"""Bounds of the bins of probabilities, ascending."""
OVER_ONE: Final = len(CHANCES) + 1
"""Bin of `probability`: q is above 0, so it is no log-prob."""
NOT_FINITE: Final = UNKNOWN
"""Bin of `probability` if q is not finite, and of `lattice` if d is not."""

FINEST: Final = -12
ZERO: Final = 0
FINER: Final = 1
"""Bin of `lattice`: d is no multiple of 2^FINEST; bin 2 + k has d of the lattice 2^(FINEST + k)."""
COARSEST: Final = FINER + 1 - FINEST
"""Bin of `lattice`: d is a multiple of 1."""

COLUMNS: Final = ("tokens", "nonfinite", "d_sum", "d_abs_sum", "d_square_sum")
WIDTH: Final = len(COLUMNS)
ROWS: Final = len(DIMENSIONS) * BINS
_ROUTING: Final = DIMENSIONS.index("routing") * BINS


def exponent(key: int) -> int:
    """Return k of a bin of `lattice` whose d are multiples of 2^k."""
    return FINEST + key - FINER - 1


class Bin(NamedTuple):
    """The sums of one bin; sums of d are in nats over `tokens`, whose p and q are finite."""

    key: int
    tokens: int
    nonfinite: int
    d_sum: float
    d_abs_sum: float
    d_square_sum: float

    @classmethod
    def of(cls, key: int, values: Float64) -> Bin:
        """Return a bin of `COLUMNS`."""
        tokens, nonfinite, *sums = values.tolist()
        return cls(key, int(tokens), int(nonfinite), *sums)

    @property
    def carrying(self) -> float:
        """(sum |d|)^2 / sum d^2: the number of tokens of one size with these sums."""
        if self.d_square_sum == 0.0:
            return 0.0
        return self.d_abs_sum * (self.d_abs_sum / self.d_square_sum)


@dataclasses.dataclass(frozen=True)
class Profiles:
    """`keys` int64 [n], ascending: dimension * BINS + bin; `values` float64 [n, WIDTH]."""

    keys: Int64
    values: Float64

    @classmethod
    def of_table(cls, table: Float64) -> Profiles:
        """Return the bins of a table [ROWS, WIDTH] that hold a token."""
        keys = np.flatnonzero(table[:, 0] + table[:, 1])
        return cls(keys, table[keys])

    @classmethod
    def merge(cls, profiles: Sequence[Profiles]) -> Profiles:
        """Add up profiles of disjoint tokens; the order affects the last bits of sums."""
        table = np.zeros((ROWS, WIDTH))
        for each in profiles:
            table[each.keys] += each.values
        return cls.of_table(table)

    def routed(self) -> tuple[Bin, Bin]:
        """Return the sums of the tokens with the same experts in each layer, and of the others."""
        bins = [each for each in self.bins("routing") if each.key != UNKNOWN]
        none = Bin(0, 0, 0, 0.0, 0.0, 0.0)
        same, flipped = ([b for b in bins if (b.key > 0) is other] for other in (False, True))
        return (add_bins(same) if same else none), (add_bins(flipped) if flipped else none)

    def bins(self, dimension: Dimension) -> tuple[Bin, ...]:
        """Return the bins of a dimension that hold a token, in the order of their keys."""
        base = DIMENSIONS.index(dimension) * BINS
        own = (self.keys >= base) & (self.keys < base + BINS)
        return tuple(
            Bin.of(key - base, row)
            for key, row in zip(self.keys[own].tolist(), self.values[own], strict=True)
        )

    def edge_tokens(self, edge: Edge) -> tuple[Bin, Bin] | None:
        """Return the sums of the first or the last tokens of rounds, and of the others.

        Tokens whose place is unknown are in neither. None: one of the two has no token.
        """
        at_edge, others = [], []
        for each in self.bins("place" if edge == "first" else "end"):
            if each.key in (0, LAST):
                at_edge.append(each)
            elif each.key != UNKNOWN:
                others.append(each)
        if not (sum(each.tokens for each in at_edge) and sum(each.tokens for each in others)):
            return None
        return add_bins(at_edge), add_bins(others)


def add_routes(table: Float64, flips: Int16, d: Float64) -> None:
    """Add tokens to a table [ROWS, WIDTH] by their number of layers with other experts.

    Args:
        table: added to.
        flips: int16 [n], below 0 for tokens that lack a route.
        d: float64 [n], p - q in nats.
    """
    keys = np.where(flips < 0, UNKNOWN, np.frexp(flips.astype(np.float64))[1])
    finite = np.isfinite(d)
    known = np.where(finite, d, 0.0)
    for at, weights in enumerate((finite, ~finite, known, np.abs(known), known * known)):
        sums = np.bincount(keys, weights, minlength=BINS)
        table[_ROUTING : _ROUTING + BINS, at] += sums


def add_bins(bins: Sequence[Bin]) -> Bin:
    """Return the sums of several bins under the key of the first."""
    _, tokens, nonfinite, *sums = map(sum, zip(*bins, strict=True))
    return Bin(bins[0].key, int(tokens), int(nonfinite), *sums)
