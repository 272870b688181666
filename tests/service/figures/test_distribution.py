"""The distribution of |d| and of the ratios: every token once, at its own edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.support.api import Rank, Service, service
from tests.support.runs.drawn import LOG_PROB, UNMEASURED, layout_of, rounds_payload, streams

from stagescope_service.figure_style import traces
from stagescope_service.figures import distribution
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_wire.errors import NotFound


def test_each_bar_counts_the_tokens_between_its_edges(deps: Dependencies) -> None:
    found = distribution.info(deps, deps.finder.step("r", None, 7))
    d = streams(7, 2).distance
    assert found.tokens == len(d)
    assert found.zeros == int((d == 0).sum())
    for low, high, tokens in found.bars:
        assert tokens == int(((d > low) & (d <= high)).sum())
    assert sum(bar.tokens for bar in found.bars) + found.zeros == len(d)
    edges = [bar.low for bar in found.bars]
    assert edges == sorted(edges)
    # Buckets are powers of 2^(1/8); the last ends at the largest difference.
    assert all(math.log2(low) * 8 == pytest.approx(round(math.log2(low) * 8)) for low in edges)
    assert found.bars[-1].high == float(d.max())


def test_of_a_round_alone(deps: Dependencies) -> None:
    found = distribution.info(deps, deps.finder.step("r", None, 7), round=2)
    tokens = streams(7, 2)
    assert found.tokens == int((tokens.round == 2).sum())
    assert "round 2" in layout_of(distribution.figure(found)).title.text
    with pytest.raises(NotFound, match="no round 9") as raised:
        distribution.info(deps, deps.finder.step("r", None, 7), round=9)
    assert raised.value.expected == "one of 0, 1, 2, 3"


def test_ratios_are_counted_on_their_side(deps: Dependencies) -> None:
    found = distribution.info(deps, deps.finder.step("r", None, 8), of="ratio")
    tokens = streams(8, 2)
    ratio = np.exp(tokens.p - tokens.q)
    edges = [0.5, 0.9, 1.0, 1.1, 2.0]
    assert [bar.low for bar in found.sides] == edges  # none below 0.5: that bar is left out
    assert float(ratio.min()) >= 0.5
    for low, high, count in found.sides:
        below = high <= 1.0
        inside = (ratio >= low) & (ratio < high) if below else (ratio > low) & (ratio <= high)
        # The outermost bounds are the extremes themselves, the innermost exclude 1.
        assert count == int((inside & (tokens.p != tokens.q)).sum())
    assert sum(bar.tokens for bar in found.sides) + found.zeros == len(ratio)
    assert found.sides[-1].high == pytest.approx(float(ratio.max()))
    either = np.maximum(ratio, 1 / ratio)
    assert found.bars[-1].high == pytest.approx(float(either.max()))
    assert found.bars[0].low >= 1.0


def test_the_figure_has_log_axes_units_and_quantiles(deps: Dependencies) -> None:
    found = distribution.info(deps, deps.finder.step("r", None, 7))
    drawn = distribution.figure(found)
    assert (layout_of(drawn).xaxis.type, layout_of(drawn).yaxis.type) == ("log", "log")
    assert layout_of(drawn).xaxis.title.text == "|d| = |p - q|, nat"
    (bars,) = traces(drawn)
    edges = np.array(bars.x) + np.array(bars.width)
    assert np.allclose(edges, [bar.high for bar in found.bars])
    assert [text.text for text in layout_of(drawn).annotations] == ["p50", "p90", "p99", "p999"]
    ratios = distribution.figure(
        distribution.info(deps, deps.finder.step("r", None, 7), of="ratio")
    )
    assert layout_of(ratios).xaxis.title.text == "ratio e^(p - q)"
    assert layout_of(ratios).yaxis2.title.text == "tokens"


def test_zeros_have_a_bar_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    with service(tmp_path_factory.mktemp("home")) as running:
        payload = rounds_payload(2, 2, 20, seed=1)
        tensors = payload["tensors"]
        q = tensors["rollout_log_probs"][2]
        tensors["old_log_probs"][2][:, ::2] = q[:, ::2]
        Rank(running, world_size=1).stage(LOG_PROB, 1, payload)
        deps = running.app.state.deps
        found = distribution.info(deps, deps.finder.step("r", None, 1))
        mask = tensors["response_mask"][2] == 1
        equal = int((tensors["old_log_probs"][2] == q)[mask].sum())
        assert found.zeros == equal > 30
        drawn = distribution.figure(found)
        zeros = next(trace for trace in traces(drawn) if trace.name == "exactly 0")
        assert list(zeros.y) == [equal]
        assert "0" in layout_of(drawn).xaxis.ticktext
        ratios = distribution.figure(
            distribution.info(deps, deps.finder.step("r", None, 1), of="ratio")
        )
        assert "exactly 1" in layout_of(ratios).xaxis.categoryarray


def test_a_step_without_numbers_says_why(trained: Service, deps: Dependencies) -> None:
    found = distribution.info(deps, deps.finder.step("r", None, UNMEASURED))
    assert (found.tokens, found.bars) == (0, ())
    assert "both streams" in (found.note or "")
    assert trained.get("/figures/distribution", run="r", step=UNMEASURED)["figure"]["data"] == []
