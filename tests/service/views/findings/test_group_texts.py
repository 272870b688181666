"""One text for findings of one cause, whose own texts differ in their values."""

from __future__ import annotations

import pytest

from stagescope_service.views.findings.texts import text_of_all


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], None),
        ([None, ""], None),
        (["x of rank 3"] * 2, "x of rank 3"),
        (
            [f"update of step {3 + r} failed on actor rank {r}: out of memory" for r in range(4)],
            "update of steps 3-6 failed on actor ranks 0-3: out of memory",
        ),
        (
            [
                "rank 1 does not answer: not heard for 31 s, after 1 payload",
                "rank 7 does not answer: not heard for 9.5 s, after 2 payloads",
            ],
            "ranks 1, 7 do not answer: not heard for 9.5 to 31 s, after 1 to 2 payloads",
        ),
        (
            [f"rank {r} of actor, which is absent, has not begun: {r} s" for r in (1, 2)],
            "ranks 1-2 of actor, which is absent, have not begun: 1 to 2 s",
        ),
        (
            ["ranks 1, 2 are missing of step 5", "rank 4 are missing of step 6"],
            "ranks 1-2, 4 are missing of steps 5-6",
        ),
        (
            ["old has shape (4, 40), expected (4, 64)", "old has shape (4, 38), expected (4, 64)"],
            "old has shape (4, 38 to 40), expected (4, 64)",
        ),
        (["loss is -2e-5", "loss is 1e-6"], "loss is -2e-5 to 1e-6"),
        (["sample 'a-1' is odd", "sample 'b-2' is odd"], "sample 'a-1' or 'b-2' is odd"),
        (
            [f"capture {0x10F0 + n:06x}: late" for n in range(5)],
            "capture 0010f0 or 0010f1 or 0010f2 or 2 more: late",
        ),
        (
            ["old is float16 of rank 1", "old is float32 of rank 1"],
            "old is float16 of rank 1 (the first of 2 that differ in this text)",
        ),
        (
            ["a trigger fired at rank 1", "another one fired"],
            "a trigger fired at rank 1 (the first of 2 that differ in this text)",
        ),
    ],
)
def test_the_text_of_a_group_is_true_of_all(texts: list[str | None], expected: str | None) -> None:
    assert text_of_all(texts) == expected


def test_a_group_with_very_many_texts_has_the_first_and_says_so() -> None:
    texts = [f"took {n} s" for n in range(5000)]
    assert text_of_all(texts) == "took 0 s (the first of 5000 that differ in this text)"
