"""Which values of two row tensors pair: by sample, in the order of the tokens that count."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.flow import is_structural
from stagescope_service.compare.pairing.layout import Layout, chosen, cumulative, same_offsets
from stagescope_service.compare.pairing.rows import Extent, Rows
from stagescope_service.dumps.records import Place
from stagescope_service.statistics.pairwise import ElementLocation, Number, value_of

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
States = npt.NDArray[np.int8]
Layouts = tuple[Layout, Layout]

COMPARED: Final = 0
LENGTHS_DIFFER: Final = 1
TOKENS_DIFFER: Final = 2
"""States of a pair of rows; only of the first all values are compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pairing:
    """Which rows of two records are the same samples.

    Attributes:
        rows_a, rows_b: int64, the pairs.
        labels: what to call each pair.
        key: by what they were paired; one of `align.KEYS`.
        by_position: rows are fragments: values pair by their token positions.
        in_order: every row pairs with the one at its own place.
    """

    rows_a: Int64
    rows_b: Int64
    labels: tuple[str, ...]
    key: str
    by_position: bool = False
    in_order: bool = False


class Location(NamedTuple):
    """Where a pair of values is, on both sides.

    Attributes:
        sample: of which sample, None of what has no rows.
        position: which of the sample's values that count, from 0.
        places: where the two records were made.
        coordinates: in the two tensors as they were kept.
        values: the two values; None where a side has no more.
    """

    sample: str | None
    position: int | None
    places: tuple[Place, Place]
    coordinates: tuple[tuple[int, ...], tuple[int, ...]]
    values: tuple[Number | None, Number | None]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenAlignment:
    """The values of two row tensors that pair.

    Attributes:
        index_a, index_b: their places in the flat tensors, None where all lie as they pair.
        edges: int64 [rows + 1] of each pair of rows among them.
        mask: which of them count, None = all.
        lengths: int64 [rows, 2], values that count on each side; None: as many on both as pair.
        states: of each pair of rows.
        kind: how values were chosen: 'full', 'mask', 'span', 'row' or 'positions'.
    """

    index_a: Int64 | None
    index_b: Int64 | None
    edges: Int64
    mask: Array | None
    lengths: Int64 | None
    states: States
    kind: str


def align_tokens(
    a: Rows, b: Rows, name: str, pairing: Pairing, bad: npt.NDArray[np.bool_]
) -> TokenAlignment:
    """Pair the values of a row tensor that both records have.

    Args:
        a, b: the records.
        name: of the tensor.
        pairing: which rows pair.
        bad: bool [pairs], pairs of which nothing can be compared.

    Returns:
        Values of rows with as many values on both sides; of a tensor that says which tokens there
        are, also what both sides have of the others, from the front.
    """
    layouts = one, other = a.known(name), b.known(name)
    direct = not bad.any() and is_direct(pairing, layouts)
    kind, of_a, of_b = _extents(a, b, name)
    keep_a, keep_b, mask_a, mask_b = of_a.keep, of_b.keep, None, None
    if kind == "row" and of_a.kind != of_b.kind:  # only one side says which values count
        mask_a, mask_b, keep_a, keep_b = keep_a, keep_b, None, None
    if direct and (keep_a is keep_b or _equal(keep_a, keep_b)):
        keep = next((each for each in (keep_a, mask_a, mask_b) if each is not None), None)
        return as_they_lie(one, keep, kind)
    index_a, edges_a = chosen(one, keep_a, pairing.rows_a)
    index_b, edges_b = chosen(other, keep_b, pairing.rows_b)
    if pairing.by_position:
        kind = "positions"
        sides = ((a, one, index_a, edges_a), (b, other, index_b, edges_b))
        index_a, index_b, edges_a = _by_position(sides, pairing)
        edges_b = edges_a
    counts_a, counts_b = np.diff(edges_a), np.diff(edges_b)
    states = np.where(counts_a == counts_b, COMPARED, LENGTHS_DIFFER).astype(np.int8)
    states[bad] = TOKENS_DIFFER
    common = np.minimum(counts_a, counts_b) if is_structural(name) else np.zeros_like(counts_a)
    length = np.where(bad, 0, np.where(states == COMPARED, counts_a, common))
    index_a, index_b = _first_of(index_a, edges_a, length), _first_of(index_b, edges_b, length)
    mask = mask_a[index_a] if mask_a is not None else None
    mask = mask_b[index_b] if mask_b is not None else mask
    lengths = np.stack([counts_a, counts_b], axis=1)
    return TokenAlignment(index_a, index_b, cumulative(length), mask, lengths, states, kind)


