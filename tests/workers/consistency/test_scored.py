"""The printed numbers, against the service's own statistics of the same tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stagescope_service.statistics import TokenBatch, publish, summarise
from stagescope_wire.engines import Generation
from stagescope_wire.tensorfile import WireTensor
from stagescope_workers.consistency.scored import (
    Scored,
    check_bos,
    check_prompts,
    check_shift,
    check_vocabulary,
    numbers,
    worst_tokens,
)
from stagescope_workers.payload import host_tensor


def letter(token: int) -> str:
    return chr(97 + token)


def rows(*lengths: int, seed: int = 0) -> list[Scored]:
    drawn = np.random.default_rng(seed)
    found = []
    for index, length in enumerate(lengths):
        p = -drawn.exponential(2.0, length).astype(np.float32)
        q = p + drawn.normal(0, 0.1, length).astype(np.float32)
        ids = tuple(int(token) for token in drawn.integers(0, 26, length))
        found.append(Scored(f"s{index}", (1, 2), ids, q.astype(float), p.astype(float)))
    return found


def published(of: list[Scored]) -> dict[str, float]:
    tensors: dict[str, WireTensor] = {
        "rollout_log_probs": host_tensor("q", [row.q.astype(np.float32) for row in of]),
        "old_log_probs": host_tensor("p", [row.p.astype(np.float32) for row in of]),
        "response_mask": host_tensor("m", [np.ones(len(row.ids), np.int8) for row in of]),
    }
    batch = TokenBatch.from_tensors(tensors, {"sample_ids": [row.name for row in of]})
    return dict(publish(summarise(batch)))


@pytest.mark.parametrize("odd", [None, math.nan, -math.inf])
def test_the_numbers_are_the_service_s(odd: float | None) -> None:
    of = rows(5, 1, 12, 7)
    if odd is not None:
        of[2].q[3] = odd
    ours, theirs = numbers(of), published(of)
    for name in set(ours) & set(theirs):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-9, nan_ok=True), name
    assert len(set(ours) & set(theirs)) == 8
    assert ours["nonfinite/rollout"] == (odd is not None)


def test_nothing_measured_is_no_zero() -> None:
    found = numbers([])
    assert math.isnan(found["logprob_abs_diff/mean"])
    assert found["counts/tokens"] == 0
    assert worst_tokens([], letter) == []


def test_the_worst_token_is_found_with_its_position() -> None:
    of = rows(5, 9, 4)
    of[1].q[6] -= 30.0
    first, *others = worst_tokens(of, letter, 3)
    assert (first.sample, first.position) == ("s1", 6)
    assert first.token_id == of[1].ids[6]
    assert first.token == letter(first.token_id)
    assert first.abs_diff == pytest.approx(abs(of[1].p[6] - of[1].q[6]))
    assert [each.abs_diff for each in others] == sorted(
        (each.abs_diff for each in others), reverse=True
    )
    of[2].p[0] = math.nan
    assert worst_tokens(of, letter, 1)[0].sample == "s2"


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
    assert check_prompts(prompts, read(2, 3), Words()).ok is True
    bos = check_prompts(prompts, read(3, 4), Words())
    assert bos.ok is False
    assert "a BOS of its own" in bos.text
    assert "another template" in check_prompts(prompts, read(9, 3), Words()).text
    assert check_prompts(prompts, read(None, None), Words()).ok is None


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ((0, 1, 2), "it puts <s> in front"),
        ((2,), "it leaves out w1 in front"),
        ((1, 3), "they differ from token 1 on"),
        ((1, 2, 3), "they differ from token 2 on"),
    ],
)
def test_prompts_that_the_engine_read_as_other_ids(ids: tuple[int, ...], text: str) -> None:
    answer = Generation("", prompt_tokens=len(ids), prompt_ids=ids)
    assert text in check_prompts([[1, 2]], [answer], Words()).text


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
