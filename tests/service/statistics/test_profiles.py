"""Profiles of d against a loop over tokens, however the tokens are split."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.batches import batch_of, random_streams

from stagescope_service.statistics import Summary, summarise
from stagescope_service.statistics.codec import flatten, restore
from stagescope_service.statistics.profile_bins import (
    CHANCES,
    COARSEST,
    DIMENSIONS,
    FINER,
    FINEST,
    LAST,
    NOT_FINITE,
    OVER_ONE,
    UNKNOWN,
    ZERO,
    Dimension,
)
from stagescope_wire.errors import InvalidInput

Found = dict[int, tuple[int, int, float, float, float]]


def digits(index: int) -> int:
    return len(f"{index:b}") if index else 0


def chance(q: float) -> int:
    if not math.isfinite(q):
        return NOT_FINITE
    return OVER_ONE if q > 0 else sum(q >= math.log(bound) for bound in CHANCES)


def lattice(d: float) -> int:
    """The bin by exact arithmetic: the power of two in the numerator over the denominator."""
    if not math.isfinite(d):
        return NOT_FINITE
    if d == 0.0:
        return ZERO
    exact = Fraction(d)
    power = (exact.numerator & -exact.numerator).bit_length() - 1 - digits(exact.denominator) + 1
    return FINER if power < FINEST else min(FINER + 1 + power - FINEST, COARSEST)


def reference(
    p: npt.NDArray[np.float64],
    q: npt.NDArray[np.float64],
    mask: npt.NDArray[np.generic],
    rounds: npt.NDArray[np.int64] | None = None,
) -> dict[Dimension, Found]:
    sums: dict[Dimension, dict[int, list[float]]] = {name: defaultdict(list) for name in DIMENSIONS}
    for row in range(len(mask)):
        model = [i for i in range(mask.shape[1]) if mask[row, i]]
        number = [0] * mask.shape[1] if rounds is None else list(rounds[row])
        for i in model:
            begin = end = i
            while begin - 1 in model and number[begin - 1] == number[i]:
                begin -= 1
            while end + 1 in model and number[end + 1] == number[i]:
                end += 1
            d = float(p[row, i]) - float(q[row, i])
            sums["place"][digits(i - begin)].append(d)
            sums["end"][LAST if i == model[-1] else digits(end - i)].append(d)
            sums["position"][digits(i)].append(d)
            sums["probability"][chance(float(q[row, i]))].append(d)
            sums["lattice"][lattice(d)].append(d)
    return {
        name: {
            key: (
                len(good := [d for d in each if math.isfinite(d)]), len(each) - len(good),
                math.fsum(good), math.fsum(map(abs, good)),
                math.fsum(d * d for d in good),
            )
            for key, each in bins.items()
        }
        for name, bins in sums.items()
    }  # fmt: skip


def assert_same(summary: Summary, expected: dict[Dimension, Found]) -> None:
    for name in DIMENSIONS:
        found = {b.key: tuple(b)[1:] for b in summary.profiles.bins(name)}
        assert found.keys() == expected[name].keys(), name
        for key, values in expected[name].items():
            assert found[key][:2] == values[:2], (name, key)
            assert found[key][2:] == pytest.approx(values[2:], abs=1e-12), (name, key)


def damaged(
    seed: int,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Streams whose blocks are cut by bins, by the mask and by values that are not finite."""
    rng = np.random.default_rng(seed)
    p, q, mask = random_streams(rng, 7, 700)
    mask[0], mask[1] = 1, 0
    mask[:, [0, -1]] |= rng.integers(0, 2, (7, 2))
    for row, at, value in ((0, 300, np.nan), (0, 301, -np.inf), (2, 5, np.nan), (4, 9, np.nan)):
        p[row, at], mask[row, at] = value, 1
    for row, at, value in ((3, 7, -np.inf), (5, 3, 0.5), (6, 2, -20.0), (3, 9, np.inf)):
        q[row, at], mask[row, at] = value, 1
    p[0, 10:20] = q[0, 10:20] - np.array([0, 1, 0.5, 3 / 4096, 2, 3, 1 / 8192, 8, 0, -6], "f4")
    return p, q, mask


