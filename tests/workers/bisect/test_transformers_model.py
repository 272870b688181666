"""Variants of a model in transformers, and experts that are replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.engines.tiny_qwen import write_qwen
from tests.support.kept_steps import kept_step

from stagescope_wire.batch import Tensor
from stagescope_wire.errors import EngineError
from stagescope_workers.bisect.kept import kept_rows, spread
from stagescope_workers.bisect.transformers_model import TransformersModel
from stagescope_workers.bisect.variants import PLAIN, Variant

ROW = [*range(20, 80)]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> TransformersModel:
    """A small Qwen3-MoE: 2 layers, 8 experts, 2 per token."""
    return TransformersModel(write_qwen(tmp_path_factory.mktemp("moe"), "moe"), "float32")


def test_position_ids_are_relative_and_a_jump_is_no_other_sequence(model: Path) -> None:
    own = TransformersModel(model, "float32")
    plain = np.array(own.score_as(ROW))
    assert np.abs(plain - own.score_as(ROW, Variant(shift=3)))[1:].max() < 1e-4
    moved = np.array(own.score_as(ROW, Variant(shift=1, shift_from=30)))
    # The token at 30 is the first that is read at another place; its successor is predicted there.
    assert np.abs(plain - moved)[1:31].max() < 1e-6
    assert np.abs(plain - moved)[31:].mean() > 0.01
    # Attention still reaches the tokens before the jump: without them it is another text.
    cut = np.array(own.score_as(ROW[30:]))
    assert np.abs(moved[31:] - cut[1:]).mean() > 0.5


def test_recorded_experts_are_replayed(moe: TransformersModel) -> None:
    # Routers below 5.0 are not modules; those of 5.0.0 return no logits, which is refused.
    pytest.importorskip("transformers", minversion="5.1")
    chosen: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    routers = [each for each in moe._model.modules() if "Router" in type(each).__name__]
    hooks = [
        each.register_forward_hook(lambda *call: chosen.append(call[2][2].numpy()))
        for each in routers
    ]
    plain = np.array(moe.score_as(ROW))
    for hook in hooks:
        hook.remove()
    own = np.stack(chosen, axis=1)
    assert own.shape == (len(ROW), 2, 2)
    np.testing.assert_array_equal(plain, np.array(moe.score_as(ROW, PLAIN, own)))
    other = own.copy()
    other[40:, 0, 1] = (own[40:].max(axis=-1)[:, 0] + 1) % 8
    replayed = np.array(moe.score_as(ROW, PLAIN, other))
    assert np.abs(replayed - plain)[1:41].max() < 1e-5
    assert np.abs(replayed - plain)[41:].mean() > 0.01
    # Where none were recorded, the router chooses.
    other[40:] = -1
    np.testing.assert_array_equal(plain, np.array(moe.score_as(ROW, PLAIN, other)))
    with pytest.raises(EngineError, match="2 routers are known in the model, and 3 were recorded"):
        moe.score_as(ROW, PLAIN, np.zeros((len(ROW), 3, 2), np.int64))


@pytest.mark.parametrize("of_responses", [True, False])
def test_recorded_experts_stand_at_their_tokens(of_responses: bool) -> None:
    """The prompts are padded on the left to 4 tokens, the responses on the right to 3."""
    prompts, responses = [[1, 2], [3, 4, 5, 6]], [[7, 8, 9], [7]]
    zeros = [[-1.0] * len(row) for row in responses]
    batch = kept_step(prompts, responses, zeros, zeros)
    begin = 4 if of_responses else 0
    routes = np.arange(begin, 7).reshape(1, -1, 1, 1) * np.ones((2, 1, 1, 1), np.int64)
    tensors = {**batch.tensors, "routed_experts": Tensor("int64", routes)}
    rows = kept_rows(type(batch)(2, tensors, batch.strings, batch.lengths, batch.padding)).rows
    first, second = (row.routes[:, 0, 0].tolist() for row in rows if row.routes is not None)
    assert first == ([-1, -1, 4, 5, 6] if of_responses else [2, 3, 4, 5, 6])
    assert second == ([-1, -1, -1, -1, 4] if of_responses else [0, 1, 2, 3, 4])


def test_rows_are_spread_over_the_mismatch_and_contain_the_worst() -> None:
    count = 40
    prompts, responses = [[1, 2]] * count, [[3, 4]] * count
    gaps = [[0.1 * row, 0.1 * row] for row in range(count)]
    batch = kept_step(prompts, responses, gaps, [[0.0, 0.0]] * count)
    found = spread(kept_rows(batch), 5)
    assert found.total == count
    assert [round(float(row.q[0]), 1) for row in found.rows] == [3.9, 2.9, 2.0, 1.0, 0.0]
