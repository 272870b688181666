"""What the integrations of trainers share."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch
from tests.support.routes import routed

from stagescope_workers import routing
from stagescope_workers.integrations.training import (
    PREFIX,
    behind_masked,
    closed_at_end,
    one_a_trainer,
    read_batch,
    scalars,
)
from stagescope_workers.payload import owned_tensor


def test_scalars_are_the_numbers_of_a_log_that_log_takes() -> None:
    logged = {
        "loss": 0.5,
        "count": 3,
        "narrow": np.float32(0.25),
        "of_torch": torch.tensor(2.0),
        "nan": math.nan,
        "epoch": 1.0,
        "flag": True,
        "text": "0.5",
        "curve": torch.zeros(2),
        "step": 7,
        "stage": 1,
        "policy_version": 7,
        f"{PREFIX}rollout_corr/kl": 0.1,
        5: 1.0,
    }
    found = scalars(logged, without=("epoch",))
    assert math.isnan(found.pop("nan"))
    assert found == {"loss": 0.5, "count": 3.0, "narrow": 0.25, "of_torch": 2.0, "5": 1.0}
    assert {type(value) for value in found.values()} == {float}
    assert scalars(None) == scalars([("loss", 1.0)]) == {}


@pytest.mark.parametrize("error", [None, ValueError("theirs"), KeyboardInterrupt()])
def test_the_end_of_a_training_is_told_with_its_exception(error: BaseException | None) -> None:
    ends: list[BaseException | None] = []

    def close(caught: BaseException | None) -> None:
        ends.append(caught)
        raise RuntimeError("ours")

    def train() -> str:
        with closed_at_end(close):
            if error is not None:
                raise error
            return "trained"

    if error is None:
        assert train() == "trained"
    else:
        with pytest.raises(type(error)) as raised:
            train()
        assert raised.value is error
    assert ends == [error]


def test_one_trainer_has_one_training_and_is_not_kept_alive() -> None:
    class Trainer:
        pass

    made: list[str] = []

    def make(_: object) -> list[str]:
        made.append("made")
        return []

    find = one_a_trainer(make)
    trainer, other = Trainer(), Trainer()
    assert find(trainer) is find(trainer)
    assert find(other) is not find(trainer)
    assert made == ["made", "made"]
    known = find.__closure__
    assert known is not None
    del trainer
    gc.collect()
    sizes = [len(cell.cell_contents) for cell in known if hasattr(cell.cell_contents, "keyrefs")]
    assert sizes == [1]


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


def test_routes_behind_masked_tokens_are_compared_by_their_pass() -> None:
    """What the integrations of SkyRL and NeMo-RL hand over begins one token before its mask."""
    step = routed(rows=3, tokens=10, flips=0.3, seed=4)
    rollout, trainer = (torch.from_numpy(each.copy()) for each in step.of_tokens)
    handed = {
        **step.tensors(),
        "rollout_routed_experts": behind_masked(rollout),
        "trainer_routed_experts": [behind_masked(row) for row in trainer],
    }
    counted = routing.count({n: owned_tensor(n, value) for n, value in handed.items()})
    differing = (rollout.sort(-1)[0] != trainer.sort(-1)[0]).any(-1).sum(-1).numpy()
    on = step.mask != 0
    assert counted["routing_flips"][2][on].tolist() == differing[on].tolist()
