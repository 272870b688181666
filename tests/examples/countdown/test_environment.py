from __future__ import annotations

import random

import pytest

from examples.countdown.config import Settings
from examples.countdown.environment import (
    Puzzle,
    Sample,
    calculate,
    make_puzzle,
    score,
    worked_example,
)
from examples.countdown.tokenizer import TOKENS, VOCABULARY_SIZE, decode, encode

PUZZLE = Puzzle((3, 5, 7, 12), 79, ())


def play(*rounds: str, settings: Settings | None = None) -> Sample:
    sample = Sample(PUZZLE, "g-0", settings or Settings())
    for text in rounds:
        assert not sample.done
        sample.take_round(encode(text), [-0.5] * len(text))
    return sample


def test_every_character_is_one_token_and_comes_back() -> None:
    text = "".join(TOKENS)
    assert encode(text) == list(range(VOCABULARY_SIZE))
    assert decode(encode(text)) == text


def test_an_unknown_character_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'é' is not one of"):
        encode("1é")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("[3 5]12*7", (12, 7, 84)),
        ("84/3", (84, 3, 28)),
        ("7-12", None),  # negative
        ("7/2", None),  # not whole
        ("7/0", None),
        ("999+1", None),  # above 999
        ("12", None),
        ("1+", None),
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
    sample = play("12*7=", "84-5=", "79$")
    assert decode(sample.tokens) == "12*7=84;84-5=79;79$"
    assert "".join(map(str, sample.mask)) == "1111100011111000111"
    assert "".join(map(str, sample.turns)) == "0000000011111111222"
    assert sample.log_probs[:6] == [-0.5] * 5 + [0.0]
    assert (sample.done, sample.answer, sample.round_count) == (True, 79, 3)
    assert (sample.valid_calls, sample.calls) == (2, 2)


def test_a_round_without_a_delimiter_is_closed_by_the_environment() -> None:
    sample = play("12*7")
    assert decode(sample.tokens) == "12*7=84;"
    assert sample.mask == [1, 1, 1, 1, 0, 0, 0, 0]


def test_an_answer_in_the_first_round_is_too_early() -> None:
    sample = play("79$")
    assert not sample.done
    assert decode(sample.tokens) == "79$=?;"


def test_the_fourth_round_is_the_last() -> None:
    sample = play("1=", "2=", "3=", "4=")
    assert (sample.done, sample.answer, sample.round_count) == (True, None, 4)
    assert sample.mask[-1] == 1


def test_a_call_with_numbers_that_are_not_there_is_answered_but_not_valid() -> None:
    sample = play("12*7=", "12*7=")
    assert decode(sample.tokens) == "12*7=84;12*7=84;"
    assert (sample.valid_calls, sample.calls) == (1, 2)


def test_a_worked_example_earns_the_whole_reward() -> None:
    generator = random.Random(2)
    rounds = set()
    for _ in range(50):
        sample = worked_example(make_puzzle(generator), Settings())
        assert sample.done
        assert score(sample.puzzle, sample.answer, sample.valid_calls / sample.calls) == 1.0
        rounds.add(sample.round_count)
    assert rounds == {2, 3, 4}


def test_the_reward_grows_with_closeness() -> None:
    none, far, near, exact = (score(PUZZLE, answer, 0.5) for answer in (None, 5, 70, 79))
    assert 0.1 == none < far < near < 0.4 < exact == pytest.approx(0.9)
