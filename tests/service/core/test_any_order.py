"""Any order, any repetition, any loss of events, and a restart at any moment."""

from __future__ import annotations

import copy
import itertools
import json
import random
import tempfile
from collections import defaultdict

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.generated import (
    Training,
    completed_without_ends,
    differences,
    trainings,
)
from tests.support.trainings import Bench, Delivery, Rank, Rows, check_memory

from stagescope_service.coordinator.restore import restore
from stagescope_service.core.instructions import Delete, Put
from stagescope_service.core.state import State
from stagescope_service.store.contract import Snapshot
from stagescope_service.store.sql import SqlStore

usual = settings(
    max_examples=100,
    # Shrinking whole trainings takes minutes; the differing cells say what is wrong.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

chances = st.integers(0, 1 << 32).map(random.Random)
"""One number a training: drawing each choice of a shuffle takes long, and nothing shrinks."""


def in_order(training: Training) -> Bench:
    bench = Bench()
    bench.give(*training.openers, *training.said)
    bench.settle_all()
    return bench


def shuffled(training: Training, chance: random.Random, repeats: int) -> list[Delivery]:
    said = [*training.said, *chance.choices(training.said, k=repeats)]
    chance.shuffle(said)
    return [*training.openers, *said]


def interleaved(training: Training, chance: random.Random) -> list[Delivery]:
    queues: dict[str, list[Delivery]] = defaultdict(list)
    for each in reversed(training.said):
        queues[each.sender.incarnation].append(each)
    said = [*training.openers]
    while queues:
        name = chance.choice(sorted(queues))
        said.append(queues[name].pop())
        if not queues[name]:
            del queues[name]
    return said


@usual
@given(trainings(), chances, st.integers(0, 30))
def test_the_rows_are_the_same_for_any_order_and_repetition(
    training: Training, chance: random.Random, repeats: int
) -> None:
    expected = in_order(training)
    bench = Bench()
    for each in shuffled(training, chance, repeats):
        bench.give(each)
        check_memory(bench.state)
        if chance.random() < 0.2:
            bench.settle_all()
    given_to_ingestors = len({order.key for order in bench.ingests})
    assert given_to_ingestors == len(bench.ingests)
    bench.settle_all()
    bench.silence()
    expected.silence()
    check_memory(bench.state)
    assert differences(bench.rows, expected.rows) == []
    assert {(a.attempt_id, a.step) for a in bench.assembled} == {
        (row["attempt_id"], row["step"])
        for row in bench.rows.of("steps")
        if row["closed_wall"] is not None
    }


@usual
@given(trainings(again=False), chances, st.floats(0.0, 1.0))
def test_loss_never_raises_and_never_completes_a_step(
    training: Training, chance: random.Random, share: float
) -> None:
    got = [each for each in training.said if chance.random() >= share]
    bench = Bench()
    bench.give(*got)
    bench.silence()
    check_memory(bench.state)
    assert completed_without_ends(bench.rows, training, got) == []
    assert all(row["closed_wall"] is not None for row in bench.rows.of("steps"))
    assert not [row for row in bench.rows.of("stages") if row["status"] == "open"]


@usual
@given(trainings(most_attempts=1), chances)
def test_a_silence_in_between_changes_nothing_in_the_end(
    training: Training, chance: random.Random
) -> None:
    expected = in_order(training)
    expected.silence()
    bench = Bench()
    for each in [*training.openers, *training.said]:
        bench.give(each)
        if chance.random() < 0.05:
            bench.silence()
            check_memory(bench.state)
    # Whoever was only quiet still holds what was not read, and offers it again.
    bench.give(*training.said)
    bench.settle_all()
    bench.silence()
    check_memory(bench.state)
    assert differences(bench.rows, expected.rows) == []


def crash(bench: Bench, rows: Rows) -> Bench:
    """Return a new state machine on what was committed."""
    state = State(lease_seconds=bench.state.lease_seconds)
    restore(state, rows.snapshot(), bench.now)
    check_memory(state)
    after = Bench(state, copy.deepcopy(rows))
    after.now = bench.now
    return after


def go_through(
    said: list[Delivery], chance: random.Random, crashes: list[tuple[int, int]]
) -> tuple[Bench, Bench]:
    """Deliver with and without restarts; each is (where, how many before were not committed)."""
    expected = Bench()
    expected.give(*said)
    expected.settle_all()
    bench, at = Bench(), 0
    for where, uncommitted in sorted((where % (len(said) + 1), lost) for where, lost in crashes):
        kept = max(at, where - uncommitted)
        bench.give(*said[at:kept])
        if chance.random() < 0.5:
            bench.settle_all()
        committed = copy.deepcopy(bench.rows)
        # These were handled and never committed nor acknowledged: they come again.
        bench.give(*said[kept:where])
        bench, at = crash(bench, committed), kept
        unread = {
            (row["incarnation"], row["seq"]) for row in committed.of("payloads", state="announced")
        }
        bench.give(*(each for each in said[:kept] if each.key in unread))
    bench.give(*said[at:])
    for each in (bench, expected):
        each.settle_all()
        check_memory(each.state)
    return bench, expected


def restartable(most_attempts: int = 2) -> st.SearchStrategy[Training]:
    # Of work without a step that ended, nothing is read back: what is done twice is not noticed.
    return st.one_of(
        trainings(most_attempts=most_attempts, stepless=False),
        trainings(most_attempts=most_attempts, again=False),
    )


crashes = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 5)), min_size=1, max_size=3)


