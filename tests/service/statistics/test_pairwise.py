from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagescope_service.statistics.pair_fields import KINDS, PairField
from stagescope_service.statistics.pairwise import ElementLocation, Pairwise, compare_values, warm
from stagescope_service.statistics.pairwise_kernel import BLOCK
from stagescope_wire.errors import InvalidTensor

NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=40)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm(lambda: None)


def taken(x: npt.ArrayLike, y: npt.ArrayLike, dtype: str = "float64", **named: Any) -> Pairwise:
    return compare_values(np.asarray(x), np.asarray(y), dtypes=(dtype, dtype), **named)[0]


def assert_as_numpy(
    found: Pairwise, x: npt.NDArray[Any], y: npt.NDArray[Any], mask: npt.NDArray[np.bool_],
    tolerance: tuple[float, float], *, within: tuple[float, float],
) -> None:  # fmt: skip
    """Every number is the one of numpy in float64; `within`: of means, of standard deviations."""
    a, b = x[mask].astype(float), y[mask].astype(float)
    finite = np.isfinite(a) & np.isfinite(b)
    agrees = (a == b) | (np.isnan(a) & np.isnan(b))
    assert (found.pairs, found.finite) == (len(a), finite.sum())
    assert found.unequal_count == (~agrees).sum()
    assert found.agreeing_non_finite == (agrees & ~finite).sum()
    assert found.disagreeing_non_finite == (~agrees & ~finite).sum()
    for name, values in (("x", a), ("y", b)):
        of_kind = {"nan": np.isnan(values), "inf": values == np.inf, "-inf": values == -np.inf}
        assert found.non_finite(name) == {kind: at.sum() for kind, at in of_kind.items()}
    u, v = a[finite], b[finite]
    d = np.abs(u - v)
    over = d > tolerance[0] + tolerance[1] * np.maximum(np.abs(u), np.abs(v))
    assert found.over_count == over.sum() + found.disagreeing_non_finite
    assert (found.unequal and found.unequal.at) == (
        None if agrees.all() else np.flatnonzero(mask)[np.argmin(agrees)]
    )
    if not len(u):
        assert math.isnan(found.max_abs)
        assert math.isnan(found.relative)
        return
    # The sums of a block run in vector lanes: within a few units of the sum of absolute values.
    assert found.max_abs == d.max()
    assert found.mean_abs == pytest.approx(d.mean(), rel=1e-12)
    of_means, of_spread = within
    signed = pytest.approx((u - v).mean(), rel=of_means, abs=1e-12 * d.max())
    assert found.mean_difference == signed
    squares = (u * u).sum() + (v * v).sum()
    expected = ((u - v) ** 2).sum() / squares if squares else 0.0
    assert found.relative == pytest.approx(expected, rel=of_means, abs=1e-300)
    for name, side in (("x", u), ("y", v)):
        said = found.side(name)
        assert (said["min"], said["max"]) == (side.min(), side.max())
        size = np.abs(side).max()
        assert said["mean"] == pytest.approx(side.mean(), rel=of_means, abs=1e-12 * size)
        assert said["std"] == pytest.approx(
            side.std(), rel=of_spread, abs=1e-9 * size if of_spread > of_means else 0.0
        )
    assert found.largest is not None
    assert found.largest.at == np.flatnonzero(mask)[finite][np.argmax(d)]


@settings(max_examples=200, deadline=None)
@given(PAIRS)
def test_every_number_is_that_of_numpy_in_float64(pairs: list[tuple[float, float, bool]]) -> None:
    x, y = (np.array([pair[side] for pair in pairs], np.float32) for side in (0, 1))
    mask, tolerance = np.array([pair[2] for pair in pairs]), (0.5, 0.125)
    found = taken(x, y, "float32", mask=mask, tolerance=tolerance)
    assert_as_numpy(found, x, y, mask, tolerance, within=(1e-9, 1e-6))


@settings(max_examples=100, deadline=None)
@given(PAIRS, st.lists(st.integers(0, 40), max_size=5), st.randoms(use_true_random=False))
def test_pieces_merge_into_the_whole_in_any_order(
    pairs: list[tuple[float, float, bool]], cuts: list[int], random: random.Random
) -> None:
    x = np.array([pair[0] for pair in pairs])
    y = np.array([pair[1] for pair in pairs])
    whole = taken(x, y, tolerance=(0.1, 0.0))
    edges = sorted({0, len(x), *(cut for cut in cuts if cut < len(x))})
    pieces = [
        taken(x[start:stop], y[start:stop], origin=start, tolerance=(0.1, 0.0))
        for start, stop in itertools.pairwise(edges)
    ]
    random.shuffle(pieces)
    merged = Pairwise.nothing()
    for piece in pieces:
        merged = merged.merge(piece)
    counts = range(PairField.EXPONENT)
    assert [merged.cell[i] for i in counts] == [whole.cell[i] for i in counts]
    for name in ("max_abs", "mean_abs", "relative"):
        got, expected = getattr(merged, name), getattr(whole, name)
        assert got == pytest.approx(expected, rel=1e-9, nan_ok=True)
    for name in ("largest", "unequal", "over"):
        one, at_once = getattr(merged, name), getattr(whole, name)
        assert (None if one is None else one.origin + one.at) == (at_once and at_once.at)


