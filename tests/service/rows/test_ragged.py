"""Ragged and padded rows, held against lists of Python lists."""

from __future__ import annotations

import hashlib
import itertools
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagescope_service.rows.ragged import (
    Bools,
    Int64,
    RowTensor,
    Values,
    before_first,
    count_by_row,
    cumulative,
    hash_rows,
    padded,
    row_block,
    row_of_each,
    row_tensor,
    same_offsets,
    select_values,
    shift_right,
    slice_indexes,
    spans,
    unpadded,
)
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensorfile import CODES, WireTensor

SIDES: Final = st.sampled_from(["left", "right"])
ROWS: Final = st.lists(st.lists(st.integers(0, 1), max_size=7), max_size=6)

Rows = list[list[int]]


def flat_of(rows: Rows) -> tuple[Bools, Int64]:
    values = np.array([value for row in rows for value in row], bool)
    return values, np.cumsum([0, *map(len, rows)], dtype=np.int64)


def by_row(values: Values, offsets: Int64) -> list[list[object]]:
    bounds = offsets.tolist()
    return [values[a:b].tolist() for a, b in itertools.pairwise(bounds)]


@st.composite
def ragged(draw: st.DrawFn) -> WireTensor:
    """Rows of any dtype of the wire, some with several values a token."""
    tag = draw(st.sampled_from(sorted(CODES)))
    lengths = draw(st.lists(st.integers(0, 6), max_size=5))
    shape = (sum(lengths), *draw(st.sampled_from([(), (), (2,), (0,)])))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    values = random.integers(0, 2 if tag == "bool" else 120, shape).astype(CODES[tag][1])
    return tag, shape, values, np.cumsum([0, *lengths], dtype=np.int64)


@settings(deadline=None)
@given(ragged(), SIDES)
def test_ragged_rows_are_padded_with_0_and_unpadded_bit_by_bit(
    tensor: WireTensor, side: str
) -> None:
    tag, _, values, offsets = tensor
    assert offsets is not None
    lengths = np.diff(offsets)
    block = row_block(tensor, len(lengths), side)
    assert block is not None
    assert block.lengths is not None
    assert (block.dtype, block.values.dtype) == (tag, values.dtype)
    assert block.lengths.tolist() == lengths.tolist()
    assert block.values.shape == (len(lengths), lengths.max(initial=0), *values.shape[1:])
    for row, length in enumerate(lengths.tolist()):
        begin = block.width - length if side == "left" else 0
        inside = np.zeros(block.width, bool)
        inside[begin : begin + length] = True
        found = block.values[row]
        assert found[inside].tobytes() == values[offsets[row] : offsets[row + 1]].tobytes()
        assert not found[~inside].any()
    flat, bounds = unpadded(block.values, lengths, side)
    assert (flat.dtype, flat.shape) == (values.dtype, values.shape)
    assert flat.tobytes() == values.tobytes()
    assert bounds.tolist() == offsets.tolist()


def test_rows_that_begin_later_are_padded_without_what_lies_before_them() -> None:
    found = padded(np.arange(6), np.array([2, 3, 5]), "left")
    assert found.tolist() == [[0, 2], [3, 4]]


def test_a_block_has_the_rows_that_are_taken() -> None:
    tensor: WireTensor = ("int64", (4,), np.arange(4), np.array([0, 1, 1, 4]))
    block = row_block(tensor, 3, "right")
    assert block is not None
    some = block.take(np.array([2, 0]))
    assert some.values.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert some.lengths is not None
    assert some.lengths.tolist() == [3, 1]
    assert row_block(tensor, 4, "right") is None
    whole = row_block(("int64", (2, 3), np.arange(6), None), 2, "right")
    assert whole is not None
    assert whole.take(np.array([False, True])).values.tolist() == [[3, 4, 5]]
    assert whole.take(np.array([1])).lengths is None
    one_each = row_block(("int64", (2,), np.arange(2), None), 2, "right")
    assert one_each is not None
    assert one_each.width == 1
    assert row_block(("int64", (), np.array(1), None), 0, "right") is None


