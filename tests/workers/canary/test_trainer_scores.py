"""The trainer's model scores the sequences as another engine does, and is left as it was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engines.tiny_llama import write_llama

from stagescope_workers.canary.sequences import SCORED, choose
from stagescope_workers.canary.trainer_scores import adapter_is_zero, score_with_model, tail

ROWS = choose(90, bos=0, max_length=512).rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> Any:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_are_the_log_softmax_of_the_models_logits(model: Any, temperature: float) -> None:
    found = score_with_model(model, ROWS, temperature)
    for row, own in zip(ROWS, found, strict=True):
        ids = torch.tensor([row])
        with torch.no_grad():
            whole = (model(input_ids=ids).logits[0].double() / temperature).log_softmax(-1)
        expected = whole[:-1].gather(1, ids[0, 1:, None])[:, 0][-SCORED:]
        assert len(own) == min(len(row) - 1, SCORED)
        assert own == pytest.approx(expected.tolist(), abs=2e-5)


def test_another_engine_has_the_same(model: Any, folder: Path, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    from stagescope_workers.consistency.ctranslate2_engine import CTranslate2Engine

    converted = tmp_path / "converted"
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted))
    engine = CTranslate2Engine(converted)
    for row, own, theirs in zip(
        ROWS, score_with_model(model, ROWS), engine.score(ROWS), strict=True
    ):
        assert tail(theirs, row) == pytest.approx(own, abs=2e-4)
    engine.close()


def test_modes_and_random_numbers_are_the_same_afterwards(model: Any) -> None:
    class Noisy(torch.nn.Module):
        """A model whose dropout would draw random numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            torch.rand(3)
            answer = self.inner(input_ids=input_ids, use_cache=use_cache)
            answer.logits = self.drop(answer.logits)
            return answer

    noisy = Noisy().train()
    noisy.inner.model.norm.eval()  # a frozen part
    before = [module.training for module in noisy.modules()]
    torch.manual_seed(7)
    state = torch.get_rng_state()
    one = score_with_model(noisy, ROWS)
    assert one == score_with_model(noisy, ROWS)  # no dropout
    assert [module.training for module in noisy.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in noisy.parameters())


def test_only_the_scored_positions_have_logits(model: Any) -> None:
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda _, __, output: sizes.append(output.shape[1]))
    score_with_model(model, ROWS)
    assert max(sizes) == SCORED + 1


def test_an_adapter_that_was_not_trained_is_zero() -> None:
    layer = torch.nn.Module()
    layer.register_parameter("lora_B", torch.nn.Parameter(torch.zeros(4, 2)))
    assert adapter_is_zero(layer) is True
    layer.register_parameter("lora_B", torch.nn.Parameter(torch.ones(4, 2)))
    assert adapter_is_zero(layer) is False
    assert adapter_is_zero(torch.nn.Linear(2, 2)) is None


def test_the_tail_of_what_a_function_returned() -> None:
    row = (1, 2, 3)
    assert tail([math.nan, -1.0, -math.inf], row) == (-1.0, -math.inf)
    assert tail(torch.tensor([-1.0, -2.0]), row) == (-1.0, -2.0)
    assert tail([-1.0], row) == (-1.0,)
    [unknown, known] = tail([math.inf, -1.0], row)
    assert math.isnan(unknown)
    assert known == -1.0