@usual
@given(restartable(), chances, crashes)
def test_a_restart_at_any_moment_changes_nothing(
    training: Training, chance: random.Random, crashes: list[tuple[int, int]]
) -> None:
    bench, expected = go_through([*training.openers, *training.said], chance, crashes)
    assert differences(bench.rows, expected.rows) == []


@usual
@given(restartable(1), chances, crashes)
def test_nor_where_processes_overtake_each_other(
    training: Training, chance: random.Random, crashes: list[tuple[int, int]]
) -> None:
    # Each process's own events keep their order: over a restart its batches come one by one.
    said = interleaved(training, chance)
    bench, expected = go_through(said, chance, crashes)
    for each in (bench, expected):
        each.silence()
    assert differences(bench.rows, expected.rows) == []


@st.composite
def fast_starts(draw: st.DrawFn) -> list[Delivery]:
    """Draw starts of one key, or of none, that follow within seconds; ranks are killed."""
    key = draw(st.sampled_from([None, "job"]))
    said: list[Delivery] = []
    step, wall = 1, 1000.0
    for number in range(draw(st.integers(2, 3))):
        size = draw(st.integers(1, 3))
        alone = bool(number) and draw(st.booleans())
        launch = {"launch": f"start {number}"} if draw(st.booleans()) else {}
        ranks = [
            Rank(rank, key=key, started=wall + rank / 10)
            for rank in (range(draw(st.integers(0, size - 1)), size) if alone else range(size))
        ]
        hellos = [rank.hello(world_size=size, **launch) for rank in ranks]
        work = [[each for at in (step, step + 1) for each in rank.work(at)] for rank in ranks]
        if draw(st.booleans()):
            said += [*hellos, *itertools.chain(*work)]
        else:
            said += itertools.chain(
                *([hello, *own] for hello, own in zip(hellos, work, strict=True))
            )
        step += draw(st.integers(1, 3))
        wall = max(rank.wall for rank in ranks) + draw(st.sampled_from([-0.5, 0.5, 5.0]))
    return said


@usual
@given(fast_starts(), chances, crashes)
def test_nor_where_starts_follow_each_other_within_seconds(
    said: list[Delivery], chance: random.Random, crashes: list[tuple[int, int]]
) -> None:
    bench, expected = go_through(said, chance, crashes)
    for each in (bench, expected):
        each.silence()
    assert differences(bench.rows, expected.rows) == []


def test_who_stayed_is_known_after_a_restart() -> None:
    ranks = [Rank(rank, key="job", started=1000.0 + rank / 10) for rank in range(3)]
    said: list[Delivery] = []
    for rank in ranks:
        said += [rank.hello(world_size=3, launch="start 0"), *rank.work(1), *rank.work(2)]
    alone = Rank(2, key="job", started=1002.15)
    said += [alone.hello(world_size=3), *alone.work(2), *alone.work(3)]
    first = Rank(0, key="job", started=1002.9)
    said += [first.hello(world_size=1), *first.work(4), *first.work(5)]
    bench, expected = go_through(said, random.Random(0), [(20, 2)])
    for each in (bench, expected):
        each.silence()
    assert differences(bench.rows, expected.rows) == []


def test_what_is_offered_again_after_a_restart_leaves_an_ended_attempt_as_it_was() -> None:
    bench = Bench()
    replaced, newest = Rank(key="a", started=1000.0), Rank(key="a", started=1100.0)
    begun, ended = replaced.work(1, payload=True)
    bench.give(begun, ended, *newest.work(1), newest.finish(), Rank(key="b").hello())
    [attempt] = bench.rows.of("attempts", number=1)
    assert attempt["ended_wall"] is not None
    assert [row["superseded"] for row in bench.rows.of("stages")] == [True, False]
    for _ in range(2):
        bench = crash(bench, bench.rows)
        bench.give(ended)
        assert bench.rows.of("attempts", number=1) == [attempt]
        assert [row["superseded"] for row in bench.rows.of("stages")] == [True, False]


@settings(usual, max_examples=8)
@given(restartable())
def test_a_restart_from_the_real_store(training: Training) -> None:
    expected = in_order(training)
    said = [*training.openers, *training.said]
    with tempfile.TemporaryDirectory() as folder:
        store = SqlStore(f"sqlite:///{folder}/catalogue.db")
        store.open()
        try:
            rows, state = Rows(), State()
            for at in range(0, len(said), 11):
                bench = Bench(state, rows)
                out = bench.give(*said[at : at + 11])
                for order in bench.ingests:
                    out += bench.settle(order.key)
                store.submit([each for each in out if isinstance(each, Put | Delete)]).result(30)
                snapshot = store.snapshot()
                assert in_words(snapshot) == in_words(rows.snapshot())
                state = State()
                restore(state, snapshot, 0.0)
                check_memory(state)
        finally:
            store.close()
    assert differences(rows, expected.rows) == []


def in_words(snapshot: Snapshot) -> dict[str, list[str]]:
    """Return a snapshot so that it compares: rows in one order, JSON as JSON, no blobs."""
    tables = ("attempts", "processes", "steps", "stages", "payloads", "findings")
    return {
        table: sorted(
            json.dumps({name: row[name] for name in row if name != "step_summary"}, sort_keys=True)
            for row in getattr(snapshot, table)
        )
        for table in tables
    }
