"""Alignment: the longest common subsequence, at a bounded cost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stagescope_service.compare.operators.calls import Codes, align, common_ends

sequences = st.lists(st.integers(0, 3), max_size=14)


def codes(values: list[int]) -> Codes:
    return np.asarray(values, np.int64)


def longest(a: list[int], b: list[int]) -> int:
    """Length of a longest common subsequence, by the textbook's table."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for j, y in enumerate(b):
            row.append(before[j] + 1 if x == y else max(row[j], before[j + 1]))
    return row[-1]


@given(sequences, sequences)
def test_as_many_as_possible_are_paired_in_order(a: list[int], b: list[int]) -> None:
    found = align(codes(a), codes(b))
    assert found.ordered
    assert len(found.pairs) == longest(a, b)
    assert all(a[i] == b[j] for i, j in found.pairs)
    for (i, j), (next_i, next_j) in zip(found.pairs, found.pairs[1:], strict=False):
        assert i < next_i
        assert j < next_j


@given(sequences, sequences)
def test_common_ends_never_overlap(a: list[int], b: list[int]) -> None:
    first, last = common_ends(codes(a), codes(b))
    assert a[:first] == b[:first]
    assert a[len(a) - last :] == b[len(b) - last :]
    assert first + last <= min(len(a), len(b))


def test_a_hundred_thousand_calls_with_a_few_edits_are_aligned_in_order() -> None:
    random = np.random.default_rng(0)
    layer = random.integers(0, 20, 40)
    a = np.tile(layer, 2500).astype(np.int64)
    b = np.insert(a, random.integers(0, len(a), 50), random.integers(0, 20, 50))
    found = align(a, b)
    assert found.ordered
    assert len(found.pairs) == len(a)


def test_an_alignment_that_costs_too_much_pairs_by_occurrence() -> None:
    random = np.random.default_rng(0)
    a, b = random.integers(0, 20, (2, 30_000))
    found = align(a, b, most_steps=100_000)
    assert not found.ordered
    assert len({i for i, _ in found.pairs}) == len({j for _, j in found.pairs}) > 25_000
    assert all(a[i] == b[j] for i, j in found.pairs)
