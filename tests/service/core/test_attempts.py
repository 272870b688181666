"""Which start of a training an event belongs to."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from tests.support.trainings import Bench, Delivery, Rank, check_memory

from stagescope_service.core import restarts
from stagescope_service.core.arrival import Arrival
from stagescope_service.core.entities import Attempt
from stagescope_service.core.instructions import Aggregate, Ingest
from stagescope_service.core.restarts import Restarts
from stagescope_wire.errors import InvalidEvent
from stagescope_wire.schema import Event


@pytest.fixture
def bench() -> Bench:
    return Bench()


def attempts(bench: Bench, run: str = "r") -> list[tuple[int, str]]:
    return [(row["number"], row["key"]) for row in bench.rows.of("attempts", run=run)]


def test_an_unknown_key_opens_the_next_attempt(bench: Bench) -> None:
    for key in ("a", "b", "c"):
        bench.give(Rank(key=key).hello(world_size=1))
    assert attempts(bench) == [(1, "a"), (2, "b"), (3, "c")]
    assert [row["run"] for row in bench.rows.of("runs")] == ["r"]


def test_a_known_key_goes_to_its_own_attempt_however_late(bench: Bench) -> None:
    first, second = Rank(key="a"), Rank(key="b", started=2000.0)
    bench.give(*first.work(1), *second.work(1))
    late = Rank(1, key="a", started=1000.5)
    bench.give(*late.work(1), *first.work(2))
    assert attempts(bench) == [(1, "a"), (2, "b")]
    assert {row["attempt_id"] for row in bench.rows.of("stages", rank=1)} == {1}
    assert {row["step"] for row in bench.rows.of("steps", attempt_id=1)} == {1, 2}


def test_jobs_with_one_key_belong_together(bench: Bench) -> None:
    bench.give(Rank(0, key="k").hello(), Rank(0, "rollout", key="k").hello())
    assert attempts(bench) == [(1, "k")]


def test_runs_number_their_attempts_apart(bench: Bench) -> None:
    bench.give(Rank(run="x", key="k").hello(), Rank(run="y", key="k").hello())
    assert attempts(bench, "x") == attempts(bench, "y") == [(1, "k")]
    assert len({row["attempt_id"] for row in bench.rows.of("attempts")}) == 2


def test_a_raw_call_without_a_key_goes_to_the_newest_attempt_and_is_marked(bench: Bench) -> None:
    raw = Rank(3, key=None, raw=True, incarnation="raw/1")
    bench.give(raw.log(1, loss=1.0))
    assert attempts(bench) == [(1, "unkeyed")]
    assert bench.attempt()["unkeyed"] is True
    bench.give(Rank(key="a").hello(), Rank(key="b").hello())
    bench.give(Rank(3, key=None, raw=True, incarnation="raw/2").log(1, loss=1.0))
    row = bench.rows.one("processes", incarnation="raw/2")
    assert (row["attempt_id"], row["raw"], row["unkeyed"]) == (3, True, True)
    assert bench.attempt(3)["unkeyed"] is False
    assert bench.rows.one("processes", attempt_id=2)["unkeyed"] is False


def closed_through(bench: Bench, ranks: int, last: int) -> list[Rank]:
    """Run a start whose steps 1 ... last closed and whose last + 1 is under way."""
    old = [Rank(rank) for rank in range(ranks)]
    for rank in old:
        bench.give(rank.hello(world_size=ranks))
    for step in range(1, last + 1):
        for rank in old:
            bench.give(*rank.work(step))
    for rank in old:
        bench.give(rank.begin(last + 1))
    assert bench.attempt()["last_closed_step"] == last
    return old


def test_a_recreated_rank_at_a_closed_step_opens_an_attempt(bench: Bench) -> None:
    closed_through(bench, 2, 5)
    new = Rank(0, started=2000.0)
    bench.give(new.hello(world_size=2), *new.work(4))
    assert attempts(bench) == [(1, "job-1"), (2, "job-1~2")]
    assert bench.attempt(2)["resumed_from_step"] == 3
    assert bench.rows.one("processes", incarnation=new.sender.incarnation)["attempt_id"] == 2
    check_memory(bench.state)


def test_a_recreated_rank_at_the_open_step_stays(bench: Bench) -> None:
    closed_through(bench, 2, 5)
    bench.give(*Rank(0, started=2000.0).work(6))
    assert attempts(bench) == [(1, "job-1")]


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_rank_that_never_spoke_before_may_be_the_first_of_the_next_start(
    bench: Bench, step: int
) -> None:
    alone = Rank(0, key=None)  # rank 1 crashed before it said a word
    for number in (3, 4, 5):
        bench.give(*alone.work(number))
    second = [Rank(1, key=None, started=2000.0), Rank(0, key=None, started=2000.1)]
    for rank in second:
        bench.give(rank.hello(world_size=2), rank.begin(step))
    assert [number for number, _ in attempts(bench)] == [1, 2]
    stages = bench.rows.of("stages", attempt_id=2)
    assert {(row["rank"], row["step"]) for row in stages} == {(0, step), (1, step)}
    check_memory(bench.state)


@pytest.mark.parametrize("steps", [(1, 2), (3,)])
def test_a_rank_that_took_leave_before_another_spoke_is_of_the_same_start(
    bench: Bench, steps: tuple[int, ...]
) -> None:
    """Two ranks of one short script: all that one has to say arrives before the other's."""
    ranks = [Rank(0, key=None), Rank(1, key=None, started=1000.001)]
    for rank in ranks:
        bench.give(rank.hello(world_size=2))
        for step in steps:
            bench.give(*rank.work(step))
        bench.give(rank.finish())
    assert [number for number, _ in attempts(bench)] == [1]
    rows = bench.rows.of("stages", attempt_id=1, superseded=False)
    assert {(row["rank"], row["step"]) for row in rows} == {(r, s) for r in (0, 1) for s in steps}
    assert not [row for row in bench.rows.of("findings") if row["kind"] == "started_again"]
    check_memory(bench.state)