@settings(deadline=None)
@given(ragged())
def test_flat_rows_are_views_with_offsets(tensor: WireTensor) -> None:
    tag, shape, values, offsets = tensor
    assert offsets is not None
    rows = len(offsets) - 1
    if len(shape) == 1:
        found = row_tensor(tensor, rows, "x")
        assert found is not None
        assert (found.dtype, found.width, found.shape) == (tag, None, shape)
        assert found.flat is values or found.flat.base is not None or not values.size
        assert found.lengths.tolist() == np.diff(offsets).tolist()
    assert row_tensor(tensor, rows + 1, "x") is None
    assert row_tensor((tag, shape, values, None), shape[0] + 1, "x") is None
    assert row_tensor((tag, (), np.zeros((), values.dtype), None), 1, "x") is None
    of_rows = row_tensor((tag, shape, values, None), shape[0], "x")
    assert of_rows is not None
    width = int(np.prod(shape[1:]))
    assert of_rows.width == width
    assert of_rows.offsets.tolist() == [row * width for row in range(shape[0] + 1)]
    assert of_rows.flat.tobytes() == values.tobytes()


@pytest.mark.parametrize("offsets", [[1, 2, 4], [0, 3, 3], [0, 3, 2], [0, 2, 5]])
def test_rows_that_overlap_or_lack_values_are_refused(offsets: list[int]) -> None:
    tensor: WireTensor = ("int64", (4,), np.arange(4), np.array(offsets))
    with pytest.raises(InvalidTensor, match=r"a\.pt: rows of x overlap or lack"):
        row_tensor(tensor, 2, "a.pt: rows of x")


@settings(deadline=None)
@given(ROWS)
def test_flags_by_row_are_those_of_each_row_alone(rows: Rows) -> None:
    flags, offsets = flat_of(rows)
    between, before = [], []
    for row in rows:
        ones = [at for at, value in enumerate(row) if value]
        first, last = (ones[0], ones[-1]) if ones else (len(row), -1)
        between.append([first <= at <= last for at in range(len(row))])
        before.append([at < first for at in range(len(row))])
    assert by_row(spans(flags, offsets), offsets) == between
    assert by_row(before_first(flags, offsets), offsets) == before
    assert count_by_row(flags, offsets).tolist() == [sum(row) for row in rows]
    assert cumulative([len(row) for row in rows]).tolist() == offsets.tolist()
    assert row_of_each(offsets).tolist() == [r for r, row in enumerate(rows) for _ in row]
    shifted = [row[-1:] + row[:-1] for row in rows]
    assert by_row(shift_right(flags.astype(int), offsets), offsets) == shifted


@settings(deadline=None)
@given(ROWS, st.booleans(), st.data())
def test_selected_values_are_those_of_the_rows_in_their_order(
    rows: Rows, all_count: bool, data: st.DataObject
) -> None:
    flags, offsets = flat_of(rows)
    tensor = RowTensor("bool", flags, offsets, None, flags.shape)
    numbers = st.lists(st.integers(0, len(rows) - 1), max_size=5)
    chosen = data.draw(numbers if rows else st.just([]))
    index, edges = select_values(tensor, None if all_count else flags, np.array(chosen, np.int64))
    expected = [
        [at for at in range(offsets[row], offsets[row + 1]) if all_count or flags[at]]
        for row in chosen
    ]
    assert by_row(index, edges) == expected
    counts = data.draw(st.tuples(*(st.integers(0, len(row)) for row in rows)))
    found = slice_indexes(offsets[:-1], np.array(counts, np.int64))
    assert found.tolist() == [
        int(offsets[row]) + at for row, count in enumerate(counts) for at in range(count)
    ]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=5), st.booleans())
def test_rows_have_the_hashes_of_their_own_bytes(rows: Rows, all_count: bool) -> None:
    values = np.array([value for row in rows for value in row], np.int64)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    found = hash_rows(values, offsets, None if all_count else values > 0)
    expected = [np.array([v for v in row if all_count or v > 0], np.int64) for row in rows]
    assert found == [hashlib.blake2b(row.tobytes(), digest_size=12).hexdigest() for row in expected]


def test_padded_and_ragged_tensors_may_have_the_same_rows() -> None:
    six = np.arange(6)

    def of_rows(shape: tuple[int, ...], offsets: list[int] | None = None) -> RowTensor:
        bounds = None if offsets is None else np.array(offsets)
        rows = shape[0] if offsets is None else len(offsets) - 1
        found = row_tensor(("int64", shape, six, bounds), rows, "x")
        assert found is not None
        return found

    two_of_three, three_of_two = of_rows((2, 3)), of_rows((3, 2))
    same, other = of_rows((6,), [0, 3, 6]), of_rows((6,), [0, 2, 6])
    assert same_offsets(two_of_three, same)
    assert same_offsets(two_of_three, two_of_three)
    assert not same_offsets(two_of_three, three_of_two)
    assert not same_offsets(two_of_three, other)
    assert not same_offsets(same, other)