def test_nan_at_the_same_place_is_equal_and_counted() -> None:
    x = [math.nan, math.inf, -math.inf, math.inf, math.nan, 1.0]
    y = [math.nan, math.inf, -math.inf, -math.inf, 1.0, 1.0]
    found = taken(x, y)
    assert found.agreeing_non_finite == 3
    assert found.disagreeing_non_finite == found.unequal_count == found.over_count == 2
    assert found.unequal == found.over
    assert found.unequal is not None
    assert found.unequal[:2] == (0, 3)
    assert (found.max_abs, found.finite) == (0.0, 1)


def test_int64_is_exact() -> None:
    x = np.array([16_777_217, 2**63 - 1, -(2**63), 2**53 + 1])
    y = np.array([16_777_216, -(2**63), -(2**63), 2**53])
    found = taken(x, y, "int64")
    assert found.unequal_count == 3
    assert found.max_abs == 2.0**64
    assert found.largest == ElementLocation(0, 1, 2**63 - 1, -(2**63))


@pytest.mark.parametrize("size", [1e300, 1e-300, 1e154])
def test_squares_beyond_float64_neither_overflow_nor_vanish(size: float) -> None:
    x = np.array([1.0, -2.0, 3.0, 0.0]) * size
    y = np.array([1.0, -2.0, 3.5, 0.0]) * size
    found, plain = taken(x, y), taken(x / size, y / size)
    for name in ("relative", "cosine", "correlation"):
        assert getattr(found, name) == pytest.approx(getattr(plain, name), rel=1e-12)
    assert found.max_abs == pytest.approx(0.5 * size)
    assert found.side("x")["std"] == pytest.approx(plain.side("x")["std"] * size, rel=1e-12)
    assert found.merge(plain).max_abs == max(found.max_abs, plain.max_abs)
    assert taken(x, x).relative == 0.0


def test_a_difference_that_float32_would_lose_is_seen() -> None:
    assert taken([1e300], [1.1e300]).unequal_count == 1
    assert taken([1.0 + 2**-40], [1.0]).max_abs == 2**-40


def test_half_precision_is_widened() -> None:
    values = np.array([1.5, -2.0, 0.0078125], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    found, _ = compare_values(bits, values, dtypes=("bfloat16", "float32"))
    assert (found.pairs, found.unequal_count) == (3, 0)
    found, _ = compare_values(values.astype(np.float16), values, dtypes=("float16", "float32"))
    assert found.unequal_count == 0


@pytest.mark.parametrize("dtype", KINDS)
def test_every_dtype_has_its_values(dtype: str) -> None:
    kind = {"bfloat16": "uint16"}.get(dtype, dtype)
    one = np.array([0, 1, 1, 0] * 300).astype(kind)
    other = one.copy()
    other[700] = 1 - other[700]
    found, rows = compare_values(
        one, other, dtypes=(dtype, dtype), offsets=np.array([0, 600, 1200])
    )
    assert found.unequal_count == 1
    assert found.unequal is not None
    assert found.unequal.at == 700
    assert rows[:, 1].tolist() == [0.0, 1.0]


def _block_of(kind: str, dtype: str, random: np.random.Generator) -> npt.NDArray[Any]:
    """Return a block of the kernel's: constant, ordinary, or with NaN and infinities in it."""
    values = np.full(BLOCK, random.integers(0, 2)).astype(dtype)
    if kind != "constant":
        values = (5 * random.standard_normal(BLOCK)).astype(dtype)
    if kind == "non-finite" and values.dtype.kind == "f":
        values[random.integers(0, BLOCK, 9)] = np.repeat([math.nan, math.inf, -math.inf], 3)
    return values


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "int8"])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_are_equal_add_up_with_those_that_are_not(dtype: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds = random.choice(["constant", "ordinary", "non-finite"], 12)
    x = np.concatenate([_block_of(kind, dtype, random) for kind in kinds])
    y = x.copy()
    for at in random.choice(12, 4, replace=False):
        block = y[at * BLOCK : (at + 1) * BLOCK]
        block[random.integers(0, BLOCK, 3)] += 1
    mask = np.repeat(random.integers(0, 3, 24) > 0, BLOCK // 2)
    mask[random.integers(0, len(x), 5)] ^= True
    edges = np.array([0, 3 * BLOCK + 1, 3 * BLOCK + 1, len(x)])
    given: dict[str, Any] = {"mask": mask, "offsets": edges, "tolerance": (0.5, 0.0)}
    found, rows = compare_values(x, y, dtypes=(dtype, dtype), **given)
    assert_as_numpy(found, x, y, mask, given["tolerance"], within=(1e-12, 1e-12))
    assert rows[:, 0].tolist() == [mask[s:e].sum() for s, e in itertools.pairwise(edges)]
    assert rows[:, 1].sum() == found.unequal_count
    assert rows[:, 5].sum() == found.finite


def test_zeros_of_both_signs_are_equal_and_no_values_are_no_difference() -> None:
    found = taken(np.zeros(3 * BLOCK), -np.zeros(3 * BLOCK))
    assert (found.unequal_count, found.max_abs, found.relative) == (0, 0.0, 0.0)
    assert found.side("y") == {"min": 0.0, "max": 0.0, "mean": 0.0, "std": 0.0}
    found = taken(np.empty(0), np.empty(0))
    assert (found.pairs, found.unequal_count, found.largest) == (0, 0, None)
    assert math.isnan(found.mean_abs)
    assert math.isnan(found.side("x")["mean"])


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InvalidTensor, match="2 values against 3"):
        taken(np.zeros(2), np.zeros(3))
    with pytest.raises(InvalidTensor, match="complex64"):
        taken(np.zeros(2), np.zeros(2), "complex64")