@pytest.mark.parametrize("seed", range(3))
def test_sums_are_those_of_a_loop_however_the_rows_are_split(seed: int) -> None:
    p, q, mask = damaged(seed)
    expected = reference(p, q, mask)
    assert_same(summarise(batch_of(p, q, mask)), expected)
    cut = int(np.random.default_rng(seed).integers(1, 6))
    parts = [
        summarise(batch_of(p[rows], q[rows], mask[rows]))
        for rows in (slice(cut, None), slice(None, cut))
    ]
    assert_same(Summary.merge(parts), expected)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 90))
def test_turns_versions_and_skipped_tokens_do_not_move_a_token(
    seed: int, rows: int, width: int
) -> None:
    rng = np.random.default_rng(seed)
    p, q, mask = random_streams(rng, rows, width)
    turns = np.sort(rng.integers(0, 4, (rows, width)))
    cut = batch_of(p, q, mask, turn_ids=turns, versions=turns % 2, policy_version=3)
    expected = reference(p, q, mask)
    assert_same(summarise(cut), expected)
    skip = rng.integers(0, 2, (rows, width)).astype(np.uint8)
    halves = [summarise(batch_of(p, q, mask), skip=which.reshape(-1)) for which in (skip, 1 - skip)]
    assert_same(Summary.merge(halves), expected)


def test_a_round_that_the_caller_names_ends_inside_a_run_of_the_mask() -> None:
    p, q, mask = damaged(1)
    rounds = np.repeat(np.arange(10), 70)[None].repeat(len(mask), axis=0)
    assert_same(summarise(batch_of(p, q, mask, round_ids=rounds)), reference(p, q, mask, rounds))


def test_what_a_piece_of_a_sample_does_not_know_is_unknown() -> None:
    p = q = np.full((1, 6), -1.0, np.float32)
    mask = np.array([[1, 1, 0, 1, 0, 1]])
    found = summarise(batch_of(p, q, mask, token_offset=np.array([4]))).profiles
    assert {b.key: b.tokens for b in found.bins("place")} == {UNKNOWN: 2, 0: 2}
    assert {b.key: b.tokens for b in found.bins("end")} == {UNKNOWN: 1, 0: 2, 1: 1}
    assert {b.key: b.tokens for b in found.bins("position")} == {3: 3, 4: 1}
    # Two ends of a sample on one rank (zigzag): a gap in the positions is no end of a round.
    ones, places = np.ones((1, 6), np.int64), np.array([[0, 1, 2, 9, 10, 11]])
    found = summarise(batch_of(p, q, ones, positions=places)).profiles
    assert {b.key: b.tokens for b in found.bins("place")} == {0: 1, 1: 1, 2: 1, UNKNOWN: 3}
    assert {b.key: b.tokens for b in found.bins("end")} == {UNKNOWN: 6}


def test_tokens_are_told_apart_by_the_engine_of_their_row() -> None:
    p, q, mask = damaged(2)
    engines = ["vllm 1", "vllm 0", "vllm 1", "vllm 0", "vllm 2", "vllm 1", "vllm 1"]
    every = summarise(batch_of(p, q, mask, engines=engines))
    halves = [
        summarise(batch_of(p[rows], q[rows], mask[rows], engines=engines[rows]))
        for rows in (slice(3, None), slice(None, 3))
    ]
    for found in (every, Summary.merge(halves), restore(*flatten(every))):
        assert list(found.engines) == ["vllm 0", "vllm 1", "vllm 2"]
        for engine, values in found.engines.items():
            own = np.array(engines) == engine
            d = (p[own].astype(float) - q[own])[mask[own] == 1]
            good = d[np.isfinite(d)]
            sums = (good.sum(), np.abs(good).sum(), (good**2).sum())
            expected = (len(good), len(d) - len(good), *sums)
            assert values == pytest.approx(expected, abs=1e-9)
    with pytest.raises(InvalidInput, match="engine_ids has 2 entries"):
        batch_of(p, q, mask, engines=engines[:2])


def test_positions_of_any_size_are_counted() -> None:
    p = q = np.full((1, 4), -1.0, np.float32)
    positions = np.array([[2**62 + 2**61, 2**62 + 2**61 + 1, -5, -4]])
    found = summarise(batch_of(p, q, np.ones((1, 4), np.int64), positions=positions)).profiles
    assert sum(b.tokens for b in found.bins("position")) == 4