@pytest.mark.parametrize("arrived", [1000.4, 1000.6])
def test_a_rank_lives_until_its_leave_arrives(bench: Bench, arrived: float) -> None:
    """Its FINISH is made at 1000.25 ... and acknowledged later; the other starts at 1000.5."""
    ranks = [Rank(0, key=None), Rank(1, key=None, started=1000.5)]
    for rank in ranks:
        rank.wall -= 0.9  # of the events; what counts is when they arrive
        for each in (rank.hello(world_size=2), *rank.work(1), rank.finish()):
            bench.now += 0.001
            bench.carry_out(
                bench.state.handle(
                    each.sender, each.event, bench.now, Arrival(wall=max(arrived, rank.wall))
                )
            )
    one_start = arrived > 1000.5
    assert [number for number, _ in attempts(bench)] == ([1] if one_start else [1, 2])
    alone = [row["rank"] for row in bench.rows.of("findings", kind="began_alone")]
    assert alone == ([] if one_start else [1])


def test_a_process_of_another_role_belongs_to_the_training_that_was(bench: Bench) -> None:
    bench.give(*Rank(0, key=None).work(1), *Rank(0, "judge", key=None, started=2000.0).work(1))
    assert [number for number, _ in attempts(bench)] == [1]


@pytest.mark.parametrize("leaves", [False, True], ids=["killed", "finished"])
@pytest.mark.parametrize("step", [3, 4])
def test_a_start_without_a_key_is_told_by_who_is_left_of_the_one_before(
    bench: Bench, step: int, leaves: bool
) -> None:
    """Plain processes that were killed in step 3, or after it, and go on from a checkpoint."""
    first, second = (
        [Rank(rank, key=None, started=started) for rank in (0, 1)] for started in (1000.0, 2000.0)
    )
    for number, ranks, numbers in ((1, first, (1, 2, 3)), (2, second, (step, step + 1))):
        for rank in ranks:
            bench.give(rank.hello(world_size=2, fingerprint={"config": {"lr": number}}))
        for each in numbers:
            for rank in ranks:
                bench.give(*rank.work(each))
        if leaves:
            bench.give(*(rank.finish() for rank in ranks))
    assert [number for number, _ in attempts(bench)] == [1, 2]
    assert [bench.attempt(n)["fingerprint"]["config"]["lr"] for n in (1, 2)] == [1, 2]
    assert bench.attempt(2)["resumed_from_step"] == step - 1
    check_memory(bench.state)


def test_a_rank_made_anew_beside_others_that_go_on_stays_with_them(bench: Bench) -> None:
    """Rank 0 is in a long stage: it polled lately, and says nothing meanwhile."""
    ranks = [Rank(rank, key=None) for rank in (0, 1)]
    for number in (1, 2):
        for rank in ranks:
            bench.give(*rank.work(number))
    again = Rank(1, key=None, started=ranks[0].wall + 20.0)
    bench.give(*again.work(3), *Rank(1, key=None, started=again.wall + 1.0).work(4))
    assert [number for number, _ in attempts(bench)] == [1]
    [found] = bench.rows.of("findings", kind="started_again")
    assert "without an attempt key" in found["message"]


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("pause", [1.0, 300.0])
def test_all_ranks_of_a_start_without_a_key_are_in_one_attempt(pause: float, leaves: bool) -> None:
    """Killed in step 3 and started again there, in any order of hellos and first steps."""
    orders = {
        order
        for order in itertools.permutations("001122")
        if list(dict.fromkeys(order)) == ["0", "1", "2"]
    }
    for order in orders:
        bench = Bench()
        first = [Rank(rank, key=None) for rank in range(3)]
        for number in (1, 2):
            for rank in first:
                bench.give(*rank.work(number))
        bench.give(*(rank.begin(3) for rank in first))
        begun = max(rank.wall for rank in first) + pause
        second = [Rank(rank, key=None, started=begun) for rank in range(3)]
        waiting = [[rank.hello(world_size=3), *rank.work(3), *rank.work(4)] for rank in second]
        spoke: set[str] = set()
        for which in order:
            said = waiting[int(which)]
            bench.give(*(said[1:] if which in spoke else said[:1]))
            if leaves and which in spoke:
                bench.give(second[int(which)].finish())
            spoke.add(which)
        found = {
            bench.rows.one("processes", incarnation=rank.sender.incarnation)["attempt_id"]
            for rank in second
        }
        assert len(found) == 1, (order, found)


# --- starts that come fast: the processes before still seem to be live --------------------------
def killed_in(bench: Bench, step: int, ranks: int = 2, **about: object) -> list[Rank]:
    """Run a start whose ranks are killed in `step`: none of them says that it leaves."""
    key = "job-1" if about.get("keyed") else None
    said = {name: value for name, value in about.items() if name != "keyed"}
    old = [Rank(rank, key=key) for rank in range(ranks)]
    for rank in old:
        bench.give(rank.hello(world_size=ranks, **said))
    for number in range(1, step):
        for rank in old:
            bench.give(*rank.work(number))
    bench.give(*(rank.begin(step) for rank in old))
    return old


def placed(bench: Bench, ranks: list[Rank]) -> list[int]:
    """Return the number of the attempt of each process."""
    numbers = {row["attempt_id"]: row["number"] for row in bench.rows.of("attempts")}
    rows = [bench.rows.one("processes", incarnation=each.sender.incarnation) for each in ranks]
    return [numbers[row["attempt_id"]] for row in rows]


