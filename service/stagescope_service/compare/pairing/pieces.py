"""Two records held against each other: a piece for every tensor and number that both have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.compare import flow
from stagescope_service.compare.pairing.layout import Layout
from stagescope_service.compare.pairing.rows import Rows
from stagescope_service.compare.pairing.token_alignment import (
    LENGTHS_DIFFER,
    Finder,
    Layouts,
    Location,
    Pairing,
    align_tokens,
    as_they_lie,
    coordinate_in,
    is_direct,
    keeps_of,
)
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.dumps.records import Place, Record
from stagescope_service.statistics.pairwise import (
    ElementLocation,
    Number,
    Pairwise,
    compare_values,
    value_of,
)
from stagescope_service.store.tensorfile import WireTensor

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Box = tuple[slice, ...]
"""A part of a tensor: a slice of each dimension, with start and stop."""


class Compared(NamedTuple):
    """Two tensors of which all values were compared; they stay in memory with what was found."""

    layouts: Layouts
    found: Pairwise
    numbers: Float64


Known = dict[tuple[Any, ...], Compared]
"""What was found by where the values lie: a mask may stand in several sections of a file."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowTable:
    """What was found in each pair of rows.

    Attributes:
        labels: of the samples.
        numbers: float64 [rows, len(pairwise.ROW_COLUMNS)].
        lengths: int64 [rows, 2], values that count on each side.
        states: int8 [rows], `taking.COMPARED` and so on.
        values: float64 [rows, 2] of tensors with one value a row, else None.
    """

    labels: tuple[str, ...]
    numbers: npt.NDArray[np.float64]
    lengths: Int64
    states: npt.NDArray[np.int8]
    values: npt.NDArray[np.float64] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One tensor or number of two records; small: it travels from where they were read.

    Attributes:
        section, name: which.
        places: where each was made.
        dtypes, shapes: of each.
        found: how the values differ.
        rows: the same by row, None of what has no rows.
        largest, unequal, over: where; see `Pairwise`.
        extent: how values were chosen; see `Taken.kind`, 'all' of what has no rows.
        key: by what rows were paired; 'place' or 'name' of what has none.
        fragments: rows may be fragments of samples: the same label again is no replica.
        shapes_differ: they have other shapes, and values were not compared.
        problem: why not all values were compared, empty if they were.
        unproven: why what was paired by its place may be of other samples, empty if it is not.
    """

    section: str
    name: str
    places: tuple[Place, Place]
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    found: Pairwise
    rows: RowTable | None = None
    largest: Location | None = None
    unequal: Location | None = None
    over: Location | None = None
    extent: str = "all"
    key: str = "place"
    fragments: bool = False
    shapes_differ: bool = False
    problem: str = ""
    unproven: str = ""


def compare_rows(
    a: Rows,
    b: Rows,
    pairing: Pairing,
    tolerances: Tolerances,
    *,
    exclude: frozenset[str] = frozenset(),
    known: Known | None = None,
) -> list[Piece]:
    """Compare every row tensor that both records have, over the rows that pair.

    Tokens and masks come first: of rows in which they differ nothing else is compared.

    Args:
        a, b: the two records.
        pairing: which rows are the same samples.
        tolerances: of each tensor.
        exclude: labels of samples whose tokens are known to differ.
        known: what other sections of the same files have found already; is added to.
    """
    known = {} if known is None else known
    section = a.record.entry.section
    both = sorted(set(a.names) & set(b.names), key=lambda name: flow.order(section, name))
    both.sort(key=lambda name: not flow.is_structural(name))
    if "versions" in both and not a.spread("versions", b):
        b.spread("versions", a)
    bad = np.array([label in exclude for label in pairing.labels], bool)
    pieces = []
    for name in both:
        structural = flow.is_structural(name)
        left_out = np.zeros_like(bad) if structural else bad
        piece = _compare_row_tensor(a, b, name, pairing, tolerances, left_out, known)
        pieces.append(piece)
        if structural and piece.rows is not None:
            table = piece.rows
            bad = bad | (table.numbers[:, 1] > 0) | (table.states == LENGTHS_DIFFER)
    return pieces


def compare_others(a: Rows, b: Rows, tolerances: Tolerances) -> list[Piece]:
    """Compare the tensors without rows and the numbers that both records have, by name."""
    one, other = a.record, b.record
    by_row = set(a.names) & set(b.names)
    pieces = [
        _compare_whole(one, other, name, tolerances, key="name")
        for name in one.tensors
        if name in other.tensors and name not in by_row
    ]
    pieces += [
        _compare_number(one, other, name, tolerances)
        for name in one.numbers
        if name in other.numbers
    ]
    return pieces


def compare_boxes(
    one: Record, other: Record, name: str, boxes: tuple[Box, Box], tolerances: Tolerances
) -> Piece:
    """Compare a part of a named tensor of one shard with the same part of another's."""
    arrays = [
        record.tensors[name][2].reshape(record.tensors[name][1])[box]
        for record, box in zip((one, other), boxes, strict=True)
    ]
    starts = [tuple(int(each.start) for each in box) for box in boxes]
    return _compare_arrays(one, other, name, arrays, starts, tolerances)


