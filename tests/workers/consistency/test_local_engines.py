"""transformers and CTranslate2 in this process: both ways to a log-prob must agree."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagescope_wire.engines import Engine, Sampling
from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_workers.consistency.ctranslate2_engine import CTranslate2Engine
from stagescope_workers.consistency.transformers_engine import TransformersEngine

PROMPTS = [[0, 5, 9, 22], [0, 7], [0, *range(10, 40)]]


def opened(kind: str, model: Path, converted: Path) -> Engine:
    if kind == "transformers":
        return TransformersEngine(model)
    return CTranslate2Engine(converted)


@pytest.mark.parametrize("kind", ["transformers", "ctranslate2"])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_what_is_generated_scores_the_same(
    kind: str, temperature: float, model: Path, converted: Path
) -> None:
    engine = opened(kind, model, converted)
    drawn = Sampling(max_tokens=12, temperature=temperature, seed=7)
    made = engine.generate(PROMPTS, drawn)
    assert [each.prompt_tokens for each in made] == [len(prompt) for prompt in PROMPTS]
    rows = [[*prompt, *(each.token_ids or ())] for prompt, each in zip(PROMPTS, made, strict=True)]
    scored = engine.score(rows)
    for prompt, each, values in zip(PROMPTS, made, scored, strict=True):
        assert each.problem == ""
        assert math.isnan(values[0])
        # Raw at every temperature: what `processed=False` of its information says.
        assert engine.info.processed is False
        np.testing.assert_allclose(values[len(prompt) :], each.log_probs, atol=2e-5)
    assert engine.generate(PROMPTS, drawn)[0].token_ids == made[0].token_ids
    engine.close()


def test_a_score_is_a_log_softmax_in_float64(model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    row = [0, *range(2, 50)]
    auto: Any = AutoModelForCausalLM
    own = auto.from_pretrained(model, dtype=torch.float64)
    with torch.inference_mode():
        logits = own(torch.tensor([row])).logits[0]
    engine = TransformersEngine(model, "float64")
    for temperature in (1.0, 0.5, 3.0):
        values = torch.log_softmax(logits / temperature, -1)
        expected = [values[index, token].item() for index, token in enumerate(row[1:])]
        [found] = engine.score_at([row], temperature)
        np.testing.assert_allclose(found[1:], expected, rtol=1e-12)


def test_a_token_that_the_model_does_not_have_is_named(model: Path) -> None:
    engine = TransformersEngine(model)
    with pytest.raises(InvalidInput, match="token 1000000 is beyond the model's vocabulary of"):
        engine.score([[1, 2], [1, 1_000_000]])


def test_the_process_s_own_random_numbers_stay(model: Path) -> None:
    import torch

    engine = TransformersEngine(model)
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    engine.generate([[0, 1]], Sampling(max_tokens=3, temperature=1.0, seed=1))
    assert torch.rand(2).tolist() == expected


def test_a_model_s_own_settings_cut_nothing(model: Path, tmp_path: Path) -> None:
    cutting = shutil.copytree(model, tmp_path / "cutting")
    own = json.loads((cutting / "generation_config.json").read_text())
    own |= {"top_k": 1, "temperature": 0.1, "do_sample": True, "repetition_penalty": 1.5}
    (cutting / "generation_config.json").write_text(json.dumps(own))
    drawn = Sampling(max_tokens=20, temperature=1.0, seed=5)
    made = TransformersEngine(cutting).generate([[0, 4]], drawn)
    assert made == TransformersEngine(model).generate([[0, 4]], drawn)


def test_stop_texts(model: Path) -> None:
    engine = TransformersEngine(model)
    [free] = engine.generate([[0, 4]], Sampling(max_tokens=20))
    stop = free.text[5]
    [cut] = engine.generate([[0, 4]], Sampling(max_tokens=20, stop=(stop,)))
    assert cut.text == free.text[: free.text.index(stop) + 1]
    assert cut.finish_reason == "stop"


def test_directories_that_are_none(tmp_path: Path, model: Path, converted: Path) -> None:
    with pytest.raises(NotFound, match="not a model directory"):
        TransformersEngine(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(NotFound, match="cannot be loaded"):
        TransformersEngine(tmp_path)
    with pytest.raises(InvalidInput, match="int3"):
        TransformersEngine(model, "int3")
    with pytest.raises(NotFound, match="not a directory of CTranslate2"):
        CTranslate2Engine(tmp_path)
    engine = CTranslate2Engine(converted)
    for prompt, what in (("a text", "token ids"), ([10**6], "vocabulary")):
        with pytest.raises(InvalidInput, match=what):
            engine.generate([prompt])
