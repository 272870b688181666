"""Compare two records: one comparison for every tensor and number that both have."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.compare import flow
from stagescope_service.compare.pairing.contents_rows import ContentsRows
from stagescope_service.compare.pairing.token_alignment import (
    LENGTHS_DIFFER,
    RowPairing,
    RowTensorPair,
    States,
    ValueLocation,
    ValueLocator,
    align_tokens,
    coordinate_in,
    direct_alignment,
    is_direct,
    keeps_of,
)
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.dumps.records import DumpContents, Location
from stagescope_service.rows.ragged import Bools, Int64, Values
from stagescope_service.statistics.pairwise import (
    ElementLocation,
    Number,
    Pairwise,
    compare_values,
    value_of,
)

Float64 = npt.NDArray[np.float64]
Shape = tuple[int, ...]
Box = tuple[slice, ...]
"""A part of a tensor: a slice of each dimension, with start and stop."""


class _CacheKey(NamedTuple):
    """Memory of two flat tensors of one dtype, their rows and the tolerance (atol, rtol)."""

    address_a: int
    address_b: int
    dtype: str
    offsets: bytes
    tolerance: tuple[float, float]


class CachedComparison(NamedTuple):
    """Two tensors whose values were all compared, which stay in memory with the result."""

    tensors: RowTensorPair
    statistics: Pairwise
    row_numbers: Float64


class Doubt(enum.Enum):
    """Why values that were paired by location may be of other samples."""

    OTHER_LAYOUT = "the sides have other ranks, parts or numbers of rows"
    OTHER_ORDER = "the trajectories are others or in another order"
    SAME_LENGTHS = "the rows have the same lengths in another order"


ValueCache = dict[_CacheKey, CachedComparison]
"""Results by the memory of the values: several sections of a file may share one mask."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowTable:
    """The comparison of each pair of rows.

    Attributes:
        labels: names of the samples.
        numbers: float64 [rows, len(pairwise.ROW)].
        lengths: int64 [rows, 2], number of values that count on each side.
        states: int8 [rows], `token_alignment.COMPARED` and so on.
        values: float64 [rows, 2] for tensors with one value per row, else None.
    """

    labels: tuple[str, ...]
    numbers: Float64
    lengths: Int64
    states: States
    values: Float64 | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ShardComparison:
    """Comparison of one tensor or number of two records; small and picklable.

    Attributes:
        section, name: section and name of the tensor or number.
        locations: locations of the two records.
        dtypes, shapes: dtype tag and shape on each side.
        statistics: how the values differ.
        rows: the same by row, None without rows.
        largest, unequal, over: locations of values; see `Pairwise`.
        extent: how values were chosen; see `TokenAlignment.kind`, 'all' without rows.
        key: the kind of key that paired the rows; 'place' or 'name' without rows.
        has_fragments: rows may be fragments of samples: a repeated label is no replica.
        shapes_differ: the shapes differ, and values were not compared.
        problem: why not all values were compared, empty if they were.
        doubt: why values that were paired by location may be of other samples, None if not.
    """

    section: str
    name: str
    locations: tuple[Location, Location]
    dtypes: tuple[str, str]
    shapes: tuple[Shape, Shape]
    statistics: Pairwise
    rows: RowTable | None = None
    largest: ValueLocation | None = None
    unequal: ValueLocation | None = None
    over: ValueLocation | None = None
    extent: str = "all"
    key: str = "place"
    has_fragments: bool = False
    shapes_differ: bool = False
    problem: str = ""
    doubt: Doubt | None = None

    @property
    def states(self) -> States:
        """States of the pairs of rows; empty without rows."""
        return np.empty(0, np.int8) if self.rows is None else self.rows.states


def compare_rows(
    a: ContentsRows,
    b: ContentsRows,
    pairing: RowPairing,
    tolerances: Tolerances,
    *,
    exclude: frozenset[str] = frozenset(),
    cache: ValueCache | None = None,
) -> list[ShardComparison]:
    """Compare every row tensor that both records have, over the rows that pair.

    Tokens and masks come first. If they differ in a row, no other tensor of that row is compared.

    Args:
        a, b: the two records.
        pairing: which rows are the same samples.
        tolerances: the tolerances of all tensors.
        exclude: labels of samples whose tokens are known to differ.
        cache: results of other sections of the same files; new ones are added.
    """
    section = a.record.entry.section
    names = sorted(set(a.names) & set(b.names), key=lambda name: flow.sort_key(section, name))
    names.sort(key=lambda name: not flow.is_structural(name))
    if "versions" in names and not a.repeat_by_token("versions", b):
        b.repeat_by_token("versions", a)
    comparer = _RowComparer(a, b, pairing, tolerances, {} if cache is None else cache)
    excluded = np.array([label in exclude for label in pairing.labels], bool)
    comparisons = []
    for name in names:
        structural = flow.is_structural(name)
        comparison = comparer.compare(name, np.zeros_like(excluded) if structural else excluded)
        comparisons.append(comparison)
        if structural and comparison.rows is not None:
            table = comparison.rows
            excluded = excluded | (table.numbers[:, 1] > 0) | (table.states == LENGTHS_DIFFER)
    return comparisons