def work_of(bench: Bench, attempt: int) -> set[tuple[int, int]]:
    found = bench.rows.of("stages", attempt_id=bench.attempt(attempt)["attempt_id"])
    return {(row["rank"], row["step"]) for row in found}


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("step", [6, 7])
@pytest.mark.parametrize("pause", [-2.0, 0.1, 5.0], ids=["overlapping", "at once", "soon"])
def test_where_every_rank_is_a_new_process_it_is_a_new_attempt(
    bench: Bench, pause: float, step: int, keyed: bool
) -> None:
    old = killed_in(bench, 6, keyed=keyed)
    began = max(rank.wall for rank in old) + pause
    new = [Rank(rank, key=old[0].sender.attempt_key, started=began + rank / 10) for rank in (0, 1)]
    bench.give(*(rank.hello(world_size=2) for rank in new))
    if pause < 0:
        bench.give(old[1].log(6, loss=1.0))  # it still lives
    for rank in new:
        bench.give(*rank.work(step))
    assert placed(bench, [*old, *new]) == [1, 1, 2, 2]
    assert work_of(bench, 2) == {(0, step), (1, step)}
    assert work_of(bench, 1) == {(rank, number) for rank in (0, 1) for number in range(1, 7)}
    assert bench.attempt(2)["resumed_from_step"] == step - 1
    assert not bench.rows.of("findings")
    check_memory(bench.state)
    bench.restart()
    assert placed(bench, [*old, *new]) == [1, 1, 2, 2]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("order", [*itertools.permutations("0011")])
def test_what_a_launcher_says_of_its_starts_tells_them_apart(
    bench: Bench, order: tuple[str, ...], keyed: bool
) -> None:
    """In any order of hellos and first steps, without the HELLO of every rank."""
    old = killed_in(bench, 6, keyed=keyed, launch="torchrun a, restart 0")
    new = [Rank(rank, key=old[0].sender.attempt_key, started=1001.0) for rank in (0, 1)]
    launch = "torchrun a, restart 1"
    said = [[each.hello(world_size=2, launch=launch), *each.work(7)] for each in new]
    spoke: set[str] = set()
    for which in order:
        bench.give(*(said[int(which)][1:] if which in spoke else said[int(which)][:1]))
        spoke.add(which)
    assert placed(bench, [*old, *new]) == [1, 1, 2, 2]
    assert not bench.rows.of("findings")
    check_memory(bench.state)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("last_first", [False, True])
def test_a_start_with_another_number_of_ranks_is_a_new_attempt(
    bench: Bench, size: int, last_first: bool, keyed: bool
) -> None:
    old = killed_in(bench, 6, 3, keyed=keyed)
    key = old[0].sender.attempt_key
    new = [Rank(rank, key=key, started=1020.0 + rank / 10) for rank in range(size)]
    if last_first:  # their batches wait for the HELLO of rank 0
        bench.give(*(rank.hello(world_size=size) for rank in new))
    for rank in reversed(new) if last_first else new:
        bench.give(rank.hello(world_size=size), *rank.work(7))
    assert placed(bench, [*old, *new]) == [1, 1, 1, *([2] * size)]
    assert not bench.rows.of("findings")
    check_memory(bench.state)


def test_a_rank_of_the_same_start_that_names_another_size_belongs_to_it(bench: Bench) -> None:
    killed_in(bench, 6, 2, keyed=True)
    late = Rank(2, started=1000.5)
    bench.give(late.hello(world_size=3), *late.work(6))
    assert placed(bench, [late]) == [1]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_rank_that_is_replaced_alone_stays(bench: Bench, goes_on: bool, keyed: bool) -> None:
    old = killed_in(bench, 6, keyed=keyed)
    new = Rank(1, key=old[0].sender.attempt_key, started=1020.0)
    bench.give(new.hello(world_size=2))
    if goes_on:
        old[0].wall = 1021.0
        bench.give(*old[0].work(6))
    registry = bench.state.registry
    assert (
        registry.restarts.may_be_of_new_start(registry.processes[new.sender.incarnation], 6)
        != goes_on
    )
    bench.give(*new.work(6))
    assert placed(bench, [*old, new]) == [1, 1, 1]
    # Then all of them start again.
    last = [Rank(rank, key=new.sender.attempt_key, started=1040.0) for rank in (0, 1)]
    bench.give(*(rank.hello(world_size=2) for rank in last), *last[0].work(7), *last[1].work(7))
    assert placed(bench, [*old, new, *last]) == [1, 1, 1, 2, 2]
    check_memory(bench.state)


def test_a_single_process_that_starts_again_under_one_key_is_a_new_attempt(bench: Bench) -> None:
    for step, started in ((1, 1000.0), (3, 1010.0)):  # as in a loop of a shell script
        rank = Rank(started=started)
        bench.give(rank.hello(single=True), *rank.work(step), *rank.work(step + 1))
    assert attempts(bench) == [(1, "job-1"), (2, "job-1~2")]


def test_the_processes_of_another_role_must_have_begun_again_too(bench: Bench) -> None:
    critic, rollout = Rank(0, "critic"), Rank(0, "rollout")
    old = killed_in(bench, 6, 1, keyed=True)
    bench.give(critic.hello(world_size=1), *critic.work(6), *rollout.work(6, "rollout_generate"))
    new = Rank(0, started=1020.0)
    bench.give(new.hello(world_size=1), *new.work(7))
    assert placed(bench, [*old, critic, new]) == [1, 1, 1]
    again = [Rank(0, started=1030.0), Rank(0, "critic", started=1030.0)]
    bench.give(*(rank.hello(world_size=1) for rank in again), *again[0].work(8))
    assert placed(bench, [*again, rollout]) == [2, 2, 1]
    check_memory(bench.state)


