"""The printed numbers, against the service's own statistics of the same tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stagescope_service.statistics import TokenBatch, publish, summarise
from stagescope_wire.tensorfile import WireTensor
from stagescope_workers.consistency.scored import Scored, numbers, worst_tokens
from stagescope_workers.payload import host_tensor


def letter(token: int) -> str:
    return chr(97 + token)


def rows(*lengths: int, seed: int = 0) -> list[Scored]:
    drawn = np.random.default_rng(seed)
    found = []
    for index, length in enumerate(lengths):
        p = -drawn.exponential(2.0, length).astype(np.float32)
        q = p + drawn.normal(0, 0.1, length).astype(np.float32)
        ids = tuple(int(token) for token in drawn.integers(0, 26, length))
        found.append(Scored(f"s{index}", (1, 2), ids, q.astype(float), p.astype(float)))
    return found


def published(of: list[Scored]) -> dict[str, float]:
    tensors: dict[str, WireTensor] = {
        "rollout_log_probs": host_tensor("q", [row.q.astype(np.float32) for row in of]),
        "old_log_probs": host_tensor("p", [row.p.astype(np.float32) for row in of]),
        "response_mask": host_tensor("m", [np.ones(len(row.ids), np.int8) for row in of]),
    }
    batch = TokenBatch.from_tensors(tensors, {"sample_ids": [row.name for row in of]})
    return dict(publish(summarise(batch)))


@pytest.mark.parametrize("odd", [None, math.nan, -math.inf])
def test_the_numbers_are_the_service_s(odd: float | None) -> None:
    of = rows(5, 1, 12, 7)
    if odd is not None:
        of[2].q[3] = odd
    ours, theirs = numbers(of), published(of)
    for name in set(ours) & set(theirs):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-9, nan_ok=True), name
    assert len(set(ours) & set(theirs)) == 8
    assert ours["nonfinite/rollout"] == (odd is not None)


def test_nothing_measured_is_no_zero() -> None:
    found = numbers([])
    assert math.isnan(found["logprob_abs_diff/mean"])
    assert found["counts/tokens"] == 0
    assert worst_tokens([], letter) == []


def test_the_worst_token_is_found_with_its_position() -> None:
    of = rows(5, 9, 4)
    of[1].q[6] -= 30.0
    first, *others = worst_tokens(of, letter, 3)
    assert (first.sample, first.position) == ("s1", 6)
    assert first.token_id == of[1].ids[6]
    assert first.token == letter(first.token_id)
    assert first.abs_diff == pytest.approx(abs(of[1].p[6] - of[1].q[6]))
    assert [each.abs_diff for each in others] == sorted(
        (each.abs_diff for each in others), reverse=True
    )
    of[2].p[0] = math.nan
    assert worst_tokens(of, letter, 1)[0].sample == "s2"
