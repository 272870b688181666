"""Which ranks have the shard in which a tensor differs from the other side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.operators.calls import OperatorColumns
from stagescope_service.compare.operators.joined_ranks import JoinedTables
from stagescope_service.compare.operators.rank_side import Side
from stagescope_service.compare.operators.rank_tensors import Float64
from stagescope_service.compare.operators.readings import Reading, Shape
from stagescope_service.fields import Number, Row, one_of

_FUSED: Final = (1, 2, 3)
"""Numbers of matrices that one weight may hold, such as those of queries, keys and values."""


class FaultyShard(Row):
    """A rank whose shard differs from the other side."""

    side: Annotated[str, one_of("a", "b")]
    """The side of the comparison to which the rank belongs."""
    rank: int
    """The rank."""
    coordinates: dict[str, int]
    """Axis of the layout -> index of the rank, such as `tp` 1."""
    evidence: Annotated[str, one_of("replicas", "non_finite", "values", "sum", "extremes")]
    """How it was found.

    `replicas`: it differs from ranks that hold the same. `non_finite`: it has NaN or infinities.
    `values`: its elements differ (full tensors). `sum`: it has a part of a sum that differs.
    `extremes`: its numbers exceed those of the whole tensor.
    """
    relative: Number | None
    """Largest difference of an element over the largest element, a ratio; null: no full tensors."""


class ShardFinder:
    """Finds the shards in which rows differ."""

    def __init__(self, sides: tuple[Side, Side], joined: JoinedTables) -> None:
        self._sides = sides
        self._joined = joined
        for side in sides:  # sums may have used up what may be read
            side.tensors.renew()

    def find(self, row_a: int, row_b: int, threshold: float, *, values: bool) -> list[FaultyShard]:
        """Return the ranks whose shards differ; empty if they are not known.

        Args:
            row_a, row_b: the row of each side.
            threshold: relative difference that counts.
            values: read full tensors, where there are any.
        """
        found: list[FaultyShard] = []
        for at, rows in ((0, (row_a, row_b)), (1, (row_b, row_a))):
            if self._sides[at].grid.axes:
                found += self._of_side(at, *rows, threshold, values=values)
        return found

    def replicas(self, at: int, row: int) -> list[FaultyShard]:
        """Return the ranks whose replica of a row differs."""
        return self._named(at, dict.fromkeys(self._joined.readings[at][row].differing), "replicas")

    def layouts(self) -> list[str | None]:
        """Return the layout of each side, None for one rank."""
        return [side.grid.text() or None for side in self._sides]

    def text_of(self, at: int, row: int) -> str | None:
        """Return how a row of a side was put together, None if the side has one rank."""
        reading = self._joined.readings[at].get(row)
        return reading.text() if reading is not None and reading.grid.axes else None

    def _of_side(
        self, at: int, row: int, partner: int, threshold: float, *, values: bool
    ) -> list[FaultyShard]:
        reading = self._joined.readings[at].get(row)
        if reading is None or reading.reason:
            return []
        if reading.differing:
            return self._named(at, dict.fromkeys(reading.differing), "replicas")
        if found := self._non_finite(at, row, partner):
            return self._named(at, dict.fromkeys(found), "non_finite")
        if values:
            differing = self._differing_values(at, row, partner, reading, threshold)
            if differing is not None:
                return self._named(at, differing, "sum" if reading.is_partial else "values")
        if reading.is_partial:
            return []
        beyond = self._beyond(at, row, partner, reading, threshold)
        return self._named(at, dict.fromkeys(beyond), "extremes")

    def _named(
        self, at: int, ranks: Mapping[int, float | None], evidence: str
    ) -> list[FaultyShard]:
        grid = self._sides[at].grid
        if len(ranks) == len(grid.ranks):
            return []  # that names no rank; if rows are in another order, all ranks differ
        return [
            {
                "side": "ab"[at], "rank": grid.ranks[each], "coordinates": grid.coordinates(each),
                "evidence": evidence, "relative": relative,
            }
            for each, relative in ranks.items()
        ]  # fmt: skip

    def _non_finite(self, at: int, row: int, partner: int) -> list[int]:
        """Return the ranks with NaN or infinities, where the other side has none."""
        if self._tables()[1 - at].texts("non_finite").text(partner) is not None:
            return []
        kinds = self._sides[at].texts("non_finite", row)
        return [index for index, kind in enumerate(kinds) if kind is not None]

    def _beyond(
        self, at: int, row: int, partner: int, reading: Reading, threshold: float
    ) -> list[int]:
        """Return the ranks whose numbers are larger than those of the whole tensor may be."""
        side, other = self._sides[at], self._tables()[1 - at]
        low, high, norm = (float(other.numbers(name)[partner]) for name in ("min", "max", "norm"))
        slack = threshold * max(abs(low), abs(high))
        numbers = side.numbers[..., row].reshape(4, -1) / reading.scale
        beyond = (numbers[0] < low - slack) | (numbers[1] > high + slack)
        beyond |= numbers[3] > norm * (1 + threshold)
        return np.flatnonzero(beyond).tolist()

    def _tables(self) -> tuple[OperatorColumns, OperatorColumns]:
        return (self._joined.a, self._joined.b)

    def _differing_values(
        self, at: int, row: int, partner: int, reading: Reading, threshold: float
    ) -> dict[int, float | None] | None:
        """Return rank -> relative difference of its elements; None if they cannot be compared."""
        side, other = self._sides[at], self._sides[1 - at]
        whole = _whole(other, self._joined.readings[1 - at].get(partner), partner)
        if whole is None:
            return None
        largest = float(np.max(np.abs(whole), initial=0.0)) or 1.0
        boxes = _boxes(side, row, reading, whole.shape)
        if boxes is None:
            return None
        best: dict[int, float | None] | None = None
        for fused in _FUSED:
            found: dict[int, float | None] = {}
            equal = 0
            for ranks, box in boxes.items():
                tensor = _sum(side, row, ranks, reading)
                expected = _cut(whole, box, fused)
                if tensor is None or expected is None or tensor.shape != expected.shape:
                    break
                with np.errstate(invalid="ignore"):
                    gap = float(np.max(np.abs(tensor - expected), initial=0.0)) / largest
                equal += gap <= threshold
                if not gap <= threshold:
                    found |= dict.fromkeys(ranks, gap)
            else:
                if not equal:
                    found = dict.fromkeys(range(len(side.grid.ranks)), None)
                if best is None or len(found) < len(best):
                    best = found
        return best


def _sum(side: Side, row: int, ranks: Sequence[int], reading: Reading) -> Float64 | None:
    total = side.sum_of(row, ranks)
    if total is None:
        return None
    return total / (reading.scale * (len(ranks) if reading.mean else 1))


def _boxes(
    side: Side, row: int, reading: Reading, whole: Shape
) -> dict[tuple[int, ...], list[tuple[int, int]]] | None:
    """Return the ranks of each shard -> start and stop of its dimensions in the whole tensor.

    None where a dimension is sharded over several axes: their order is not known.
    """
    dims = [dim for dim in reading.dims if dim is not None]
    sizes = side.sizes_of(row)
    if len({*dims}) < len(dims) or sizes is None:
        return None
    grid, boxes = side.grid, dict[tuple[int, ...], list[tuple[int, int]]]()
    ranks = np.arange(len(grid.ranks)).reshape(grid.sizes)
    axes = range(len(grid.axes))
    for place in itertools.product(
        *(range(grid.sizes[axis]) if reading.sharded(axis) else [None] for axis in axes)
    ):
        cut = tuple(
            index if index is not None
            else slice(None) if reading.partial[axis] else reading.replica[axis]
            for axis, index in zip(axes, place, strict=True)
        )  # fmt: skip
        first = tuple(index or 0 for index in place)
        box = [(0, size) for size in whole]
        for axis, dim in enumerate(reading.dims):
            if dim is not None:
                along = [
                    int(sizes[(*first[:axis], index, *first[axis + 1 :], dim)])
                    for index in range(grid.sizes[axis])
                ]
                start = sum(along[: first[axis]])
                box[dim] = (start, start + along[first[axis]])
        boxes[tuple(np.asarray(ranks[cut]).reshape(-1).tolist())] = box
    return boxes


def _cut(whole: Float64, box: Sequence[tuple[int, int]], fused: int) -> Float64 | None:
    """Return a shard of the whole tensor; each of `fused` matrices of a dimension is sharded."""
    for dim, (start, stop) in enumerate(box):
        size = whole.shape[dim]
        if (start, stop) == (0, size):
            continue
        if any(each % fused for each in (start, stop, size)):
            return None
        pieces = [
            np.take(each, range(start // fused, stop // fused), dim)
            for each in np.split(whole, fused, dim)
        ]
        whole = np.concatenate(pieces, dim)
    return whole


def _whole(side: Side, reading: Reading | None, row: int) -> Float64 | None:
    """Return the whole tensor of a side."""
    if reading is None or not side.grid.axes:
        return side.tensor(0, row)
    sizes = side.sizes_of(row)
    if sizes is None:
        return None
    shape = tuple(
        sum(int(each) for each in _along(sizes, reading, dim)) for dim in range(sizes.shape[-1])
    )
    boxes = _boxes(side, row, reading, shape)
    if boxes is None:
        return None
    whole = np.zeros(shape)
    for ranks, box in boxes.items():
        tensor = _sum(side, row, ranks, reading)
        if tensor is None:
            return None
        whole[tuple(slice(*each) for each in box)] = tensor
    return whole


def _along(sizes: npt.NDArray[np.int64], reading: Reading, dim: int) -> npt.NDArray[np.int64]:
    """Return the sizes of a dimension along the axis over which it is sharded."""
    of_dim = sizes[..., dim]
    cut = tuple(slice(None) if each == dim else 0 for each in reading.dims)
    return np.asarray(of_dim[cut]).reshape(-1)