def may_be_of_new_start(bench: Bench, rank: Rank, step: int) -> bool:
    registry = bench.state.registry
    return registry.restarts.may_be_of_new_start(registry.processes[rank.sender.incarnation], step)


def poll(bench: Bench, ranks: list[Rank], wall: float) -> None:
    for rank in ranks:
        bench.state.renew(rank.sender.incarnation, bench.now, wall)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("role", ["eval", "reward_model", "critic"])
@pytest.mark.parametrize("changed", ["launch", "size", "step"])
@pytest.mark.parametrize("says_so", [False, True], ids=["long stage", "goes on"])
def test_a_role_that_is_started_again_beside_the_actors_stays(
    bench: Bench, says_so: bool, changed: str, role: str, keyed: bool
) -> None:
    """By its own torchrun or Slurm job, larger or smaller, at any step; once and again."""
    actors = killed_in(bench, 6, keyed=keyed, launch="torchrun a")
    key, helpers = actors[0].sender.attempt_key, []
    for number in range(4):
        helper = Rank(0, role, key=key, started=1020.0 + 100 * number)
        launch = f"Slurm job {number if changed == 'launch' else 0}"
        poll(bench, actors, helper.wall)
        size = 1 + (changed == "size") * (number % 2)
        bench.give(helper.hello(world_size=size, launch=launch))
        if says_so:
            for actor in actors:
                actor.wall = helper.wall + 1.0
                bench.give(*actor.work(7 + number))
        elif number:
            assert may_be_of_new_start(bench, helper, 7)
        bench.give(*helper.work(5 if changed == "step" else 7 + number))
        helpers.append(helper)
    assert placed(bench, [*actors, *helpers]) == [1] * 6
    check_memory(bench.state)


def test_actors_that_their_launcher_starts_again_wait_for_a_sign_of_the_others(
    bench: Bench,
) -> None:
    """A reward model may outlive them, or still be at work because they are not all started."""
    for says_so in (False, True):
        run = f"r{says_so}"
        judge = Rank(0, "reward_model", run=run)
        old = Rank(0, run=run)
        bench.give(judge.hello(world_size=1), old.hello(world_size=1, launch="torchrun a"))
        bench.give(*judge.work(1), *old.work(1))
        new = Rank(0, run=run, started=1020.0)
        bench.give(new.hello(world_size=1, launch="torchrun b"))
        assert may_be_of_new_start(bench, new, 2)
        judge.wall = 1021.0
        bench.give(*(judge.work(2) if says_so else ()), *new.work(2))
        assert [number for number, _ in attempts(bench, run)] == ([1] if says_so else [1, 2])


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("apart", [0.0, 0.1, 5.0, 60.0])
@pytest.mark.parametrize("told", [{}, {"single": True}, {"world_size": 1}])
def test_live_processes_that_share_the_default_rank_are_of_one_attempt(
    bench: Bench, told: dict[str, object], apart: float, keyed: bool
) -> None:
    """Tasks of one job that call `init` without a rank, in any order of their work."""
    key = "job-1" if keyed else None
    for number, order in enumerate(itertools.permutations(range(3))):
        run = f"r{number}"
        ranks = [
            Rank(run=run, key=key, incarnation=f"{run}-{i}", started=1000.0 + apart * i)
            for i in range(3)
        ]
        bench.give(*(rank.hello(**told) for rank in ranks))
        for step in range(1, 4):
            for which in order:
                ranks[which].wall = max(ranks[which].wall, 1000.0 + 2 * apart + 6 + step)
                bench.give(*ranks[which].work(step))
        assert [number for number, _ in attempts(bench, run)] == [1], order
    check_memory(bench.state)


def test_a_poll_shows_that_a_process_of_the_same_rank_lives_on(bench: Bench) -> None:
    for polls in (False, True):
        first, second = (Rank(run=f"r{polls}", started=started) for started in (1000.0, 1020.0))
        bench.give(first.hello(single=True), *first.work(1), first.begin(2))
        bench.give(second.hello(single=True))
        if polls:
            poll(bench, [first], 1026.0)
        bench.give(*second.work(3))
        assert [number for number, _ in attempts(bench, f"r{polls}")] == ([1] if polls else [1, 2])


@pytest.mark.parametrize("keyed", [False, True])
def test_a_rank_that_is_replaced_before_the_others_began_a_step_stays(
    bench: Bench, keyed: bool
) -> None:
    key = "job-1" if keyed else None
    ranks = [Rank(rank, key=key) for rank in (0, 1)]
    bench.give(*(rank.hello(world_size=2) for rank in ranks), *ranks[1].work(1))
    again = Rank(1, key=key, started=1010.0)
    bench.give(again.hello(world_size=2), *again.work(1))
    bench.give(*ranks[0].work(1))
    assert placed(bench, [*ranks, again]) == [1, 1, 1]
    check_memory(bench.state)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_rank_that_joins_an_elastic_training_stays(bench: Bench, rank: int, keyed: bool) -> None:
    """With a larger world_size, while the others are inside a long stage."""
    old = killed_in(bench, 6, keyed=keyed)
    joined = Rank(rank, key=old[0].sender.attempt_key, started=1200.0)
    poll(bench, old, joined.wall)
    bench.give(joined.hello(world_size=4))
    assert may_be_of_new_start(bench, joined, 6)
    bench.give(*joined.work(6))
    for each in old:
        each.wall = 1300.0
        bench.give(*each.work(6))
    assert placed(bench, [*old, joined]) == [1, 1, 1]
    check_memory(bench.state)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_start_costs_about_as_much_for_each_rank_however_many_there_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, missing: int, keyed: bool
) -> None:
    count = 300
    compared = 0

    def counted(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: object, **named: object) -> object:
            nonlocal compared
            compared += 1
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    old = killed_in(bench, 2, count, keyed=keyed)
    for owner, name in [
        (Restarts, "_next"), (Restarts, "older_of"), (Restarts, "came_with"), (Attempt, "believe"),
        (restarts, "_is_nearer"), (restarts, "_began_after"),
        (restarts, "_is_recent"),
    ]:  # fmt: skip
        counted(owner, name)
    key = old[0].sender.attempt_key
    new = [Rank(rank, key=key, started=1020.0) for rank in range(count - missing)]
    bench.give(*(rank.hello(world_size=count) for rank in new))
    for rank in new:
        bench.give(rank.begin(2))
    assert set(placed(bench, new)) == ({1} if missing else {2})
    assert count < compared < 40 * count


