"""Names of trainers, and values of theirs that stand for missing ones."""

from __future__ import annotations

import numpy as np
import pytest

from stagescope_workers.compat import read_batch


@pytest.mark.parametrize(
    ("trainer", "column", "ours"),
    [
        ("openrlhf", "rollout_log_probs", "rollout_log_probs"),
        ("nemo_rl", "prev_logprobs", "old_log_probs"),
    ],
)
def test_zeros_that_stand_for_a_missing_stream_are_left_out_with_the_reason(
    trainer: str, column: str, ours: str
) -> None:
    found = read_batch({column: np.zeros((2, 3)), "advantages": np.zeros((2, 3))}, trainer)
    assert ours not in found
    assert found["missing_streams"] == [ours]
    why = f"0.0 in every token, which {trainer} writes where it has no value: it is not measured"
    assert found["left_out"] == {ours: why}
    assert "advantages" in found
    values = np.array([[0.0, -1.0]])
    assert read_batch({column: values}, trainer)[ours] is values


def test_prime_rls_stream_is_of_the_updates_own_pass() -> None:
    found = read_batch({"trainer_logprobs": np.ones((1, 2))}, "prime_rl")
    assert {*found} == {"log_probs", "producers"}
