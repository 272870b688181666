"""The timeline of a step, its waits, and its trace events."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from tests.support.api import Rank, Service, service
from tests.support.runs.drawn import LOG_PROB, RANKS, SLOW, UPDATE, layout_of

from stagescope_service.figure_style import traces
from stagescope_service.figures import timeline
from stagescope_service.figures.timeline import Lane, TimelineInfo
from stagescope_service.views.reading.dependencies import Dependencies

STAGES = ("rollout_generate", LOG_PROB, UPDATE, "weight_sync")


@pytest.fixture(scope="module")
def found(deps: Dependencies) -> TimelineInfo:
    return timeline.info(deps, deps.finder.step("r", None, 8))


@pytest.fixture(scope="module")
def trouble(trained: Service, deps: Dependencies) -> TimelineInfo:
    return timeline.info(deps, deps.finder.step("trouble", None, 4))


def lane_of(found: TimelineInfo, rank: int) -> Lane:
    return next(lane for lane in found.lanes if lane.ranks == (("actor", rank),))


def test_each_rank_has_a_lane_with_its_stages(found: TimelineInfo) -> None:
    assert found.stages == STAGES
    assert [lane.label for lane in found.lanes] == [f"actor {rank}" for rank in range(RANKS)]
    for rank, lane in enumerate(found.lanes):
        assert [each.stage for each in lane.slices] == [*STAGES]
        expected = [4.0 + 0.1 * rank, 2.0, 5.5 if rank == SLOW else 3.0, 0.5]
        assert [each.seconds for each in lane.slices] == pytest.approx(expected)
        # A quarter of a second lies between two events of a rank.
        begin = 0.0
        for each in lane.slices:
            assert each.begin == pytest.approx(begin)
            begin += each.seconds + 0.25
        assert {each.status for each in lane.slices} == {"ok"}
        assert lane.not_begun == ()


def test_who_waited_for_whom_and_how_long(found: TimelineInfo) -> None:
    end = 4.0 + 0.1 * SLOW + 2.0 + 5.5 + 0.5 + 3 * 0.25
    for rank, lane in enumerate(found.lanes):
        waits = [wait for wait in lane.waits if wait.stage == "weight_sync"]
        if rank == SLOW:
            assert waits == []
            continue
        (wait,) = waits
        own = 4.0 + 0.1 * rank + 2.0 + 3.0 + 0.5 + 3 * 0.25
        assert wait.by == ("actor", SLOW)
        assert (wait.begin, wait.seconds) == pytest.approx((own, end - own))
    worst = found.held_up[0]
    assert (worst.rank, worst.stage, worst.ranks) == (SLOW, "weight_sync", RANKS - 1)
    assert worst.longest == pytest.approx(2.5 + 0.1 * SLOW)
    assert "actor 3 held up 7 ranks in weight_sync" in (found.note or "")


def test_whoever_went_on_did_not_wait(found: TimelineInfo) -> None:
    # Rank 0 ended its update long before rank 3, but was in its weight sync meanwhile.
    assert [wait.stage for wait in lane_of(found, 0).waits] == ["weight_sync"]


def test_failed_unfinished_and_absent_ranks(trouble: TimelineInfo) -> None:
    failed = lane_of(trouble, 2).slices[-1]
    assert (failed.status, failed.error) == ("failed", "RuntimeError: <b>out of memory</b>")
    still = lane_of(trouble, 6).slices[-1]
    assert still.status == "open"
    # Until now, which the service's clock says is 20 s after the step began.
    assert still.begin + still.seconds == pytest.approx(20.0, abs=0.5)
    assert lane_of(trouble, 7).slices == ()
    assert "rollout_generate" in lane_of(trouble, 7).not_begun
    drawn = timeline.figure(trouble)
    marks = {trace.name: trace for trace in traces(drawn) if trace.type == "scatter"}
    assert list(marks["failed"].y) == ["actor 2"]
    assert "&lt;b&gt;out" in marks["failed"].hovertext[0]
    assert list(marks["open"].y) == ["actor 6"]
    assert list(marks["not begun"].y) == ["actor 7"]


def test_the_figure_has_a_lane_a_rank_and_its_units(found: TimelineInfo) -> None:
    drawn = timeline.figure(found)
    assert layout_of(drawn).xaxis.title.text == "seconds since the step began"
    assert list(layout_of(drawn).yaxis.categoryarray) == [f"actor {rank}" for rank in range(RANKS)]
    bars = {trace.name: trace for trace in traces(drawn) if trace.type == "bar"}
    assert set(bars) == {*STAGES, "waits"}
    assert len(bars[UPDATE].x) == RANKS
    assert "waits 2.8 s for actor 3" in " ".join(bars["waits"].hovertext)


def test_a_step_that_nobody_began_says_so() -> None:
    nothing = timeline.TimelineInfo(
        "r", 1, 8, None, 0.0, (), (), 0, (), None, "no rank has begun a stage of this step"
    )
    drawn = timeline.figure(nothing)
    assert len(traces(drawn)) == 0
    assert "no rank has begun" in layout_of(drawn).annotations[0].text
    assert layout_of(drawn).xaxis.title.text == "seconds since the step began"


def test_many_ranks_are_folded_and_those_that_matter_are_not(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with service(tmp_path_factory.mktemp("home")) as running:
        for at in range(80):
            rank = Rank(running, rank=at, world_size=80)
            rank.stage("rollout_generate", 1, seconds=2.0 + at / 100)
            rank.begin(UPDATE, 1)
            rank.clock += 5.0 if at == 41 else 1.0
            rank.end(UPDATE, 1, status="failed" if at == 7 else "ok")
        deps = running.app.state.deps
        found = timeline.info(deps, deps.finder.step("r", None, 1))
    alone = [lane.label for lane in found.lanes if len(lane.ranks) == 1]
    assert {"actor 7", "actor 41"} <= set(alone)
    assert len(found.lanes) <= 64
    assert sorted(rank for lane in found.lanes for _, rank in lane.ranks) == [*range(80)]
    assert found.ranks == 80
    folded = next(lane for lane in found.lanes if len(lane.ranks) > 1)
    (first, *_, last) = [rank for _, rank in folded.ranks]
    generate = folded.slices[0]
    assert (generate.begin, generate.seconds) == pytest.approx((0.0, 2.0 + last / 100))
    assert generate.all_in == pytest.approx((0.0, 2.0 + first / 100))
    assert "actor 41 held up" in (found.note or "")


# --- trace events -----------------------------------------------------------------------------
def trace_of(trained: Service, **query: Any) -> dict[str, Any]:
    step = query.pop("step")
    answer = trained.read.get(f"/steps/{step}/timeline", params=query)
    assert answer.status_code == 200
    assert answer.headers["content-disposition"].startswith("attachment; filename=")
    found: dict[str, Any] = json.loads(answer.text)
    return found


def test_the_trace_is_one_that_viewers_open(trained: Service) -> None:
    """As the Trace Event Format demands: complete events nest on a thread, metadata names it."""
    trace = trace_of(trained, run="r", step=8)
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    for event in events:
        assert event["ph"] in ("X", "M", "i")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {rank: f"actor {rank}" for rank in range(RANKS)}
    (process,) = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert process == "actor, run r, attempt 2, step 8"
    slices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["tid"]].append(event)
    for own in slices.values():
        for one in own:
            for other in own:
                begin, end = one["ts"], one["ts"] + one["dur"]
                apart = other["ts"] >= end or other["ts"] + other["dur"] <= begin
                inside = other["ts"] >= begin and other["ts"] + other["dur"] <= end
                outside = other["ts"] <= begin and other["ts"] + other["dur"] >= end
                assert apart or inside or outside
    generate = next(e for e in slices[2] if e["name"] == "rollout_generate")
    assert (generate["ts"], generate["dur"]) == (0, 4_200_000)
    waits = [e for e in slices[0] if e["cat"] == "wait"]
    assert waits[-1]["name"] == f"waits for actor {SLOW}"


def test_the_trace_shows_what_failed_and_who_is_absent(trained: Service) -> None:
    events = trace_of(trained, run="trouble", step=4)["traceEvents"]
    failed = next(e for e in events if e.get("cat") == "failed")
    assert (failed["tid"], failed["args"]["error"]) == (2, "RuntimeError: <b>out of memory</b>")
    assert next(e for e in events if e.get("cat") == "open")["tid"] == 6
    absent = [e for e in events if e["ph"] == "i"]
    assert {e["tid"] for e in absent} == {7}
    assert all(e["s"] == "t" for e in absent)


def test_slices_that_overlap_have_tracks_of_their_own(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with service(tmp_path_factory.mktemp("home")) as running:
        rank = Rank(running, world_size=1)
        rank.begin("outer", 1)
        rank.begin("inner", 1)
        rank.clock += 1.0
        rank.end("inner", 1)
        rank.begin("crossing", 1)
        rank.clock += 1.0
        rank.end("outer", 1)
        rank.clock += 1.0
        rank.end("crossing", 1)
        events = trace_of(running, run="r", step=1)["traceEvents"]
    tids = {e["name"]: e["tid"] for e in events if e["ph"] == "X"}
    assert tids["outer"] == tids["inner"] == 0
    assert tids["crossing"] == 1_000_000
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[1_000_000] == "actor 0 (overlapping)"
