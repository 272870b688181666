"""Numbers by rank and round, and by rank and step: by value, folded and sorted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.api import Rank, Service, service
from tests.support.measure import Handed
from tests.support.runs.drawn import (
    APART,
    APART_FROM,
    LENGTH,
    LOG_PROB,
    RANKS,
    ROUNDS,
    ROWS,
    UNMEASURED,
    layout,
    layout_of,
    rounds_payload,
    streams,
)

from stagescope_service import figure_style as style
from stagescope_service.figure_style import traces
from stagescope_service.figures import heatmaps
from stagescope_service.figures.heatmaps import HeatInfo
from stagescope_service.figures.rank_rows import explained, standing_apart
from stagescope_service.views.reading.dependencies import Dependencies, Window
from stagescope_service.views.reading.target import Target

EVERYTHING: Window = {"first": None, "last": None}
METRICS: tuple[heatmaps.Metric, ...] = tuple(heatmaps._MEASURES)


def target(deps: Dependencies, step: int, run: str = "r") -> Target:
    return deps.finder.step(run, None, step)


def test_each_rank_and_round_has_the_number_of_its_own_tokens(deps: Dependencies) -> None:
    found = heatmaps.rounds_info(deps, target(deps, 8))
    assert found.columns == (*range(ROUNDS),)
    assert found.ranks == len(found.rows) == RANKS
    for row in found.rows:
        ((role, rank),) = row.ranks
        assert (role, row.label) == ("actor", f"rank {rank} (dp {rank})")
        tokens = streams(8, 2, [rank])
        for column, value in zip(found.columns, row.values, strict=True):
            own = tokens.where(tokens.round == column).distance
            assert value == pytest.approx(float(own.mean()), rel=1e-9)
        assert row.tokens == (ROWS * LENGTH,) * ROUNDS


@pytest.mark.parametrize("metric", METRICS)
def test_numbers_are_those_that_are_published(
    deps: Dependencies, trained: Service, metric: heatmaps.Metric
) -> None:
    found = heatmaps.steps_info(deps, "r", None, Window(first=7, last=7), metric)
    by_round = heatmaps.rounds_info(deps, target(deps, 7), metric)
    assert {row.ranks for row in found.rows} == {row.ranks for row in by_round.rows}
    for row in found.rows:
        (rank,) = row.ranks
        published = trained.get("/steps/7/metrics", run="r", rank=rank[1])["metrics"][metric]
        assert list(row.values) == pytest.approx([published], rel=1e-9)
    tokens = streams(7, 2)
    by_hand = {
        "logprob_abs_diff/max": lambda d: np.abs(d).max(),
        "rollout_corr/kl": lambda d: -d.mean(),
        "token_mult_prob_error": lambda d: np.exp(np.abs(d)).mean(),
        "tail/abs_diff_over_0.5_share": lambda d: (np.abs(d) > 0.5).mean(),
        "counts/tokens": len,
    }
    if metric in by_hand:
        row = next(row for row in by_round.rows if row.ranks == (("actor", APART),))
        own = streams(7, 2, [APART])
        for column, value in zip(by_round.columns, row.values, strict=True):
            d = (own.p - own.q)[own.round == column]
            assert value == pytest.approx(float(by_hand[metric](d)), rel=1e-9)
    assert len(tokens.p) == RANKS * ROWS * LENGTH * ROUNDS


def test_the_odd_one_out_is_on_top_and_named(deps: Dependencies) -> None:
    found = heatmaps.rounds_info(deps, target(deps, 8))
    assert [row.apart for row in found.rows] == [True] + [False] * (RANKS - 1)
    assert found.rows[0].ranks == (("actor", APART),)
    value = style.number(float(streams(8, 2, [APART]).distance.mean()))
    differs = f"actor rank {APART} ({value}) differs from the other ranks: the median rank has "
    assert (found.note or "").startswith(differs)
    means = [float(streams(8, 2, row.ranks_numbers).distance.mean()) for row in _numbered(found)]
    assert means == sorted(means, reverse=True)


class _Numbered:
    def __init__(self, ranks: list[int]) -> None:
        self.ranks_numbers = ranks


def _numbered(found: HeatInfo) -> list[_Numbered]:
    return [_Numbered([rank for _, rank in row.ranks]) for row in found.rows]


def test_by_step_it_stands_apart_since_it_does(deps: Dependencies) -> None:
    found = heatmaps.steps_info(deps, "r", None, EVERYTHING, heatmaps.DEFAULT)
    assert found.columns == (*range(1, 11),)
    row = found.rows[0]
    assert row.ranks == (("actor", APART),)
    others = [other.values for other in found.rows[1:]]
    for at, step in enumerate(found.columns):
        if step in (UNMEASURED, 10):
            assert row.values[at] is None
            continue
        attempt = 2 if step > 5 else 1
        mean = float(streams(step, attempt, [APART]).distance.mean())
        assert row.values[at] == pytest.approx(mean, rel=1e-9)
        largest = max(values[at] or 0.0 for values in others)
        assert (mean > 2 * largest) == (step >= APART_FROM)
    assert "no numbers in steps 3, 10" in (found.note or "")


def test_the_figure_has_a_gap_where_nothing_was_measured(deps: Dependencies) -> None:
    found = heatmaps.steps_info(deps, "r", None, EVERYTHING, heatmaps.DEFAULT)
    drawn = heatmaps.figure(found)
    (heat,) = traces(drawn)
    assert np.isnan(heat.z[:, UNMEASURED - 1]).all()
    assert "not measured" in heat.text[0][UNMEASURED - 1]
    assert heat.y[0] == f"▲ rank {APART} (dp {APART})"
    assert (layout_of(drawn).xaxis.title.text, layout_of(drawn).yaxis.title.text) == (
        "step",
        "rank",
    )
    assert heat.colorbar.ticksuffix == " nat"


def test_ranks_that_are_apart_are_labelled_among_many(deps: Dependencies) -> None:
    found = heatmaps.rounds_info(deps, target(deps, 1))
    rows = [
        dataclasses.replace(found.rows[0], label=f"rank {at}", apart=at < 5) for at in range(80)
    ]
    labels = layout_of(heatmaps.figure(dataclasses.replace(found, rows=tuple(rows)))).yaxis.tickvals
    assert [f"▲ rank {at}" for at in range(5)] == list(labels[:5])
    assert "rank 78" in labels
    assert "rank 77" not in labels


def test_a_step_without_numbers_says_why(deps: Dependencies) -> None:
    found = heatmaps.rounds_info(deps, target(deps, UNMEASURED))
    assert (found.rows, found.ranks) == ((), 0)
    assert "both streams" in (found.note or "")
    assert len(traces(heatmaps.figure(found))) == 0


# --- many ranks -----------------------------------------------------------------------------
TP, DP = 4, 24
HOT_TP, ODD = 3, 37


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """96 ranks of tp 4: those of tp 3 differ twice as much, and rank 37 ten times."""
    with service(tmp_path_factory.mktemp("home")) as running:
        for at in range(TP * DP):
            rank = Rank(running, rank=at, world_size=TP * DP, data_rank=at,
                        layout=layout(at, TP, DP))  # fmt: skip
            rank.stage(LOG_PROB, 1, wide_payload(at))
        yield running


def wide_payload(at: int) -> Handed:
    noise = 0.01 * (10.0 if at == ODD else 2.0 if at % TP == HOT_TP else 1.0)
    return rounds_payload(1, 2, 40, seed=at, first_sample=at, noise=noise)


def distances(ranks: list[int], column: int) -> npt.NDArray[np.float64]:
    found = []
    for at in ranks:
        tensors = wide_payload(at)["tensors"]
        p, q = (tensors[n][2].astype(np.float64) for n in ("old_log_probs", "rollout_log_probs"))
        found.append(np.abs(p - q)[0, 41 * column : 41 * column + 40])
    return np.concatenate(found)


def test_many_ranks_are_folded_by_what_tells_them_apart(wide: Service) -> None:
    deps = wide.app.state.deps
    found = heatmaps.rounds_info(deps, target(deps, 1))
    assert found.ranks == TP * DP
    odd, *folded = found.rows
    assert (odd.ranks, odd.apart) == ((("actor", ODD),), True)
    assert (found.folded_by or "").startswith("tp")
    assert folded[0].label == f"tp {HOT_TP} ({DP} ranks)"
    assert sorted(rank for row in found.rows for _, rank in row.ranks) == [*range(TP * DP)]
    for row in folded:
        ranks = [rank for _, rank in row.ranks]
        for column, value in zip(found.columns, row.values, strict=True):
            # Every token counts once: no mean of means.
            assert value == pytest.approx(float(distances(ranks, column).mean()), rel=1e-9)
        worst = max(ranks, key=lambda rank: float(distances([rank], 0).mean()))
        assert f"actor {worst}," in row.largest[0]
    assert "96 ranks are folded by tp" in (found.note or "")


def test_of_the_largest_the_fold_is_the_largest(wide: Service) -> None:
    deps = wide.app.state.deps
    found = heatmaps.rounds_info(deps, target(deps, 1), "logprob_abs_diff/max")
    for row in found.rows:
        ranks = [rank for _, rank in row.ranks]
        assert row.values[0] == float(distances(ranks, 0).max())


def test_without_a_layout_ranks_are_folded_by_their_numbers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with service(tmp_path_factory.mktemp("home")) as running:
        for at in range(70):
            rank = Rank(running, rank=at, world_size=70)
            rank.stage(LOG_PROB, 1, rounds_payload(1, 1, 8, seed=at, first_sample=at))
        deps = running.app.state.deps
        found = heatmaps.rounds_info(deps, target(deps, 1))
        assert len(found.rows) < 64
        assert "no parallel dimension" in (found.folded_by or "")
        assert sorted(rank for row in found.rows for _, rank in row.ranks) == [*range(70)]


# --- what decides -----------------------------------------------------------------------------
def test_standing_apart_is_by_median_and_deviation() -> None:
    values = np.array([1.0, 1.1, 0.9, 1.05, 0.95, 5.0, np.nan])
    assert np.flatnonzero(standing_apart(values)).tolist() == [5]
    # Equal values have no deviation: then a quarter of the median is the least.
    assert not standing_apart(np.array([1.0, 1.0, 1.0, 1.0, 1.2])).any()
    assert standing_apart(np.array([1.0, 1.0, 1.0, 1.0, 1.3])).tolist() == [False] * 4 + [True]
    assert not standing_apart(np.array([1.0, 9.0, 1.0])).any()
    in_groups = np.array([1.0, 1.0, 1.0, 1.1, 3.0, 3.0, 3.1, 9.0])
    assert np.flatnonzero(standing_apart(in_groups, [0] * 4 + [1] * 4)).tolist() == [7]


def test_the_explained_share_is_that_of_an_analysis_of_variance() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    keys = ["a", "a", "a", "b", "b", "b"]
    clipped = np.clip(values, np.quantile(values, 0.01), np.quantile(values, 0.99))
    means = np.repeat([clipped[:3].mean(), clipped[3:].mean()], 3)
    expected = ((means - clipped.mean()) ** 2).sum() / ((clipped - clipped.mean()) ** 2).sum()
    assert explained(values, keys) == pytest.approx(float(expected))
    assert explained(values, ["a"] * 6) == 0.0
    assert explained(np.ones(6), keys) == 0.0
    assert explained(np.full(6, np.nan), keys) == 0.0
