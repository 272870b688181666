"""The puzzle and its calculator: four numbers, a target, and 2 to 4 rounds to reach it.

A sample reads, on one line and with every number in three digits::

    003 005 007 012>079|  [003 005 007 012]012*007=  084;  [003 005 084]084-005=  079;  079$
    prompt                round 0, the model's       env   round 1                env   round 2

In a round the model writes the remaining numbers and one operation, and ends it with `=`. Then the
environment appends the calculator's answer and `;`. `$` after a number is the final answer. If a
round exhausts its budget without either, the environment writes the `=`.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from typing import Final

from examples.countdown.config import Settings
from examples.countdown.tokenizer import (
    ANSWER,
    ANSWER_ID,
    CALL,
    CALL_ID,
    RESULT,
    WRONG,
    decode,
    encode,
)

NUMBERS: Final = 4
_LARGEST: Final = 999
_OPERATION: Final = re.compile(r"(\d{3})([-+*/])(\d{3})\Z")
_ANSWER: Final = re.compile(r"(\d{3})\Z")


@dataclasses.dataclass(frozen=True, slots=True)
class Puzzle:
    """Numbers to combine, each used at most once, and the target to reach."""

    numbers: tuple[int, ...]
    target: int
    solution: tuple[str, ...]
    """Operations that reach the target, for worked examples; the model never sees them."""

    @property
    def prompt(self) -> str:
        """Text of constant length, so that no prompt needs padding."""
        return f"{_listed(self.numbers)}>{self.target:03d}|"


def calculate(expression: str) -> tuple[int, int, int] | None:
    """Read `a op b` at the end of a text, three digits each.

    Returns:
        (a, b, result), or None where there is no such operation or its result is negative, above
        999 or not whole.
    """
    found = _OPERATION.search(expression)
    if found is None:
        return None
    a, sign, b = int(found[1]), found[2], int(found[3])
    if sign == "/":
        result = a // b if b and a % b == 0 else -1
    else:
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return (a, b, result) if 0 <= result <= _LARGEST else None


def make_puzzle(generator: random.Random) -> Puzzle:
    """Draw numbers and walk 1 to 3 operations to a target, so that a solution exists."""
    numbers = tuple(generator.randint(1, 20) for _ in range(NUMBERS))
    remaining, solution, target = list(numbers), [], 0
    for _ in range(generator.randint(1, NUMBERS - 1)):
        while True:
            a, b = generator.sample(range(len(remaining)), 2)
            text = f"{remaining[a]:03d}{generator.choice('++--**/')}{remaining[b]:03d}"
            step = calculate(text)
            if step is not None:
                break
        target = step[2]
        solution.append(text)
        remaining = [*(n for i, n in enumerate(remaining) if i not in (a, b)), target]
    return Puzzle(numbers, target, tuple(solution))


class Sample:
    """One trajectory while it is generated; each response token has mask, log-prob and turn."""

    def __init__(self, puzzle: Puzzle, uid: str, settings: Settings) -> None:
        self.puzzle = puzzle
        self.uid = uid
        self.prompt = encode(puzzle.prompt)
        self.tokens: list[int] = []
        self.mask: list[int] = []
        self.log_probs: list[float] = []
        self.turns: list[int] = []
        self.done = False
        self.answer: int | None = None
        self.results: list[int] = []
        """The results of the calls that used available numbers."""
        self._min_rounds, self._max_rounds = settings.rounds
        self._remaining = list(puzzle.numbers)
        self._round = 0

    @property
    def context(self) -> list[int]:
        """The tokens that the engine continues."""
        return self.prompt + self.tokens

    @property
    def round_count(self) -> int:
        """Rounds that the model has written."""
        return self._round

    def append_round(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Append the model's tokens of one round and the environment's answer."""
        self._append(ids, log_probs, mask=1)
        self._round += 1
        last, text = ids[-1], decode(ids)
        if last == ANSWER_ID and self._round >= self._min_rounds:
            found = _ANSWER.search(text[:-1])
            self.answer = int(found[1]) if found else None
            self.done = True
        elif self._round == self._max_rounds:
            self.done = True
        else:
            closing = "" if last == CALL_ID else CALL
            reply = encode(closing + self._call(text.rstrip(CALL + ANSWER)) + RESULT)
            self._append(reply, [0.0] * len(reply), mask=0)

    def _call(self, expression: str) -> str:
        step = calculate(expression)
        if step is None:
            return WRONG
        a, b, result = step
        left = list(self._remaining)
        for number in (a, b):
            if number not in left:
                return f"{result:03d}"
            left.remove(number)
        self._remaining = [*left, result]
        self.results.append(result)
        return f"{result:03d}"

    def _append(self, ids: Sequence[int], log_probs: Sequence[float], mask: int) -> None:
        self.tokens += ids
        self.log_probs += log_probs
        self.mask += [mask] * len(ids)
        # The environment's answer belongs to the turn of the call.
        self.turns += [self._round - (mask == 0)] * len(ids)


def make_samples(settings: Settings, step: int) -> list[Sample]:
    """Return a step's puzzles, `group_size` times each; they depend only on seed and step."""
    generator = random.Random(f"puzzles {settings.seed} {step}")
    samples: list[Sample] = []
    for group in range(settings.groups):
        puzzle = make_puzzle(generator)
        uids = (f"s{step}g{group}-{index}" for index in range(settings.group_size))
        samples += [Sample(puzzle, uid, settings) for uid in uids]
    return samples


def play(
    samples: Sequence[Sample],
    write: Callable[[Sequence[Sample]], Sequence[tuple[Sequence[int], Sequence[float]]]],
) -> None:
    """Play samples to their ends; `write` returns the next round of each: ids and log-probs."""
    while playing := [sample for sample in samples if not sample.done]:
        for sample, (ids, log_probs) in zip(playing, write(playing), strict=True):
            sample.append_round(ids, log_probs)


def score(puzzle: Puzzle, answer: int | None, results: Sequence[int]) -> float:
    """Return the score of a sample, in [0, 1].

    Three calls that used available numbers give 0.5, fewer give less. A close answer gives up to
    0.2, an exact one 0.3 more, so small improvements of the policy increase the score. An answer
    that is not the result of a call scores 0, else copying the target would be the best policy.

    Args:
        puzzle: the puzzle.
        answer: the model's final answer, if it gave one.
        results: results of the calls that used available numbers.
    """
    calls = 0.5 * min(len(results), NUMBERS - 1) / (NUMBERS - 1)
    if answer is None or answer not in results:
        return calls
    distance = abs(answer - puzzle.target)
    closeness = max(0.0, 1.0 - distance / max(puzzle.target, 10))
    return calls + 0.2 * closeness + 0.3 * (distance == 0)


def worked_example(puzzle: Puzzle, settings: Settings) -> Sample:
    """Return the sample of a model that knows the solution."""
    sample = Sample(puzzle, "example", settings)
    remaining = list(puzzle.numbers)
    for operation in puzzle.solution:
        text = f"[{_listed(remaining)}]{operation}{CALL}"
        _write(sample, text)
        a, b, result = calculate(operation) or (0, 0, 0)
        remaining.remove(a)
        remaining.remove(b)
        remaining.append(result)
    _write(sample, f"{puzzle.target:03d}{ANSWER}")
    return sample


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(f"{number:03d}" for number in numbers)


def _write(sample: Sample, text: str) -> None:
    ids = encode(text)
    sample.append_round(ids, [0.0] * len(ids))
