"""Conditions against plain re-computations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_service.rules.conditions import When

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False) | st.sampled_from([math.nan, math.inf, -math.inf])


def evaluate(
    when: Mapping[str, object], value: float, history: list[float], noise: float = math.nan
) -> bool:
    column = np.array(history, np.float64).reshape(-1, 1)
    found = When.parse(when, "when").evaluate(np.array([value]), np.array([noise]), column)
    return bool(found.holds[0])


def finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


@given(NUMBERS, st.floats(-1e6, 1e6))
def test_bounds(value: float, bound: float) -> None:
    assert evaluate({">": bound}, value, []) == (value > bound)
    assert evaluate({"<": bound}, value, []) == (value < bound)
    assert evaluate({">=": bound}, value, []) == (value >= bound)
    assert evaluate({"<=": bound}, value, []) == (value <= bound)
    assert evaluate({">": bound, "<": bound + 1}, value, []) == (bound < value < bound + 1)
    assert evaluate({"non_finite": True}, value, []) == (not math.isfinite(value))


@given(NUMBERS, st.lists(NUMBERS, max_size=12), st.floats(0.1, 10))
def test_ratio_to_the_median(value: float, history: list[float], ratio: float) -> None:
    known = finite(history)
    expected = len(known) >= 3 and value > ratio * statistics.median(known)
    assert evaluate({"median_ratio": ratio}, value, history) == expected


@given(NUMBERS, NUMBERS, st.floats(0.1, 10))
def test_ratio_to_the_noise_floor(value: float, noise: float, ratio: float) -> None:
    assert evaluate({"noise_ratio": ratio}, value, [], noise) == (value > ratio * noise)


@given(
    NUMBERS,
    st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 2)), max_size=12),
    st.floats(0.5, 5),
    st.integers(2, 12),
)
def test_z_score(value: float, history: list[float], over: float, steps: int) -> None:
    known = history[-steps:]
    if len(known) < 5 or not math.isfinite(value):
        expected = False
    elif len(set(known)) == 1:
        expected = value != known[0]
    else:
        score = abs(value - statistics.mean(known)) / statistics.stdev(known)
        if abs(score - over) < 1e-6:
            return
        expected = score > over
    assert evaluate({"z_score": {"over": over, "steps": steps}}, value, history) == expected


def test_each_series_has_its_own_history() -> None:
    when = When.parse({"median_ratio": 2}, "when")
    history = np.array([[1.0, 10.0, math.nan]] * 5)
    found = when.evaluate(np.array([3.0, 3.0, 3.0]), np.full(3, math.nan), history)
    assert found.holds.tolist() == [True, False, False]
    assert found.numbers["median"].tolist() == pytest.approx([1.0, 10.0, math.nan], nan_ok=True)


@given(
    st.floats(0.01, 10), st.floats(0.01, 5), st.integers(1, 500), st.floats(0.5, 8),
    st.integers(1, 64),
)  # fmt: skip
def test_standard_errors(
    value: float, bound: float, tokens: int, errors: float, series: int
) -> None:
    """A mean of `tokens` tokens against the larger of a bound and twice the median, 1."""
    relative = 1.0 / math.sqrt(tokens)
    when = When.parse({">": bound, "median_ratio": 2, "standard_errors": errors}, "when")
    found = when.evaluate(
        np.full(series, value), np.full(series, math.nan), np.ones((5, series)),
        np.full(series, relative),
    )  # fmt: skip
    normal = statistics.NormalDist()
    each = -normal.inv_cdf(normal.cdf(-errors) / series)
    least = max(bound, 2.0) * (1.0 + each * relative)
    assert found.holds.tolist() == [value > least] * series
    assert found.numbers["standard_error"][0] == pytest.approx(max(bound, 2.0) * relative)


def test_a_standard_error_that_is_not_known_holds_nothing() -> None:
    assert not evaluate({">": 1, "standard_errors": 1}, 5.0, [])
    assert evaluate({">": 1}, 5.0, [])
