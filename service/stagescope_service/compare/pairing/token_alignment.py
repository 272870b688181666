"""Pair the values of two row tensors: by sample, in the order of the tokens that count."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.flow import is_structural
from stagescope_service.compare.pairing.contents_rows import ContentsRows, RowExtent
from stagescope_service.dumps.records import Location
from stagescope_service.rows.positions import TokenIndex, positions_of
from stagescope_service.rows.ragged import (
    Bools,
    Int64,
    RowTensor,
    cumulative,
    row_of_each,
    same_offsets,
    select_values,
    slice_indexes,
)
from stagescope_service.statistics.pairwise import ElementLocation, Number, value_of

States = npt.NDArray[np.int8]
RowTensorPair = tuple[RowTensor, RowTensor]

COMPARED: Final = 0
LENGTHS_DIFFER: Final = 1
TOKENS_DIFFER: Final = 2
"""States of a pair of rows; only of `COMPARED` rows all values are compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowPairing:
    """Which rows of two records are the same samples.

    Attributes:
        rows_a, rows_b: int64 [pairs], the rows of each pair.
        labels: a name of each pair.
        key: the kind of key that paired them; one of `shard_index.PAIRING_KEYS`.
        by_position: rows are fragments of samples: values pair by their token positions.
        in_order: row r of one side pairs with row r of the other.
    """

    rows_a: Int64
    rows_b: Int64
    labels: tuple[str, ...]
    key: str
    by_position: bool = False
    in_order: bool = False


class ValueLocation(NamedTuple):
    """Location of a pair of values on both sides.

    Attributes:
        sample: the sample, None for a tensor without rows.
        position: index of the value among those of the sample that count, from 0.
        locations: locations of the two records.
        coordinates: coordinates in the two tensors as they were kept.
        values: the two values; None where a side has no more.
    """

    sample: str | None
    position: int | None
    locations: tuple[Location, Location]
    coordinates: tuple[tuple[int, ...], tuple[int, ...]]
    values: tuple[Number | None, Number | None]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenAlignment:
    """The values of two row tensors that pair.

    Attributes:
        index_a, index_b: their indexes in the flat tensors, None if value i pairs with value i.
        edges: int64 [rows + 1], bounds of each pair of rows among the values.
        mask: which of the values count, None = all.
        lengths: int64 [rows, 2], number of values that count on each side; None: as `edges` say.
        states: int8 [rows], state of each pair of rows.
        kind: how values were chosen: 'full', 'mask', 'span', 'row' or 'positions'.
    """

    index_a: Int64 | None
    index_b: Int64 | None
    edges: Int64
    mask: Bools | None
    lengths: Int64 | None
    states: States
    kind: str


class _SelectedValues(NamedTuple):
    """Values of the paired rows of one side: their flat indexes, and bounds of each row."""

    rows: ContentsRows
    tensor: RowTensor
    flat_index: Int64
    edges: Int64


def align_tokens(
    a: ContentsRows, b: ContentsRows, name: str, pairing: RowPairing, excluded: Bools
) -> TokenAlignment:
    """Pair the values of a row tensor that both records have.

    Args:
        a, b: the records.
        name: name of the tensor.
        pairing: which rows pair.
        excluded: bool [pairs], pairs of rows whose values are not compared.

    Returns:
        The values of rows that have the same number of values on both sides. For tokens and masks
        also the common beginning of the other rows.
    """
    tensors = one, other = a.tensor(name), b.tensor(name)
    direct = not excluded.any() and is_direct(pairing, tensors)
    kind, extent_a, extent_b = _extents(a, b, name)
    keep_a, keep_b, mask_a, mask_b = extent_a.keep, extent_b.keep, None, None
    if kind == "row" and extent_a.kind != extent_b.kind:  # only one side has a mask
        mask_a, mask_b, keep_a, keep_b = keep_a, keep_b, None, None
    if direct and (keep_a is keep_b or _equal(keep_a, keep_b)):
        keep = next((each for each in (keep_a, mask_a, mask_b) if each is not None), None)
        return direct_alignment(one, keep, kind)
    index_a, edges_a = select_values(one, keep_a, pairing.rows_a)
    index_b, edges_b = select_values(other, keep_b, pairing.rows_b)
    if pairing.by_position:
        kind = "positions"
        index_a, index_b, edges_a = _pair_by_position(
            _SelectedValues(a, one, index_a, edges_a),
            _SelectedValues(b, other, index_b, edges_b),
            pairing,
        )
        edges_b = edges_a
    counts_a, counts_b = np.diff(edges_a), np.diff(edges_b)
    states = np.where(counts_a == counts_b, COMPARED, LENGTHS_DIFFER).astype(np.int8)
    states[excluded] = TOKENS_DIFFER
    common = np.minimum(counts_a, counts_b) if is_structural(name) else np.zeros_like(counts_a)
    length = np.where(excluded, 0, np.where(states == COMPARED, counts_a, common))
    index_a, index_b = _first_of(index_a, edges_a, length), _first_of(index_b, edges_b, length)
    mask = mask_a[index_a] if mask_a is not None else None
    mask = mask_b[index_b] if mask_b is not None else mask
    lengths = np.stack([counts_a, counts_b], axis=1)
    return TokenAlignment(index_a, index_b, cumulative(length), mask, lengths, states, kind)


