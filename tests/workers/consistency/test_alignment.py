from __future__ import annotations

import numpy as np
import pytest
from tests.workers.consistency.test_scored import rows

from stagescope_wire.engines import Generation
from stagescope_workers.consistency.scored import (
    Scored,
    check_bos,
    check_prompts,
    check_shift,
    check_vocabulary,
)


class Words:
    """A tokenizer with a BOS and ten words."""

    bos_token_id: int | None = 0
    words = ("<s>", *(f"w{index}" for index in range(1, 10)))

    def __len__(self) -> int:
        return len(self.words)

    def convert_ids_to_tokens(self, ids: int | list[int]) -> str | list[str]:
        return self.words[ids] if isinstance(ids, int) else [self.words[index] for index in ids]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        kept = [token for token in ids if not (skip_special_tokens and token == 0)]
        return " ".join(self.words[token] for token in kept)


def read(*counts: int | None) -> list[Generation]:
    return [Generation("", prompt_tokens=count) for count in counts]


def test_prompts_of_equal_length_and_of_others() -> None:
    prompts = [[0, 1], [0, 1, 2]]
    assert check_prompts(prompts, read(2, 3)).ok is True
    bos = check_prompts(prompts, read(3, 4))
    assert bos.ok is False
    assert "a BOS of its own" in bos.text
    assert "another template" in check_prompts(prompts, read(9, 3)).text
    assert check_prompts(prompts, read(None, None)).ok is None


def test_a_bos_twice_is_wrong() -> None:
    assert check_bos([[0, 1], [1]], Words()).ok is True
    assert "1 of 2 prompts begin with <s>" in check_bos([[0, 1], [1]], Words()).text
    assert check_bos([[0, 0, 1]], Words()).ok is False
    without = Words()
    without.bos_token_id = None
    assert check_bos([[1]], without).ok is True


def test_vocabularies_that_differ() -> None:
    assert check_vocabulary([], Words(), Words.words).ok is True
    swapped = ("<s>", "w2", "w1", *Words.words[3:])
    found = check_vocabulary([], Words(), swapped)
    assert found.ok is False
    assert "token 1 is 'w2' there and 'w1' here" in found.text
    reported = [Generation("w1 w2", token_ids=(1, 2)), Generation("w3", token_ids=(3, 0))]
    assert check_vocabulary(reported, Words(), ()).ok is True
    assert check_vocabulary([Generation("w5", token_ids=(6,))], Words(), ()).ok is False
    assert check_vocabulary([Generation("w5")], Words(), ()).ok is None


@pytest.mark.parametrize(("by", "side"), [(1, "after"), (-1, "before")])
def test_a_shift_by_one_is_seen(by: int, side: str) -> None:
    aligned = rows(20, 30)
    assert check_shift(aligned).ok is True
    shifted = [Scored(row.name, row.prompt, row.ids, np.roll(row.q, -by), row.p) for row in aligned]
    found = check_shift(shifted)
    assert found.ok is False
    assert f"one token {side} the other" in found.text
    assert check_shift(rows(3, 3)).ok is None


def test_streams_that_have_nothing_to_do_with_each_other_are_not_aligned() -> None:
    random = np.random.default_rng(3)
    aligned = rows(40, 40)
    others = [
        Scored(row.name, row.prompt, row.ids, row.p, -random.standard_exponential(len(row.p)))
        for row in aligned
    ]
    found = check_shift(others)
    assert found.ok is False
    assert "another model" in found.text or "the other" in found.text
