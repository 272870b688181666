"""Compares both sides' answers to a data set with each other and with the right ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final, TypedDict

from stagescope.engines import Generation
from stagescope.wire.errors import InvalidInput
from stagescope_workers.consistency.prompts import Item

MATCHES: Final = ("exact", "contains", "regex")


@dataclasses.dataclass(frozen=True)
class Marking:
    """When an answer is right.

    Attributes:
        match: "exact": the full answer, without spaces at its ends; "contains": a part of it;
            "regex": the last match of `pattern` in it (of its first group, if it has one).
        pattern: a regular expression, for "regex".
    """

    match: str = "contains"
    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.match not in MATCHES or (self.match == "regex") != (self.pattern is not None):
            raise InvalidInput(
                f"match is {self.match!r:.50} and pattern {self.pattern!r:.50}",
                expected=f"one of {', '.join(MATCHES)}, and a pattern for regex alone",
            )
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise InvalidInput(f"pattern {self.pattern!r:.100}: {error}") from error

    def is_right(self, text: str, answer: str) -> bool:
        """Return whether `text` gives `answer`."""
        expected = answer.strip()
        if self.match == "exact":
            return text.strip() == expected
        if self.match == "contains":
            return expected in text
        found = list(re.finditer(self.pattern or "", text))
        if not found:
            return False
        last = found[-1]
        return (last[1] if last.re.groups else last[0] or "").strip() == expected


class AnswerRow(TypedDict):
    """Both sides' answers to one prompt."""

    sample: str
    answer: str | None
    engine: str
    other: str
    first_difference: int | None
    """The first token that differs; None where none does."""
    engine_right: bool | None
    """None where the right answer is unknown."""
    other_right: bool | None


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerAgreement:
    """Two sides' answers to the same prompts.

    Attributes:
        answers: the number of prompts.
        same: the number of answers that are the same, token by token.
        token_share: tokens up to the first that differs, over those of the longer answer.
        marked: the number of prompts with a right answer.
        engine_right, other_right: how many of those each side got right.
        rows: the answers to each prompt.
    """

    answers: int
    same: int
    token_share: float
    marked: int
    engine_right: int
    other_right: int
    rows: tuple[AnswerRow, ...]

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """The shares of right answers, the engine's first; None where nothing was marked."""
        if not self.marked:
            return None
        return self.engine_right / self.marked, self.other_right / self.marked


def compare_answers(
    items: Sequence[Item],
    engine: Sequence[Generation],
    other: Sequence[Generation],
    marking: Marking,
) -> AnswerAgreement:
    """Compare both sides' answers with each other, and with the right ones."""
    rows: list[AnswerRow] = []
    shared = longest = 0
    for item, one, two in zip(items, engine, other, strict=True):
        one_units, two_units = _units(one, two)
        first = _first_difference(one_units, two_units)
        length = max(len(one_units), len(two_units))
        shared += length if first is None else first
        longest += length
        right = [
            None if item.answer is None else marking.is_right(each.text, item.answer)
            for each in (one, two)
        ]
        rows.append(
            {
                "sample": item.name, "answer": item.answer, "engine": one.text, "other": two.text,
                "first_difference": first, "engine_right": right[0], "other_right": right[1],
            }
        )  # fmt: skip
    marked = [row for row in rows if row["answer"] is not None]
    return AnswerAgreement(
        answers=len(rows),
        same=sum(row["first_difference"] is None for row in rows),
        token_share=shared / longest if longest else 1.0,
        marked=len(marked),
        engine_right=sum(bool(row["engine_right"]) for row in marked),
        other_right=sum(bool(row["other_right"]) for row in marked),
        rows=tuple(rows),
    )


def _units(one: Generation, two: Generation) -> tuple[Sequence[object], Sequence[object]]:
    """Return token ids where both sides have them, else the characters of the texts."""
    if one.token_ids is not None and two.token_ids is not None:
        return one.token_ids, two.token_ids
    return one.text, two.text


def _first_difference(one: Sequence[object], two: Sequence[object]) -> int | None:
    for index, (first, second) in enumerate(zip(one, two, strict=False)):
        if first != second:
            return index
    return None if len(one) == len(two) else min(len(one), len(two))