def direct_alignment(tensor: RowTensor, keep: Bools | None, kind: str) -> TokenAlignment:
    """Pair value i of one tensor with value i of another one with the same rows."""
    states = np.zeros(len(tensor.offsets) - 1, np.int8)
    return TokenAlignment(None, None, tensor.offsets, keep, None, states, kind)


@dataclasses.dataclass(frozen=True, slots=True)
class ValueLocator:
    """Locates pairs of aligned values in the two tensors."""

    alignment: TokenAlignment
    pairing: RowPairing
    tensors: RowTensorPair
    locations: tuple[Location, Location]

    def locate(self, element: ElementLocation | None) -> ValueLocation | None:
        """Return the location of an aligned element on both sides."""
        if element is None:
            return None
        alignment, at = self.alignment, element.at
        pair = int(np.searchsorted(alignment.edges, at, "right")) - 1
        start = int(alignment.edges[pair])
        position = at - start
        if alignment.index_a is None and alignment.mask is not None:
            position = int(np.count_nonzero(alignment.mask[start:at]))
        flats = [at if i is None else int(i[at]) for i in (alignment.index_a, alignment.index_b)]
        rows = (int(self.pairing.rows_a[pair]), int(self.pairing.rows_b[pair]))
        coordinates = [
            _coordinate(tensor, flat, row)
            for tensor, flat, row in zip(self.tensors, flats, rows, strict=True)
        ]
        return ValueLocation(
            self.pairing.labels[pair], position, self.locations,
            (coordinates[0], coordinates[1]), (element.x, element.y),
        )  # fmt: skip

    def end_of(self, pair: int, keeps: tuple[Bools | None, Bools | None]) -> ValueLocation:
        """Return the location of the first value that only one side of a pair of rows has."""
        assert self.alignment.lengths is not None
        common = int(self.alignment.lengths[pair].min())
        coordinates: list[tuple[int, ...]] = []
        values: list[Number | None] = []
        sides = zip(self.tensors, keeps, (self.pairing.rows_a, self.pairing.rows_b), strict=True)
        for tensor, keep, rows in sides:
            index, _ = select_values(tensor, keep, rows[pair : pair + 1])
            flat = int(index[common]) if common < len(index) else None
            coordinates.append(() if flat is None else _coordinate(tensor, flat, int(rows[pair])))
            values.append(None if flat is None else value_of(tensor.flat, tensor.dtype, flat))
        return ValueLocation(
            self.pairing.labels[pair], common, self.locations,
            (coordinates[0], coordinates[1]), (values[0], values[1]),
        )  # fmt: skip


def keeps_of(a: ContentsRows, b: ContentsRows, name: str) -> tuple[Bools | None, Bools | None]:
    """Return which values of a tensor count on each side, None = all."""
    _, extent_a, extent_b = _extents(a, b, name)
    return extent_a.keep, extent_b.keep


