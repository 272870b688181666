"""The rounds of a step by value."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.support.api import Service
from tests.support.runs.drawn import (
    LENGTH,
    RANKS,
    ROUNDS,
    ROWS,
    UNMEASURED,
    layout_of,
    streams,
    y_axes_of,
)

from stagescope_service.figure_style import traces
from stagescope_service.figures import rounds
from stagescope_service.figures.rounds import RoundsInfo
from stagescope_service.views.reading.dependencies import Dependencies

BUCKET = 0.045
"""Relative error of a quantile by histogram."""


@pytest.fixture(scope="module")
def found(deps: Dependencies) -> RoundsInfo:
    return rounds.info(deps, deps.finder.step("r", None, 7))


def test_each_round_has_the_mean_and_the_quantiles_of_its_tokens(found: RoundsInfo) -> None:
    assert (found.run, found.attempt, found.step) == ("r", 2, 7)
    assert [each.round for each in found.rounds] == [*range(ROUNDS)]
    tokens = streams(7, 2)
    for each in found.rounds:
        d = np.sort(tokens.where(tokens.round == each.round).distance)
        assert each.tokens == len(d) == RANKS * ROWS * LENGTH
        assert each.mean == pytest.approx(float(d.mean()), rel=1e-9)
        assert each.largest == float(d[-1])
        assert each.p50 == pytest.approx(d[math.ceil(0.5 * len(d)) - 1], rel=BUCKET)
        assert each.p99 == pytest.approx(d[math.ceil(0.99 * len(d)) - 1], rel=BUCKET)
        assert each.nonfinite == 0


def test_the_steps_before_are_those_in_force(found: RoundsInfo) -> None:
    assert [(each.step, each.attempt) for each in found.before] == [(6, 2), (5, 1), (4, 1)]
    for each in found.before:
        tokens = streams(each.step, each.attempt)
        assert [at for at, _ in each.means] == [*range(ROUNDS)]
        for at, mean in each.means:
            own = tokens.where(tokens.round == at).distance
            assert mean == pytest.approx(float(own.mean()), rel=1e-9)


def test_of_a_superseded_step_they_are_those_of_its_own_attempt(deps: Dependencies) -> None:
    found = rounds.info(deps, deps.finder.step("r", 1, 7), compare=2)
    assert [(each.step, each.attempt) for each in found.before] == [(6, 1), (5, 1)]
    assert rounds.info(deps, deps.finder.step("r", None, 7), compare=0).before == ()


def test_what_is_not_finite_is_counted_and_marked(deps: Dependencies) -> None:
    found = rounds.info(deps, deps.finder.step("r", None, 2))
    assert [each.nonfinite for each in found.rounds] == [1, 0, 0, 0]
    assert found.rounds[0].tokens == RANKS * ROWS * LENGTH - 1
    bad = next(trace for trace in traces(rounds.figure(found)) if trace.name == "not finite")
    assert list(bad.x) == [0]


def test_the_figure_has_units_and_its_worst_round_stands_out(found: RoundsInfo) -> None:
    drawn = rounds.figure(found)
    assert layout_of(drawn).xaxis.title.text == "round"
    assert [axis.title.text for axis in y_axes_of(drawn)] == ["|d|, nat", "tokens"]
    mean = next(trace for trace in traces(drawn) if trace.name == "mean")
    worst = max(found.rounds, key=lambda each: each.mean or 0.0).round
    assert [at for at, symbol in enumerate(mean.marker.symbol) if symbol == "diamond"] == [worst]
    before = [trace for trace in traces(drawn) if trace.name == "steps before: mean"]
    assert len(before) == 3
    bars = next(trace for trace in traces(drawn) if trace.name == "tokens")
    assert list(bars.y) == [RANKS * ROWS * LENGTH] * ROUNDS


def test_a_step_without_numbers_says_why(trained: Service, deps: Dependencies) -> None:
    found = rounds.info(deps, deps.finder.step("r", None, UNMEASURED))
    assert found.rounds == ()
    assert "no rank has handed over both streams" in (found.note or "")
    drawn = rounds.figure(found)
    assert (len(traces(drawn)), layout_of(drawn).xaxis.title.text) == (0, "round")
    answer = trained.get("/figures/rounds", run="r", step=UNMEASURED)
    assert answer["note"] == found.note
    assert answer["figure"]["data"] == []
