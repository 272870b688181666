"""When an order starts: what is computed, and the whole protocol against simulated ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trainings import Bench, Rank

from stagescope_service.core.captures import agreement as agreeing
from stagescope_service.core.captures.active_plan import Plan
from stagescope_service.core.captures.agreement import (
    Agreement,
    CaptureParticipants,
    Estimate,
    Member,
    resolve,
    start_step,
)
from stagescope_service.core.captures.participants import step_seconds
from stagescope_service.core.captures.requests import CaptureRequests
from stagescope_wire.captures import matches, validate_capture
from stagescope_wire.errors import Conflict
from stagescope_wire.plan import CaptureScope, CaptureSpec, SentPlan


def capture_spec(**changes: object) -> CaptureSpec:
    spec = {"stages": ["update"], "steps": "next", "task": "statistics", **changes}
    return validate_capture(spec, allowed_roots=())


@pytest.mark.parametrize(
    ("top", "trip", "seconds", "start"),
    [
        (7, 0.0, None, 8),  # nothing is known: the next
        (7, 1.0, 600.0, 8),  # none fits into two round trips of a slow training
        (7, 1.0, 1.0, 10),  # two fit
        (7, 1.0, 0.9, 10),
        (7, 0.0, 0.1, 13),  # never less than the least round trip
        (7, 1.0, 0.0, 8),
    ],
)
def test_start_step(top: int, trip: float, seconds: float | None, start: int) -> None:
    assert start_step(top, trip, seconds) == start


@pytest.mark.parametrize(
    ("steps", "resolved", "passed"),
    [
        ({"next": 2}, [5, 6], []),
        ("all", {"every": 1, "start": 5, "count": None}, []),
        ([3, 5, 9], [5, 9], [3]),
        ([3], [], [3]),
        ({"every": 3, "start": None, "count": 2}, {"every": 3, "start": 5, "count": 2}, []),
        ({"every": 3, "start": 0, "count": None}, {"every": 3, "start": 6, "count": None}, []),
        ({"every": 3, "start": 9, "count": 1}, {"every": 3, "start": 9, "count": 1}, []),
    ],
)
def test_resolve(steps: Any, resolved: object, passed: list[int]) -> None:
    assert resolve(steps, 5) == (resolved, passed)


@given(
    st.one_of(
        st.lists(st.integers(0, 40), min_size=1).map(sorted),
        st.just("all"),
        st.builds(lambda k: {"next": k}, st.integers(1, 5)),
        st.builds(
            lambda every, start, count: {"every": every, "start": start, "count": count},
            st.integers(1, 5), st.none() | st.integers(0, 30), st.none() | st.integers(1, 4),
        ),
    ),
    st.integers(0, 35),
)  # fmt: skip
def test_no_resolved_step_comes_before_the_start(steps: Any, start: int) -> None:
    resolved, passed = resolve(steps, start)
    spec: CaptureScope = {"stages": "all", "roles": None, "ranks": "all", "steps": resolved}
    hit = [n for n in range(80) if matches(spec, stage="s", role="a", rank=0, step=n)]
    assert all(step >= start for step in hit)
    assert all(step < start for step in passed)
    last = agreeing.last_step(resolved)
    assert last is None or not hit or max(hit) == last
    if isinstance(steps, list):
        assert sorted({*hit, *passed}) == sorted({*steps})


def participants(
    *revisions: int | None, top: int | None = 7, step: float | None = 1.0
) -> CaptureParticipants:
    members = tuple(Member("actor", n, f"i{n}", each) for n, each in enumerate(revisions))
    return CaptureParticipants("r", 1, members, top, None, step)


def check(
    asked: Agreement, spec: CaptureSpec, there: CaptureParticipants, elapsed: float = 0.1
) -> Any:
    return agreeing.check(asked, spec, there, elapsed=elapsed, round_trip=0.1, wall=9.0)


def test_a_step_takes_what_consecutive_ones_took() -> None:
    bench, rank = Bench(), Rank(0)
    bench.give(rank.hello(world_size=1))
    for step, later in ((1, 0.0), (2, 2.0), (3, 2.0), (50, 100.0), (51, 4.0)):
        rank.wall += later
        bench.give(*rank.work(step))  # 0.25 s until it begins, 0.25 s until it ends
    attempt = bench.state.registry.newest("r")
    assert attempt is not None
    assert step_seconds(attempt) == 2.5  # the median of 2.5, 2.5 and 4.5


def test_it_waits_for_all_and_names_those_it_goes_without() -> None:
    asked = Agreement(revision=4)
    assert check(asked, capture_spec(), participants(4, 3)) is None
    assert check(asked, capture_spec(), participants(4, None)) is None
    assert check(asked, capture_spec(), participants()) is None
    assert check(asked, capture_spec(), participants(4, 4, top=None)) is None
    agreed = check(asked, capture_spec(), participants(4, 5))
    assert (agreed.phase, agreed.start, agreed.steps) == ("agreed", 8, [8])
    waiting = capture_spec(timeout=2.0)
    assert check(asked, waiting, participants(4, 3), elapsed=500.0) is None
    without = check(asked, capture_spec(timeout=2.0, late="go_on"), participants(4, 3), elapsed=2.0)
    assert (without.phase, without.without) == ("agreed", [{"role": "actor", "rank": 1}])
    # Nobody has heard: there is nobody to go on with.
    assert (
        check(asked, capture_spec(timeout=2.0, late="go_on"), participants(3, 3), elapsed=2.0)
        is None
    )
    ended = check(asked, capture_spec(timeout=2.0, late="give_up"), participants(4, 3), elapsed=2.0)
    assert (ended.phase, ended.without) == ("given up", [{"role": "actor", "rank": 1}])


def test_steps_that_have_all_begun_are_too_late_or_moved() -> None:
    asked = Agreement(revision=4)
    assert check(asked, capture_spec(steps=[8]), participants(4, top=9)).phase == "too late"
    moved = check(
        dataclasses.replace(asked, again_left=1), capture_spec(steps=[8]), participants(4, top=9)
    )
    assert (moved.phase, moved.steps, moved.missed_steps, moved.again_left) == (
        "agreed", [10], [8], 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("estimates", "refused"),
    [
        ([{"seconds": 301.0, "collective_timeout": 600.0}], "half of the collectives' time limit"),
        ([{"seconds": 299.0, "collective_timeout": 600.0}], None),
        ([{"seconds": 9e9, "collective_timeout": None}], None),
        ([{"bytes": 6, "free_bytes": 10, "node_id": "a"}], None),
        ([{"bytes": 6, "free_bytes": 10, "node_id": "a"}] * 2, "0.0 GB are free"),
        ([{"bytes": 6, "free_bytes": 10, "node_id": node} for node in "ab"], None),
        ([{"error": "no such list"}], "cannot carry it out: no such list"),
    ],
)
def test_what_costs_too_much_is_refused_unless_forced(
    estimates: list[Estimate], refused: str | None
) -> None:
    said: list[Estimate] = [
        {"role": "actor", "rank": 0, "stage": "update", **each} for each in estimates
    ]
    reason = agreeing.refusal(capture_spec(), said)
    assert (reason is None) if refused is None else (refused in (reason or ""))
    forced = agreeing.refusal(capture_spec(force=True), said)
    assert forced is None or "cannot carry it out" in forced


# --- the protocol ---------------------------------------------------------------------------


class Ranks:
    """Simulated ranks that poll, begin steps and report, as the real ones do."""

    def __init__(self, size: int) -> None:
        self.bench = Bench()
        self.plan = Plan()
        self.requests = CaptureRequests(self.plan, self.bench.state)
        self.now = 0.0
        self.captured: list[tuple[int, int]] = []
        self.history: list[tuple[int, int, int]] = []
        self.attempt = 0
        self.size = size
        self.start()

    def start(self) -> None:
        """Start (again): a new attempt, whose ranks know no plan."""
        self.attempt += 1
        base = 1000.0 * self.attempt
        self.ranks = [
            Rank(rank, key=f"job-{self.attempt}", started=base + rank) for rank in range(self.size)
        ]
        self.steps = [0] * self.size
        self.applied: list[SentPlan] = [{"revision": 0, "captures": []}] * self.size
        for rank in self.ranks:
            self.bench.give(rank.hello(world_size=self.size))

    def poll(self, rank: int) -> None:
        """Acknowledge what it applied, then apply what is in force."""
        process = self.bench.state.registry.processes[self.ranks[rank].sender.incarnation]
        process.plan_revision = self.applied[rank]["revision"]
        self.check()
        if self.plan.revision == self.applied[rank]["revision"]:
            return
        self.applied[rank] = self.plan.wire("r")
        for capture in self.applied[rank]["captures"]:
            if capture["phase"] == "asked":
                said = {"role": "actor", "rank": rank, "stage": "update", "state": "estimated"}
                self.requests.reported({**said, "capture_id": capture["capture_id"]}, 0.0, 0.0)

    def begin(self, rank: int) -> None:
        """Begin and end the next step; what its plan orders is captured."""
        self.steps[rank] += 1
        step = self.steps[rank]
        for capture in self.applied[rank]["captures"]:
            if matches(capture, stage="update", role="actor", rank=rank, step=step):
                self.captured.append((rank, step))
                self.history.append((self.attempt, rank, step))
        self.bench.give(*self.ranks[rank].work(step, "update"))

    def check(self) -> None:
        self.now += 0.01
        puts = self.requests.check(self.now, self.now)
        self.bench.carry_out(puts)
        self.plan.publish(self.plan.publication())

    def restart(self) -> None:
        """The coordinator dies and is made anew from what was written."""
        rows = [
            row["spec"] for row in self.bench.rows.of("captures") if row["removed_wall"] is None
        ]
        revision = max((row["revision"] for row in self.bench.rows.of("captures")), default=0)
        revisions = {
            key: process.plan_revision
            for key, process in self.bench.state.registry.processes.items()
        }
        self.bench.restart()
        for key, process in self.bench.state.registry.processes.items():
            process.plan_revision = revisions.get(key)
        self.plan = Plan(rows, revision=revision)
        self.requests = CaptureRequests(self.plan, self.bench.state)

    def add(self, **changes: object) -> str:
        entry = self.requests.add(
            capture_spec(run="r", **changes), by="me", mono=self.now, wall=self.now
        )
        self.bench.carry_out([self.requests.row(entry)])
        self.check()
        return entry.capture_id

    def agreement(self, capture_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.bench.rows.one("captures", capture_id=capture_id)["spec"]
        return dict(found["agreement"])


def settle(ranks: Ranks) -> None:
    for _ in range(3):
        for rank in range(ranks.size):
            ranks.poll(rank)


def test_every_rank_starts_on_the_same_step() -> None:
    ranks = Ranks(3)
    for rank in range(3):
        ranks.begin(rank)
    capture = ranks.add(steps={"next": 2})
    ranks.poll(0)
    ranks.begin(0)
    assert ranks.agreement(capture)["phase"] == "asked"
    settle(ranks)
    start = ranks.agreement(capture)["start"]
    assert start > 2
    for _ in range(start + 3):
        for rank in range(3):
            ranks.begin(rank)
        ranks.poll(0)
    assert sorted(ranks.captured) == [(r, s) for r in range(3) for s in (start, start + 1)]
    assert ranks.agreement(capture)["phase"] == "done"
    assert ranks.plan.entries == {}


def test_a_restart_between_acknowledgement_and_start_changes_nothing() -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.begin(rank)
    capture = ranks.add()
    settle(ranks)
    agreed = ranks.agreement(capture)
    ranks.restart()
    settle(ranks)
    assert ranks.agreement(capture) == agreed
    for _ in range(agreed["start"] + 1):
        ranks.begin(0)
        ranks.begin(1)
    assert ranks.captured == [(0, agreed["start"]), (1, agreed["start"])]


def test_what_was_asked_before_a_restart_is_asked_again() -> None:
    ranks = Ranks(2)
    ranks.begin(0)
    capture = ranks.add()
    ranks.poll(0)
    ranks.restart()
    settle(ranks)
    assert ranks.agreement(capture)["phase"] == "agreed"


def test_a_new_attempt_agrees_anew() -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.begin(rank)
    capture = ranks.add()
    settle(ranks)
    first = ranks.agreement(capture)
    ranks.start()
    ranks.begin(0)
    settle(ranks)
    settle(ranks)
    second = ranks.agreement(capture)
    assert second["attempt_id"] == first["attempt_id"] + 1
    assert second["phase"] == "agreed"
    for _ in range(20):
        ranks.begin(0)
        ranks.begin(1)
    assert ranks.captured == [(0, second["start"]), (1, second["start"])]


def test_a_missed_step_is_agreed_again_by_choice() -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.begin(rank)
    capture = ranks.add(again=1)
    settle(ranks)
    first = ranks.agreement(capture)
    gap = {"capture_id": capture, "role": "actor", "rank": 1, "step": first["start"]}
    gap |= {"stage": "update", "state": "missed"}
    ranks.bench.carry_out(ranks.requests.reported(gap, ranks.now, ranks.now))
    assert ranks.agreement(capture)["phase"] == "asked"
    for _ in range(first["start"]):
        ranks.begin(0)
        ranks.begin(1)
    settle(ranks)
    second = ranks.agreement(capture)
    assert (second["phase"], second["number"], second["again_left"]) == ("agreed", 2, 0)
    assert second["start"] > first["start"]
    assert [each["rank"] for each in second["missed"]] == [1]
    ranks.requests.reported({**gap, "step": second["start"]}, ranks.now, ranks.now)
    assert len(ranks.bench.rows.of("findings", kind="capture_partial")) == 1


def test_what_is_left_of_the_steps_is_agreed_with_the_missed_one() -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.begin(rank)
    capture = ranks.add(again=1, steps=[3, 40, 45])
    settle(ranks)
    assert ranks.agreement(capture)["steps"] == [3, 40, 45]
    for _ in range(4):
        ranks.begin(0)
        ranks.begin(1)
    gap = {"capture_id": capture, "role": "actor", "rank": 1, "step": 3}
    gap |= {"stage": "update", "state": "missed"}
    ranks.bench.carry_out(ranks.requests.reported(gap, ranks.now, ranks.now))
    settle(ranks)
    again = ranks.agreement(capture)
    assert again["phase"] == "agreed"
    assert again["steps"] == [again["start"], 40, 45]
    assert 5 < again["start"] < 40


def test_what_the_service_keeps_alone_waits_for_a_training_s_step() -> None:
    """It is agreed on without ranks, and counts from a step that there is."""
    ranks = Ranks(1)
    capture = ranks.add(task=None, keep=["trajectories"])
    for _ in range(5):
        settle(ranks)
        assert ranks.agreement(capture)["phase"] == "asked"
    ranks.begin(0)
    settle(ranks)
    agreed = ranks.agreement(capture)
    assert (agreed["phase"], agreed["steps"]) == ("agreed", [2])
    # Of half a second each: the next one may have begun where its ranks hear of it.
    ranks.begin(0)
    ranks.begin(0)
    quick = ranks.add(task=None, keep=["old_log_probs"])
    settle(ranks)
    assert ranks.agreement(quick)["steps"] == [5]
    begun = ranks.add(task=None, keep=["old_log_probs"], steps=[2, 9])
    settle(ranks)
    agreed = ranks.agreement(begun)
    assert (agreed["steps"], agreed["missed_steps"]) == ([2, 9], [2])
    again = ranks.add(task=None, keep=["prob_ratio"], steps=[3, 9], again=1)
    settle(ranks)
    gap = {"capture_id": again, "role": "actor", "rank": 0, "step": 3}
    gap |= {"stage": "update", "state": "missed"}
    ranks.bench.carry_out(ranks.requests.reported(gap, ranks.now, ranks.now))
    settle(ranks)
    assert (ranks.agreement(again)["steps"], ranks.agreement(again)["again_left"]) == ([3, 5, 9], 0)
    twice = ranks.add(task=None, keep=["entropy"], steps=[3, 9], again=2)
    settle(ranks)
    for rank in (0, 1):  # each of them says what it missed
        gap |= {"capture_id": twice, "rank": rank}
        ranks.bench.carry_out(ranks.requests.reported(gap, ranks.now, ranks.now))
        settle(ranks)
    agreed = ranks.agreement(twice)
    assert (agreed["steps"], agreed["missed_steps"], agreed["again_left"]) == ([3, 5, 9], [3], 1)
    # What has begun is not asked for: ranks would report it all as missed.
    every = ranks.add(task=None, keep=["entropy"], steps="all")
    settle(ranks)
    assert ranks.agreement(every)["steps"] == {"every": 1, "start": 5, "count": None}
    ranks.bench.give(ranks.ranks[0].finish())
    late = ranks.add(task=None, keep=["advantages"])
    revision = ranks.plan.revision
    for _ in range(5):
        settle(ranks)
    assert ranks.agreement(late)["phase"] == "asked"
    assert ranks.plan.revision == revision


def test_orders_that_cannot_be_meant() -> None:
    ranks = Ranks(1)
    for _ in range(3):
        ranks.begin(0)
    with pytest.raises(Conflict, match="step 2 has begun: the newest is 3"):
        ranks.add(steps=[1, 2])
    entry = ranks.requests.add(capture_spec(run="other"), by="me", mono=0.0, wall=0.0)
    assert "no run 'other' is known" in ranks.requests.notes(entry)[0]
    entry = ranks.requests.add(capture_spec(run="r", stages=["gen"]), by="me", mono=0.0, wall=0.0)
    assert "no rank has done gen lately" in ranks.requests.notes(entry)[0]
    for misspelt in ("updat", "Update"):
        with pytest.raises(Conflict, match="did you mean update"):
            ranks.add(stages=["update", misspelt])
    assert ranks.add(stages=["updat"], force=True)
    ranks.start()  # a run that has closed no step may still come to it
    ranks.begin(0)
    entry = ranks.requests.add(
        capture_spec(run="r", stages=["updates"]), by="me", mono=0.0, wall=0.0
    )
    assert "updates (did you mean update?) lately" in ranks.requests.notes(entry)[0]
    entry = ranks.requests.add(
        capture_spec(run="b", stages=["actor_updat"]), by="me", mono=0.0, wall=0.0
    )
    assert "actor_updat (did you mean actor_update?) lately" in ranks.requests.notes(entry)[1]
    empty = Ranks(0)
    with pytest.raises(Conflict, match="0 runs are live"):
        empty.requests.add(capture_spec(), by="me", mono=0.0, wall=0.0)


def test_steps_that_closed_are_refused_also_while_no_attempt_is_live() -> None:
    ranks = Ranks(1)
    for _ in range(3):
        ranks.begin(0)
    ranks.bench.give(ranks.ranks[0].finish())
    with pytest.raises(Conflict, match="step 2 has closed: attempt 1 closed step 3, and no"):
        ranks.add(steps=[1, 2])
    assert ranks.add(steps=[1, 2], force=True)  # the next attempt may repeat them
    assert ranks.add(steps=[2, 4])
    ranks.start()
    ranks.bench.give(ranks.ranks[0].finish())  # it began no step
    with pytest.raises(Conflict, match="attempt 1 closed step 3"):
        ranks.add(steps=[3])


def test_a_run_that_nobody_knows_is_noted_with_the_one_that_it_may_mean() -> None:
    ranks = Ranks(0)
    for number, run in enumerate(("old", "jump", "new")):
        rank = Rank(run=run, key=run)
        ranks.bench.give(rank.hello(world_size=1), *rank.work(1 + number, "update"))
    meant = ranks.requests.add(capture_spec(run="jmp"), by="me", mono=0.0, wall=0.0)
    assert "(did you mean jump?): it waits for one of that name" in ranks.requests.notes(meant)[0]
    entry = ranks.requests.add(capture_spec(run="later"), by="me", mono=0.0, wall=0.0)
    [note] = ranks.requests.notes(entry)
    assert "it waits for one of that name; known, the newest first: new, jump, old" in note


def test_ranks_and_roles_that_are_not_there_are_named_in_a_note() -> None:
    ranks = Ranks(1)
    ranks.begin(0)
    entry = ranks.requests.add(capture_spec(run="r", ranks="0,9"), by="me", mono=0.0, wall=0.0)
    assert any(
        "rank 9 has not reported: nothing is collected there until it does (actor has 1 ranks)"
        in note
        for note in ranks.requests.notes(entry)
    )
    named = {"roles": ["actor", "actr"], "ranks": [0]}
    entry = ranks.requests.add(capture_spec(run="r", **named), by="me", mono=0.0, wall=0.0)
    said = ranks.requests.notes(entry)
    assert "no process has the role actr (did you mean actor?); the roles are actor" in said
    assert not any("has not reported" in note for note in said)
    kept = {"task": None, "keep": ["old_logprobs", "is_loss", "loss", "mine"], "ranks": [0, 3]}
    entry = ranks.requests.add(capture_spec(run="r", **kept), by="me", mono=0.0, wall=0.0)
    said = ranks.requests.notes(entry)
    assert "old_logprobs is no section and no known tensor (did you mean old_log_probs?)" in said[0]
    assert "mine is no section and no known tensor: it is kept where something" in said[1]
    assert any("rank 3 has not reported" in note for note in said[2:])


def test_filters_of_a_config_that_the_request_replaces_are_named_at_once() -> None:
    ranks = Ranks(2)
    for rank in (0, 1):
        ranks.begin(rank)

    def notes(config: dict[str, object], **fields: object) -> list[str]:
        spec = capture_spec(run="r", task=None, config=config, **fields)
        entry = ranks.requests.add(spec, by="me", mono=0.0, wall=0.0)
        return [note for note in ranks.requests.notes(entry) if "config" in note]

    assert notes({"rank": [4, "6-7"], "step": [1]}) == [
        "the config's rank [4, '6-7'] is not used: the request's ranks are all (--ranks); the run "
        "has no rank 4, 6, 7",
        "the config's step [1] is not used: the request's steps are {'next': 1} (--steps)",
    ]
    assert notes({"rank": [1]}, ranks="0") == [
        "the config's rank [1] is not used: the request's ranks are [0] (--ranks)"
    ]
    assert notes({"rank": [1], "step": []}, ranks="1") == []


def test_the_same_order_is_another_once_its_steps_have_begun() -> None:
    ranks = Ranks(2)
    for rank in (0, 1):
        ranks.begin(rank)
    capture = ranks.add()
    with pytest.raises(Conflict, match="already requests exactly this"):
        ranks.add()
    settle(ranks)
    with pytest.raises(Conflict, match="already requests exactly this"):
        ranks.add()
    for _ in range(ranks.agreement(capture)["start"]):
        ranks.begin(0)
    # It has begun, and may go on: an order from now on is of a later step.
    assert ranks.add() != capture


ACTIONS = ("poll", "begin", "add", "restart", "start", "remove")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2)), max_size=60))
def test_nobody_captures_what_was_not_agreed_on(actions: list[tuple[str, int]]) -> None:
    """In any order of polls, steps, restarts and new attempts.

    A rank captures only steps that an agreement named, and an agreement starts beyond the highest
    step that anyone had begun when it was made.
    """
    ranks = Ranks(3)
    agreed: set[tuple[int, int]] = set()
    count = 0
    for action, number in actions:
        top = max(ranks.steps)
        before = {key: entry.agreement for key, entry in ranks.plan.entries.items()}
        if action == "poll":
            ranks.poll(number)
        elif action == "begin":
            ranks.begin(number)
        elif action == "add":
            count += 1
            ranks.add(keep=[f"tensor-{count}"])
        elif action == "restart":
            ranks.restart()
        elif action == "start":
            ranks.start()
        elif ranks.plan.entries:
            entry, rows = ranks.requests.remove(next(iter(ranks.plan.entries)), by="me", wall=0.0)
            ranks.bench.carry_out(rows)
            ranks.plan.publish(ranks.plan.publication())
        for key, entry in ranks.plan.entries.items():
            if entry.agreement.phase != "agreed":
                continue
            assert isinstance(entry.agreement.steps, list)
            agreed |= {(ranks.attempt, step) for step in entry.agreement.steps}
            if key in before and before[key].phase == "asked" and action != "start":
                assert entry.agreement.start is not None
                assert entry.agreement.start > top
        assert {(attempt, step) for attempt, _, step in ranks.history} <= agreed
    revisions = [row["revision"] for row in ranks.bench.rows.of("captures")]
    assert len(revisions) == len({*revisions})
