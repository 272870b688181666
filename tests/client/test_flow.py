from __future__ import annotations

import pytest

from stagescope.flow import FLOW, order_of
from stagescope.wire.schema import STREAM_TENSORS


def test_names_are_in_the_order_of_the_data_flow() -> None:
    names = [
        "responses", "response_mask", "rollout_log_probs", "rewards", "old_log_probs",
        "ref_log_probs", "entropy", "values", "advantages", "prob_ratio", "loss",
        "gradient/lm_head.weight", "parameter/lm_head.weight",
    ]  # fmt: skip
    assert sorted(set(names), key=order_of) == names
    assert len(set(FLOW)) == len(FLOW)
    assert set(STREAM_TENSORS.values()) < set(FLOW)


@pytest.mark.parametrize("name", ["entropy", "values"])
def test_what_an_update_computes_again_follows_the_advantages(name: str) -> None:
    assert order_of(name) < order_of("advantages") < order_of(name, "actor_update")
    assert order_of(name, "actor_update") <= order_of("log_probs")


def test_the_rest_comes_last() -> None:
    assert order_of("something_else") > order_of("parameter/a.b")
    assert order_of("gradient.1/linear.weight") == order_of("gradients") == order_of("gradient/x")
