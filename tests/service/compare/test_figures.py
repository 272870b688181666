"""Figures of a comparison."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.support.memory_dumps import MemoryDump, batch, record, single, split

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.report import as_json
from stagescope_service.compare.report.figures import MAX_DETAILED, pictures

SHARES = [[0, 1, 2], [3, 4, 5]]
FLOW = "Differences in the order in which data flows"
Figure = dict[str, Any]
"""A plotly figure as JSON."""


def drawn(*sides: MemoryDump) -> list[Figure]:
    return [figure.to_dict() for figure in pictures(as_json(compare(sides))["pairs"][0])]


def titles(figures: list[Figure]) -> list[str]:
    return [figure["layout"]["title"]["text"] for figure in figures]


def numbers(**values: list[float]) -> MemoryDump:
    return single("other", {n: np.array(v) for n, v in values.items()})


def test_nothing_is_drawn_of_what_is_the_same() -> None:
    assert drawn(split(batch()), split(batch())) == []


def test_of_tokens_is_counted_where_they_differ() -> None:
    figures = drawn(split(batch(), SHARES), split(batch(seed=1), SHARES))
    assert titles(figures)[:2] == [
        FLOW, "trajectories/prompts: values that differ by rank and part",
    ]  # fmt: skip
    flow, locations = figures[:2]
    crosses = next(trace for trace in flow["data"] if trace["name"] == "differs, has no distance")
    assert {"trajectories/prompts", "trajectories/responses"} <= set(crosses["x"])
    assert locations["layout"]["yaxis"]["title"]["text"] == "part"
    assert locations["data"][0]["zmin"] == 0


def test_a_zero_stands_below_the_smallest_difference() -> None:
    (flow,) = drawn(numbers(a=[1.0], b=[1.0], c=[1.0]), numbers(a=[1.0], b=[1.02], c=[31.0]))
    axis = flow["layout"]["yaxis"]
    ticks = dict(zip(axis["ticktext"], axis["tickvals"], strict=True))
    assert ticks == pytest.approx({"0": 1e-3, "0.01": 1e-2, "0.1": 0.1, "1": 1, "10": 10,
                                   "100": 100})  # fmt: skip
    same, different = flow["data"][:2]
    assert same["y"] == pytest.approx([1e-3])
    assert different["y"] == pytest.approx([0.02, 30])


def test_tensors_without_finite_values_are_drawn_as_differing() -> None:
    (flow,) = drawn(numbers(a=[1.0]), numbers(a=[math.nan]))
    assert flow["data"][-1]["name"] == "differs, has no distance"
    assert list(flow["data"][-1]["x"]) == ["other/a"]


def test_few_tensors_have_figures_of_their_own_and_names_are_distinct() -> None:
    def dump(by: float) -> MemoryDump:
        named = {f"model.{at}.a_long_tail_that_is_the_same": np.full(4, 1 + by) for at in range(20)}
        return MemoryDump([record("gradients", named, rank=rank) for rank in range(2)])

    figures = drawn(dump(0.0), dump(1.0))
    assert len(figures) == 1 + MAX_DETAILED
    assert len(set(figures[0]["data"][0]["x"])) == 20


def test_names_are_no_markup_of_plotlys() -> None:
    evil = "<a href='http://x'>%{y}</a>"
    (flow,) = drawn(numbers(**{evil: [1.0]}), numbers(**{evil: [2.0]}))
    assert "<a" not in str(flow)


def test_a_rank_and_part_shows_its_largest_difference() -> None:
    def side(a: float, b: float) -> MemoryDump:
        values = {"one": a, "two": b}
        return MemoryDump([
            record("other", {"x": np.array([x])}, stage=stage) for stage, x in values.items()
        ])  # fmt: skip

    _, heatmap = drawn(side(1, 1), side(4, 3))
    assert heatmap["data"][0]["z"] == [[3.0]]