@pytest.mark.parametrize("skew", [-7200.0, 7200.0])
@pytest.mark.parametrize("skewed", [0, 1])
def test_a_clock_that_is_hours_off_moves_no_start(bench: Bench, skew: float, skewed: int) -> None:
    """The ranks of two starts; the clock of one node is wrong, which its ranks have measured."""

    def start(began: float) -> list[Rank]:
        ranks = [Rank(rank, key=None, started=began) for rank in (0, 1)]
        wrong = ranks[skewed]
        wrong.wall += skew
        wrong.sender = dataclasses.replace(
            wrong.sender, started=began + skew, clock_offset=-skew, clock_error=0.01
        )
        return ranks

    for number, began in ((1, 10_000.0), (3, 10_060.0)):
        ranks = start(began)
        bench.give(*(rank.hello(world_size=2) for rank in ranks))
        for step in (number, number + 1):
            bench.give(*(event for rank in ranks for event in rank.work(step)))
        bench.give(*(rank.finish() for rank in ranks))
    rows = bench.rows.of("attempts")
    assert [(row["number"], row["opened_wall"]) for row in rows] == [(1, 10_000.0), (2, 10_060.0)]
    begun = [row["begun_wall"] for row in bench.rows.of("stages", attempt_id=2)]
    assert 10_060.0 < min(begun) <= max(begun) < 10_070.0
    assert all(10_000.0 < row["opened_wall"] < 10_070.0 for row in bench.rows.of("steps"))


def test_after_a_restart_of_the_service_nobody_is_taken_for_gone(bench: Bench) -> None:
    ranks = [Rank(rank, key=None) for rank in (0, 1)]
    for rank in ranks:
        bench.give(*rank.work(1))
    bench.restart()
    bench.state.registry.restarts.listening_since = 1990.0
    bench.give(*Rank(1, key=None, started=2000.0).work(2))
    assert [number for number, _ in attempts(bench)] == [1]


def test_a_single_process_that_starts_again_at_once_is_a_new_start(bench: Bench) -> None:
    first = Rank(0, key=None)
    bench.give(*first.work(1), *Rank(0, key=None, started=first.wall + 1.0).work(2))
    assert [number for number, _ in attempts(bench)] == [1, 2]
    assert not bench.rows.of("findings")


def test_a_rank_that_comes_to_a_start_that_goes_on_belongs_to_it(bench: Bench) -> None:
    first, joined = Rank(0), Rank(1, started=2000.0)
    for number in (1, 2, 3):
        bench.give(*first.work(number))
    first.wall = 2001.0
    bench.give(first.log(3, loss=1.0), *joined.work(2))
    assert attempts(bench) == [(1, "job-1")]


def test_a_process_that_goes_on_after_its_leave_is_there_again_over_a_restart(bench: Bench) -> None:
    rank = Rank(0)
    bench.give(*rank.work(1), rank.finish())
    bench.restart()
    bench.give(*rank.work(2))
    assert bench.rows.one("processes")["finished_wall"] is None
    assert bench.attempt()["ended_wall"] is None
    assert {row["status"] for row in bench.rows.of("stages")} == {"ok"}
    assert not bench.rows.of("losses")


def test_a_third_start_under_one_key_opens_a_third_attempt(bench: Bench) -> None:
    closed_through(bench, 1, 3)
    for started in (2000.0, 3000.0):
        again = Rank(0, started=started)
        for step in (1, 2, 3):
            bench.give(*again.work(step))
    assert attempts(bench) == [(1, "job-1"), (2, "job-1~2"), (3, "job-1~3")]
    check_memory(bench.state)


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_siblings_follow_into_the_new_attempt_in_any_order(
    bench: Bench, order: tuple[int, ...]
) -> None:
    closed_through(bench, 2, 5)
    first, second = Rank(0, started=2000.0), Rank(1, started=2000.1)
    hellos = [first.hello(world_size=2), second.hello(world_size=2)]
    begins = [first.begin(3), second.begin(3)]
    said = [hellos[0], begins[0], hellos[1], begins[1]]
    bench.give(*(said[place] for place in order))
    assert attempts(bench) == [(1, "job-1"), (2, "job-1~2")]
    moved = bench.rows.of("processes", attempt_id=2)
    assert {row["incarnation"] for row in moved} == {
        first.sender.incarnation, second.sender.incarnation,
    }  # fmt: skip
    assert {row["incarnation"] for row in bench.rows.of("stages", attempt_id=2)} == {
        first.sender.incarnation, second.sender.incarnation,
    }  # fmt: skip
    check_memory(bench.state)


