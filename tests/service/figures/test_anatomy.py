"""The mismatch of a step by place, position, probability, lattice and staleness, as answered."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.api import Rank, Service, service
from tests.support.runs.drawn import LOG_PROB, RANKS, UNMEASURED, handed, layout_of, streams

from stagescope_service.figure_style import traces
from stagescope_service.figures import anatomy
from stagescope_service.figures.anatomy import AXES, By
from stagescope_service.views.reading.dependencies import Dependencies


@pytest.mark.parametrize("by", ["place", "end", "position", "probability", "lattice"])
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
    assert layout_of(drawn).xaxis.title.text == AXES[by]


def test_bins_are_labelled_by_what_they_hold() -> None:
    assert [anatomy.label("place", key) for key in (0, 1, 2, 3, 64, 65)] == [
        "0", "1", "2-3", "4-7", "last of the sample", "unknown",
    ]  # fmt: skip
    assert [anatomy.label("probability", key) for key in (0, 1, 9, 10, 65)] == [
        "0-1e-06", "1e-06-0.0001", "0.999-1", "over 1", "not finite",
    ]  # fmt: skip
    assert [anatomy.label("lattice", key) for key in (0, 1, 2, 14, 65)] == [
        "d = 0", "below 2^-12", "2^-12", "2^0", "not finite",
    ]  # fmt: skip


def test_the_answer_has_the_numbers_of_the_figure(trained: Service, deps: Dependencies) -> None:
    answer = trained.get("/steps/7/anatomy", run="r", by="probability")
    found = anatomy.info(deps, deps.finder.step("r", None, 7), "probability")
    assert (answer["step"], answer["by"], answer["note"]) == (7, "probability", None)
    assert answer["mean_abs"] == found.mean_abs
    assert [tuple(row.values()) for row in answer["rows"]] == [
        (each.label, each.tokens, each.nonfinite, each.mean_abs, each.mean) for each in found.bins
    ]


def test_engines_have_the_tokens_of_the_rows_that_they_sampled(deps: Dependencies) -> None:
    found = anatomy.info(deps, deps.finder.step("r", None, 8), "engine")
    assert [each.label for each in found.bins] == ["replica 0", "replica 1"]
    for first, each in enumerate(found.bins):
        own = streams(8, 2, range(first, RANKS, 2))
        assert each.tokens == len(own.p)
        assert each.mean_abs == pytest.approx(float(own.distance.mean()))
        assert each.mean == pytest.approx(float((own.p - own.q).mean()))


def test_tokens_of_rows_that_name_no_engine_are_counted(tmp_path: Path) -> None:
    with service(tmp_path / "home") as live:
        for at in (0, 1):
            payload = handed(at, 1)
            if at:
                del payload["strings"]["engine_ids"]
            Rank(live, rank=at, world_size=2).stage(LOG_PROB, 1, payload)
        answer = live.get("/steps/1/anatomy", by="engine")
        own, other = (len(streams(1, 1, [at]).p) for at in (0, 1))
        assert [(row["label"], row["tokens"]) for row in answer["rows"]] == [("replica 0", own)]
        assert answer["left_out"] == other
        note = f"{other} of {own + other} tokens are left out: their rows name no engine"
        assert answer["note"] == note
        assert live.get("/steps/1/anatomy", by="place")["left_out"] == 0


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
    assert len(layout_of(drawn).annotations) == 1