def noise_floor(rows: Rows) -> Pairwise | None:
    """Return how far apart log-probs are that a record holds twice, None where it does not."""
    one, other = rows.layout("old_log_probs"), rows.layout("recomputed_log_probs")
    if one is None or other is None or not np.array_equal(one.offsets, other.offsets):
        return None
    mask = rows.mask_of("old_log_probs")
    keep = None if mask is None else rows.ones(mask)
    return compare_values(one.flat, other.flat, dtypes=(one.dtype, other.dtype), mask=keep)[0]


def _compare_row_tensor(
    a: Rows,
    b: Rows,
    name: str,
    pairing: Pairing,
    tolerances: Tolerances,
    bad: npt.NDArray[np.bool_],
    known: Known,
) -> Piece:
    layouts = one, other = a.known(name), b.known(name)
    dtypes, section = (one.dtype, other.dtype), a.record.entry.section
    tolerance = tolerances.of(section, name, dtypes)
    bounds = (tolerance.atol, tolerance.rtol)
    equal = None
    if flow.is_structural(name) and is_direct(pairing, layouts):
        equal = _equal_with_padding(layouts, bounds, known)
    if equal is not None:
        taken, (found, numbers) = as_they_lie(one, None, "full"), equal
        if name in flow.MASKS:
            b.share(a, name)
    else:
        taken = align_tokens(a, b, name, pairing, bad)
        found, numbers = compare_values(
            one.flat if taken.index_a is None else one.flat[taken.index_a],
            other.flat if taken.index_b is None else other.flat[taken.index_b],
            dtypes=dtypes, mask=taken.mask, offsets=taken.edges, tolerance=bounds,
        )  # fmt: skip
    places = (a.record.entry.place, b.record.entry.place)
    finder = Finder(taken, pairing, layouts, places)
    lengths = taken.lengths
    if lengths is None:
        lengths = np.empty((len(numbers), 2), np.int64)
        lengths[:] = numbers[:, :1]
    table = RowTable(pairing.labels, numbers, lengths, taken.states, _row_values(layouts, pairing))
    piece = Piece(
        section, name, places, dtypes, (one.shape, other.shape), found, rows=table,
        largest=finder.locate(found.largest), unequal=finder.locate(found.unequal),
        over=finder.locate(found.over), extent=taken.kind, key=pairing.key,
        fragments=a.has_fragments,
    )  # fmt: skip
    short = np.flatnonzero(taken.states == LENGTHS_DIFFER)
    return piece if not len(short) else _with_lengths(piece, finder, int(short[0]), (a, b))


def _equal_with_padding(
    layouts: Layouts, tolerance: tuple[float, float], known: Known
) -> tuple[Pairwise, Float64] | None:
    """Compare all values of two tensors that lie alike, None unless all are equal.

    Which of them count makes no difference then.
    """
    one, other = layouts
    if one.dtype != other.dtype:
        return None
    place = (one.flat.ctypes.data, other.flat.ctypes.data)
    key = (*place, one.dtype, one.offsets.tobytes(), tolerance)
    if key not in known:
        found, numbers = compare_values(
            one.flat, other.flat, dtypes=(one.dtype, other.dtype), offsets=one.offsets,
            tolerance=tolerance,
        )  # fmt: skip
        known[key] = Compared(layouts, found, numbers)
    _, found, numbers = known[key]
    is_equal = not found.unequal_count and found.finite == found.pairs
    return (found, numbers) if is_equal else None


