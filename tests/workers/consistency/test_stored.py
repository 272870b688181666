"""Stored rollouts scored again, with the environment's tokens between the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.api import Service
from tests.support.command_line import invoke

from stagescope import attach, cli
from stagescope_wire.batch import Batch, Padding, Tensor
from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_workers.consistency.command import consistency
from stagescope_workers.consistency.ctranslate2_engine import CTranslate2Engine
from stagescope_workers.consistency.stored import read_batch, rescore
from stagescope_workers.consistency.transformers_engine import TransformersEngine

PROMPTS = [[0, 5, 9], [0, 7], [0, 11, 12, 13, 14], [0, 3]]
WIDTH = 10


@pytest.fixture(scope="module")
def stored(model: Path) -> Batch:
    """Four rows of unlike length: five tokens of the model, three of a tool, the model again."""
    engine = TransformersEngine(model)
    drawn = np.random.default_rng(1)
    tensors: dict[str, Any] = {
        "prompts": np.full((4, 5), 99, np.int64),
        "responses": np.full((4, WIDTH), 98, np.int64),
        "response_mask": np.zeros((4, WIDTH), np.int8),
        "rollout_log_probs": np.zeros((4, WIDTH), np.float32),
        "rewards": np.array([0.0, 1.0, 0.5, 0.0], np.float32),
    }
    lengths = np.array([10, 9, 7, 8])
    for row, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        ids = [int(token) for token in drawn.integers(2, 90, length)]
        mask = np.ones(length, np.int8)
        mask[5:8] = 0
        [scores] = engine.score([[*prompt, *ids]])
        tensors["prompts"][row, 5 - len(prompt) :] = prompt
        tensors["responses"][row, :length] = ids
        tensors["response_mask"][row, :length] = mask
        tensors["rollout_log_probs"][row, :length] = np.where(mask, scores[len(prompt) :], 0.0)
    return Batch(
        rows=4,
        tensors={name: Tensor(str(values.dtype), values) for name, values in tensors.items()},
        strings={"sample_ids": ("a-0", "a-1", "b-0", "b-1"), "group_ids": ("a", "a", "b", "b")},
        lengths={
            "prompts": np.array([len(prompt) for prompt in PROMPTS]),
            "responses": lengths,
            "response_mask": lengths,
        },
        padding={"prompts": Padding("left", 99), "responses": Padding("right", 98)},
        source={"run": "countdown", "attempt": 1, "step": 5},
    )


def test_the_same_model_says_what_was_stored(stored: Batch, model: Path, converted: Path) -> None:
    found = rescore(stored, CTranslate2Engine(converted), "rollout_log_probs")
    assert found.numbers["counts/tokens"] == stored["response_mask"].sum()
    assert found.numbers["logprob_abs_diff/max"] < 1e-4
    assert found.aligned
    assert [row.prompt for row in found.rows] == [tuple(prompt) for prompt in PROMPTS]
    assert [row.name for row in found.rows] == ["a-0", "a-1", "b-0", "b-1"]
    assert "11 tokens that no model sampled" in found.checks[0].text
    both = rescore(stored, CTranslate2Engine(converted), TransformersEngine(model), limit=2)
    assert len(both.rows) == 2
    assert both.numbers["logprob_abs_diff/max"] < 1e-4


def test_a_token_that_was_stored_wrong_is_the_worst(stored: Batch, converted: Path) -> None:
    values = stored["rollout_log_probs"].copy()
    values[2, 1] -= 3.0
    values[:, 5:8] = -50.0  # no model sampled these: they count nowhere
    tensors = {**stored.tensors, "rollout_log_probs": Tensor("float32", values)}
    wrong = Batch(4, tensors, stored.strings, stored.lengths, stored.padding)
    found = rescore(wrong, CTranslate2Engine(converted), "rollout_log_probs")
    first = found.worst[0]
    assert (first.sample, first.position) == ("b-0", 1)
    assert first.abs_diff == pytest.approx(3.0, abs=1e-3)
    assert first.token == CTranslate2Engine(converted).vocabulary[first.token_id]
    assert found.worst[1].abs_diff < 1e-3


def test_what_was_not_kept_is_reported(stored: Batch, converted: Path) -> None:
    engine = CTranslate2Engine(converted)
    with pytest.raises(NotFound, match="no old_log_probs"):
        rescore(stored, engine, "old_log_probs")
    for name in ("prompts", "responses", "response_mask"):
        tensors = {key: value for key, value in stored.tensors.items() if key != name}
        without = Batch(4, tensors, stored.strings, stored.lengths, stored.padding)
        with pytest.raises(NotFound, match=name):
            rescore(without, engine, "rollout_log_probs")
    for text in ("absent.safetensors:", "countdown"):
        with pytest.raises(InvalidInput):
            read_batch(text)


def test_recorded_as_the_same_samples(
    stored: Batch, converted: Path, live: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.main.commands, "consistency", consistency)
    file = stored.save(tmp_path / "step5.safetensors")
    words = ("--engine", f"ctranslate2:{converted}", "--batch", str(file), "--against", "stored")
    found = invoke("consistency", *words, "--run", "again", "--step", "5", "--json")
    assert found.exit_code == 0, found.output
    reported = json.loads(found.stdout)
    assert reported["stored"] == stored.heading
    assert reported["against"]["kind"] == "stored"
    assert "recorded as step 5 of run again" in reported["recorded"]
    with attach() as session:
        metrics = session.step(5, run="again").metrics()
        assert metrics["counts/tokens"] == stored["response_mask"].sum()
        assert metrics["per_round/total_rounds"] == 2
        assert metrics["logprob_abs_diff/max"] == pytest.approx(
            reported["metrics"]["logprob_abs_diff/max"], rel=1e-4
        )
    shown = invoke("consistency", *words, "--no-record")
    assert f"of the stored {stored.heading}" in " ".join(shown.stdout.split())
    assert invoke("consistency", *words, "--prompts", str(file)).exit_code == 2
    nothing = invoke("consistency", "--engine", f"ctranslate2:{converted}")
    assert nothing.exit_code == 2
    assert "--model" in nothing.stderr
