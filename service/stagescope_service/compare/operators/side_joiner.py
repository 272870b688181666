"""One side of `joined_ranks`: how each of its tensors is put together, and their statistics."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from stagescope_service.compare.operators.calls import Flags, Floats, OperatorColumns
from stagescope_service.compare.operators.differences import EPS, Thresholds
from stagescope_service.compare.operators.layouts import ROW_AXIS, ShardRule
from stagescope_service.compare.operators.rank_side import NUMBERS, Side, Stats
from stagescope_service.compare.operators.rank_tensors import statistics_of
from stagescope_service.compare.operators.readings import (
    Reading,
    Shape,
    Sizes,
    assignments,
    cannot_join,
    choose,
    follows,
    ways_of_placements,
)
from stagescope_service.dumps.msprobe.operators import non_finite_kind

MEAN_AT: Final = NUMBERS.index("mean")
_PARAMETERS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": ("1", "2", "weight", "bias"), "embedding": ("1", "weight"),
    "layer_norm": ("2", "3", "weight", "bias"), "rms_norm": ("2", "weight"),
    "conv1d": ("1", "2", "weight", "bias"), "conv2d": ("1", "2", "weight", "bias"),
}  # fmt: skip
"""Function -> which of its arguments are parameters."""
_GRADIENTS: Final = ("backward", "parameters_grad")
_REPLICAS: Final = 4 * EPS["float32"]
"""Relative difference up to which the statistics of replicas are equal."""
_LOCAL_INDEXES: Final = "whole numbers that differ between the ranks, such as local indexes"
_LOOKED_UP: Final = "each rank looked up its own part; the sum exists only in a later call"


class SideJoiner:
    """Puts the rows of one side together."""

    def __init__(self, side: Side, thresholds: Thresholds, rules: Sequence[ShardRule]) -> None:
        self.side = side
        self.readings: dict[int, Reading] = {}
        self.scale = 1.0
        self.values: dict[int, str] = {}
        """Row of a size of the shard -> the size of the whole."""
        self._rules = rules
        self.used: set[str] = set()
        """Patterns of the rules that counted."""
        self._sizes: dict[int, Sizes] = {}
        self._wholes: dict[int, Shape] = {}
        self._merged: Stats = side.numbers.reshape(len(NUMBERS), -1, side.base.rows)[:, 0].copy()
        self._known: Flags = side.known.reshape(len(NUMBERS), -1, side.base.rows)[:, 0].copy()
        self._assignments: dict[tuple[bytes, Shape], list[tuple[int | None, ...]]] = {}
        dtypes = side.base.by_text("dtype", thresholds.for_dtype, 0.0)[:-1].astype(np.float64)
        self._threshold: Floats = np.where(dtypes > 0, np.maximum.accumulate(dtypes), 0.0)
        # Replicas are copies: of coarse dtypes, too, nothing but the order of a sum may differ.
        self._equal: Floats = np.where(dtypes > 0, _REPLICAS, 0.0)
        self._disagreements = side.disagreements(self._equal)

    # --- reading ----------------------------------------------------------------------------
    def read_tensor(self, row: int, sizes: Sizes | None, whole: Shape | None, reason: str) -> None:
        """Find out how the ranks make a tensor of shape `whole`; without one, `reason` says why."""
        grid = self.side.grid
        ways = self._ways(row)
        if sizes is None or whole is None:
            self.readings[row] = cannot_join(grid, reason)
            return
        key = (sizes.tobytes(), whole)
        if key not in self._assignments:
            self._assignments[key] = assignments(sizes, whole)
        candidates = self._assignments[key]
        if not ways and (placements := self.side.text("placements", row)):
            ways = ways_of_placements(grid, placements)
            if not any(follows(grid, dims, ways) for dims in candidates):
                ways = {}
        self.readings[row] = choose(
            grid, candidates, self._disagreements[:, row].tolist(), ways,
            of_parameter=self._of_parameter(row),
        )  # fmt: skip
        self._sizes[row], self._wholes[row] = sizes, whole

    def _ways(self, row: int) -> Mapping[str, int | str]:
        """Return what the first rule that matches a tensor says of the layout's axes."""
        axes = self.side.grid.axes
        name = self.side.name_of(row) if axes and self._rules else ""
        for rule in self._rules if axes else ():
            if rule.matches(name):
                if any(axis in axes for axis in rule.ways):
                    self.used.add(rule.pattern)
                return rule.ways
        return {}

    def _of_parameter(self, row: int) -> bool:
        """Return whether a tensor is a parameter or its gradient; functions have these by place."""
        side = self.side
        section, direction = side.text("section", row), side.text("direction", row)
        if section == "parameters" or direction == "parameters_grad":
            return True
        if side.text("kind", row) != "Functional":
            return False
        if direction == "backward":
            return side.text("operator", row) == "embedding" and section == "output"
        index = (side.text("index", row) or "").partition(".")[0]
        return index in _PARAMETERS_OF.get(side.text("operator", row) or "", ())

    def read_value(self, row: int, other: str | None) -> None:
        """Find out whether a value that is no tensor is a size of a shard.

        Args:
            row: its row.
            other: the value on the other side.
        """
        values = self.side.texts("value", row)
        if len({*values}) > 1:
            if self.side.text("type", row) in ("int", "float", "slice", "torch.Size"):
                self.readings[row] = cannot_join(self.side.grid, "a value that depends on the rank")
        elif values[0] != other and _is_size(values[0], other, self.side.grid.sizes):
            self.values[row] = other or ""

    def find_sums(self) -> None:
        """Find out which tensors are sums of parts, and which replicas differ."""
        calls: defaultdict[int, list[int]] = defaultdict(list)
        for row in sorted(self.readings):
            calls[int(self.side.base.call_of_row[row])].append(row)
        sums: dict[bytes, list[bool]] = {}
        for rows in calls.values():
            sharded = [
                any(self.readings[row].sharded(axis) for row in rows)
                for axis in range(len(self.side.grid.axes))
            ]
            looked_up = False
            for row in rows:
                looked_up |= self._find_sum(row, sharded, sums, looked_up=looked_up)

    def _find_sum(
        self, row: int, sharded: Sequence[bool], sums: dict[bytes, list[bool]], *, looked_up: bool
    ) -> bool:
        """Find out whether a tensor is a sum; return whether it holds local indexes."""
        reading = self.readings[row]
        differing = [axis for axis in reading.replicated() if self._disagreements[axis, row]]
        if reading.reason or not differing:
            return False
        rounds = self._threshold[row] > 0 or "float" in (self.side.text("dtype", row) or "")
        if not rounds:
            if not any(sharded[axis] for axis in differing):
                return False
            self.readings[row] = cannot_join(self.side.grid, _LOCAL_INDEXES)
            return True
        section, direction = (self.side.text(name, row) for name in ("section", "direction"))
        is_result = section == "output" or direction in _GRADIENTS
        numbers = self.side.numbers[..., row].tobytes()
        before = sums.get(numbers)
        for axis in () if reading.is_given else differing:
            is_sum = is_result and (sharded[axis] or direction == "parameters_grad")
            reading.partial[axis] = is_sum or (before is not None and before[axis])
        if reading.is_partial:
            if looked_up:
                self.readings[row] = cannot_join(self.side.grid, _LOOKED_UP)
            sums[numbers] = reading.partial
        return False

    # --- merging ----------------------------------------------------------------------------
    def merge_all(self) -> None:
        """Merge the statistics of every tensor that can be put together."""
        for row, reading in self.readings.items():
            if not reading.reason:
                self._store(row, self._merge(row, reading))

    def _store(self, row: int, found: tuple[Floats, Flags]) -> None:
        self._merged[:, row], self._known[:, row] = found

    def _merge(self, row: int, reading: Reading) -> tuple[Floats, Flags]:
        """Return the statistics of the whole tensor, and which of them are known."""
        side, axes = self.side, range(len(reading.dims))
        cut = tuple(
            slice(None) if reading.sharded(axis) or reading.partial[axis] else reading.replica[axis]
            for axis in axes
        )
        numbers, known = (
            side.numbers[(slice(None), *cut, row)],
            side.known[(slice(None), *cut, row)],
        )
        counts = self._sizes[row].prod(axis=-1)[cut]
        left = [axis for axis in axes if reading.sharded(axis) or reading.partial[axis]]
        summed = tuple(at for at, axis in enumerate(left) if reading.partial[axis])
        if summed:
            numbers, known = self._summed(row, reading, cut, numbers, known, summed)
            for at in reversed(summed):
                counts = np.take(counts, 0, at)
        numbers = numbers.reshape(len(NUMBERS), -1)
        known = known.reshape(len(NUMBERS), -1)
        weights = np.asarray(counts, np.float64).reshape(-1)
        filled = weights > 0
        if not filled.any():
            return numbers[:, 0], known[:, 0]
        numbers, known, weights = numbers[:, filled], known[:, filled], weights[filled]
        if len(weights) == 1:
            return numbers[:, 0] / reading.scale, known[:, 0]
        with np.errstate(invalid="ignore", over="ignore"):
            merged = np.asarray([
                numbers[0].min(), numbers[1].max(), (numbers[2] * weights).sum() / weights.sum(),
                math.sqrt(np.square(numbers[3]).sum()),
            ])  # fmt: skip
        return merged / reading.scale, np.asarray(known.all(axis=1))

    def _summed(
        self, row: int, reading: Reading, cut: tuple[slice | int, ...], numbers: Stats,
        known: Flags, summed: tuple[int, ...],
    ) -> tuple[Stats, Flags]:  # fmt: skip
        """Return the statistics of the sums of parts, of each shard of the sum."""
        ranks = np.arange(len(self.side.grid.ranks)).reshape(self.side.grid.sizes)[cut]
        moved = np.moveaxis(ranks, summed, range(-len(summed), 0))
        shards = moved.shape[: moved.ndim - len(summed)]
        parts = moved.reshape(*shards, -1)
        divisor = parts.shape[-1] if reading.mean else 1
        of_mean = numbers[MEAN_AT].sum(axis=summed) / divisor
        if not self._wholes[row]:  # a scalar: its mean is its value
            every = np.broadcast_to(of_mean, (len(NUMBERS), *shards)).copy()
            return every, np.broadcast_to(known[MEAN_AT].all(axis=summed), every.shape)
        found = np.full((len(NUMBERS), *shards), np.nan)
        found[MEAN_AT] = of_mean
        is_known = np.zeros(found.shape, bool)
        is_known[MEAN_AT] = known[MEAN_AT].all(axis=summed)
        for place in np.ndindex(*shards):
            total = self.side.sum_of(row, parts[place].tolist())
            if total is not None:
                found[(slice(None), *place)] = statistics_of(total / divisor)
                is_known[(slice(None), *place)] = True
        return found, is_known

    # --- what only the other side shows -----------------------------------------------------
    def scale_gradients(self, other: SideJoiner, partners: Mapping[int, int]) -> None:
        """Find the factor of gradients by the first that is sharded over rows, and apply it."""
        if ROW_AXIS not in self.side.grid.axes:
            return
        over = self.side.grid.axes.index(ROW_AXIS)
        ranks = self.side.grid.sizes[over]
        gradients = [
            row
            for row, reading in sorted(self.readings.items())
            if not reading.reason
            and self.side.text("direction", row) in _GRADIENTS
            and (reading.sharded(over) or reading.partial[over])
        ]
        for row in gradients:
            reading = self.readings[row]
            norm, whole = self._merged[3, row], other._merged[3, partners[row]]
            if reading.is_partial or not (np.isfinite(norm) and np.isfinite(whole) and whole > 0):
                continue
            if abs(norm / whole - ranks) < abs(norm / whole - 1):
                self.scale = float(ranks)
            break
        if self.scale == 1.0:
            return
        for row in gradients:
            self.readings[row].scale = self.scale
            self._store(row, self._merge(row, self.readings[row]))

    def settle(self, other: SideJoiner, partners: Mapping[int, int]) -> None:
        """Choose between a sum and a mean, and take the replica farthest from the other side."""
        for row, reading in self.readings.items():
            if reading.reason:
                continue
            if reading.is_partial and not reading.is_given:
                self._settle_sum(row, reading, other, partners[row])
            differing = [axis for axis in reading.replicated() if self._disagreements[axis, row]]
            if differing:
                self._take_farthest(row, reading, differing, other, partners[row])

    def _settle_sum(self, row: int, reading: Reading, other: SideJoiner, partner: int) -> None:
        """Choose between a sum, a mean, and replicas of which one is that of the other side."""
        means = (False,) if self.side.text("direction", row) in _GRADIENTS else (False, True)
        distances = {}
        for reading.mean in means:
            distances[reading.mean] = self._distance(self._merge(row, reading), other, partner)
        reading.mean = min(distances, key=distances.__getitem__)
        if distances[reading.mean] > self._threshold[row]:
            partial, reading.partial = reading.partial, [False] * len(reading.partial)
            axes = [axis for axis, is_partial in enumerate(partial) if is_partial]
            replicas = self._of_replicas(row, reading, axes, other, partner)
            if min(replicas.values()) > self._threshold[row]:
                reading.partial = partial
        self._store(row, self._merge(row, reading))

    def _of_replicas(
        self, row: int, reading: Reading, axes: Sequence[int], other: SideJoiner, partner: int
    ) -> dict[tuple[int, ...], float]:
        """Return the distance of each choice of replicas along axes from the other side."""
        found = {}
        for choice in np.ndindex(*(self.side.grid.sizes[axis] for axis in axes)):
            for axis, index in zip(axes, choice, strict=True):
                reading.replica[axis] = index
            found[choice] = self._distance(self._merge(row, reading), other, partner)
        return found

    def _distance(self, found: tuple[Floats, Flags], other: SideJoiner, row: int) -> float:
        """Return how far statistics are from those of the other side; not finite is farthest."""
        numbers, known = found
        whole, both = other._merged[:, row], known & other._known[:, row]
        finite = np.isfinite(whole)
        if (np.isfinite(numbers[both]) != finite[both]).any():
            return math.inf
        gaps = np.where(both & finite, np.abs(numbers - whole), 0.0)
        extremes, norm = np.abs(whole[:2][finite[:2]]).max(initial=0.0), abs(whole[3])
        ratios = [gaps[:3].max() / extremes if extremes else 0.0, gaps[3] / norm if norm else 0.0]
        return float(np.nanmax(ratios))

    def _take_farthest(
        self, row: int, reading: Reading, differing: Sequence[int], other: SideJoiner, partner: int
    ) -> None:
        """Compare each replica, take the farthest, and name its ranks that differ from the best."""
        grid = self.side.grid
        choices = self._of_replicas(row, reading, differing, other, partner)
        farthest, best = (pick(choices, key=choices.__getitem__) for pick in (max, min))
        ranks = np.arange(len(grid.ranks)).reshape(grid.sizes)
        numbers = self.side.numbers[..., row]
        cuts = []
        for choice in (farthest, best):
            cut: list[slice | int] = [slice(None)] * len(grid.axes)
            for axis, index in zip(differing, choice, strict=True):
                cut[axis] = index
            cuts.append(tuple(cut))
        one, other_numbers = (numbers[(slice(None), *cut)] for cut in cuts)
        with np.errstate(invalid="ignore"):
            near = np.abs(one - other_numbers) <= self._equal[row] * np.abs(other_numbers)
        unequal = ~(near | (one == other_numbers) | (np.isnan(one) & np.isnan(other_numbers)))
        named = ranks[cuts[0]][unequal.any(axis=0)]
        reading.differing = tuple(np.asarray(named).reshape(-1).tolist())
        for axis, index in zip(differing, farthest, strict=True):
            reading.replica[axis] = index
        self._store(row, self._merge(row, reading))

    def unequal_parameters(self) -> list[int]:
        """Return the rows of parameters whose replicas differ, however little."""
        return [
            row
            for row, reading in sorted(self.readings.items())
            if reading.differing
            and self._of_parameter(row)
            and self.side.text("direction", row) not in _GRADIENTS
        ]

    def sums_by_mean(self) -> int:
        """Return the number of sums of which only the mean is known."""
        return sum(
            reading.is_partial and not reading.reason and not self._known[1, row]
            for row, reading in self.readings.items()
        )

    # --- the result -------------------------------------------------------------------------
    def table(self) -> OperatorColumns:
        """Return the table of the whole tensors."""
        if not self.side.grid.axes:
            return self.side.base
        texts: dict[str, dict[int, str | None]] = {"shape": {}, "non_finite": {}, "checksum": {}}
        for row, reading in self.readings.items():
            if row in self._wholes and not reading.reason:
                texts["shape"][row] = str(list(self._wholes[row]))
                low, high, mean, norm = self._merged[:, row].tolist()
                known = self._known[:, row]
                ends = (value if is_known else None for value, is_known in
                        ((low, known[0]), (high, known[1]), (norm, known[3])))  # fmt: skip
                kind = non_finite_kind(*ends)
                is_nan = known[MEAN_AT] and math.isnan(mean) and not known[0]
                texts["non_finite"][row] = "nan" if is_nan else kind
                texts["checksum"][row] = None
        numbers = {name: self._merged[at] for at, name in enumerate(NUMBERS)}
        known_numbers = {name: self._known[at] for at, name in enumerate(NUMBERS)}
        return self.side.base.replaced({**texts, "value": self.values}, numbers, known_numbers)


def _is_size(one: str | None, other: str | None, sizes: Sequence[int]) -> bool:
    """Return whether the sizes of a shard times those of some axes make the sizes of the whole."""
    try:
        own, whole = json.loads(one or ""), json.loads(other or "")
    except ValueError:
        return False
    own, whole = (each if isinstance(each, list) else [each] for each in (own, whole))
    if len(own) != len(whole) or not all(type(each) is int for each in [*own, *whole]):
        return False
    factors = {1}
    for size in sizes:
        factors |= {factor * size for factor in factors}
    return all(any(x * factor == y for factor in factors) for x, y in zip(own, whole, strict=True))