def test_ranks_that_are_new_in_the_second_start_follow_too(bench: Bench) -> None:
    closed_through(bench, 1, 5)
    joined, again = Rank(1, started=2000.0), Rank(0, started=2000.1)
    bench.give(joined.hello(world_size=2), again.hello(world_size=2), again.begin(5))
    assert len(bench.rows.of("processes", attempt_id=2)) == 2


def test_a_rank_that_comes_late_to_a_step_stays_with_the_others_of_its_start(bench: Bench) -> None:
    killed = [Rank(rank) for rank in range(2)]
    for rank in killed:
        bench.give(rank.hello(world_size=2), *rank.work(1))
    bench.give(killed[1].begin(2))
    quick, slow = (Rank(rank, started=1010.0) for rank in range(2))
    bench.give(quick.hello(world_size=2), *quick.work(1), quick.begin(2))
    assert bench.step(1)["close_reason"] == "everyone went on"
    bench.give(slow.hello(world_size=2), *slow.work(1))
    assert attempts(bench) == [(1, "job-1")]
    answering = bench.rows.of("stages", superseded=False, step=1)
    names = {row["incarnation"] for row in answering}
    assert names == {quick.sender.incarnation, slow.sender.incarnation}
    assert bench.assembled.count(Aggregate(1, 1)) == 2  # closed, and another one answered


def test_the_old_start_stays_ended_when_its_second_leaves_it(bench: Bench) -> None:
    closed_through(bench, 2, 5)
    bench.silence(wall=1500.0)
    assert bench.attempt()["ended_wall"] == 1500.0
    new = Rank(0, started=2000.0)
    bench.give(new.hello(world_size=2), *new.work(5))
    assert bench.attempt(1)["ended_wall"] == 1500.0
    assert bench.attempt(1)["end_reason"] == "its processes fell silent"
    assert bench.attempt(2)["ended_wall"] is None


def test_a_rollout_never_opens_an_attempt_and_a_working_one_stays(bench: Bench) -> None:
    closed_through(bench, 1, 5)
    serving = Rank(0, "rollout")
    bench.give(serving.hello(), serving.begin(None, "rollout_generate", policy_version=3))
    bench.give(*Rank(0, "rollout", started=2000.0).work(2, "rollout_generate"))
    assert attempts(bench) == [(1, "job-1")]
    bench.give(*Rank(0, started=2000.0).work(2))
    row = bench.rows.one("processes", incarnation=serving.sender.incarnation)
    assert row["attempt_id"] == 1


def test_a_raw_caller_of_a_rank_is_no_earlier_incarnation_of_it(bench: Bench) -> None:
    raw = Rank(0, raw=True, started=500.0)
    bench.give(raw.end_step(1))
    bench.give(*Rank(0).work(1))
    assert attempts(bench) == [(1, "job-1")]


def test_an_older_incarnation_that_comes_late_opens_nothing(bench: Bench) -> None:
    old = Rank(0, started=900.0)
    closed_through(bench, 1, 5)
    bench.give(*old.work(2))
    assert attempts(bench) == [(1, "job-1")]


def test_a_users_key_never_names_a_start_of_another(bench: Bench) -> None:
    closed_through(bench, 1, 2)
    bench.give(Rank(key="job-1~2").hello())
    bench.give(*Rank(5).work(3))
    assert attempts(bench) == [(1, "job-1"), (2, "job-1-2")]
    assert {row["attempt_id"] for row in bench.rows.of("stages", rank=5)} == {1}


@pytest.mark.parametrize(("told", "expected"), [(None, 6), (4, 4), (0, 0)])
def test_where_an_attempt_resumed(bench: Bench, told: int | None, expected: int) -> None:
    bench.give(*Rank(key="a").work(1))
    again = Rank(key="b")
    hello = again.hello(resumed_from_step=told) if told is not None else again.hello()
    bench.give(hello, again.begin(9), again.begin(7))
    assert bench.attempt(2)["resumed_from_step"] == expected
    assert bench.attempt(2)["first_step"] == 7
    assert bench.attempt(1)["resumed_from_step"] is None


def test_an_unsupported_version_is_one_finding_of_the_attempt(bench: Bench) -> None:
    said = {"unsupported": ["torch 2.3.1 is not supported"], "untried": ["ray 3 was not tried"]}
    bench.give(*(Rank(rank).hello(fingerprint={"versions": said}) for rank in range(3)))
    bench.give(Rank(3).hello(fingerprint={"versions": {"unsupported": []}}))
    found = bench.rows.one("findings", kind="unsupported_version")
    assert (found["message"], found["role"]) == ("torch 2.3.1 is not supported", "actor")
    assert bench.attempt()["fingerprint"]["versions"] == said


@pytest.mark.parametrize("driver_first", [False, True])
def test_the_configuration_is_that_of_who_says_most(bench: Bench, driver_first: bool) -> None:
    told = {"rollout_is": "token", "producers": {"rollout": "engine"}, "keep": {"all": True}}
    whole = {**told, "verl": {"trainer.n": 4, "actor.lr": 1e-6}}
    driver, rank = Rank(role="driver"), Rank()
    hellos = [
        driver.hello(settings=whole, fingerprint={"git": "d", "config": whole}),
        rank.hello(settings=told, fingerprint={"git": "r", "config": told}),
    ]
    bench.give(*(hellos if driver_first else reversed(hellos)))
    assert bench.attempt()["fingerprint"] == {"git": "r", "config": whole}
    assert bench.rows.one("runs")["settings"] == whole
    begun = driver.begin(1)
    bench.give(begun)
    jobs = [o for o in bench.give(driver.end(begun, payload=True)) if isinstance(o, Ingest)]
    assert [job.job.get("settings") for job in jobs] == [told]  # not 50 kB with each payload


