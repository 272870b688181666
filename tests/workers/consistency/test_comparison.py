"""What is compared with what: temperatures, ids that a server does not say, images."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.engines.servers import log_prob_of

from stagescope_wire.engines import EngineInfo, Generation, Sampling
from stagescope_wire.errors import InvalidInput
from stagescope_workers.consistency.comparison import Options, compare
from stagescope_workers.consistency.prompts import Item


class Letters:
    """A tokenizer of one character a token, `a` being 0; no BOS, no template."""

    bos_token_id = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, object]:
        return {"input_ids": [ord(c) - 97 for c in text]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token) for token in ids)


class Model:
    """An engine in memory: it answers `xyz`; `at` is the temperature of its own log-probs."""

    def __init__(self, kind: str, *, processed: bool = False, at: float = 1.0) -> None:
        self.info = EngineInfo(kind, "here", processed=processed, scores=True)
        self.at = at
        self.asked: list[Any] = []

    def generate(
        self, prompts: Sequence[Any], sampling: Sampling | None = None
    ) -> list[Generation]:
        made = []
        for prompt in prompts:
            row = [*prompt, 23, 24, 25]
            values = tuple(log_prob_of(row[:index], row[index]) / self.at for index in (-3, -2, -1))
            made.append(
                Generation("xyz", ("x", "y", "z"), (23, 24, 25), values, prompt_tokens=len(prompt))
            )
        return made

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        return self._scores(rows, 1.0)

    def _scores(self, rows: Sequence[Sequence[int]], at: float) -> list[tuple[float, ...]]:
        return [
            (math.nan, *(log_prob_of(row[:t], row[t]) / at for t in range(1, len(row))))
            for row in rows
        ]

    def close(self) -> None:
        pass


class Rescoring(Model):
    def score_at(
        self, rows: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        self.asked.append(temperature)
        return self._scores(rows, temperature)


ITEMS = [Item(str(index), prompt="abcde"[: index + 1]) for index in range(5)]


def options(temperature: float) -> Options:
    return Options(sampling=Sampling(max_tokens=3, temperature=temperature))


def test_log_probs_after_temperature_are_held_against_the_same() -> None:
    other = Rescoring("transformers")
    found = compare(ITEMS, Model("sglang", processed=True, at=0.5), other, Letters(), options(0.5))
    assert other.asked == [0.5]
    assert found.numbers["logprob_abs_diff/max"] == 0
    assert (found.streams["old"]["temperature"], found.streams["old"]["processed"]) == (0.5, True)
    assert found.streams["rollout"]["processed"] is True


@pytest.mark.parametrize(("processed", "temperature"), [(False, 0.5), (True, 1.0), (True, 0.0)])
def test_raw_log_probs_are_held_against_raw_ones(processed: bool, temperature: float) -> None:
    other = Rescoring("transformers")
    engine = Model("vllm", processed=processed)
    found = compare(ITEMS, engine, other, Letters(), options(temperature))
    assert other.asked == []
    assert found.numbers["logprob_abs_diff/max"] == 0
    assert (found.streams["old"]["temperature"], found.streams["old"]["processed"]) == (1.0, False)
    assert found.aligned


def test_where_the_other_side_cannot_scale_the_streams_say_so() -> None:
    engine = Model("sglang", processed=True, at=0.5)
    found = compare(ITEMS, engine, Model("vllm"), Letters(), options(0.5))
    assert found.numbers["logprob_abs_diff/mean"] > 0.1
    assert found.streams["rollout"]["temperature"] == 0.5
    assert found.streams["old"]["temperature"] == 1.0


class TextOnly(Model):
    """A server that gives texts without ids; `merged` hides how they were cut."""

    def __init__(self, merged: bool) -> None:
        super().__init__("openai")
        self.merged = merged

    def generate(
        self, prompts: Sequence[object], sampling: Sampling | None = None
    ) -> list[Generation]:
        tokens = ("xy", "z", "") if self.merged else ("x", "y", "z")
        made = super().generate(prompts, sampling)
        return [dataclasses.replace(each, token_ids=None, tokens=tokens) for each in made]


def test_ids_are_found_by_the_texts_or_the_answer_is_left_out() -> None:
    found = compare(ITEMS, TextOnly(False), Model("vllm"), Letters(), options(1.0))
    assert [row.ids for row in found.rows] == [(23, 24, 25)] * 5
    assert found.numbers["logprob_abs_diff/max"] == 0
    without = compare(ITEMS, TextOnly(True), Model("vllm"), Letters(), options(1.0))
    assert without.rows == ()
    assert set(without.left_out.values()) == {"the engine returned no token ids"}
    assert not without.aligned


class Seeing(Model):
    def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, object]]],
        sampling: Sampling | None = None,
    ) -> list[Generation]:
        self.asked += conversations
        return [Generation("a cat") for _ in conversations]


def test_prompts_with_images_are_answered_by_both(tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\n")
    items = [*ITEMS, Item("picture", prompt="what?", answer="cat", image=image)]
    engine, other = Seeing("vllm"), Seeing("transformers")
    asked = Options(sampling=Sampling(max_tokens=3), answers=True)
    found = compare(items, engine, other, Letters(), asked)
    assert len(found.rows) == 5
    assert found.agreement is not None
    assert (found.agreement.answers, found.agreement.same) == (6, 6)
    assert found.agreement.accuracy == (1.0, 1.0)
    [[sent]], [[local]] = engine.asked, other.asked
    assert sent["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert local["content"] == [
        {"type": "image", "path": str(image)}, {"type": "text", "text": "what?"},
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match="1 prompts have images, and ctranslate2 accepts none"):
        compare(items, Model("ctranslate2"), other, Letters(), asked)
