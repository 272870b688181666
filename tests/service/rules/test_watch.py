"""Which steps fire: by example, and for any order and repetition of step summaries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stagescope_service.rules.conditions import HISTORY
from stagescope_service.rules.document import Rules
from stagescope_service.rules.series import SeriesKey, Values, pack, unpack
from stagescope_service.rules.watch import (
    REACH,
    Firing,
    FiringChanges,
    FiringRecord,
    RuleWatch,
    RunStep,
)

METRIC = "logprob_abs_diff/mean"


def rules_of(*rules: Mapping[str, object]) -> Rules:
    found = [
        {"name": f"rule-{at}", "metric": METRIC, "cooldown": 0, "when": {">": 1}, **rule}
        for at, rule in enumerate(rules)
    ]
    return Rules.parse({"rules": found})


def values(*numbers: float) -> Values:
    """The values of one rule: one a round."""
    series = tuple(SeriesKey(METRIC, round=at) for at in range(len(numbers)))
    unknown = np.full(len(numbers), math.nan)
    return Values(series, np.array(numbers, np.float64), unknown, unknown)


def train(
    rules: Rules,
    steps: Mapping[RunStep, Sequence[float]],
    order: Sequence[RunStep],
    *,
    since: int = 0,
) -> RuleWatch:
    """Hand wholes over in an order; return the watch."""
    watch = RuleWatch(rules.rules)
    for at in order:
        step = values(*steps[at])
        watch.evaluate(at, {rule.name: step for rule in rules.rules}, fires=at.step >= since)
    return watch


def fired(rule: Mapping[str, object], line: Sequence[float], since: int = 0) -> list[int]:
    """The steps (from 0) of one attempt at which a rule fires."""
    steps = {RunStep(1, step): [value] for step, value in enumerate(line)}
    watch = train(rules_of(rule), steps, list(steps), since=since)
    return [at.step for at in watch.fired("rule-0")]


def test_a_rule_fires_at_each_step_that_holds() -> None:
    assert fired({}, [0, 2, 0, 2, 2, math.nan, math.inf]) == [1, 3, 4, 6]


def test_for_so_many_steps_in_a_row() -> None:
    assert fired({"for": 3}, [2, 2, 0, 2, 2, 2, 2, 0, 2, 2]) == [5, 6]
    assert fired({"for": 2, "when": {"<": 1}}, [2, 0, 0, 2, 0]) == [2]


def test_a_row_is_of_one_series() -> None:
    steps = {RunStep(1, 0): [2.0, 0.0], RunStep(1, 1): [0.0, 2.0], RunStep(1, 2): [0.0, 2.0]}
    watch = train(rules_of({"for": 2}), steps, list(steps))
    assert watch.fired("rule-0") == [RunStep(1, 2)]


def test_a_step_without_a_number_neither_fires_nor_ends_a_row() -> None:
    steps: dict[RunStep, list[float]] = {
        RunStep(1, 0): [2.0],
        RunStep(1, 1): [],
        RunStep(1, 2): [2.0],
    }
    watch = train(rules_of({"for": 2}), steps, list(steps))
    assert watch.fired("rule-0") == [RunStep(1, 2)]


def test_cooldown() -> None:
    assert fired({"cooldown": 3}, [2] * 8) == [0, 3, 6]
    assert fired({"cooldown": 3}, [2, 0, 0, 2, 0, 0, 0, 2, 2]) == [0, 3, 7]
    assert fired({"cooldown": 1}, [2] * 3) == [0, 1, 2]


class Reported:
    """What a watch said of each firing, last; and a watch that goes on from it, as restarted."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.watch = RuleWatch(rules.rules)
        self.firings: dict[tuple[str, RunStep], Firing] = {}

    def take(self, at: RunStep, *numbers: float) -> FiringChanges:
        step = values(*numbers)
        changes = self.watch.evaluate(at, {rule.name: step for rule in self.rules.rules})
        self.firings |= {(firing.rule, firing.at): firing for firing in changes.fired}
        for gone in changes.withdrawn:
            del self.firings[gone]
        return changes

    def restarted(self) -> RuleWatch:
        position = {
            key: FiringRecord(
                unpack(pack(hit.series for hit in (*firing.hits, *firing.lasting))),
                acts=firing.cools_since is None,
            )
            for key, firing in self.firings.items()
        }
        return RuleWatch(self.rules.rules, fired=position)

    def lines(self) -> list[tuple[int, list[int | None], list[int | None], int | None]]:
        """(step, rounds that are news, rounds that last, the step whose actions it cools from)."""
        return [
            (
                firing.at.step,
                [hit.series.round for hit in firing.hits],
                [hit.series.round for hit in firing.lasting],
                None if firing.cools_since is None else firing.cools_since.step,
            )
            for _, firing in sorted(self.firings.items())
        ]