@pytest.mark.parametrize(
    ("stage", "meant"),
    [
        ("actor_updte", "actor_update"),
        ("Actor-Update", "actor_update"),
        ("update_actor", "actor_update"),
        ("rollout_generat", "rollout_generate"),
        ("actor_update", None),
        ("actor_update_2", None),
        ("my_actor_update", None),
        ("optimizer", None),
    ],
)
def test_a_misspelt_stage_is_one_finding_of_each_attempt_and_role(
    bench: Bench, stage: str, meant: str | None
) -> None:
    for key in ("a", "b"):
        for rank in (Rank(0, key=key), Rank(1, key=key), Rank(0, "critic", key=key)):
            bench.give(*rank.work(1, stage), *rank.work(2, stage), *rank.work(None, stage))
        bench.restart()
    found = bench.rows.of("findings", kind="misspelt_stage")
    where = [] if meant is None else [(1, "actor"), (1, "critic"), (2, "actor"), (2, "critic")]
    assert sorted((row["attempt_id"], row["role"]) for row in found) == where
    assert {row["evidence"]["meant"] for row in found} <= {meant}
    assert all(f"did you mean {meant}?" in row["message"] for row in found)


def test_an_attempt_has_the_fingerprint_of_its_first_rank_whoever_speaks_first(
    bench: Bench,
) -> None:
    bench.give(Rank(role="rollout").hello(fingerprint={"git": "r"}))
    assert bench.attempt()["fingerprint"] == {"git": "r"}
    bench.give(Rank(1).hello(fingerprint={"git": "b"}), Rank(0).hello(fingerprint={"git": "a"}))
    bench.give(Rank(2).hello(fingerprint={"git": "c"}))
    assert bench.attempt()["fingerprint"] == {"git": "a"}


def handshake(rank: Rank, start: int) -> Delivery:
    """Say of a start what is of it alone: its command, its settings, whence it resumed."""
    versions = {"unsupported": [f"torch {start} is not supported"]}
    config = {f"of start {start}": start}
    return rank.hello(
        fingerprint={"argv": [f"start{start}.py"], "versions": versions, "config": config},
        settings=config,
        resumed_from_step=start - 1,
        world_size=start,
        expects=[f"role{start}"],
    )


def known_of(bench: Bench, number: int) -> tuple[object, ...]:
    """Return what is known of an attempt, which `handshake` says of its start."""
    row = bench.attempt(number)
    said = row["fingerprint"] or {}
    where = {"attempt_id": row["attempt_id"], "kind": "unsupported_version"}
    wrong = [each["message"] for each in bench.rows.of("findings", **where)]
    return (said.get("argv"), said.get("config"), row["resumed_from_step"], wrong)


def expected_of(start: int) -> tuple[object, ...]:
    wrong = [f"torch {start} is not supported"]
    return ([f"start{start}.py"], {f"of start {start}": start}, start - 1, wrong)


@pytest.mark.parametrize("key", [None, "job-1"])
@pytest.mark.parametrize("restarted", [False, True])
def test_each_start_has_what_its_own_processes_said(
    bench: Bench, key: str | None, restarted: bool
) -> None:
    for start in (1, 2, 3):
        rank = Rank(key=key, started=1000.0 * start)
        bench.give(handshake(rank, start))
        if restarted:
            bench.restart()
        for step in (1, 2):
            bench.give(*rank.work(step))
        bench.give(rank.finish())
        # The starts before keep theirs, whoever came after them.
        for number in range(1, start + 1):
            assert known_of(bench, number) == expected_of(number)
        assert bench.rows.one("runs")["settings"] == {f"of start {start}": start}
    assert [row["fingerprint"]["argv"][0] for row in bench.rows.of("attempts")] == [
        "start1.py", "start2.py", "start3.py",
    ]  # fmt: skip
    check_memory(bench.state)


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_a_new_start_takes_along_what_it_said_in_any_order(
    bench: Bench, order: tuple[int, ...]
) -> None:
    old = [Rank(rank) for rank in range(2)]
    for rank in old:
        bench.give(rank.hello(fingerprint={"argv": ["old"]}, world_size=2))
    for step in (1, 2, 3):
        bench.give(*(event for rank in old for event in rank.work(step)))
    completeness = [row["completeness"] for row in bench.rows.of("steps", attempt_id=1)]
    driver = Rank(role="a driver", started=1999.0)
    first, second, third = (Rank(rank, started=2000.0 + rank) for rank in range(3))
    said = [
        driver.hello(fingerprint={"argv": ["new"], "config": {"lr": 1}}, settings={"lr": 1}),
        handshake(first, 3),
        third.hello(fingerprint={"argv": ["third"]}, world_size=3, resumed_from_step=1),
        first.begin(2),
    ]
    bench.give(*(said[place] for place in order), second.begin(2))
    assert attempts(bench) == [(1, "job-1"), (2, "job-1~2")]
    assert bench.attempt(1)["fingerprint"] == {"argv": ["old"]}
    assert bench.attempt(1)["resumed_from_step"] is None
    assert bench.attempt(2)["fingerprint"]["argv"] == ["new"]
    assert bench.attempt(2)["resumed_from_step"] == 1
    assert not bench.rows.of("findings", attempt_id=1)
    # The old start's ranks were all there, however many the new one has.
    assert [row["completeness"] for row in bench.rows.of("steps", attempt_id=1)][:2] == (
        completeness[:2]
    )
    check_memory(bench.state)


