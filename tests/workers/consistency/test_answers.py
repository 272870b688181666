from __future__ import annotations

import pytest

from stagescope_wire.engines import Generation
from stagescope_wire.errors import InvalidInput
from stagescope_workers.consistency.prompts import Item, Marking, compare_answers


@pytest.mark.parametrize(
    ("marking", "text", "right"),
    [
        (Marking("exact"), " 42\n", True),
        (Marking("exact"), "it is 42", False),
        (Marking("contains"), "it is 42.", True),
        (Marking("contains"), "it is 4 2", False),
        (Marking("regex", r"answer: (\d+)"), "answer: 7, no, answer: 42", True),
        (Marking("regex", r"answer: (\d+)"), "answer: 42, no, answer: 7", False),
        (Marking("regex", r"\d+"), "first 1, then 42", True),
        (Marking("regex", r"(\d+)"), "none", False),
    ],
)
def test_when_an_answer_is_right(marking: Marking, text: str, right: bool) -> None:
    assert marking.is_right(text, " 42 ") is right


@pytest.mark.parametrize(
    ("match", "pattern"), [("fuzzy", None), ("exact", "x"), ("regex", None), ("regex", "(")]
)
def test_a_marking_that_cannot_be(match: str, pattern: str | None) -> None:
    with pytest.raises(InvalidInput):
        Marking(match, pattern)


def test_both_sides_answers() -> None:
    items = [Item("a", prompt="x", answer="7"), Item("b", prompt="y", answer="8"),
             Item("c", prompt="z")]  # fmt: skip
    ours = [Generation("7", token_ids=(1, 2, 3)), Generation("9", token_ids=(1, 5)),
            Generation("same", token_ids=(4, 4, 4, 4))]  # fmt: skip
    theirs = [Generation("7", token_ids=(1, 2, 9, 9)), Generation("8", token_ids=(1, 5, 6)),
              Generation("same", token_ids=(4, 4, 4, 4))]  # fmt: skip
    found = compare_answers(items, ours, theirs, Marking("exact"))
    assert [row["first_difference"] for row in found.rows] == [2, 2, None]
    assert found.same == 1
    assert found.token_share == pytest.approx((2 + 2 + 4) / (4 + 3 + 4))
    assert (found.marked, found.accuracy) == (2, (0.5, 1.0))
    assert found.rows[2]["engine_right"] is None
    texts = compare_answers(items[2:], [Generation("abc")], [Generation("abd")], Marking())
    assert texts.rows[0]["first_difference"] == 2
    assert texts.accuracy is None
