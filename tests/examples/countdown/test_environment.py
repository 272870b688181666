from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from examples.countdown.config import Settings
from examples.countdown.environment import (
    Puzzle,
    Sample,
    calculate,
    make_puzzle,
    score,
    worked_example,
)
from examples.countdown.tokenizer import (
    TOKENS,
    VOCABULARY_SIZE,
    decode,
    encode,
    write_tokenizer,
)

PUZZLE = Puzzle((3, 5, 7, 12), 79, ())


def play(*rounds: str, settings: Settings | None = None) -> Sample:
    sample = Sample(PUZZLE, "g-0", settings or Settings())
    for text in rounds:
        assert not sample.done
        sample.append_round(encode(text), [-0.5] * len(text))
    return sample


def test_every_character_is_one_token_and_comes_back() -> None:
    text = "".join(TOKENS)
    assert encode(text) == list(range(VOCABULARY_SIZE))
    assert decode(encode(text)) == text


def test_the_service_reads_the_same_characters(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "".join(TOKENS)
    assert found.encode(text).ids == encode(text)
    assert [found.id_to_token(index) for index in range(VOCABULARY_SIZE)] == list(TOKENS)


def test_an_unknown_character_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'é' is not one of"):
        encode("1é")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("[003 005]012*007", (12, 7, 84)),
        ("084/003", (84, 3, 28)),
        ("007-012", None),  # negative
        ("007/002", None),  # not whole
        ("007/000", None),
        ("999+001", None),  # above 999
        ("7+5", None),  # not three digits
        ("012", None),
        ("001+", None),
        ("", None),
    ],
)
def test_the_calculator_reads_the_last_operation(
    text: str, result: tuple[int, int, int] | None
) -> None:
    assert calculate(text) == result


def test_every_puzzle_has_the_solution_it_was_made_with() -> None:
    generator = random.Random(1)
    for _ in range(200):
        puzzle = make_puzzle(generator)
        left = list(puzzle.numbers)
        for operation in puzzle.solution:
            step = calculate(operation)
            assert step is not None
            left.remove(step[0])
            left.remove(step[1])
            left.append(step[2])
        assert left[-1] == puzzle.target
        assert len(puzzle.prompt) == len(PUZZLE.prompt)


def test_the_calculators_tokens_are_masked_and_belong_to_their_round() -> None:
    sample = play("012*007=", "084-005=", "079$")
    assert decode(sample.tokens) == "012*007=084;084-005=079;079$"
    assert "".join(map(str, sample.mask)) == "1111111100001111111100001111"
    assert "".join(map(str, sample.turns)) == "0000000000001111111111112222"
    assert sample.log_probs[:9] == [-0.5] * 8 + [0.0]
    assert (sample.done, sample.answer, sample.round_count) == (True, 79, 3)
    assert sample.results == [84, 79]


def test_a_round_without_a_delimiter_is_closed_by_the_environment() -> None:
    sample = play("012*007")
    assert decode(sample.tokens) == "012*007=084;"
    assert sample.mask == [1] * 7 + [0] * 5


def test_an_answer_in_the_first_round_is_too_early() -> None:
    sample = play("079$")
    assert not sample.done
    assert decode(sample.tokens) == "079$=?;"


def test_the_fourth_round_is_the_last() -> None:
    sample = play("1=", "2=", "3=", "4=")
    assert (sample.done, sample.answer, sample.round_count) == (True, None, 4)
    assert sample.mask[-1] == 1


def test_a_call_with_numbers_that_are_not_there_is_answered_but_not_counted() -> None:
    sample = play("012*007=", "012*007=")
    assert decode(sample.tokens) == "012*007=084;012*007=084;"
    assert sample.results == [84]


def test_a_worked_example_solves_its_puzzle() -> None:
    generator = random.Random(2)
    rewards = set()
    for _ in range(50):
        sample = worked_example(make_puzzle(generator), Settings())
        assert sample.done
        assert len(sample.results) == sample.round_count - 1
        rewards.add(round(score(sample.puzzle, sample.answer, sample.results), 6))
    assert rewards == {round(0.5 * calls / 3 + 0.5, 6) for calls in (1, 2, 3)}


def test_the_reward_grows_with_closeness_and_with_calls() -> None:
    scores = [score(PUZZLE, answer, [5, 70, 79]) for answer in (None, 5, 70, 79)]
    assert scores == sorted(set(scores))
    assert scores[0] == 0.5
    assert scores[-1] == pytest.approx(1.0)
    assert score(PUZZLE, 79, [79]) == pytest.approx(0.5 / 3 + 0.5)


def test_an_answer_that_no_call_gave_earns_nothing() -> None:
    assert score(PUZZLE, 79, [84]) == score(PUZZLE, None, [84])
