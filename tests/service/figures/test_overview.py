"""The overview: its numbers by value, on what real ranks handed over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.api import Rank, Service, service
from tests.support.runs.drawn import FLOOR, UNMEASURED, layout_of, streams, y_axes_of
from tests.support.runs.shown import keep_tensors, payload

from stagescope_service import figure_style as style
from stagescope_service.figure_style import traces
from stagescope_service.figures import overview
from stagescope_service.figures.drawing import as_json
from stagescope_service.figures.lines import Mark, NotFinite
from stagescope_service.figures.overview import OverviewInfo
from stagescope_service.figures.run_curves import CurveRequest, Panel
from stagescope_service.views.reading.dependencies import Dependencies, Window
from stagescope_wire.errors import InvalidInput, NotFound

MEAN, K3 = "logprob_abs_diff/mean", "rollout_corr/k3_kl"
PEARSON = "training/rollout_actor_probs_pearson_corr"


def values_of(panel: Panel) -> dict[tuple[int, int], tuple[bool, float | None]]:
    """Return (attempt, step) -> whether it is superseded, and its value."""
    return {
        (line.attempt, step): (line.superseded, value)
        for line in panel.lines
        for step, value in zip(line.steps, line.values, strict=True)
    }


def marks_of(found: OverviewInfo, kind: str) -> list[Mark]:
    return [mark for mark in found.marks if mark.kind == kind]


@pytest.fixture(scope="module")
def found(deps: Dependencies) -> OverviewInfo:
    return overview.info(deps, "r", CurveRequest([MEAN, K3, PEARSON]))


def test_every_step_of_each_attempt_has_the_number_of_its_tokens(found: OverviewInfo) -> None:
    values = values_of(found.panels[0])
    expected = [(1, step) for step in range(1, 9)] + [(2, step) for step in range(6, 11)]
    assert sorted(values) == expected
    for (attempt, step), (superseded, value) in values.items():
        assert superseded == (attempt == 1 and step > 5)
        if (attempt, step) in ((1, UNMEASURED), (1, 8), (2, 10)):  # not handed over; not closed
            assert value is None
        else:
            assert value == pytest.approx(float(streams(step, attempt).distance.mean()), rel=1e-9)
    d = streams(7, 2).p - streams(7, 2).q
    k3 = values_of(found.panels[1])[2, 7][1]
    assert k3 == pytest.approx(float((np.expm1(d) - d).mean()), rel=1e-9)
    assert (found.panels[0].unit, found.panels[2].unit) == ("nat", "")
    assert (found.steps, found.first, found.last) == (13, 1, 10)


def test_the_noise_floor_and_the_stalenesses_are_those_of_their_tokens(found: OverviewInfo) -> None:
    panel = found.panels[0]
    tokens = streams(5)
    (floor, _, _) = panel.floor
    own = dict(zip(floor.steps, floor.values, strict=True))[5]
    assert own == pytest.approx(float(np.abs(tokens.p - tokens.again).mean()), rel=1e-9)
    assert own == pytest.approx(FLOOR * math.sqrt(2 / math.pi), rel=0.1)
    assert [staleness for staleness, _ in panel.stalenesses] == [0, 1]
    for staleness, (line, *_) in panel.stalenesses:
        mean = float(tokens.where(tokens.staleness == staleness).distance.mean())
        assert dict(zip(line.steps, line.values, strict=True))[5] == pytest.approx(mean, rel=1e-9)


def test_attempts_and_what_happened_are_marked(found: OverviewInfo) -> None:
    (boundary,) = found.boundaries
    assert (boundary.attempt, boundary.step) == (2, 6)
    assert "resumed after step 5" in boundary.text
    assert [(m.first, m.last) for m in marks_of(found, "weight sync")] == [
        (2, 2), (4, 4), (6, 6), (8, 8), (10, 10),
    ]  # fmt: skip
    (capture,) = marks_of(found, "capture")
    assert (capture.first, capture.level) == (5, "complete")
    assert "2 dumps" in capture.text
    mine = {mark.text.partition(":")[0]: mark for mark in marks_of(found, "finding")}
    assert mine["rank_apart"].level == "warning"
    assert (mine["non_finite_scalars"].first, mine["non_finite_scalars"].level) == (4, "error")


def test_gaps_have_their_reason(found: OverviewInfo) -> None:
    gaps = {(mark.first, mark.last): mark.text for mark in marks_of(found, "no value")}
    assert gaps == {
        (UNMEASURED, UNMEASURED): "no rank handed over both streams",
        (8, 8): "the step is still open",
        (10, 10): "the step is still open",
    }


def test_scalars_and_what_is_not_finite(deps: Dependencies) -> None:
    found = overview.info(deps, "r", CurveRequest(["loss", "reward"]))
    loss, reward = found.panels
    assert values_of(reward)[2, 9][1] == pytest.approx(9 / 20)
    assert values_of(loss)[1, 5][1] == pytest.approx(1 / 5)
    assert values_of(loss)[1, 4] == (False, None)
    assert loss.not_finite == (NotFinite(4, 1, "inf"),)
    bad = next(t for t in traces(overview.figure(found)) if t.name == "not finite")
    assert (list(bad.x), "∞" in bad.hovertext[0]) == ([4], True)


def test_the_moving_average_is_of_the_steps_up_to_it(deps: Dependencies) -> None:
    found = overview.info(deps, "r", CurveRequest([MEAN], smooth=2.0))
    (line, *_) = found.panels[0].lines
    known = [(s, v) for s, v in zip(line.steps, line.values, strict=True) if v is not None]
    for step, value in zip(line.steps, line.smoothed(2.0).values, strict=True):
        before = [(math.exp((s - step) / 2.0), v) for s, v in known if s <= step]
        expected = sum(w * v for w, v in before) / sum(w for w, _ in before)
        assert (value is None) == (step not in dict(known))
        assert value is None or value == pytest.approx(expected, rel=1e-12)
    names = [trace.name for trace in traces(overview.figure(found))]
    assert "moving average over 2 steps of attempt 2" in names
    assert "moving average" not in str([t.name for t in traces(overview.figure(
        overview.info(deps, "r", CurveRequest([MEAN]))))])  # fmt: skip


def test_a_window_an_attempt_and_steps_in_force(deps: Dependencies) -> None:
    window: Window = {"first": 4, "last": 7}
    in_force = overview.info(deps, "r", CurveRequest([MEAN], None, window, superseded=False))
    assert sorted(values_of(in_force.panels[0])) == [(1, 4), (1, 5), (2, 6), (2, 7)]
    first = overview.info(deps, "r", CurveRequest([MEAN], 1))
    assert sorted(values_of(first.panels[0])) == [(1, step) for step in range(1, 9)]
    assert first.boundaries == ()


def test_names_and_their_number_are_checked(deps: Dependencies) -> None:
    with pytest.raises(NotFound, match="no metric") as raised:
        overview.info(deps, "r", CurveRequest(["rollout_corr/k3kl"]))
    assert "rollout_corr/k3_kl" in raised.value.advice
    with pytest.raises(NotFound):
        overview.info(deps, "r", CurveRequest(['a"b', "\x00"]))
    with pytest.raises(InvalidInput):
        overview.info(deps, "r", CurveRequest([MEAN] * 13))


def test_the_figure_has_a_panel_a_metric_and_shows_its_units(found: OverviewInfo) -> None:
    drawn = overview.figure(found)
    axes = [axis.title.text for axis in y_axes_of(drawn)]
    assert axes == ["nat", "nat", "", ""]
    assert layout_of(drawn).xaxis.title.text == "step"
    names = {text.text for text in layout_of(drawn).annotations}
    assert {f"<b>{MEAN}</b>", f"<b>{K3}</b>", f"<b>{PEARSON}</b>", "attempt 2"} <= names
    (line,) = layout_of(drawn).shapes
    assert (line.x0, line.x1) == (5.5, 5.5)
    looks = {t.name: (t.line.dash, t.line.color) for t in traces(drawn) if t.name[:7] == "attempt"}
    assert looks == {
        "attempt 1": ("solid", style.BLUE), "attempt 1, repeated later": ("dot", style.BLUE),
        "attempt 2": ("solid", style.VERMILLION),
    }  # fmt: skip
    bands = [
        trace for trace in traces(drawn) if trace.name == "noise floor" and trace.fill != "none"
    ]
    assert {trace.yaxis for trace in bands} == {"y", "y2"}  # no band under a correlation
    rows = layout_of(drawn).yaxis4
    assert list(rows.ticktext) == ["finding", "capture", "weight sync", "no value"]


def test_numbers_that_are_missing_are_null_in_json(found: OverviewInfo) -> None:
    title, drawing = as_json(overview.figure(found))
    assert title == "Over the steps of r"
    assert "title" not in drawing["layout"]
    traces: list[dict[str, Any]] = drawing["data"]
    first = next(t for t in traces if t["name"] == "attempt 1" and t["yaxis"] == "y")
    assert [math.isnan(value) for value in first["y"]] == [False, False, True, False, False]


def test_a_service_and_a_range_without_steps(trained: Service, deps: Dependencies) -> None:
    window: Window = {"first": 500, "last": None}
    nothing = overview.info(deps, "r", CurveRequest([MEAN], None, window))
    assert nothing.note == "run r has no step in this range yet"
    drawn = overview.figure(nothing)
    assert len(traces(drawn)) == 0
    assert "no step in this range" in layout_of(drawn).annotations[0].text.replace("<br>", " ")
    only = overview.info(
        deps, "r", CurveRequest([MEAN], None, Window(first=UNMEASURED, last=UNMEASURED))
    )
    assert only.note == "no step has a value: no rank handed over both streams"


def test_a_run_without_numbers_shows_its_scalars(tmp_path_factory: pytest.TempPathFactory) -> None:
    with service(tmp_path_factory.mktemp("home")) as live:
        rank = Rank(live, world_size=1)
        rank.stage("actor_update", 1, scalars={"reward": 0.5})
        rank.begin("actor_update", 2)
        found = overview.info(live.app.state.deps, None, CurveRequest())
        assert [panel.name for panel in found.panels] == ["reward"]


MISMATCH = list(overview.MISMATCH)


@pytest.mark.parametrize(
    ("logged", "drawn"),
    [
        ([], MISMATCH),
        (["loss", "reward"], [MISMATCH[0], "reward", "loss", MISMATCH[1]]),
        (
            ["actor/reward_kl", "critic/score/mean", "critic/rewards/mean"],
            [MISMATCH[0], "critic/score/mean", *MISMATCH[1:3]],
        ),
        (
            ["actor/entropy", "actor/grad_norm", "actor/pg_loss", "critic/vf_loss",
             "prompt_length/mean", "response_length/max", "response_length/mean",
             "train/rewards/all/mean", "train/rewards/all/std"],
            [MISMATCH[0], "train/rewards/all/mean", "actor/pg_loss", "actor/grad_norm",
             "actor/entropy", "response_length/mean"],
        ),
    ],
)  # fmt: skip
def test_the_first_questions_about_a_run_are_drawn_unasked(
    tmp_path: Path, logged: list[str], drawn: list[str]
) -> None:
    with service(tmp_path) as live:
        keep_tensors(live)
        rank = Rank(live, world_size=1)
        rank.stage("actor_update", 1, payload(1, 0), scalars=dict.fromkeys(logged, 0.5))
        rank.begin("actor_update", 2)
        found = overview.info(live.app.state.deps, None, CurveRequest())
        assert [panel.name for panel in found.panels] == drawn


def test_stages_apart_have_panels_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    with service(tmp_path_factory.mktemp("home")) as live:
        rank = Rank(live, world_size=1)
        rank.stage("actor_update", 1, scalars={"loss": 1.0})
        rank.stage("critic_update", 1, scalars={"loss": 3.0})
        found = overview.info(live.app.state.deps, "r", CurveRequest(["loss"]))
        assert [panel.name for panel in found.panels] == [
            "loss (actor_update actor)", "loss (critic_update actor)",
        ]  # fmt: skip