def test_a_series_that_begins_while_another_cools_down_fires_and_what_costs_does_not() -> None:
    watched = Reported(rules_of({"cooldown": 4}))
    line = [
        (0, 0, 0), (2, 0, 0), (2, 0, 0), (2, 3, 0), (2, 3, 0), (2, 3, 0),  # 1 at step 1, 2 at 3
        (2, 3, 0), (2, 3, 0), (2, 3, 0), (0, 0, 0), (0, 0, 5), (2, 0, 0), (2, 0, 0),
    ]  # fmt: skip
    for step, numbers in enumerate(line):
        watched.take(RunStep(1, step), *numbers)
    assert watched.lines() == [
        (1, [0], [], None),
        (3, [1], [0], 1),  # said at once, and cools down with the one that lasts
        (7, [1, 0], [], None),
        (10, [2], [], 7),
        (11, [0], [], None),
    ]


def test_a_series_that_spreads_is_said_each_time_and_acted_on_once_a_cooldown() -> None:
    watched = Reported(rules_of({"cooldown": 10}))
    for step in range(24):
        watched.take(RunStep(1, step), *(2.0 if at <= step else 0.0 for at in range(16)))
    acting = [step for step, _, _, since in watched.lines() if since is None]
    assert acting == [0, 10]
    assert [news for _, news, _, _ in watched.lines()] == [[at] for at in range(16)]
    at_once = Reported(rules_of({"cooldown": 10}))
    for step in range(10):
        at_once.take(RunStep(1, step), *[2.0] * 64)
    assert at_once.lines() == [(0, [*range(64)], [], None)]


def test_a_new_watch_neither_repeats_a_series_nor_silences_another() -> None:
    watched = Reported(rules_of({"cooldown": 9}))
    watched.take(RunStep(1, 1), 2, 0)
    again = watched.restarted()  # step 1 is no longer in memory: what was kept of its firing counts
    assert not again.evaluate(RunStep(1, 2), {"rule-0": values(2, 0)}).fired
    (fired,) = again.evaluate(RunStep(1, 3), {"rule-0": values(2, 2)}).fired
    assert ([hit.series.round for hit in fired.hits], fired.cools_since) == ([1], RunStep(1, 1))


def test_what_a_late_step_takes_away_or_adds_is_acted_on() -> None:
    watched = Reported(rules_of({"cooldown": 9}))
    watched.take(RunStep(1, 1), 2, 0)
    watched.take(RunStep(1, 3), 2, 2)
    changes = watched.take(RunStep(1, 1), 0, 0)
    assert changes.withdrawn == [("rule-0", RunStep(1, 1))]
    assert watched.lines() == [(3, [0, 1], [], None)]
    watched.take(RunStep(1, 2), 2, 0)
    assert watched.watch.fired("rule-0") == [RunStep(1, 2), RunStep(1, 3)]


SERIES = st.builds(
    SeriesKey,
    st.sampled_from(["loss", "a"]),
    st.sampled_from([None, "s"]),
    st.sampled_from([None, "actor"]),
    st.sampled_from([None, 0, 1, 2, 9]),
    st.sampled_from([None, 0, 3]),
)


@given(st.frozensets(SERIES))
def test_packed_series(series: frozenset[SeriesKey]) -> None:
    assert unpack(pack(series)) == series
    ranks = [SeriesKey("a", "s", "actor", rank) for rank in range(1024)]
    assert pack(ranks) == [["a", "s", "actor", None, [[0, 1023]]]]


def test_steps_that_closed_before_the_rules_were_given_are_history_alone() -> None:
    rule = {"when": {"median_ratio": 2}}
    assert fired(rule, [1, 1, 1, 3, 1, 3]) == [3, 5]
    assert fired(rule, [1, 1, 1, 3, 1, 3], since=4) == [5]