def as_they_lie(layout: Layout, keep: Array | None, kind: str) -> TokenAlignment:
    """Pair values of two tensors that lie alike: each with that at its own place."""
    states = np.zeros(len(layout.offsets) - 1, np.int8)
    return TokenAlignment(None, None, layout.offsets, keep, None, states, kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Finder:
    """Says where a pair of values is that was taken."""

    taken: TokenAlignment
    pairing: Pairing
    layouts: Layouts
    places: tuple[Place, Place]

    def locate(self, spot: ElementLocation | None) -> Location | None:
        """Return where a spot among the taken values lies on both sides."""
        if spot is None:
            return None
        taken = self.taken
        row = int(np.searchsorted(taken.edges, spot.at, "right")) - 1
        start = int(taken.edges[row])
        position = spot.at - start
        if taken.index_a is None and taken.mask is not None:
            position = int(np.count_nonzero(taken.mask[start : spot.at]))
        flats = [spot.at if i is None else int(i[spot.at]) for i in (taken.index_a, taken.index_b)]
        rows = (int(self.pairing.rows_a[row]), int(self.pairing.rows_b[row]))
        coordinates = [
            _coordinate(layout, flat, at)
            for layout, flat, at in zip(self.layouts, flats, rows, strict=True)
        ]
        return Location(
            self.pairing.labels[row], position, self.places, (coordinates[0], coordinates[1]),
            (spot.x, spot.y),
        )  # fmt: skip

    def end_of(self, pair: int, keeps: tuple[Array | None, Array | None]) -> Location:
        """Return the first value that only one side of a pair of rows has."""
        rows = (self.pairing.rows_a[pair : pair + 1], self.pairing.rows_b[pair : pair + 1])
        assert self.taken.lengths is not None
        common = int(self.taken.lengths[pair].min())
        coordinates: list[tuple[int, ...]] = []
        values: list[Number | None] = []
        for layout, keep, row in zip(self.layouts, keeps, rows, strict=True):
            index, _ = chosen(layout, keep, row)
            there = common < len(index)
            coordinates.append(
                _coordinate(layout, int(index[common]), int(row[0])) if there else ()
            )
            values.append(
                value_of(layout.flat, layout.dtype, int(index[common])) if there else None
            )
        return Location(
            self.pairing.labels[pair], common, self.places, (coordinates[0], coordinates[1]),
            (values[0], values[1]),
        )  # fmt: skip


def keeps_of(a: Rows, b: Rows, name: str) -> tuple[Array | None, Array | None]:
    """Return which values of a tensor count on each side, None = all."""
    _, of_a, of_b = _extents(a, b, name)
    return of_a.keep, of_b.keep


def _extents(one: Rows, other: Rows, name: str) -> tuple[str, Extent, Extent]:
    a, b = one.extents(name), other.extents(name)
    masks = one.mask_of(name), other.mask_of(name)
    if not is_structural(name) and None not in masks and masks[0] != masks[1]:
        # One is of responses and one of whole sequences: what the policy made is in both.
        ones = [rows.ones(mask) for rows, mask in zip((one, other), masks, strict=True) if mask]
        return "mask", Extent("mask", ones[0]), Extent("mask", ones[1])
    for kind in ("full", "mask", "span"):
        if kind in a and kind in b:
            return kind, a[kind], b[kind]
    spans = [each.get("span", each.get("response")) for each in (a, b)]
    if one.known(name).width != other.known(name).width and spans[0] and spans[1]:
        return "span", spans[0], spans[1]
    if "mask" in a or "mask" in b:
        return "row", a.get("mask", a["row"]), b.get("mask", b["row"])
    keeps = _without_padding(one.known(name), other.known(name))
    return "row", Extent("row", keeps[0]), Extent("row", keeps[1])


def _without_padding(one: Layout, other: Layout) -> tuple[Array | None, Array | None]:
    """Return which values count where no mask says it and one side's rows are wider.

    Columns that it has more, on the right or on the left, are padding where all they hold is 0.
    """
    wide, width = (
        (one, other.width) if (one.width or 0) > (other.width or 0) else (other, one.width)
    )
    if one.width is None or other.width is None or one.width == other.width or not width:
        return None, None
    assert wide.width is not None
    if any(len(layout.shape) != 2 for layout in (one, other)):
        return None, None
    values = wide.flat.reshape(-1, wide.width)
    for columns in (slice(0, width), slice(wide.width - width, None)):
        keep = np.zeros(values.shape, bool)
        keep[:, columns] = True
        if not values[~keep].any():
            flat = keep.reshape(-1)
            return (flat, None) if wide is one else (None, flat)
    return None, None


def is_direct(pairing: Pairing, layouts: Layouts) -> bool:
    """Whether the rows lie alike: the same order, the same lengths, padding included."""
    return pairing.in_order and not pairing.by_position and same_offsets(*layouts)


def _equal(one: Array | None, other: Array | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)


def _first_of(index: Int64, edges: Int64, lengths: Int64) -> Int64:
    """Return the first `lengths` places of each row."""
    counts = np.diff(edges)
    if np.array_equal(counts, lengths):
        return index
    position = np.arange(len(index)) - np.repeat(edges[:-1], counts)
    kept: Int64 = index[position < np.repeat(lengths, counts)]
    return kept


Side = tuple[Rows, Layout, Int64, Int64]


def _by_position(sides: tuple[Side, Side], pairing: Pairing) -> tuple[Int64, Int64, Int64]:
    """Return the places of the tokens whose positions both fragments have, and their edges."""
    positions = [_positions(side, at) for side, at in zip(sides, _rows(pairing), strict=True)]
    (_, _, index_a, edges_a), (_, _, index_b, edges_b) = sides
    found_a, found_b, counts = [], [], []
    for row in range(len(pairing.labels)):
        in_a, in_b = slice(*edges_a[row : row + 2]), slice(*edges_b[row : row + 2])
        _, at_a, at_b = np.intersect1d(
            positions[0][in_a], positions[1][in_b], assume_unique=True, return_indices=True
        )
        found_a.append(index_a[in_a][at_a])
        found_b.append(index_b[in_b][at_b])
        counts.append(len(at_a))
    empty = [np.empty(0, np.int64)]
    return np.concatenate(found_a or empty), np.concatenate(found_b or empty), cumulative(counts)


def _rows(pairing: Pairing) -> tuple[Int64, Int64]:
    return pairing.rows_a, pairing.rows_b


def _positions(side: Side, rows: Int64) -> Int64:
    """Return the token positions of the taken values of one side.

    Without `positions`, a value's is its place from the row's first that counts, after what
    `token_offset` says was left to other fragments.
    """
    record, layout, index, edges = side
    said = record.layout("positions")
    if said is not None and np.array_equal(said.offsets, layout.offsets):
        return np.asarray(said.flat[index], np.int64)
    from_first = np.arange(len(index)) - np.repeat(edges[:-1], np.diff(edges))
    offset = record.layout("token_offset")
    if offset is None:
        return from_first
    shift = np.asarray(offset.flat[rows], np.int64)
    return np.asarray(from_first + np.repeat(shift, np.diff(edges)), np.int64)


def coordinate_in(shape: tuple[int, ...], flat: int) -> tuple[int, ...]:
    """Return the coordinate of a value in a tensor whose values lie in memory order."""
    found = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        found.append(at)
    return tuple(reversed(found))


def _coordinate(layout: Layout, flat: int, row: int) -> tuple[int, ...]:
    if layout.width is None:
        return (row, flat - int(layout.offsets[row]))
    return coordinate_in(layout.shape, flat)
