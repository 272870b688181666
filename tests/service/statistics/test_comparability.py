from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.batches import batch_of

from stagescope_service.statistics import examine, summarise

RNG = np.random.default_rng(0)
Q = -RNG.exponential(1.0, (4, 500)) - 1e-3
P = np.minimum(Q + RNG.normal(0, 5e-3, Q.shape), -1e-6)
ON = np.ones((4, 500), np.int64)


def found(p: Any, q: Any, **others: Any) -> tuple[str, set[str]]:
    result = examine(summarise(batch_of(p, q, ON, **others)))
    return result.verdict, {check.name for check in result.suspects}


def test_streams_that_compare() -> None:
    assert found(P, Q) == ("comparable", set())


@pytest.mark.parametrize("lag", [1, -1])
def test_a_shift_by_one(lag: int) -> None:
    verdict, names = found(P, np.roll(Q, lag, axis=1))
    assert verdict == "suspect"
    assert "shifted" in names


def test_a_temperature() -> None:
    assert "temperature" in found(P * 0.7, Q)[1]
    assert "temperature" in found(P, Q * 0.7)[1]


def test_a_renormalised_stream() -> None:
    assert found(Q - 0.05, Q)[1] == {"renormalised"}
    assert found(Q + np.minimum(0.05, -Q / 2), Q)[1] == {"renormalised"}


def test_probabilities_instead_of_log_probs() -> None:
    assert "probabilities" in found(np.exp(P), Q)[1]
    assert "probabilities" in found(P, np.exp(Q))[1]


def test_a_stream_that_was_never_filled_in() -> None:
    assert {"constant", "coverage"} <= found(P, np.zeros_like(Q))[1]


def test_a_mask_over_tokens_that_one_stream_lacks() -> None:
    q = Q.copy()
    q[:, ::20] = 0.0
    assert "coverage" in found(P, q)[1]
    q[:, ::20] = -np.inf
    assert "coverage" in found(P, q)[1]


def test_several_policy_versions() -> None:
    versions = np.repeat([[3], [4], [4], [5]], 500, axis=1)
    assert found(P, Q, versions=versions, policy_version=5) == ("suspect", {"versions"})


def test_bitwise_equal_streams_are_not_measured() -> None:
    verdict, names = found(Q, Q)
    assert verdict == "not measured"
    assert "bitwise_equal" in names


def test_too_few_tokens_say_nothing() -> None:
    few = examine(summarise(batch_of(P[:1, :5], Q[:1, :5], ON[:1, :5])))
    assert few.verdict == "unknown"
    none = examine(summarise(batch_of(P[:1, :5], Q[:1, :5], ON[:1, :5] * 0)))
    assert none.verdict == "unknown"
    assert not none.suspects
