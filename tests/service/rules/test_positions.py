"""What a rise of the mismatch with the position is, and what is none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stagescope_service.rules.symptoms.positions import Rise
from stagescope_service.statistics.profile_bins import Bin

FACTOR = 3.0


def bins_of(means: Sequence[float], tokens: int = 256) -> list[Bin]:
    """Return bins with a mean |d|, all of whose tokens carry it: positions 0, 1, 2-3, 4-7, ..."""
    return [
        Bin(key, tokens, 0, 0.0, mean * tokens, mean**2 * tokens)
        for key, mean in enumerate(means)
    ]  # fmt: skip


def exceeds(means: Sequence[float], tokens: int = 256) -> bool:
    rise = Rise.of(13, bins_of(means, tokens))
    assert rise is not None
    return rise.exceeds(FACTOR)


@pytest.mark.parametrize(
    "means",
    [
        # An int8 engine; a template of two, of four, of fifteen tokens that are nearly certain.
        [0.00014, 0.0011, 0.0116, 0.0050, 0.0062, 0.0106, 0.0122, 0.0152],
        [0.0001, 0.0001, 0.012, 0.012, 0.012, 0.012, 0.012, 0.013],
        [0.0001, 0.0001, 0.0002, 0.012, 0.012, 0.012, 0.012, 0.013],
        [0.0001, 0.0001, 0.0002, 0.0002, 0.0003, 0.012, 0.012, 0.013],
    ],
)
def test_certain_tokens_at_the_begin_are_no_rise(means: list[float]) -> None:
    assert not exceeds(means)


@pytest.mark.parametrize(
    "means",
    [
        [0.01 * 2**key for key in range(8)],
        [0.0001, 0.0001, *(0.01 * 2**key for key in range(6))],
        [0.01] * 7 + [0.2],
        [0.01 * 1.4**key for key in range(14)],  # slowly, over 8192 positions
    ],
)
def test_a_rise_beyond_the_first_positions_is_one(means: list[float]) -> None:
    assert exceeds(means)


def test_the_text_names_the_positions_that_it_counted() -> None:
    rise = Rise.of(13, bins_of([0.001] * 7 + [0.02], tokens=64))
    assert rise is not None
    assert rise.text == (
        "step 13: mean |d| is 0.001 at positions 2-7 (128 tokens), 0.0105 from position 32 on "
        "(128 tokens)"
    )


def test_few_positions_are_not_compared() -> None:
    assert Rise.of(13, bins_of([0.01, 0.02, 0.04, 0.08])) is None
    assert Rise.of(13, []) is None
