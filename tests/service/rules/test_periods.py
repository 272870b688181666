"""Since when a symptom holds: replayed, it does not move, and seldom comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_service.rules import evidence
from stagescope_service.rules.evidence import (
    Evidence,
    Period,
    Series,
    beyond,
    event_period,
    rate_period,
)
from stagescope_service.rules.symptoms.scalars import _spike
from stagescope_service.statistics.cell import Float64

WINDOW = 10


def replayed(found: Callable[[int], int | None], length: int) -> tuple[int, list[int]]:
    """Check that what is found up to each value never moves while it holds.

    Returns how often it came or went, and the first index of each stretch.
    """
    before, flips, since = None, 0, []
    for end in range(1, length + 1):
        first = found(end)
        if before is not None and first is not None:
            assert first == before, end
        flips += (first is None) != (before is None)
        since += [first] if first is not None and before is None else []
        before = first
    return flips, since


def first_of(period: Period | None) -> int | None:
    return None if period is None or period.last is not None else period.first


COUNTS = st.lists(
    st.integers(0, 16).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    min_size=1, max_size=60,
)  # fmt: skip


@given(COUNTS, st.sampled_from([0.01, 0.1, 0.5, 0.8]))
def test_the_begin_of_a_rate_does_not_move(counts: list[tuple[int, int]], share: float) -> None:
    marked, trials = np.array(counts, np.float64).T
    _, since = replayed(
        lambda end: first_of(rate_period(marked[:end], trials[:end], share, WINDOW)), len(counts)
    )
    assert since == sorted(set(since))
    assert all(marked[first] for first in since)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 12))
def test_the_begin_of_events_does_not_move(marks: list[bool], window: int) -> None:
    events = np.array(marks)
    replayed(lambda end: first_of(event_period(events[:end], window)), len(events))
    period = event_period(events, window)
    assert (first_of(period) is None) == (not events[-window:].any())
    if period is not None and period.last is not None:
        assert period.last == np.flatnonzero(events)[-1]


@pytest.mark.parametrize("trials", [1, 16])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_a_rate_at_the_share_itself_seldom_comes_and_goes(trials: int, share: float) -> None:
    """Of 20 runs of 400 steps whose rate is the share at which the symptom begins."""
    flips: list[int] = []
    plain: list[int] = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        marked = rng.binomial(trials, share, 400).astype(np.float64)
        each = np.full(400, float(trials))
        flips.append(
            replayed(
                lambda end, marked=marked, each=each: first_of(  # type: ignore[misc]
                    rate_period(marked[:end], each[:end], share, WINDOW)
                ),
                400,
            )[0]
        )
        over = np.convolve(marked, np.ones(WINDOW), "valid") >= share * trials * WINDOW
        plain.append(int(np.abs(np.diff(over.astype(int))).sum()))
    assert max(flips) <= 16
    assert 3 * np.mean(flips) <= np.mean(plain), (np.mean(flips), np.mean(plain))


@pytest.mark.parametrize("begin", [0, 7, 40])
def test_a_rate_that_rises_is_found_from_its_first_step_on(begin: int) -> None:
    rng = np.random.default_rng(begin)
    marked = rng.binomial(16, np.where(np.arange(200) < begin, 0.2, 0.8), 200).astype(np.float64)
    flips, since = replayed(
        lambda end: first_of(rate_period(marked[:end], np.full(end, 16.0), 0.5, WINDOW)), 200
    )
    assert (flips, since) == (1, [begin])


def test_a_rate_that_falls_again_is_over() -> None:
    marked = np.concatenate([np.ones(20), np.zeros(6), np.ones(3), np.zeros(12)])
    ends = [
        end
        for end in range(1, len(marked) + 1)
        if first_of(rate_period(marked[:end], np.ones(end), 0.5, WINDOW)) is not None
    ]
    assert ends[0] == 5
    assert ends[-1] == 37
    ended = rate_period(marked, np.ones(len(marked)), 0.5, WINDOW)
    assert ended is not None
    assert (ended.first, ended.last) == (0, 28)


def series(values: Sequence[float] | Float64) -> Series:
    steps = np.arange(1, len(values) + 1)
    return Series("grad_norm", steps, np.ones(len(values), np.int64), np.array(values, np.float64))


def since_of(evidence: Evidence) -> int | None:
    return evidence.since_step if evidence.verdict == "found" else None


def test_spikes_since_their_first_one_however_the_median_moves() -> None:
    """Of a live run of the example: spikes in steps 29, 49, 73 and 170, in a norm that falls."""
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(0.0, 0.3, 300)) * np.linspace(3.0, 0.3, 300)
    norms[[28, 48, 72, 169]] *= 40.0
    flips, since = replayed(lambda end: since_of(_spike(series(norms[:end]), 10.0, 50)), 300)
    assert (flips, since) == (4, [29, 170])
    late = _spike(series(norms[:110]), 10.0, 50)
    assert late.sure == 1.0
    assert "(step 29, step 49, step 73)" in late.supports[0]
    assert late.against == ("last seen in step 73; 37 steps without it",)
    assert late.last_step == 73


@given(st.lists(st.sampled_from([1.0, 1.1, 0.9, 30.0, float("nan")]), min_size=1, max_size=80))
def test_the_begin_of_spikes_does_not_move(values: list[float]) -> None:
    replayed(lambda end: since_of(_spike(series(values[:end]), 10.0, 12)), len(values))


def test_what_holds_although_the_newest_steps_are_fewer_says_so() -> None:
    marks = [1.0] * 20 + [0.0, 1.0] * 2 + [0.0] * 2
    found = beyond(series(marks), 0.5, WINDOW, 0.7)
    assert (found.verdict, found.since_step) == ("found", 1)
    assert found.against == (
        "the share in the newest 10 steps, 60%, is below the limit of 70%, but not by more than "
        "chance: the symptom continues",
    )


def test_values_that_are_not_finite_are_no_spikes() -> None:
    values = [1.0] * 10 + [float("nan")] * 20 + [1.0] * 5
    assert _spike(series(values), 10.0, 50).verdict == "not found"
    (late,) = {_spike(series([*values, 30.0]), 10.0, 50).since_step}
    assert late == len(values) + 1


# --- statistics of the evidence ---------------------------------------------------------------
@given(st.lists(st.integers(-5, 5), min_size=2, max_size=40))
def test_rank_correlations_are_those_of_their_definitions(values: list[int]) -> None:
    numbers = np.array(values, np.float64)
    count = len(values)
    pairs = [
        (later > earlier) - (later < earlier)
        for index, earlier in enumerate(values)
        for later in values[index + 1 :]
    ]
    assert evidence.kendall(numbers) == pytest.approx(sum(pairs) / (count * (count - 1) / 2))
    ranks = [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]
    if len(set(values)) > 1:
        expected = np.corrcoef(ranks, np.arange(count))[0, 1]
        assert evidence.spearman(numbers) == pytest.approx(expected, abs=1e-12)