def test_after_a_restart_a_step_is_held_against_those_that_it_continued_from() -> None:
    rules = rules_of({"when": {"median_ratio": 2}})
    before = {RunStep(1, step): [1.0 if step < 4 else 100.0] for step in range(8)}
    resumed = {RunStep(2, 4): [1.0], RunStep(2, 5): [3.0]}
    steps = {**before, **resumed}
    # Against all steps before, the median would be 1 at step 4 and 100 were those of the branch
    # that was left the only ones.
    watch = train(rules, steps, list(steps))
    assert RunStep(2, 5) in watch.fired("rule-0")
    assert RunStep(2, 4) not in watch.fired("rule-0")
    left = {RunStep(1, step): [100.0] for step in range(3, 9)}
    start = {RunStep(1, step): [1.0] for step in range(3)}
    steps = {**start, **left, RunStep(2, 3): [3.0]}
    assert RunStep(2, 3) in train(rules, steps, list(steps)).fired("rule-0")


def test_cooldown_goes_on_over_a_restart_but_not_from_a_branch_that_was_left() -> None:
    steps = {RunStep(1, 1): [2.0], RunStep(1, 2): [0.0], RunStep(1, 3): [0.0], RunStep(2, 3): [2.0]}
    assert train(rules_of({"cooldown": 9}), steps, list(steps)).fired("rule-0") == [RunStep(1, 1)]
    steps = {
        RunStep(1, 1): [0.0],
        RunStep(1, 2): [2.0],
        RunStep(2, 1): [0.0],
        RunStep(2, 2): [2.0],
        RunStep(2, 3): [2.0],
    }
    watch = train(rules_of({"cooldown": 9}), steps, list(steps))
    assert watch.fired("rule-0") == [RunStep(1, 2), RunStep(2, 2)]


def test_a_whole_that_is_formed_again_fires_once_and_may_take_a_firing_back() -> None:
    rules = rules_of({})
    watch = RuleWatch(rules.rules)
    first = watch.evaluate(RunStep(1, 1), {"rule-0": values(0.5, 3.0)})
    assert [(f.rule, f.at) for f in first.fired] == [("rule-0", RunStep(1, 1))]
    assert [hit.series.round for hit in first.fired[0].hits] == [1]
    for again in (values(0.5, 3.0), values(0.7, 3.5), values(math.nan, 4.0)):
        changes = watch.evaluate(RunStep(1, 1), {"rule-0": again})
        assert not changes.fired
        assert not changes.withdrawn
    # What it did not name when it fired is watched, and the firing stays one.
    (more,) = watch.evaluate(RunStep(1, 1), {"rule-0": values(2.5, 3.0)}).fired
    assert ([hit.series.round for hit in more.hits], more.cools_since) == ([1, 0], None)
    assert watch.fired("rule-0") == [RunStep(1, 1)]
    assert watch.evaluate(RunStep(1, 1), {"rule-0": values(0.5)}).withdrawn == [
        ("rule-0", RunStep(1, 1))
    ]
    assert watch.fired("rule-0") == []


def test_the_worst_comes_first() -> None:
    rules = rules_of({"when": {"non_finite": True}}, {"when": {"<": 5}}, {})
    watch = RuleWatch(rules.rules)
    step = values(2.0, 3.0, -1.0, math.inf)
    changes = watch.evaluate(RunStep(1, 1), {rule.name: step for rule in rules.rules})
    rounds = {f.rule: [hit.series.round for hit in f.hits] for f in changes.fired}
    assert rounds == {"rule-0": [3], "rule-1": [2, 0, 1], "rule-2": [3, 1, 0]}


def test_a_new_watch_that_knows_what_fired_goes_on() -> None:
    rules = rules_of({"cooldown": 4, "for": 2, "when": {"median_ratio": 2}})
    line = [1, 1, 1, 1, 3, 3, 3, 1, 1, 3, 3, 3, 1, 3, 3]
    steps = {RunStep(1, step): [float(value)] for step, value in enumerate(line)}
    whole = train(rules, steps, list(steps))
    for cut in range(1, len(line)):
        first = Reported(rules)
        for at in list(steps)[:cut]:
            first.take(at, *steps[at])
        again = first.restarted()
        for at in list(steps)[:cut]:
            again.remember(at, {"rule-0": values(*steps[at])})
        for at in list(steps)[cut:]:
            again.evaluate(at, {"rule-0": values(*steps[at])})
        assert again.fired("rule-0") == whole.fired("rule-0")


