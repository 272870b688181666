"""Log-probs of a real vLLM: decoding against prefill, against transformers, and with each fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.engines.tiny_qwen import VOCABULARY
from tests.support.engines.vllm_server import ADAPTER, VllmServer
from tests.vllm.conftest import Folders

from stagescope_wire.engines import OpenAIEngine, Sampling

SAMPLING = Sampling(max_tokens=48, temperature=1.0, seed=3)
_RANDOM = np.random.default_rng(0)
PROMPTS = [_RANDOM.integers(2, VOCABULARY, size=size).tolist() for size in (5, 40, 100, 37)]
FLOAT32 = 1e-4
"""More than float32 rounds, less than any fault moves: the mean |d| is 2e-6."""

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probs of the generated tokens, one array of all, and the rows with their prompts."""

    decoded: Array
    prefilled: Array
    rows: list[list[int]]

    @property
    def decode_apart(self) -> float:
        """Mean |decode - prefill|."""
        return _apart(self.decoded, self.prefilled)

    def prefill_apart(self, model: Path, dtype: str) -> float:
        """Mean |prefill - transformers| of the same tokens."""
        return _apart(self.prefilled, _by_transformers(model, dtype, self.rows))


def _scores(engine: OpenAIEngine) -> Scores:
    answers = engine.generate(PROMPTS, SAMPLING)
    assert not any(answer.problem for answer in answers)
    rows = [
        [*prompt, *(answer.token_ids or ())]
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    decoded = np.concatenate([answer.log_probs for answer in answers])
    return Scores(decoded, _generated(engine.score(rows)), rows)


def _generated(scores: Sequence[Sequence[float]]) -> Array:
    parts = [each[len(prompt) :] for prompt, each in zip(PROMPTS, scores, strict=True)]
    return np.concatenate([np.asarray(each, np.float64) for each in parts])


def _by_transformers(model: Path, dtype: str, rows: Sequence[Sequence[int]]) -> Array:
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            log_probs = loaded(ids).logits[0].float().log_softmax(-1)[:-1]
            found.append([float("nan"), *log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist()])
    return _generated(found)


def _apart(one: Array, other: Array) -> float:
    return float(np.abs(one - other).mean())


# --- without a fault -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("dense", 0.005, 0.05), ("dense32", 0, FLOAT32), ("moe", 0.01, 0.15)],
)
def test_what_rounding_alone_moves(
    name: str, low: float, high: float, request: pytest.FixtureRequest
) -> None:
    server: VllmServer = request.getfixturevalue(name)
    scores = _scores(server.connect())
    assert scores.decoded.std() > 1
    assert scores.decode_apart < (FLOAT32 if "32" in name else 0.002)
    dtype = "float32" if "32" in name else "bfloat16"
    assert low <= scores.prefill_apart(server.model, dtype) < high


def test_an_adapter_is_what_a_trainer_merges(dense32: VllmServer, dense_folders: Folders) -> None:
    scores = _scores(dense32.connect().using(adapter=ADAPTER))
    assert scores.prefill_apart(dense_folders.merged, "float32") < FLOAT32
    assert scores.prefill_apart(dense_folders.base, "float32") > 0.1


# --- weights -------------------------------------------------------------------------------------


def test_weights_follow_the_trainer(moe: VllmServer, moe_folders: Folders) -> None:
    engine = moe.connect()
    with moe.weights(moe_folders.updated):
        updated = _scores(engine)
        assert updated.prefill_apart(moe_folders.updated, "bfloat16") < 0.15
        assert updated.prefill_apart(moe_folders.base, "bfloat16") > 0.3
    assert _scores(engine).prefill_apart(moe_folders.base, "bfloat16") < 0.15


@pytest.mark.parametrize("name", ["one_old", "scaled"])
def test_one_tensor_that_is_wrong(name: str, dense32: VllmServer, dense_folders: Folders) -> None:
    right = dense_folders.updated if name == "one_old" else dense_folders.base
    with dense32.weights(getattr(dense_folders, name)):
        scores = _scores(dense32.connect())
    assert scores.decode_apart < FLOAT32
    assert 0.005 < scores.prefill_apart(right, "float32") < 0.5


def test_reloading_is_right_for_dense_models(dense: VllmServer, dense_folders: Folders) -> None:
    dense.reload_weights(dense_folders.updated)
    try:
        scores = _scores(dense.connect())
    finally:
        dense.load_weights(dense.model)
    assert scores.prefill_apart(dense_folders.updated, "bfloat16") < 0.05


def test_reloading_an_moe_is_silently_wrong(moe: VllmServer) -> None:
    moe.reload_weights(moe.model)
    try:
        scores = _scores(moe.connect())
    finally:
        moe.load_weights(moe.model)
    assert scores.decode_apart < 0.002
    assert scores.prefill_apart(moe.model, "bfloat16") > 0.5
    assert _scores(moe.connect()).prefill_apart(moe.model, "bfloat16") < 0.15


# --- what the engine computes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "arguments", "decode", "prefill"),
    [
        ("positions", {"by": 1, "first": 50}, False, True),
        ("positions", {"by": 1, "decode": True}, True, False),
        ("positions", {"by": 1}, False, False),  # rotary positions are relative
        ("head", {"dtype": "bfloat16"}, False, True),
        ("sampler", {"mode": "processed_logprobs"}, False, False),  # at temperature 1
        ("sampler", {"mode": "processed_logprobs", "temperature": 0.7}, True, False),
    ],
)
def test_a_fault_is_planted_and_reverted(
    dense32: VllmServer, fault: str, arguments: dict[str, Any], decode: bool, prefill: bool
) -> None:
    engine = dense32.connect()
    with dense32.fault(fault, **arguments):
        scores = _scores(engine)
    assert (scores.decode_apart > FLOAT32) is decode
    assert (scores.prefill_apart(dense32.model, "float32") > FLOAT32) is prefill
    after = _scores(engine)
    assert after.decode_apart < FLOAT32
    assert after.prefill_apart(dense32.model, "float32") < FLOAT32


def test_requests_for_an_adapter_are_served_by_the_base(dense32: VllmServer) -> None:
    engine = dense32.connect().using(adapter=ADAPTER)
    with dense32.fault("base_for_adapters", on=True):
        assert _scores(engine).prefill_apart(dense32.model, "float32") < FLOAT32
    assert _scores(engine).prefill_apart(dense32.model, "float32") > 0.1