def _with_lengths(piece: Piece, finder: Finder, short: int, sides: tuple[Rows, Rows]) -> Piece:
    """Say that rows have other lengths; of tokens and masks the first one's end is a difference."""
    assert piece.rows is not None
    if flow.is_structural(piece.name):
        first = piece.unequal
        if first is not None and _row_of(piece.rows, first) <= short:
            return piece
        end = finder.end_of(short, keeps_of(*sides, piece.name))
        return dataclasses.replace(piece, unequal=end, over=end)
    one, other = piece.rows.lengths[short].tolist()
    count = int((piece.rows.states == LENGTHS_DIFFER).sum())
    why = f"{count} rows have another number of values ({piece.rows.labels[short]}: {one}, {other})"
    if piece.extent == "row":
        why += ", and no mask says what is padding"
    return dataclasses.replace(piece, problem=why)


def _row_of(table: RowTable, location: Location) -> int:
    return table.labels.index(location.sample or "")


def _row_values(layouts: tuple[Layout, Layout], pairing: Pairing) -> npt.NDArray[np.float64] | None:
    if any(len(layout.shape) != 1 or layout.width != 1 for layout in layouts):
        return None
    columns = [
        [float(value_of(layout.flat, layout.dtype, int(row))) for row in rows]
        for layout, rows in zip(layouts, (pairing.rows_a, pairing.rows_b), strict=True)
    ]
    return np.array(columns, np.float64).T


def _compare_whole(
    one: Record, other: Record, name: str, tolerances: Tolerances, *, key: str
) -> Piece:
    tensors = (one.tensors[name], other.tensors[name])
    shapes = (tensors[0][1], tensors[1][1])
    if shapes[0] == shapes[1] and tensors[0][3] is None and tensors[1][3] is None:
        arrays = [tensor[2].reshape(tensor[1]) for tensor in tensors]
        starts = [(0,) * len(shapes[0])] * 2
        return _compare_arrays(one, other, name, arrays, starts, tolerances)
    return Piece(
        one.entry.section, name, (one.entry.place, other.entry.place), _tags(tensors), shapes,
        Pairwise.nothing(), key=key, shapes_differ=True,
        problem=f"shapes {_shape(shapes[0])} and {_shape(shapes[1])}",
    )  # fmt: skip


def _compare_arrays(
    one: Record,
    other: Record,
    name: str,
    arrays: Sequence[Array],
    starts: Sequence[tuple[int, ...]],
    tolerances: Tolerances,
) -> Piece:
    tensors = (one.tensors[name], other.tensors[name])
    section, places = one.entry.section, (one.entry.place, other.entry.place)
    dtypes = _tags(tensors)
    tolerance = tolerances.of(section, name, dtypes)
    bounds = (tolerance.atol, tolerance.rtol)
    found, _ = compare_values(arrays[0], arrays[1], dtypes=dtypes, tolerance=bounds)
    shape = arrays[0].shape

    def locate(spot: ElementLocation | None) -> Location | None:
        if spot is None:
            return None
        at = coordinate_in(shape, spot.at)
        x, y = (tuple(s + i for s, i in zip(start, at, strict=True)) for start in starts)
        return Location(None, None, places, (x, y), (spot.x, spot.y))

    return Piece(
        section, name, places, dtypes, (tensors[0][1], tensors[1][1]), found,
        largest=locate(found.largest), unequal=locate(found.unequal), over=locate(found.over),
        key="name",
    )  # fmt: skip


def _compare_number(one: Record, other: Record, name: str, tolerances: Tolerances) -> Piece:
    values = (one.numbers[name], other.numbers[name])
    section, places = one.entry.section, (one.entry.place, other.entry.place)
    arrays = [_as_array(value) for value in values]
    dtypes = ("int64" if arrays[0].dtype == np.int64 else "float64", "")
    dtypes = (dtypes[0], "int64" if arrays[1].dtype == np.int64 else "float64")
    tolerance = tolerances.of(
        section, name, ("float32", "float32") if "float64" in dtypes else dtypes
    )
    found, _ = compare_values(
        arrays[0], arrays[1], dtypes=dtypes, tolerance=(tolerance.atol, tolerance.rtol)
    )

    def locate(spot: ElementLocation | None) -> Location | None:
        return None if spot is None else Location(None, None, places, ((), ()), (spot.x, spot.y))

    return Piece(
        section, name, places, dtypes, ((), ()), found, largest=locate(found.largest),
        unequal=locate(found.unequal), over=locate(found.over),
    )  # fmt: skip


def _as_array(value: Number) -> Array:
    """Return a number as an array of one; an int over 64 bits is rounded to a float."""
    whole = isinstance(value, int) and -(2**63) <= value < 2**63
    return np.array([value], np.int64 if whole else np.float64)


def _tags(tensors: Sequence[WireTensor]) -> tuple[str, str]:
    return (tensors[0][0], tensors[1][0])


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
