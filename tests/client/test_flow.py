from __future__ import annotations

import pytest

from stagescope_wire.batch.data import FLOW, flow_index
from stagescope_wire.tensors import STREAM_TENSORS


def test_names_are_in_the_order_of_the_data_flow() -> None:
    names = [
        "responses", "response_mask", "rollout_log_probs", "rewards", "old_log_probs",
        "ref_log_probs", "entropy", "values", "advantages", "prob_ratio", "loss",
        "gradient/lm_head.weight", "parameter/lm_head.weight",
    ]  # fmt: skip
    assert sorted(set(names), key=flow_index) == names
    assert len(set(FLOW)) == len(FLOW)
    assert set(STREAM_TENSORS.values()) < set(FLOW)


@pytest.mark.parametrize("name", ["entropy", "values"])
def test_what_an_update_computes_again_follows_the_advantages(name: str) -> None:
    assert flow_index(name) < flow_index("advantages") < flow_index(name, "actor_update")
    assert flow_index(name, "actor_update") <= flow_index("log_probs")


def test_the_rest_comes_last() -> None:
    assert flow_index("something_else") > flow_index("parameter/a.b")
    assert (
        flow_index("gradient.1/linear.weight")
        == flow_index("gradients")
        == flow_index("gradient/x")
    )