RULES = st.fixed_dictionaries(
    {
        "for": st.integers(1, 3),
        "cooldown": st.integers(0, 5),
        "when": st.sampled_from(
            [{">": 1}, {"<": 0.5}, {"median_ratio": 2}, {">": 0.5, "median_ratio": 1.5},
             {"z_score": {"over": 2, "steps": 6}}, {"non_finite": True}]
        ),
    }
)  # fmt: skip
VALUES = st.sampled_from([0.0, 0.4, 0.6, 1.0, 1.1, 2.0, 5.0, math.nan, math.inf])


@st.composite
def runs(draw: st.DrawFn) -> dict[RunStep, list[float]]:
    steps: dict[RunStep, list[float]] = {}
    first = 1
    for attempt in range(1, draw(st.integers(1, 3)) + 1):
        last = first + draw(st.integers(0, 9))
        for step in range(first, last + 1):
            steps[RunStep(attempt, step)] = draw(st.lists(VALUES, max_size=3))
        first = draw(st.integers(1, last + 1))
    return steps


@settings(max_examples=300, deadline=None)
@given(st.lists(RULES, min_size=1, max_size=3), runs(), st.data())
def test_no_order_and_no_repetition_changes_what_fired(
    given_rules: Sequence[dict[str, object]], steps: dict[RunStep, list[float]], data: st.DataObject
) -> None:
    rules = rules_of(*given_rules)
    in_order = train(rules, steps, list(steps))
    shuffled = [*data.draw(st.permutations(list(steps)))]
    repeated = shuffled + data.draw(st.lists(st.sampled_from(shuffled), max_size=10))
    watch = RuleWatch(rules.rules)
    position: set[tuple[str, RunStep]] = set()
    for at in repeated:
        step = values(*steps[at])
        changes = watch.evaluate(at, {rule.name: step for rule in rules.rules})
        for firing in changes.fired:
            position.add((firing.rule, firing.at))
            assert firing.hits
        position -= set(changes.withdrawn)
    for rule in rules.rules:
        assert watch.fired(rule.name) == in_order.fired(rule.name)
        assert {at for name, at in position if name == rule.name} == set(watch.fired(rule.name))


@settings(max_examples=100, deadline=None)
@given(RULES, runs())
def test_series_and_actions_of_an_attempt_keep_the_cooldown(
    rule: dict[str, Any], steps: dict[RunStep, list[float]]
) -> None:
    watched = Reported(rules_of(rule))
    for at, numbers in steps.items():
        watched.take(at, *numbers)
    for attempt in {at.attempt for _, at in watched.firings}:
        own = [watched.firings[key] for key in sorted(watched.firings) if key[1].attempt == attempt]
        named: dict[SeriesKey, int] = {}
        for firing in own:
            for hit in firing.hits:
                assert firing.at.step - named.get(hit.series, -math.inf) >= rule["cooldown"]
            named |= {hit.series: firing.at.step for hit in (*firing.hits, *firing.lasting)}
        acting = [firing.at.step for firing in own if firing.cools_since is None]
        gaps = [later - earlier for earlier, later in itertools.pairwise(acting)]
        assert all(gap >= rule["cooldown"] for gap in gaps)


def test_what_is_remembered_is_bounded_and_a_very_late_step_is_let_go() -> None:
    count = HISTORY + REACH + 50
    steps = {RunStep(1, step): [1.0] for step in range(1, count)}
    watch = train(rules_of({}), steps, list(steps))
    assert len(watch._steps) == HISTORY + REACH
    # What lasts is named once, however many steps hold it.
    assert len({id(step.values["rule-0"].series) for step in watch._steps.values()}) == 1
    assert not watch.evaluate(RunStep(1, 0), {"rule-0": values(9.0)}).fired
    late = RunStep(1, count - REACH + 1)
    assert watch.evaluate(late, {"rule-0": values(9.0)}).fired


def test_only_the_firings_that_may_be_checked_are_remembered() -> None:
    steps = {RunStep(1, step): [2.0] for step in range(1000)}
    watch = train(rules_of({}, {"cooldown": 5}), steps, list(steps))
    for name in ("rule-0", "rule-1"):
        kept = watch.fired(name)
        assert 100 < len(kept) <= 320
        assert kept[-1].step >= 995
    assert watch.reach == RunStep(1, 1000 - REACH)
    assert len(watch._records) <= 640
