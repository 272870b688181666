"""How the tensors of several ranks make one: by the shapes of both sides, or by a user's rule.

A dimension is sharded over an axis if the sizes of the ranks along it add up to the size on the
other side. Along every other axis ranks hold the same tensor (replicas), or parts of a sum. Of
several assignments that the shapes allow, the one counts in which the fewest replicas differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.operators.layouts import MEAN, ROW_AXIS, SAME, SKIP, SUM, Grid

Shape = tuple[int, ...]
Sizes = npt.NDArray[np.int64]
"""Sizes of one tensor on each rank: [*grid, dimension]."""


@dataclasses.dataclass(slots=True)
class Reading:
    """How a tensor of several ranks is put together.

    Attributes:
        grid: the ranks.
        dims: for each axis the dimension that is sharded over it, None if none is.
        partial: for each axis whether the ranks hold parts of a sum.
        mean: the sum is divided by the number of its parts.
        scale: the result is divided by it (gradients of a loss that is a mean over own rows).
        replica: for each axis the replica that counts.
        differing: ranks that differ from their replicas.
        is_given: a user's rule says whether it is a sum.
        reason: why it cannot be put together; empty if it can.
    """

    grid: Grid
    dims: tuple[int | None, ...]
    partial: list[bool] = dataclasses.field(default_factory=list)
    mean: bool = False
    scale: float = 1.0
    replica: list[int] = dataclasses.field(default_factory=list)
    differing: tuple[int, ...] = ()
    is_given: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        self.partial = self.partial or [False] * len(self.dims)
        self.replica = self.replica or [0] * len(self.dims)

    @property
    def is_partial(self) -> bool:
        """Whether it is a sum of parts."""
        return any(self.partial)

    def sharded(self, axis: int) -> bool:
        """Return whether a dimension is sharded over an axis."""
        return self.dims[axis] is not None

    def replicated(self) -> list[int]:
        """Return the axes along which ranks hold the same."""
        kinds = zip(self.dims, self.partial, strict=True)
        return [at for at, (dim, partial) in enumerate(kinds) if dim is None and not partial]

    def text(self) -> str:
        """Return it in words: `dimension 0 over dp, sum over tp`."""
        if self.reason:
            return self.reason
        how = []
        for axis, dim, partial in zip(self.grid.axes, self.dims, self.partial, strict=True):
            if dim is not None:
                how.append(f"dimension {dim} over {axis}")
            elif partial:
                how.append(f"{'mean' if self.mean else 'sum'} over {axis}")
            else:
                how.append(f"the same over {axis}")
        scale = f", divided by {self.scale:g}" if self.scale != 1.0 else ""
        return ", ".join(how) + scale


def cannot_join(grid: Grid, reason: str) -> Reading:
    """Return the reading of a tensor that cannot be put together."""
    return Reading(grid, (None,) * len(grid.axes), reason=reason)


def ways_of_placements(grid: Grid, text: str | None) -> dict[str, int | str]:
    """Return axis -> how a DTensor is put together, as far as its placements say it.

    msprobe records the shape and the numbers of the shard. Of what a backward call returns it
    records the placements of another tensor, so that replicas are not taken from them.

    Args:
        grid: the ranks; each of its axes is a dimension of the device mesh, in the same order.
        text: msprobe's placements, such as `[{"Shard": {"dim": 0}}]`.
    """
    try:
        placements = json.loads(text or "[]")
        found: dict[str, int | str] = {}
        for axis, placement in zip(grid.axes, placements, strict=True):
            if "Shard" in placement:
                found[axis] = int(placement["Shard"]["dim"])
            elif "Partial" in placement:
                found[axis] = MEAN if placement["Partial"].get("reduce_op") == "avg" else SUM
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}  # none, of another mesh, or of another form
    return found


def whole_shape(one: Sizes, other: Sizes) -> Shape | None:
    """Return the shape of the whole tensor, of which two sides have shards; None: no such shape.

    It is the smallest one that the ranks of both sides can make.
    """
    if one.shape[-1] != other.shape[-1]:
        return None
    found = []
    for dim in range(one.shape[-1]):
        common = {*_totals(one[..., dim]).values()} & {*_totals(other[..., dim]).values()}
        if not common:
            return None
        found.append(min(common))
    return tuple(found)


def _totals(sizes: Sizes) -> dict[tuple[int, ...], int]:
    """Return axes -> sum of the sizes along them, where it is the same for all other places."""
    found = {}
    for count in range(sizes.ndim + 1):
        for axes in itertools.combinations(range(sizes.ndim), count):
            total = sizes.sum(axis=axes) if axes else sizes
            if total.size and (total == total.flat[0]).all():
                found[axes] = int(total.flat[0])
    return found


def assignments(sizes: Sizes, whole: Shape) -> list[tuple[int | None, ...]]:
    """Return all ways to shard the dimensions of a tensor over the axes that make a whole shape."""
    axes = sizes.ndim - 1
    if 0 in whole:
        return [(None,) * axes]
    choices = [
        [over for over, total in _totals(sizes[..., dim]).items() if total == size]
        for dim, size in enumerate(whole)
    ]
    return [*_assign(choices, (None,) * axes, 0)]


def _assign(
    choices: Sequence[Sequence[tuple[int, ...]]], dims: tuple[int | None, ...], dim: int
) -> Iterator[tuple[int | None, ...]]:
    if dim == len(choices):
        yield dims
        return
    for over in choices[dim]:
        if all(dims[axis] is None for axis in over):
            taken = tuple(dim if axis in over else each for axis, each in enumerate(dims))
            yield from _assign(choices, taken, dim + 1)


def choose(
    grid: Grid,
    candidates: Sequence[tuple[int | None, ...]],
    disagreements: Sequence[int],
    ways: Mapping[str, int | str],
    *,
    of_parameter: bool,
) -> Reading:
    """Return the reading of a tensor.

    Args:
        grid: the ranks.
        candidates: see `assignments`.
        disagreements: for each axis, how many lines of ranks along it differ among themselves.
        ways: what the user's rule says of the axes.
        of_parameter: it is a parameter or its gradient, which has no rows of a batch.
    """
    if any(way == SKIP for way in ways.values()):
        return cannot_join(grid, "left out by a shard rule")
    if not candidates:
        return cannot_join(grid, "no layout of its shards makes the tensor of the other side")
    allowed = [each for each in candidates if follows(grid, each, ways)]
    if not allowed:
        return cannot_join(grid, "the shapes of the ranks do not allow what the shard rule says")

    def cost(dims: tuple[int | None, ...]) -> tuple[int, tuple[int, ...]]:
        differing = sum(n for n, dim in zip(disagreements, dims, strict=True) if dim is None)
        return differing, _unusual(grid, dims, of_parameter=of_parameter)

    dims = min(allowed, key=cost)
    partial = [ways.get(axis) in (SUM, MEAN) for axis in grid.axes]
    mean = MEAN in ways.values()
    return Reading(
        grid,
        dims,
        partial,
        mean=mean,
        is_given=any(way in (SUM, MEAN, SAME) for way in ways.values()),
    )


def follows(grid: Grid, dims: tuple[int | None, ...], ways: Mapping[str, int | str]) -> bool:
    """Return whether an assignment is what `ways` says."""
    for axis, dim in zip(grid.axes, dims, strict=True):
        way = ways.get(axis)
        if way is not None and dim != (None if way in (SUM, MEAN, SAME) else way):
            return False
    return True


def _unusual(grid: Grid, dims: tuple[int | None, ...], *, of_parameter: bool) -> tuple[int, ...]:
    """Return a key that is lower for what is usual where several assignments fit equally well.

    Ranks along `dp` hold other rows (the first dimension) and the same parameters. Other axes shard
    the last dimensions.
    """
    rows = any(axis == ROW_AXIS and dim is not None
               for axis, dim in zip(grid.axes, dims, strict=True))  # fmt: skip
    order = (
        (dim or 0) if axis == ROW_AXIS else -(dim or 0)
        for axis, dim in zip(grid.axes, dims, strict=True)
    )
    return (rows == of_parameter, *order)