def compare_others(
    a: ContentsRows, b: ContentsRows, tolerances: Tolerances
) -> list[ShardComparison]:
    """Compare the tensors without rows and the numbers that both records have, by name."""
    one, other = a.record, b.record
    by_row = set(a.names) & set(b.names)
    comparisons = [
        _compare_tensor(one, other, name, tolerances)
        for name in one.tensors
        if name in other.tensors and name not in by_row
    ]
    comparisons += [
        _compare_number(one, other, name, tolerances)
        for name in one.numbers
        if name in other.numbers
    ]
    return comparisons


def compare_boxes(
    one: DumpContents,
    other: DumpContents,
    name: str,
    boxes: tuple[Box, Box],
    tolerances: Tolerances,
) -> ShardComparison:
    """Compare a part of a named tensor of one shard with the same part of another's."""
    arrays = [
        record.tensors[name][2].reshape(record.tensors[name][1])[box]
        for record, box in zip((one, other), boxes, strict=True)
    ]
    starts = [tuple(int(each.start) for each in box) for box in boxes]
    return _with_values(_of_tensor(one, other, name), arrays, starts, tolerances)


def log_prob_noise(rows: ContentsRows) -> Pairwise | None:
    """Compare the log-probs that a record holds twice; None if it does not."""
    one, other = rows.find("old_log_probs"), rows.find("recomputed_log_probs")
    if one is None or other is None or not np.array_equal(one.offsets, other.offsets):
        return None
    mask = rows.mask_of("old_log_probs")
    keep = None if mask is None else rows.ones(mask)
    return compare_values(one.flat, other.flat, dtypes=(one.dtype, other.dtype), mask=keep)[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _RowComparer:
    """Compares row tensors of two records over the rows that pair."""

    a: ContentsRows
    b: ContentsRows
    pairing: RowPairing
    tolerances: Tolerances
    cache: ValueCache

    def compare(self, name: str, excluded: Bools) -> ShardComparison:
        """Compare a tensor; `excluded`, bool [pairs], marks rows to leave out."""
        a, b, pairing = self.a, self.b, self.pairing
        tensors = one, other = a.tensor(name), b.tensor(name)
        dtypes, section = (one.dtype, other.dtype), a.record.entry.section
        tolerance = self.tolerances.for_tensor(section, name, dtypes)
        bounds = (tolerance.atol, tolerance.rtol)
        equal = None
        if flow.is_structural(name) and is_direct(pairing, tensors):
            equal = self._equal_with_padding(tensors, bounds)
        if equal is not None:
            alignment, (statistics, numbers) = direct_alignment(one, None, "full"), equal
            if name in flow.MASKS:
                b.share_ones(a, name)
        else:
            alignment = align_tokens(a, b, name, pairing, excluded)
            statistics, numbers = compare_values(
                one.flat if alignment.index_a is None else one.flat[alignment.index_a],
                other.flat if alignment.index_b is None else other.flat[alignment.index_b],
                dtypes=dtypes, mask=alignment.mask, offsets=alignment.edges, tolerance=bounds,
            )  # fmt: skip
        locations = (a.record.entry.location, b.record.entry.location)
        locator = ValueLocator(alignment, pairing, tensors, locations)
        lengths = alignment.lengths
        if lengths is None:
            lengths = np.repeat(numbers[:, :1], 2, axis=1).astype(np.int64)
        table = RowTable(
            pairing.labels, numbers, lengths, alignment.states, _row_values(tensors, pairing)
        )
        comparison = ShardComparison(
            section, name, locations, dtypes, (one.shape, other.shape), statistics, rows=table,
            largest=locator.locate(statistics.largest),
            unequal=locator.locate(statistics.unequal), over=locator.locate(statistics.over),
            extent=alignment.kind, key=pairing.key, has_fragments=a.has_fragments,
        )  # fmt: skip
        unequal_lengths = np.flatnonzero(alignment.states == LENGTHS_DIFFER)
        if not len(unequal_lengths):
            return comparison
        return self._with_lengths(comparison, locator, int(unequal_lengths[0]))

    def _equal_with_padding(
        self, tensors: RowTensorPair, tolerance: tuple[float, float]
    ) -> tuple[Pairwise, Float64] | None:
        """Compare all values of two aligned tensors, padding included; None unless all are equal.

        If they are, it makes no difference which of them count.
        """
        one, other = tensors
        if one.dtype != other.dtype:
            return None
        addresses = (one.flat.ctypes.data, other.flat.ctypes.data)
        key = _CacheKey(*addresses, one.dtype, one.offsets.tobytes(), tolerance)
        if key not in self.cache:
            statistics, numbers = compare_values(
                one.flat, other.flat, dtypes=(one.dtype, other.dtype), offsets=one.offsets,
                tolerance=tolerance,
            )  # fmt: skip
            self.cache[key] = CachedComparison(tensors, statistics, numbers)
        _, statistics, numbers = self.cache[key]
        is_equal = not statistics.unequal_count and statistics.finite == statistics.pairs
        return (statistics, numbers) if is_equal else None

    def _with_lengths(
        self, comparison: ShardComparison, locator: ValueLocator, pair: int
    ) -> ShardComparison:
        """Return a comparison that names the rows whose lengths differ, the first being `pair`.

        In tokens and masks another length is a difference. In other tensors it is a problem.
        """
        table = comparison.rows
        assert table is not None
        if flow.is_structural(comparison.name):
            first = comparison.unequal
            if first is not None and table.labels.index(first.sample or "") <= pair:
                return comparison
            end = locator.end_of(pair, keeps_of(self.a, self.b, comparison.name))
            return dataclasses.replace(comparison, unequal=end, over=end)
        one, other = table.lengths[pair].tolist()
        count = int((table.states == LENGTHS_DIFFER).sum())
        problem = (
            f"{count} rows have another number of values ({table.labels[pair]}: {one}, {other})"
        )
        if comparison.extent == "row":
            problem += ", and no mask says what is padding"
        return dataclasses.replace(comparison, problem=problem)


def _row_values(tensors: RowTensorPair, pairing: RowPairing) -> Float64 | None:
    """Return the values of each pair of rows, None unless tensors have one value a row."""
    if any(len(tensor.shape) != 1 or tensor.width != 1 for tensor in tensors):
        return None
    columns = [
        [float(value_of(tensor.flat, tensor.dtype, int(row))) for row in rows]
        for tensor, rows in zip(tensors, (pairing.rows_a, pairing.rows_b), strict=True)
    ]
    return np.array(columns, np.float64).T


def _of_tensor(one: DumpContents, other: DumpContents, name: str) -> ShardComparison:
    """Return a comparison of a tensor without rows, still without its values."""
    (dtype_a, shape_a, *_), (dtype_b, shape_b, *_) = one.tensors[name], other.tensors[name]
    return ShardComparison(
        one.entry.section, name, (one.entry.location, other.entry.location), (dtype_a, dtype_b),
        (shape_a, shape_b), Pairwise.nothing(), key="name",
    )  # fmt: skip


def _compare_tensor(
    one: DumpContents, other: DumpContents, name: str, tolerances: Tolerances
) -> ShardComparison:
    """Compare a tensor without rows."""
    comparison = _of_tensor(one, other, name)
    shape_a, shape_b = comparison.shapes
    (*_, array_a, offsets_a), (*_, array_b, offsets_b) = one.tensors[name], other.tensors[name]
    if shape_a == shape_b and offsets_a is None and offsets_b is None:
        arrays = (array_a.reshape(shape_a), array_b.reshape(shape_b))
        return _with_values(comparison, arrays, [(0,) * len(shape_a)] * 2, tolerances)
    problem = f"shapes {list(shape_a)} and {list(shape_b)}"
    return dataclasses.replace(comparison, shapes_differ=True, problem=problem)


def _compare_number(
    one: DumpContents, other: DumpContents, name: str, tolerances: Tolerances
) -> ShardComparison:
    arrays = [_as_array(record.numbers[name]) for record in (one, other)]
    comparison = ShardComparison(
        one.entry.section, name, (one.entry.location, other.entry.location),
        (str(arrays[0].dtype), str(arrays[1].dtype)), ((), ()), Pairwise.nothing(),
    )  # fmt: skip
    return _with_values(comparison, arrays, ((), ()), tolerances)


def _with_values(
    comparison: ShardComparison,
    arrays: Sequence[Values],
    starts: Sequence[Shape],
    tolerances: Tolerances,
) -> ShardComparison:
    """Compare arrays of one shape; `starts`: their offsets in the tensors of the records."""
    dtypes = tolerated = comparison.dtypes
    if comparison.shapes == ((), ()) and "float64" in dtypes:
        tolerated = ("float32", "float32")  # a number of Python, made from tensors
    tolerance = tolerances.for_tensor(comparison.section, comparison.name, tolerated)
    bounds = (tolerance.atol, tolerance.rtol)
    statistics, _ = compare_values(arrays[0], arrays[1], dtypes=dtypes, tolerance=bounds)

    def locate(element: ElementLocation | None) -> ValueLocation | None:
        if element is None:
            return None
        at = coordinate_in(arrays[0].shape, element.at)
        x, y = (tuple(s + i for s, i in zip(start, at, strict=True)) for start in starts)
        return ValueLocation(None, None, comparison.locations, (x, y), (element.x, element.y))

    return dataclasses.replace(
        comparison, statistics=statistics, largest=locate(statistics.largest),
        unequal=locate(statistics.unequal), over=locate(statistics.over),
    )  # fmt: skip


def _as_array(value: Number) -> Values:
    """Return a number as an int64 or float64 array; an int over 64 bits is rounded."""
    is_int64 = isinstance(value, int) and -(2**63) <= value < 2**63
    return np.array(value, np.int64 if is_int64 else np.float64)