def _extents(one: ContentsRows, other: ContentsRows, name: str) -> tuple[str, RowExtent, RowExtent]:
    """Return the most exact kind of extent that both sides have, and the extent of each.

    If the sides are padded to other widths, a side without a mask looks for one in other files.
    """
    if one.tensor(name).width != other.tensor(name).width:
        for rows in (one, other):
            rows.borrow_mask(name)
    a, b = one.extents(name), other.extents(name)
    masks = one.mask_of(name), other.mask_of(name)
    if not is_structural(name) and None not in masks and masks[0] != masks[1]:
        # One mask is of responses and one of whole sequences: both cover the policy's tokens.
        ones = [rows.ones(mask) for rows, mask in zip((one, other), masks, strict=True) if mask]
        return "mask", RowExtent("mask", ones[0]), RowExtent("mask", ones[1])
    for kind in ("full", "mask", "span"):
        if kind in a and kind in b:
            return kind, a[kind], b[kind]
    spans = [each.get("span", each.get("response")) for each in (a, b)]
    if one.tensor(name).width != other.tensor(name).width and spans[0] and spans[1]:
        return "span", spans[0], spans[1]
    if "mask" in a or "mask" in b:
        return "row", a.get("mask", a["row"]), b.get("mask", b["row"])
    keeps = _without_padding(one.tensor(name), other.tensor(name))
    return "row", RowExtent("row", keeps[0]), RowExtent("row", keeps[1])


def _without_padding(one: RowTensor, other: RowTensor) -> tuple[Bools | None, Bools | None]:
    """Return which values count if there is no mask and the rows of one side are wider.

    Its additional columns, on the right or on the left, are padding if they hold only 0.
    """
    wide, width = (
        (one, other.width) if (one.width or 0) > (other.width or 0) else (other, one.width)
    )
    if not width or wide.width is None or wide.width == width:
        return None, None
    if any(len(tensor.shape) != 2 for tensor in (one, other)):
        return None, None
    values = wide.flat.reshape(-1, wide.width)
    for columns in (slice(0, width), slice(wide.width - width, None)):
        keep = np.zeros(values.shape, bool)
        keep[:, columns] = True
        if not values[~keep].any():
            flat = keep.reshape(-1)
            return (flat, None) if wide is one else (None, flat)
    return None, None


def is_direct(pairing: RowPairing, tensors: RowTensorPair) -> bool:
    """Return whether rows have the same order and the same lengths, padding included."""
    return pairing.in_order and not pairing.by_position and same_offsets(*tensors)


def _equal(one: Bools | None, other: Bools | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)


def _first_of(index: Int64, edges: Int64, lengths: Int64) -> Int64:
    """Return the first `lengths` indexes of each row."""
    if np.array_equal(np.diff(edges), lengths):
        return index
    return index[slice_indexes(edges[:-1], lengths)]


def _pair_by_position(
    a: _SelectedValues, b: _SelectedValues, pairing: RowPairing
) -> tuple[Int64, Int64, Int64]:
    """Return the flat indexes of tokens whose positions both fragments have, and their bounds."""
    count = len(pairing.labels)
    pair_a, pair_b = row_of_each(a.edges), row_of_each(b.edges)
    position_a, position_b = _positions(a, pairing.rows_a), _positions(b, pairing.rows_b)
    index = TokenIndex.build(pair_b, position_b, count)
    tokens_a, tokens_b = index.pair(pair_a, position_a)
    edges = np.searchsorted(pair_a[tokens_a], np.arange(count + 1))
    return a.flat_index[tokens_a], b.flat_index[tokens_b], edges


def _positions(selected: _SelectedValues, rows: Int64) -> Int64:
    """Return the token positions of the selected values of one side.

    Without `positions`, a value's position is its column plus the row's `token_offset`, as in the
    statistics. Without that, columns count from the row's first value that is not left out, since a
    whole row may be padded on the left.
    """
    tensor, index, edges = selected.tensor, selected.flat_index, selected.edges
    row = row_of_each(edges)
    positions, offset = selected.rows.find("positions"), selected.rows.find("token_offset")
    if positions is not None and not np.array_equal(positions.offsets, tensor.offsets):
        positions = None
    if positions is None and offset is None:
        return index - index[edges[:-1][row]]
    recorded = [
        None if each is None else each.flat.astype(np.int64, copy=False)
        for each in (positions, offset)
    ]
    return positions_of(index, rows[row], tensor.offsets, *recorded)


def coordinate_in(shape: tuple[int, ...], flat: int) -> tuple[int, ...]:
    """Return the coordinate of a value in a tensor whose values lie in memory order."""
    return tuple(map(int, np.unravel_index(flat, shape)))


def _coordinate(tensor: RowTensor, flat: int, row: int) -> tuple[int, ...]:
    if tensor.width is None:
        return (row, flat - int(tensor.offsets[row]))
    return coordinate_in(tensor.shape, flat)
