"""Who is stuck: the judgement alone, by example and over generated trainings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_service.core.entities import StageKey, StageTiming
from stagescope_service.core.hangs.detection import (
    GONE,
    LIVE,
    NOT_BEGUN,
    NOT_ENDED,
    SILENT,
    UNHEARD,
    RankPosition,
    Role,
    StageHistory,
    Stuck,
    StuckRules,
    history,
    judge,
)
from stagescope_wire.schema import Part

RULES = StuckRules(min_seconds=10.0, factor=3.0)
UPDATE = StageKey(5, "actor_update", Part())


def role(
    positions: Mapping[int, RankPosition],
    begun: Mapping[int, float],
    ended: Mapping[int, float] | None = None,
    earlier: StageHistory = StageHistory([4.0, 5.0, 6.0], [0.5, 0.5, 0.5]),  # noqa: B008
    place: StageKey = UPDATE,
) -> Role:
    """A role with one part of one open step, begun and ended by ranks at times."""
    ended = ended or {}
    timing = StageTiming(place)
    for rank, at in begun.items():
        timing.begun(at)
        if rank in ended:
            timing.took(ended[rank] - at)
    members: dict[str, Collection[int]] = {"begun": begun.keys(), "ended": ended.keys()}
    return Role(
        positions,
        {place: timing} if begun else {},
        begun=lambda _: members["begun"],
        ended=lambda _: members["ended"],
        history=lambda _: earlier,
    )


def inside(since: float) -> RankPosition:
    return RankPosition(LIVE, since, UPDATE, 100.0)


def between(since: float, frontier: float = -math.inf) -> RankPosition:
    return RankPosition(LIVE, since, None, frontier)


def who(found: list[Stuck]) -> list[tuple[int, str, bool]]:
    return [(each.rank, each.status, each.whole_role) for each in found]


def test_the_rank_that_has_not_begun_is_stuck_and_those_that_wait_for_it_are_not() -> None:
    view = role({0: inside(100.0), 1: between(90.0), 2: inside(101.0)}, {0: 100.0, 2: 101.0})
    assert judge(view, 109.0, RULES) == []
    [stuck] = judge(view, 900.0, RULES)
    assert (stuck.rank, stuck.status, stuck.key) == (1, NOT_BEGUN, UPDATE)
    assert (stuck.since, stuck.seconds) == (100.0, 800.0)
    assert (stuck.begun, stuck.ended) == (2, 0)
    assert stuck.limit.usual == 0.5
    assert stuck.limit.steps == 3


def test_the_rank_that_has_not_ended_is_stuck_where_others_have() -> None:
    done = between(105.0, frontier=100.0)
    view = role({0: done, 1: inside(100.0)}, {0: 100.0, 1: 100.0}, {0: 105.0})
    assert judge(view, 115.0, RULES) == []  # 3 x the median of 5 s
    assert who(judge(view, 115.1, RULES)) == [(1, NOT_ENDED, False)]


def test_a_whole_role_that_stopped_is_stuck_after_longer_than_ever() -> None:
    view = role({0: inside(100.0), 1: inside(103.0)}, {0: 100.0, 1: 103.0})
    assert judge(view, 117.0, RULES) == []  # rank 1 is not late yet
    found = judge(view, 118.1, RULES)
    assert who(found) == [(0, NOT_ENDED, True), (1, NOT_ENDED, True)]


def test_without_history_the_lag_behind_the_others_counts() -> None:
    new = StageHistory()
    view = role({0: inside(100.0), 1: inside(100.0)}, {0: 100.0, 1: 100.0}, earlier=new)
    assert judge(view, 1e6, RULES) == []  # nobody knows how long a first step takes
    slow = role({0: between(130.0, 100.0), 1: inside(100.0)}, {0: 100.0, 1: 100.0}, {0: 130.0}, new)
    assert judge(slow, 189.0, RULES) == []  # 3 x the 30 s that rank 0 took
    [stuck] = judge(slow, 191.0, RULES)
    assert (stuck.rank, stuck.limit.steps, stuck.limit.usual) == (1, 0, None)
    late = role({0: inside(100.0), 1: between(95.0)}, {0: 100.0}, earlier=new)
    assert judge(late, 140.0, RULES) == []  # 4 x the floor
    assert who(judge(late, 140.1, RULES)) == [(1, NOT_BEGUN, False)]


def test_one_slow_step_of_the_past_is_not_held_against_the_next() -> None:
    # Every eighth step writes a checkpoint inside the stage.
    earlier = StageHistory([5.0] * 7 + [60.0], [0.1] * 8)
    view = role({0: inside(100.0), 1: inside(100.0)}, {0: 100.0, 1: 100.0}, earlier=earlier)
    assert judge(view, 189.0, RULES) == []
    assert len(judge(view, 191.0, RULES)) == 2


def test_a_rank_that_went_on_or_takes_no_part_is_not_awaited() -> None:
    only_first = StageHistory([5.0], [0.0], {0})
    saving = role({0: inside(100.0), 1: between(90.0)}, {0: 100.0}, earlier=only_first)
    assert who(judge(saving, 900.0, RULES)) == [(0, NOT_ENDED, True)]
    past = role({0: inside(100.0), 1: between(90.0, frontier=101.0)}, {0: 100.0})
    assert [each.rank for each in judge(past, 900.0, RULES)] == [0]


def test_a_rank_that_is_gone_or_was_never_heard_of_is_named() -> None:
    silent = RankPosition(GONE, 120.0, UPDATE, 100.0)
    view = role({0: inside(100.0), 1: silent}, {0: 100.0, 1: 100.0})
    found = judge(view, 131.0, RULES)
    assert [(each.rank, each.process) for each in found][-1] == (1, GONE)
    absent = role({0: inside(100.0), 1: RankPosition(UNHEARD)}, {0: 100.0})
    assert [(each.rank, each.process) for each in judge(absent, 900.0, RULES)] == [(1, UNHEARD)]


def test_a_rank_that_steps_closed_without_is_named_once_the_others_are_late() -> None:
    without = StageHistory([4.0, 5.0, 6.0], [0.5, 0.5, 0.5], {0, 1}, {0, 1})
    absent = RankPosition(UNHEARD)
    waiting = {0: inside(100.0), 1: inside(100.0), 2: absent}
    view = role(waiting, {0: 100.0, 1: 100.0}, earlier=without)
    assert (
        judge(view, 115.0, RULES) == []
    )  # a step like those before: it may not be meant to report
    [stuck] = judge(view, 115.1, RULES)
    assert (stuck.rank, stuck.status, stuck.process) == (2, NOT_BEGUN, UNHEARD)
    assert (stuck.key, stuck.since, stuck.begun, stuck.whole_role) == (UPDATE, 100.0, 2, False)
    beside = waiting | {1: RankPosition(GONE, 90.0)}
    found = judge(role(beside, {0: 100.0}, earlier=without), 900.0, RULES)
    assert [(each.rank, each.process) for each in found] == [(1, GONE), (2, UNHEARD)]


def test_a_rank_that_never_reported_is_not_awaited_where_others_take_no_part_or_ended() -> None:
    absent = RankPosition(UNHEARD)
    only_first = StageHistory([5.0], [0.0], {0}, {0})
    saving = {0: inside(100.0), 1: between(90.0), 2: absent}
    found = judge(role(saving, {0: 100.0}, earlier=only_first), 900.0, RULES)
    assert who(found) == [(0, NOT_ENDED, True)]
    without = StageHistory([5.0], [0.0], {0, 1}, {0, 1})
    done = {0: inside(100.0), 1: between(105.0, 100.0), 2: absent}
    view = role(done, {0: 100.0, 1: 100.0}, {1: 105.0}, without)
    assert who(judge(view, 900.0, RULES)) == [(0, NOT_ENDED, False)]


@pytest.mark.parametrize("process", [SILENT, GONE])
def test_those_that_wait_for_a_process_that_does_not_answer_are_not_stuck(process: str) -> None:
    inside_too = RankPosition(process, 100.0, UPDATE, 100.0)
    view = role({0: inside(100.0), 1: inside_too}, {0: 100.0, 1: 100.0})
    assert who(judge(view, 900.0, RULES)) == [(1, NOT_ENDED, False)]
    before = RankPosition(process, 90.0, None)
    view = role({0: inside(100.0), 1: before}, {0: 100.0})
    assert who(judge(view, 900.0, RULES)) == [(1, NOT_BEGUN, False)]
    beyond = RankPosition(process, 105.0, None, 100.0)
    view = role({0: inside(100.0), 1: beyond}, {0: 100.0, 1: 100.0}, {1: 105.0})
    assert who(judge(view, 900.0, RULES)) == [(0, NOT_ENDED, False)]


def test_where_nobody_is_left_nobody_is_stuck() -> None:
    silent = RankPosition(GONE, 120.0, UPDATE, 100.0)
    assert judge(role({0: silent, 1: silent}, {0: 100.0, 1: 100.0}), 1e6, RULES) == []
    assert judge(role({0: between(1.0), 1: between(1.0)}, {}), 1e6, RULES) == []


SECONDS = st.floats(0.0, 1000.0)


@st.composite
def speeds(draw: st.DrawFn) -> list[dict[str, tuple[float, float]]]:
    """Draw for each rank, by stage, the gap before it and how long it takes."""
    stages = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    ranks = draw(st.integers(1, 4))
    # Two parts that begin at the very same instant have no order that could be told.
    gaps = SECONDS.map(lambda seconds: seconds + 0.001)
    return [{stage: (draw(gaps), draw(SECONDS)) for stage in stages} for _ in range(ranks)]


def _times(
    speed: Mapping[str, tuple[float, float]], begin: float, step: int
) -> list[tuple[float, float, StageKey]]:
    found = []
    for stage, (gap, took) in speed.items():
        found.append((begin + gap, begin + gap + took, StageKey(step, stage, Part())))
        begin += gap + took
    return found


@given(speeds(), st.integers(1, 8), st.floats(0.0, 1.0), st.sampled_from([0.0, 1.0, 30.0]))
def test_nobody_is_stuck_who_is_as_slow_as_ever(
    ranks: list[dict[str, tuple[float, float]]], steps: int, moment: float, floor: float
) -> None:
    known = _history(ranks, steps)
    now = moment * max(_times(speed, 0.0, steps)[-1][1] for speed in ranks)
    view = _at(ranks, steps, now, known)
    assert judge(view, now, StuckRules(min_seconds=floor)) == []


@given(speeds(), st.integers(1, 8), st.data())
def test_a_rank_that_stops_is_found_in_the_end_and_it_alone(
    ranks: list[dict[str, tuple[float, float]]], steps: int, data: st.DataObject
) -> None:
    """One rank stops inside a stage that the others go through, or before it."""
    if len(ranks) == 1:
        return
    last = [*ranks[0]][-1]
    stops = data.draw(st.integers(0, len(ranks) - 1))
    known = _history(ranks, steps)
    halted = data.draw(st.sampled_from(["before", "inside"]))
    gap, took = ranks[stops][last]
    slow = {**ranks[stops], last: (math.inf, took) if halted == "before" else (gap, math.inf)}
    now = 1e7
    halting = [slow if rank == stops else each for rank, each in enumerate(ranks)]
    view = _at(halting, steps, now, known)
    [stuck] = judge(view, now, StuckRules())
    assert (stuck.rank, stuck.key.stage) == (stops, last)
    assert stuck.status == (NOT_BEGUN if halted == "before" else NOT_ENDED)
    assert not stuck.whole_role


def _history(ranks: list[dict[str, tuple[float, float]]], steps: int) -> Mapping[str, StageHistory]:
    earlier: list[dict[StageKey, StageTiming]] = []
    for step in range(steps):
        timings: dict[StageKey, StageTiming] = {}
        for speed in ranks:
            for begun, ended, place in _times(speed, 0.0, step):
                timings.setdefault(place, StageTiming(place)).begun(begun)
                timings[place].took(ended - begun)
        earlier.append(timings)
    return history(earlier, [{stage: range(len(ranks)) for stage in ranks[0]}])


def _at(
    ranks: list[dict[str, tuple[float, float]]],
    step: int,
    now: float,
    known: Mapping[str, StageHistory],
) -> Role:
    """The role as the events up to `now` of a step that began at 0 tell it."""
    timings: dict[StageKey, StageTiming] = {}
    begun: dict[StageKey, set[int]] = {}
    ended: dict[StageKey, set[int]] = {}
    stood: dict[int, tuple[float, StageKey | None, StageKey | None]] = {}
    for rank, speed in enumerate(ranks):
        said, where, reached = 0.0, None, None
        for begin, end, place in _times(speed, 0.0, step):
            if begin <= now:
                timings.setdefault(place, StageTiming(place)).begun(begin)
                begun.setdefault(place, set()).add(rank)
                said, where, reached = begin, place, place
            if end <= now:
                timings[place].took(end - begin)
                ended.setdefault(place, set()).add(rank)
                said, where = end, None
        stood[rank] = (said, where, reached)
    positions = {
        rank: RankPosition(
            LIVE, said, where, -math.inf if reached is None else timings[reached].first
        )
        for rank, (said, where, reached) in stood.items()
    }
    return Role(
        positions,
        timings,
        begun=lambda place: begun.get(place, set()),
        ended=lambda place: ended.get(place, set()),
        history=lambda stage: known.get(stage, StageHistory()),
    )


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1), st.randoms(use_true_random=False))
def test_a_pace_is_the_same_in_any_order(times: list[tuple[float, float]], random: Random) -> None:
    one, other = StageTiming(UPDATE), StageTiming(UPDATE)
    for begun, took in times:
        one.begun(begun)
        one.took(took)
    shuffled = sorted(times, key=lambda _: random.random())
    for begun, took in [*shuffled, *times]:
        other.took(took)
        other.begun(begun)
    assert one == other


def test_a_limit_never_falls_below_the_floor() -> None:
    assert StuckRules(min_seconds=30.0).after([0.1], None).seconds == 30.0
    assert StuckRules(min_seconds=30.0).after([], None).seconds == 120.0
    assert StuckRules(min_seconds=1.0, factor=2.0).after([4.0, 5.0, 6.0], 99.0).seconds == 10.0
    assert StuckRules(min_seconds=1.0).after([1.0, 1.0, 100.0], None).seconds == pytest.approx(
        150.0
    )


def test_a_look_at_many_ranks_takes_time_in_proportion() -> None:
    ranks, asked = 300, 0

    def earlier(_: str) -> StageHistory:
        nonlocal asked
        asked += 1
        return StageHistory([4.0, 5.0, 6.0], [0.5, 0.5, 0.5], range(2 * ranks))

    waiting = dict.fromkeys(range(ranks), inside(100.0))
    # Their processes do not answer, and they had ended this part before.
    silent = dict.fromkeys(range(ranks, 2 * ranks), RankPosition(SILENT, 190.0, None, 150.0))
    here = role(waiting | silent, dict.fromkeys(range(2 * ranks), 100.0))
    found = judge(dataclasses.replace(here, history=earlier), 300.0, RULES)
    assert {each.rank for each in found if each.whole_role} == {*range(ranks)}
    assert asked < 10 * 2 * ranks