@pytest.mark.parametrize("moves", [True, False])
def test_what_is_reported_before_the_first_step_goes_with_its_process(
    bench: Bench, moves: bool
) -> None:
    old, ranks = Rank(0), 1 if moves else 2  # rank 1 goes on, or there is none
    bench.give(old.hello(world_size=ranks), old.refused("settings", step=None))
    closed_through(bench, ranks, 5)
    new, driver = Rank(0, started=2000.0), Rank(role="a driver", started=1999.0)
    said = [
        driver.hello(),
        driver.log(None, learning_rate=0.1),
        new.hello(world_size=ranks),
        new.log(None, loss=2.0),
        new.log(3, reward=1.0),
        new.log(4, reward=1.0),
        new.log(5, reward=2.0),
        new.log(None, bad=float("nan")),
        new.dropped(count=3),
        new.refused("settings", step=None),
        new.refused("plan", step=None),
    ]
    bench.give(*said, *said)  # delivered twice: nothing changes
    assert not bench.rows.of("scalars", attempt_id=2)
    bench.give(new.begin(4 if moves else 6), said[3], said[8], said[10])
    own = 2 if moves else 1
    assert len(attempts(bench)) == own
    scalars = {
        (row["name"], row["step"]): row["attempt_id"]
        for row in bench.rows.of("scalars")
        if row["incarnation"] != old.sender.incarnation
    }
    # Step 3 is the one that the new start goes on from: it does not do it again.
    assert scalars == {
        ("learning_rate", None): own, ("loss", None): own, ("bad", None): own,
        ("reward", 3): 1, ("reward", 4): own, ("reward", 5): own,
    }  # fmt: skip
    assert [row["attempt_id"] for row in bench.rows.of("losses")] == [own]
    rows = [row for row in bench.rows.of("findings") if row["kind"] != "superseded_work"]
    found = [(row["kind"], row["attempt_id"]) for row in rows]
    # What the start before had said, too, stays its own.
    both = [("refused_settings", 1)] + [("refused_settings", own)] * moves
    assert sorted(found) == sorted([("non_finite_scalars", own), *both, ("refused_plan", own)])


def test_a_rank_made_anew_at_the_open_step_tells_its_attempt_what_it_said(bench: Bench) -> None:
    closed_through(bench, 2, 5)
    new = Rank(0, started=2000.0)
    bench.give(handshake(new, 2))
    assert bench.attempt()["fingerprint"] is None
    bench.give(new.begin(6))
    assert attempts(bench) == [(1, "job-1")]
    assert known_of(bench, 1) == expected_of(2)


def test_an_attempt_ends_with_its_last_process_and_resumes_with_a_new_one(bench: Bench) -> None:
    first, second = Rank(0), Rank(1)
    bench.give(*first.work(1), *second.work(1), first.finish())
    assert bench.attempt()["ended_wall"] is None
    last = second.finish()
    bench.give(last)
    assert bench.attempt()["ended_wall"] == max(last.event.wall, first.said[-1].event.wall)
    assert bench.attempt()["end_reason"] == "finished"
    bench.give(Rank(2).hello())
    assert (bench.attempt()["ended_wall"], bench.attempt()["end_reason"]) == (None, None)
    bench.silence()
    assert bench.attempt()["end_reason"] == "its processes fell silent"


def test_a_raw_logger_beside_probes_does_not_hold_the_attempt(bench: Bench) -> None:
    raw, rank = Rank(0, raw=True), Rank(0)
    bench.give(raw.log(1, loss=1.0), *rank.work(1), rank.finish())
    assert bench.attempt()["end_reason"] == "finished"
    assert bench.step(1)["close_reason"] == "attempt ended"


def test_old_attempts_leave_memory_and_late_events_find_them(bench: Bench) -> None:
    old = [Rank(rank, key="a") for rank in range(3)]
    for rank in old:
        bench.give(*rank.work(1), *rank.work(2))
    bench.silence()
    bench.give(Rank(key="b").hello())
    bench.silence()
    assert not bench.state.registry.attempts[1].processes
    assert len(bench.state.registry.processes) == 1
    before = {**bench.step(2)}
    bench.give(*old[0].work(2, "late"))
    assert bench.rows.one("stages", stage="late", revision=5)["attempt_id"] == 1
    after = bench.step(2)
    assert after.pop("parts_mark") > before.pop("parts_mark")  # its verdict is looked at again
    assert after == before
    check_memory(bench.state)


def bad_events() -> list[Event]:
    return [
        Event("begin", 1, 1.0, 1.0, {"step": 1}),
        Event("begin", 1, 1.0, 1.0, {"step": "1", "stage": "s"}),
        Event("begin", 1, 1.0, 1.0, {"step": True, "stage": "s"}),
        Event("begin", 1, 1.0, 1.0, {"step": 1 << 70, "stage": "s"}),
        Event("begin", 1, 1.0, 1.0, {"step": 1, "stage": ""}),
        Event("end", 1, 1.0, 1.0, {"step": 1, "stage": 7}),
        Event("end", 1, 1.0, 1.0, {"step": 1, "stage": "s", "minibatch": -1}),
        Event("dump", 1, 1.0, 1.0, {"step": 1}),
        Event("end_step", 1, 1.0, 1.0, {}),
        Event("log", 1, 1.0, 1.0, {"step": 1.5, "scalars": {}}),
    ]


@pytest.mark.parametrize("event", bad_events(), ids=str)
def test_a_bad_event_is_refused_alone_and_changes_nothing(bench: Bench, event: Event) -> None:
    rank = Rank()
    with pytest.raises(InvalidEvent):
        bench.give(Delivery(rank.sender, event))
    assert not bench.state.registry.processes
    assert not bench.state.registry.attempts
