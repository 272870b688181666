"""The difference of two arms: on numbers, and for any tokens."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_service.core.canary.measures import Change, follows, measure, repeated
from stagescope_wire.canary import Arm

NAN = math.nan


def arm(*rows: tuple[tuple[int, ...], tuple[float, ...]]) -> Arm:
    return Arm(tuple(ids for ids, _ in rows), tuple(scores for _, scores in rows))


def test_tokens_are_paired_by_their_position_and_the_worst_is_named() -> None:
    first = arm(((7, 8, 9, 10), (-1.0, -2.0, -3.0)), ((1, 2, 3), (-1.0,)))
    second = arm(((7, 8, 9, 10), (-2.0, -3.5)), ((1, 2, 3), (-4.0, -1.25)))
    found = measure(first, second)
    assert (found.tokens, found.unscored, found.not_finite) == (3, 2, 0)
    assert (found.mean, found.max) == (0.25, 0.5)
    assert [each["mean"] for each in found.sequences] == [0.25, 0.25]
    worst = found.sequences[0]
    assert (worst["position"], worst["token_id"]) == (3, 10)
    assert (worst["first"], worst["second"], worst["parts_at"]) == (-3.0, -3.5, None)
    assert found.error == pytest.approx(0.25 / math.sqrt(3))


def test_arms_with_other_tokens_are_compared_up_to_there_and_say_so() -> None:
    first = arm(((7, 8, 9, 10), (-1.0, -2.0, -3.0)))
    second = arm(((7, 8, 5, 6, 4), (-1.5, -9.0, -9.0, -9.0)))
    found = measure(first, second)
    (sequence,) = found.sequences
    assert (found.tokens, found.unscored, found.mean) == (1, 5, 0.5)
    assert sequence["parts_at"] == 2
    nothing = measure(arm(((1, 2), (-1.0,))), arm(((3, 2), (-1.0,))))
    assert (nothing.tokens, nothing.unscored, nothing.mean, nothing.error) == (0, 2, None, None)


def test_rows_are_paired_by_their_tokens_in_any_order() -> None:
    first = arm(((1, 2), (-1.0,)), ((3, 4), (-2.0,)))
    second = arm(((3, 4), (-2.0,)), ((1, 2), (-1.0,)))
    assert measure(first, second).mean == 0.0


def test_what_is_not_finite_is_counted_and_never_a_number() -> None:
    first = arm(((0, 1, 2, 3), (-1.0, NAN, -math.inf)))
    second = arm(((0, 1, 2, 3), (-1.5, -1.0, -1.0)))
    found = measure(first, second)
    assert (found.tokens, found.not_finite, found.mean, found.max) == (1, 2, 0.5, 0.5)
    only_nan = measure(arm(((0, 1), (NAN,))), arm(((0, 1), (-1.0,))))
    assert (only_nan.tokens, only_nan.not_finite) == (0, 1)
    assert (only_nan.mean, only_nan.max) == (None, None)
    assert only_nan.sequences[0]["position"] is None


def test_a_temperature_is_a_slope_and_noise_and_other_weights_are_not() -> None:
    chance = random.Random(3)
    ids = tuple(range(65))
    raw = [-chance.expovariate(0.5) for _ in range(64)]

    def slope(scores: list[float]) -> float | None:
        return measure(arm((ids, tuple(scores))), arm((ids, tuple(raw)))).slope

    hot = slope([each / 0.7 + 0.05 + chance.gauss(0, 0.01) for each in raw])
    assert hot == pytest.approx(1 / 0.7, rel=0.02)
    assert slope([each + chance.gauss(0, 0.01) for each in raw]) is None
    assert slope([-chance.expovariate(0.5) for _ in raw]) is None
    assert slope([each + 0.3 for each in raw]) is None
    assert slope(raw) is None


def test_a_difference_that_repeats_is_seen_on_the_tokens_that_all_arms_have() -> None:
    chance, rows = random.Random(4), [tuple(range(at, at + 101)) for at in (0, 1000, 2000)]
    wrong = [[chance.gauss(0, 0.02) for _ in row[1:]] for row in rows]

    def sides(size: float) -> tuple[Arm, Arm]:
        """The trainer also scores a row that is too long for the engine."""
        weights = [[-chance.expovariate(0.5) for _ in row[1:]] for row in rows]
        engine = [
            [p + size * w + chance.gauss(0, 0.01) for p, w in zip(*each, strict=True)]
            for each in zip(weights, wrong, strict=True)
        ]
        long = (tuple(range(5000, 5101)), (-1.0,) * 100)
        trainer = arm(*zip(rows, map(tuple, weights), strict=True), long)
        return trainer, arm(*zip(rows, map(tuple, engine), strict=True))

    same = repeated(sides(1.0), sides(1.0))
    assert same is not None
    assert same.tokens == 300
    assert same.correlation == pytest.approx(0.8, abs=0.1)
    other = repeated(sides(1.0), sides(0.0))
    assert other is not None
    assert abs(other.correlation) < 0.2
    trainer, _ = sides(1.0)
    assert repeated((trainer, trainer), sides(1.0)) is None


def test_an_engine_follows_the_change_that_it_received_within_the_rounding() -> None:
    chance, ids = random.Random(5), tuple(range(801))
    exact = [[-chance.expovariate(0.5) for _ in ids[1:]]]
    for _ in range(3):
        exact.append([p + chance.gauss(0, 0.04) for p in exact[-1]])

    def change(version: int, rounding: float = 0.03) -> Change:
        """The rounding grows."""
        sides = zip(exact[version : version + 2], (rounding, 0.5 * rounding), strict=True)
        before, after = (
            arm((ids, tuple(p + chance.gauss(0, size) for p in scores))) for scores, size in sides
        )
        return Change(after, before)

    assert follows(change(1), change(2), change(1)) > 6
    assert follows(change(2), change(2), change(1)) < -6
    assert abs(follows(change(0), change(2), change(1))) < 4
    short = Change(arm(((1, 2), (-1.0,))), arm(((1, 2), (-2.0,))))
    assert follows(short, change(2), change(1)) == 0


scores = st.floats(-30, 0) | st.sampled_from([NAN, -math.inf])


@st.composite
def arms(draw: st.DrawFn) -> Arm:
    rows = draw(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=4))
    lengths = [draw(st.integers(0, len(row))) for row in rows]
    drawn = [draw(st.lists(scores, min_size=n, max_size=n)) for n in lengths]
    return Arm(tuple(map(tuple, rows)), tuple(map(tuple, drawn)))


@given(arms(), arms())
def test_every_token_counts_once_and_the_total_is_that_of_its_sequences(
    first: Arm, second: Arm
) -> None:
    found = measure(first, second)
    for name in ("tokens", "unscored", "not_finite"):
        assert getattr(found, name) == sum(each[name] for each in found.sequences)
    total = sum(each["tokens"] * (each["mean"] or 0.0) for each in found.sequences)
    if found.mean is not None:
        assert total == pytest.approx(found.tokens * found.mean)
        assert found.max == max(each["max"] or 0.0 for each in found.sequences)
    assert (found.mean is None) == (found.tokens == 0)
    finite = all(math.isfinite(each) for row in first.log_probs for each in row)
    same = measure(first, first)
    assert same.mean in (None, 0.0)
    assert not finite or same.unscored == same.not_finite == 0
