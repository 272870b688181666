from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from tests.support.batches import batch_of

from stagescope_service.statistics import publish, summarise
from stagescope_service.statistics.histogram import bounds, midpoint


def buckets_of(values: list[float]) -> dict[int, int]:
    p = -np.array([values])
    histogram = summarise(batch_of(p, np.zeros_like(p), np.ones(p.shape))).histogram
    return dict(zip(histogram.buckets.tolist(), histogram.counts.tolist(), strict=True))


@pytest.mark.parametrize("exponent", [-50, -8, -1, 0, 1, 7, 40])
def test_upper_bounds_are_inclusive_as_opentelemetry_defines(exponent: int) -> None:
    power = 2.0**exponent
    assert buckets_of([power]) == {8 * exponent - 1: 1}
    assert buckets_of([math.nextafter(power, math.inf)]) == {8 * exponent: 1}


def test_every_value_lies_in_its_bucket() -> None:
    rng = np.random.default_rng(0)
    for value in np.exp(rng.uniform(-40, 40, 300)).tolist():
        ((bucket, _),) = buckets_of([value]).items()
        low, high = bounds(bucket)
        assert low < value <= high
        assert abs(midpoint(bucket) / value - 1) < 0.0453


def test_the_numbers_around_each_bound_lie_on_their_sides() -> None:
    bounds_within = range(-511, 512)
    below = []
    for bucket in bounds_within:
        last = 2.0 ** (bucket / 8)
        last = math.nextafter(last, math.inf)
        while Fraction(last) ** 8 > Fraction(2) ** bucket:
            last = math.nextafter(last, 0.0)
        below.append(last)
    above = [math.nextafter(last, math.inf) for last in below]
    assert buckets_of(below) == {bucket - 1: 1 for bucket in bounds_within}
    assert buckets_of(above) == dict.fromkeys(bounds_within, 1)


def test_zeros_have_no_bucket_and_far_values_the_outermost() -> None:
    assert buckets_of([0.0, 1e-30, 1e30]) == {-512: 1, 511: 1}


def test_quantiles_are_within_their_bucket() -> None:
    rng = np.random.default_rng(1)
    d = np.concatenate([np.exp(rng.normal(-6, 2, 9000)), np.zeros(1000)])[None]
    found = publish(summarise(batch_of(-d, np.zeros_like(d), np.ones(d.shape))))
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        exact = np.sort(d[0])[math.ceil(share * d.size) - 1]
        assert found[f"logprob_abs_diff/{name}"] == pytest.approx(exact, rel=0.0453)
    d[:, :6000] = 0.0
    again = publish(summarise(batch_of(-d, np.zeros_like(d), np.ones(d.shape))))
    assert again["logprob_abs_diff/p50"] == 0.0
