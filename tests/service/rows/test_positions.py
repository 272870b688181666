"""Tokens by sample and position, held against dicts {(sample, position): token}."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagescope_service.rows.positions import (
    TokenIndex,
    continues,
    positions_of,
    token_positions,
)
from stagescope_service.rows.ragged import Int64, cumulative, row_of_each
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensorfile import WireTensor

SAMPLES: Final = 4
TOKENS: Final = st.lists(st.tuples(st.integers(0, SAMPLES - 1), st.integers(-2, 6)), max_size=20)
Key = tuple[int, int]


def arrays(keys: list[Key]) -> tuple[Int64, Int64]:
    table = np.array(keys, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@settings(deadline=None)
@given(TOKENS, TOKENS, st.sampled_from([1, 1 << 40]))
def test_tokens_are_found_by_sample_and_position(
    keys: list[Key], others: list[Key], far: int
) -> None:
    keys, others = ([(s, far * at) for s, at in each] for each in (keys, others))
    index = TokenIndex.build(*arrays(keys), SAMPLES)
    expected: dict[Key, int] = {}
    repeats = []
    for token, key in enumerate(keys):
        if key in expected:
            repeats.append((expected[key], token))
        expected[key] = token
    assert index.tokens.tolist() == [expected[key] for key in sorted(expected)]
    assert sorted(zip(*index.repeats.tolist(), strict=True)) == sorted(repeats)
    unknown = [(-1, position) for _, position in others]
    tokens, found = index.find(*arrays([*others, *unknown, (0, -9), (SAMPLES - 1, 99)]))
    assert found.tolist() == [key in expected for key in others] + [False] * (len(others) + 2)
    assert tokens[found].tolist() == [expected[key] for key in others if key in expected]


@settings(deadline=None)
@given(TOKENS.map(set).map(list), TOKENS.map(set).map(list), st.sampled_from([1, 1 << 40]))
def test_tokens_of_two_sides_pair_in_the_order_of_their_positions(
    keys: list[Key], others: list[Key], far: int
) -> None:
    sides = [[(s, far * at) for s, at in each] for each in (keys, others)]
    one, other = TokenIndex.build(*arrays(sides[1]), SAMPLES).pair(*arrays(sides[0]))
    common = sorted(set(sides[0]) & set(sides[1]))
    assert one.tolist() == [sides[0].index(key) for key in common]
    assert other.tolist() == [sides[1].index(key) for key in common]


@pytest.mark.parametrize("repeats", [0, 1])
def test_a_position_that_a_sample_has_twice_pairs_with_nothing(repeats: int) -> None:
    sides = [[(0, 0), (0, 1)], [(0, 0), (0, 1)]]
    sides[repeats].append((0, 1))
    index = TokenIndex.build(*arrays(sides[1]), 1)
    with pytest.raises(InvalidTensor, match="positions repeat"):
        index.pair(*arrays(sides[0]))


def test_positions_outside_of_any_sample_are_refused() -> None:
    far = np.array([0, 1 << 61])
    with pytest.raises(InvalidTensor, match=f"positions from 0 to {1 << 61}"):
        TokenIndex.build(np.array([0, 1]), far, 2)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(-3, 3), max_size=5), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_a_token_continues_the_one_before_it_in_its_row_and_its_sample(
    rows: list[list[int]], recorded: bool, data: st.DataObject
) -> None:
    offsets = cumulative([len(row) for row in rows])
    row = row_of_each(offsets)
    positions = np.array([at for each in rows for at in each], np.int64) if recorded else None
    begins = data.draw(st.none() | st.just([3 * (index + 1) for index in range(len(rows))]))
    token_offset = None if begins is None else np.array(begins)
    expected = [
        each if recorded else [column + (begins[index] if begins else 0) for column in range(size)]
        for index, each in enumerate(rows)
        for size in [len(each)]
    ]
    tokens = np.arange(len(row))
    found = positions_of(tokens, row, offsets, positions, token_offset)
    assert found.tolist() == [at for each in expected for at in each]
    follows = [
        column > 0 and at == each[column - 1] + 1
        for each in expected
        for column, at in enumerate(each)
    ]
    assert continues(tokens, row, offsets, positions).tolist() == follows
    last = np.arange(len(rows))  # a token behind its row continues nothing
    assert not continues(offsets[1:], last, offsets, positions).any()


def tensor(rows: list[list[int]], *, ragged: bool) -> WireTensor:
    """Rows of integers, padded on the right with 0 or ragged."""
    if ragged:
        flat = np.array([value for row in rows for value in row], np.int64)
        return "int64", flat.shape, flat, np.cumsum([0, *map(len, rows)], dtype=np.int64)
    width = max(map(len, rows), default=0)
    table = np.array([row + [0] * (width - len(row)) for row in rows], np.int64)
    return "int64", (len(rows), width), table.reshape(len(rows), width), None


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=4),
    st.sampled_from(["positions", "token_offset"]),
    st.booleans(),
    st.data(),
)
def test_tokens_of_fragments_have_the_positions_that_were_recorded(
    masks: list[list[int]], given_by: str, ragged: bool, data: st.DataObject
) -> None:
    expected: dict[Key, int] = {}
    begins = [data.draw(st.integers(1, 5)) for _ in masks]
    positions = []
    for row, (mask, begin) in enumerate(zip(masks, begins, strict=True)):
        step = 1 if given_by == "token_offset" else data.draw(st.integers(1, 2))
        positions.append([begin + step * at for at in range(len(mask))])
        # Of padded rows with an offset alone, what follows the last 1 may be padding.
        certain = len(mask)
        if given_by == "token_offset" and not ragged:
            certain = max((at + 1 for at, one in enumerate(mask) if one), default=0)
        expected |= {(row, positions[row][at]): mask[at] for at in range(certain)}
    tensors = {"response_mask": tensor(masks, ragged=ragged)}
    if given_by == "positions":
        tensors["positions"] = tensor(positions, ragged=data.draw(st.booleans()))
    else:
        tensors["token_offset"] = ("int64", (len(begins),), np.array(begins), None)
    found = token_positions(tensors, len(masks))
    assert found is not None
    rows, tokens = np.nonzero(found.present)
    keys = zip(rows.tolist(), found.positions[rows, tokens].tolist(), strict=True)
    assert dict(zip(keys, found.counted[rows, tokens].tolist(), strict=True)) == expected
    assert found.span == 1 + max((position for _, position in expected), default=-1)


def test_positions_that_contradict_the_mask_or_are_absent_are_none() -> None:
    mask = tensor([[1, 1, 1]], ragged=False)
    assert token_positions({"response_mask": mask}, 1) is None
    assert token_positions({"positions": tensor([[0, 1, 2]], ragged=False)}, 1) is None
    falling = {"response_mask": mask, "positions": tensor([[4, 5, 3]], ragged=False)}
    assert token_positions(falling, 1) is None
    narrow = {"response_mask": mask, "positions": tensor([[4, 5]], ragged=False)}
    assert token_positions(narrow, 1) is None
