"""The mismatch by place, position, probability and staleness, against a loop over tokens."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from tests.support.api import Service
from tests.support.batches import batch_of, random_streams
from tests.support.figures import UNMEASURED, streams

from stagescope_service.api.dependencies import Dependencies
from stagescope_service.api.figures import anatomy
from stagescope_service.api.figures.anatomy import AXES, LAST, UNKNOWN, By, Sums
from stagescope_service.figure_style import traces

Found = dict[str, tuple[int, int, float | None, float | None]]


def span(index: int) -> str:
    """The label of the bin of an index: 0, 1, 2-3, 4-7, ..."""
    low = 1
    while 2 * low <= index:
        low *= 2
    return str(index) if index < 2 else f"{low}-{2 * low - 1}"


def chance(q: float) -> str:
    if not math.isfinite(q):
        return "not finite"
    if q > 0:
        return "over 1"
    bounds = ["0", "1e-06", "0.0001", "0.001", "0.01", "0.1", "0.5", "0.9", "0.99", "0.999", "1"]
    for low, high in itertools.pairwise(bounds):
        if math.exp(q) < float(high) or high == "1":
            return f"{low}-{high}"
    raise AssertionError


def reference(by: str, p: Any, q: Any, mask: Any) -> Found:
    sums: dict[str, list[list[float]]] = defaultdict(lambda: [[], []])
    for row in range(len(mask)):
        model = [i for i in range(mask.shape[1]) if mask[row, i]]
        for i in model:
            begin = end = i
            while begin - 1 in model:
                begin -= 1
            while end + 1 in model:
                end += 1
            labels = {
                "place": span(i - begin),
                "end": LAST if i == model[-1] else span(end - i),
                "position": span(i),
                "probability": chance(float(q[row, i])),
            }
            d = float(p[row, i]) - float(q[row, i])
            sums[labels[by]][0 if math.isfinite(d) else 1].append(d)
    return {
        label: (
            len(good), len(bad), math.fsum(map(abs, good)) / len(good) if good else None,
            math.fsum(good) / len(good) if good else None,
        )
        for label, (good, bad) in sums.items()
    }  # fmt: skip


def found_in(sums: Sums) -> Found:
    return {each.label: (each.tokens, each.nonfinite, each.mean_abs, each.mean)
            for each in sums.bins()}  # fmt: skip


def assert_same(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for label, (tokens, bad, absolute, mean) in expected.items():
        assert found[label][:2] == (tokens, bad)
        for value, right in zip(found[label][2:], (absolute, mean), strict=True):
            assert value is None if right is None else value == pytest.approx(right, abs=1e-12)


@pytest.mark.parametrize("by", ["place", "end", "position", "probability"])
@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_those_of_a_loop_however_the_rows_are_split(by: By, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q, mask = random_streams(rng, 7, 60)
    mask[0], mask[1] = 1, 0
    mask[:, [0, -1]] |= rng.integers(0, 2, (7, 2))
    p[2, 5], q[3, 7], q[4, 9], q[5, 3], q[6, 2] = np.nan, -np.inf, np.nan, 0.5, -20.0
    mask[2, 5] = mask[3, 7] = mask[4, 9] = mask[5, 3] = mask[6, 2] = 1
    expected = reference(by, p, q, mask)
    whole, parts = Sums(by), Sums(by)
    whole.add(batch_of(p, q, mask))
    assert_same(found_in(whole), expected)
    cut = int(rng.integers(1, 6))
    for rows in (slice(cut, None), slice(None, cut)):
        parts.add(batch_of(p[rows], q[rows], mask[rows]))
    assert_same(found_in(parts), expected)


def test_what_a_piece_does_not_know_is_said() -> None:
    p = q = np.full((1, 6), -1.0, np.float32)
    mask = np.array([[1, 1, 0, 1, 0, 1]])
    piece = batch_of(p, q, mask, token_offset=np.array([4]))
    tokens = {}
    for by in ("place", "end", "position"):
        sums = Sums(by)
        sums.add(piece)
        tokens[by] = {each.label: each.tokens for each in sums.bins()}
    assert tokens["place"] == {UNKNOWN: 2, "0": 2}
    assert tokens["end"] == {UNKNOWN: 1, "0": 2, "1": 1}
    assert tokens["position"] == {"4-7": 3, "8-15": 1}
    # Two ends of a sample on one rank (zigzag): a gap in the positions is no end of a round.
    zigzag = batch_of(p, q, np.ones((1, 6), np.int64), positions=np.array([[0, 1, 2, 9, 10, 11]]))
    place, end = Sums("place"), Sums("end")
    place.add(zigzag)
    end.add(zigzag)
    assert {e.label: e.tokens for e in place.bins()} == {"0": 1, "1": 1, "2-3": 1, UNKNOWN: 3}
    assert {e.label: e.tokens for e in end.bins()} == {UNKNOWN: 6}


@pytest.mark.parametrize("by", ["place", "end", "position", "probability"])
def test_every_token_of_a_step_counts_once(by: By, deps: Dependencies) -> None:
    found = anatomy.info(deps, deps.finder.step("r", None, 7), by)
    tokens = streams(7, 2)
    assert sum(each.tokens for each in found.bins) == len(tokens.p)
    weighted = sum(each.tokens * (each.mean or 0.0) for each in found.bins)
    assert weighted / len(tokens.p) == pytest.approx(float((tokens.p - tokens.q).mean()))
    assert found.mean_abs == pytest.approx(float(tokens.distance.mean()))
    drawn = anatomy.figure(found)
    assert list(traces(drawn)[0].x) == [each.label for each in found.bins]
    assert list(traces(drawn)[0].y) == [each.mean_abs for each in found.bins]
    assert drawn.layout.xaxis.title.text == AXES[by]


def test_the_answer_has_the_numbers_of_the_figure(trained: Service, deps: Dependencies) -> None:
    answer = trained.get("/steps/7/anatomy", run="r", by="probability")
    found = anatomy.info(deps, deps.finder.step("r", None, 7), "probability")
    assert (answer["step"], answer["by"], answer["note"]) == (7, "probability", None)
    assert answer["mean_abs"] == found.mean_abs
    assert [tuple(row.values()) for row in answer["rows"]] == [
        (each.label, each.tokens, each.nonfinite, each.mean_abs, each.mean) for each in found.bins
    ]


def test_stalenesses_are_those_of_the_store(deps: Dependencies) -> None:
    target = deps.finder.step("r", None, 7)
    found = anatomy.info(deps, target, "staleness")
    measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    stored = measured.summary.summary.staleness.items()
    assert [(each.label, each.tokens) for each in found.bins] == [
        (str(age), cell.tokens) for age, cell in stored
    ]
    assert (found.note is None) == bool(stored)


@pytest.mark.parametrize("by", AXES)
def test_a_step_without_numbers_gives_axes_and_a_sentence(by: By, deps: Dependencies) -> None:
    found = anatomy.info(deps, deps.finder.step("r", None, UNMEASURED), by)
    assert found.bins == ()
    assert found.note
    drawn = anatomy.figure(found)
    assert not drawn.data
    assert len(drawn.layout.annotations) == 1
