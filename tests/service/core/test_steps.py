"""When a step closes, and what is said of it then and later."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.trainings import Bench, Rank, check_memory

from stagescope_service.core.arrival import Arrival
from stagescope_service.core.departures import LONG_GONE_SECONDS
from stagescope_service.core.entities import OPEN_STEPS, RECENT_STEPS, SETTLED_REMEMBERED
from stagescope_service.core.instructions import Put
from stagescope_service.core.state import State


@pytest.fixture
def bench() -> Bench:
    return Bench()


def missing(row: dict[str, Any]) -> list[tuple[str, int, str, str]]:
    return [(m["role"], m["rank"], m["stage"], m["status"]) for m in row["missing"]]


def hello(bench: Bench, ranks: list[Rank], size: int | None) -> None:
    for rank in ranks:
        bench.give(rank.hello(**({} if size is None else {"world_size": size})))


def test_a_step_closes_when_every_role_and_rank_went_on(bench: Bench) -> None:
    actors, critic = [Rank(0), Rank(1)], Rank(0, "critic")
    hello(bench, [*actors, critic], None)
    for each in (*actors, critic):
        bench.give(*each.work(1))
    bench.give(actors[0].begin(2), actors[1].begin(2))
    assert bench.step(1)["closed_wall"] is None
    last = critic.begin(3)
    bench.give(last)
    row = bench.step(1)
    assert (row["closed_wall"], row["close_reason"]) == (last.event.wall, "everyone went on")
    assert bench.step(2)["closed_wall"] is None
    bench.give(actors[0].begin(3), actors[1].begin(3))
    assert bench.step(2)["closed_wall"] is not None
    assert bench.attempt()["last_closed_step"] == 2


@pytest.mark.parametrize(
    ("offset", "ahead"),
    [
        (-3600.0, 3600.0),
        (3600.0, -3600.0),
        (None, 0.0),
        (None, 3600.0),  # unknown: nothing happens later than it is heard of
    ],
)
def test_a_step_has_the_services_clock_and_not_that_of_its_senders(
    offset: float | None, ahead: float
) -> None:
    state, rank = State(), Rank(started=1000.0 + ahead)
    sender = dataclasses.replace(rank.sender, clock_offset=offset)
    found: dict[str, dict[str, Any]] = {"attempts": {}, "steps": {}, "processes": {}}
    for said in (rank.hello(world_size=1), *rank.work(1), rank.finish()):
        for put in state.handle(sender, said.event, 0.0, Arrival(wall=said.event.wall - ahead)):
            if isinstance(put, Put) and put.table in found:
                found[put.table] |= put.row
    attempt, step = found["attempts"], found["steps"]
    times = [attempt["opened_wall"], step["opened_wall"], step["closed_wall"]]
    assert times == sorted(times)
    assert all(1000.0 <= wall < 1100.0 for wall in times)
    assert 1000.0 <= found["processes"]["last_wall"] + (offset or 0.0) < 1100.0
    if offset is not None:
        assert attempt["ended_wall"] == pytest.approx(step["closed_wall"])


@pytest.mark.parametrize(("offset", "ahead"), [(-3600.0, 3600.0), (None, 3600.0)])
def test_a_restart_is_dated_by_the_services_clock(offset: float | None, ahead: float) -> None:
    state = State()
    opened: dict[int, float] = {}
    for started in (1000.0, 1050.0):
        rank = Rank(started=started + ahead)
        sender = dataclasses.replace(rank.sender, clock_offset=offset)
        for said in (rank.hello(world_size=1), *rank.work(1), *rank.work(2), *rank.work(3)):
            for put in state.handle(sender, said.event, 0.0, Arrival(wall=said.event.wall - ahead)):
                if isinstance(put, Put) and put.table == "attempts":
                    opened[put.row["number"]] = put.row["opened_wall"]
    assert [*opened] == [1, 2]
    assert 1000.0 <= opened[1] < 1050.0 <= opened[2] < 1100.0


def test_who_never_begins_a_step_holds_none_open(bench: Bench) -> None:
    rank, idle = Rank(0), Rank(0, "reward_model")
    bench.give(idle.hello(world_size=1), *rank.work(1), *rank.work(2))
    assert bench.step(1)["closed_wall"] is not None


def test_work_without_a_step_opens_none(bench: Bench) -> None:
    rollout = Rank(0, "rollout")
    bench.give(*rollout.work(None, "rollout_generate", policy_version=4))
    assert bench.rows.of("steps") == []
    row = bench.rows.one("stages")
    assert (row["step"], row["policy_version"], row["status"]) == (None, 4, "ok")
    assert row["work_key"] == "|4|rollout_generate|0.0.0.0"


@pytest.mark.parametrize(("size", "verdict"), [(None, "unknown"), (1, "complete"), (2, "partial")])
def test_the_first_step_is_never_complete_without_a_world_size(
    bench: Bench, size: int | None, verdict: str
) -> None:
    rank = Rank(0)
    hello(bench, [rank], size)
    bench.give(*rank.work(1), rank.begin(2))
    assert bench.step(1)["completeness"] == verdict


def test_a_driver_whose_ranks_never_speak_completes_no_step(bench: Bench) -> None:
    driver = Rank(0, "driver")
    bench.give(driver.hello(world_size=1, expects=["actor"]))
    for step in (1, 2):
        bench.give(*driver.work(step))
    assert bench.step(1)["completeness"] == "unknown"
    assert bench.rows.of("findings") == []  # they may still be on their way
    driver.wall += 60.0
    for step in (3, 4):
        bench.give(*driver.work(step))
    [found] = bench.rows.of("findings")
    assert (found["kind"], found["role"], found["over_wall"]) == ("silent_ranks", "actor", None)
    assert "STAGESCOPE_TOKEN_FILE" in found["advice"]
    actor = Rank(0)
    actor.wall += 60.0
    bench.give(actor.hello(world_size=1), *actor.work(3))
    [found] = bench.rows.of("findings")
    assert found["over_wall"] is not None
    assert [bench.step(step)["completeness"] for step in (2, 3)] == ["unknown", "complete"]


def test_a_short_training_without_its_ranks_says_so_at_its_end(bench: Bench) -> None:
    driver = Rank(0, "driver")
    bench.give(driver.hello(expects=["actor"]), *driver.work(1), driver.finish())
    assert [row["kind"] for row in bench.rows.of("findings")] == ["silent_ranks"]
    assert bench.step(1)["completeness"] == "unknown"


def test_a_rank_that_no_process_reports_for_is_a_finding(bench: Bench) -> None:
    first = Rank(0)
    bench.give(first.hello(world_size=3), *first.work(1), *first.work(2))
    assert bench.rows.of("findings") == []  # they may still be on their way
    first.wall += 60.0
    bench.give(*first.work(3), first.begin(4))
    [found] = bench.rows.of("findings")
    assert (found["kind"], found["role"], found["over_wall"]) == ("absent_ranks", "actor", None)
    assert "step 2 closed without actor ranks 1, 2: no process reports for them" in found["message"]
    for rank in (1, 2):
        late = Rank(rank)
        late.wall += 60.0
        bench.give(late.hello(world_size=3), *late.work(3))
        [found] = bench.rows.of("findings", kind="absent_ranks")
        assert (found["over_wall"] is not None) is (rank == 2)


@pytest.mark.parametrize("has_steps", [True, False])
def test_a_short_training_says_at_its_end_which_ranks_never_came(
    bench: Bench, has_steps: bool
) -> None:
    first = Rank(0)
    bench.give(first.hello(world_size=4, expects=["critic"]))
    if has_steps:
        bench.give(*first.work(1), first.end_step(1))
        assert bench.step(1)["close_reason"] == "end_step"
    assert bench.rows.of("findings") == []  # they may still be on their way
    bench.give(first.finish())
    absent, silent = sorted(bench.rows.of("findings"), key=lambda row: row["kind"])
    assert (silent["kind"], silent["role"]) == ("silent_ranks", "critic")
    assert silent["message"].startswith("the attempt ended with what the trainer's process")
    assert (absent["kind"], absent["role"], absent["severity"]) == (
        "absent_ranks",
        "actor",
        "error",
    )
    assert absent["message"] == (
        "the attempt ended without actor ranks 1, 2, 3: no process reports for them. "
        "3 of 4 ranks are missing"
    )
    assert absent["evidence"] == {"ranks": [1, 2, 3]}
    for rank in (Rank(1), Rank(2), Rank(3), Rank(0, "critic")):  # their words were on the way
        bench.give(rank.hello(world_size=4 if rank.sender.role == "actor" else 1), rank.finish())
    assert bench.rows.of("findings") == []


def test_an_attempt_whose_processes_left_memory_names_no_absent_ranks(bench: Bench) -> None:
    ranks = [Rank(rank, key="a") for rank in range(2)]
    hello(bench, ranks, 2)
    for rank in ranks:
        bench.give(*rank.work(1), rank.finish())
    bench.give(Rank(0, key="b", started=2000.0).hello(), *Rank(0, key="b").work(1))
    bench.silence()
    assert not bench.state.registry.attempts[1].processes
    bench.give(ranks[0].hello(world_size=2), ranks[0].finish())
    assert bench.rows.of("findings", kind="absent_ranks") == []


@pytest.mark.parametrize(("world_size", "more"), [(11, ""), (12, " and 1 more")])
def test_ten_absent_ranks_are_named_and_the_others_counted(
    bench: Bench, world_size: int, more: str
) -> None:
    first = Rank(0)
    bench.give(first.hello(world_size=world_size), *first.work(1), *first.work(2))
    first.wall += 60.0
    bench.give(*first.work(3), first.begin(4))
    [found] = bench.rows.of("findings", kind="absent_ranks")
    assert (
        f"actor ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10{more}: no process reports" in found["message"]
    )
    assert found["evidence"] == {"ranks": [*range(1, world_size)]}


def test_a_rank_that_left_is_not_absent(bench: Bench) -> None:
    ranks = [Rank(0), Rank(1)]
    hello(bench, ranks, 2)
    bench.give(*ranks[1].work(1), ranks[1].finish(), *ranks[0].work(1))
    ranks[0].wall += 60.0
    bench.give(*ranks[0].work(2), ranks[0].finish())
    assert bench.rows.of("findings", kind="absent_ranks") == []


def test_a_stage_that_failed_and_a_process_that_crashed_are_findings(bench: Bench) -> None:
    ranks = [Rank(0), Rank(1)]
    hello(bench, ranks, 2)
    error: dict[str, Any] = {"error_type": "RuntimeError", "error_message": "CUDA error:\nassert"}
    for rank in ranks:
        bench.give(rank.end(rank.begin(3), status="failed", **error))
    failed = sorted(bench.rows.of("findings", kind="stage_failed"), key=lambda row: row["rank"])
    assert [row["rank"] for row in failed] == [0, 1]
    assert failed[0]["message"] == (
        r"actor_update of step 3 failed on actor rank 0: RuntimeError: 'CUDA error:\nassert'"
    )
    bench.give(ranks[0].say("finish", **error), ranks[1].finish())
    [crash] = bench.rows.of("findings", kind="process_crashed")
    assert (crash["step"], crash["rank"], crash["severity"]) == (3, 0, "error")
    assert bench.attempt()["end_reason"] == "an exception ended one of its processes"
    check_memory(bench.state)


def test_what_an_exception_says_is_quoted_on_one_line_without_secrets(bench: Bench) -> None:
    rank = Rank(0)
    hello(bench, [rank], 1)
    token = f"hf_{'a' * 30}"
    said = f"401 for {token}\n  -> stagescope doctor\x1b[2J" + " " * 470 + token
    error: dict[str, Any] = {"error_type": "HTTPError", "error_message": said}
    bench.give(rank.end(rank.begin(3), status="failed", **error), rank.say("finish", **error))
    bench.give(rank.say("dump", stage="actor_update", step=3, state="failed", error=said))
    shown = [row["message"] for row in bench.rows.of("findings")]
    shown += [row["reason"] for row in bench.rows.of("losses")]
    assert len(shown) == 3
    assert sum("HTTPError: '401" in text for text in shown) == 2
    for text in shown:
        assert r"401 for [redacted]\n  -> stagescope doctor\x1b[2J" in text
        assert text.isprintable()
        assert "hf_a" not in text
    (stage,) = bench.rows.of("stages", step=3)
    assert "hf_a" not in stage["error_message"]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("crashes", [False, True])
def test_a_training_that_somebody_stops_did_not_crash(
    bench: Bench, crashes: bool, restarted: bool
) -> None:
    ranks = [Rank(0), Rank(1)]
    hello(bench, ranks, 2)
    stopped: dict[str, Any] = {"error_type": "Stopped", "interrupted": True}
    raw: dict[str, Any] = {"error_type": "KeyboardInterrupt"}
    bench.give(ranks[0].end(ranks[0].begin(3), status="failed", **stopped))
    bench.give(ranks[1].end(ranks[1].begin(3), status="failed", **raw))
    bench.give(ranks[0].say("finish", **stopped))
    if restarted:
        bench.restart()
    bench.give(ranks[1].say("finish", **({"error_type": "ValueError"} if crashes else raw)))
    found = [(row["kind"], row["rank"], row["severity"]) for row in bench.rows.of("findings")]
    assert sorted(found) == [
        *([("process_crashed", 1, "error")] if crashes else []),
        ("process_interrupted", 0, "info"),
        *([] if crashes else [("process_interrupted", 1, "info")]),
        ("stage_interrupted", 0, "info"),
        ("stage_interrupted", 1, "info"),
    ]
    ended = "an exception ended one of its processes" if crashes else "it was interrupted"
    assert bench.attempt()["end_reason"] == ended


def test_a_first_step_stays_unknown_when_something_of_it_comes_late(bench: Bench) -> None:
    rank = Rank(0)
    begun = rank.begin(1)
    bench.give(begun, rank.begin(2), rank.end(begun))
    assert bench.step(1)["completeness"] == "unknown"
    bench.give(*Rank(1).work(1))
    assert bench.step(1)["completeness"] == "unknown"


def test_without_a_world_size_the_last_closed_step_tells_whom_to_expect(bench: Bench) -> None:
    ranks = [Rank(0), Rank(1)]
    for step in (1, 2):
        for rank in ranks:
            bench.give(*rank.work(step))
    bench.give(*ranks[0].work(3), *ranks[1].work(3, "other"))
    for rank in ranks:
        bench.give(*rank.work(4))
    assert bench.step(2)["completeness"] == "complete"
    assert missing(bench.step(3)) == [("actor", 1, "actor_update", "not begun")]
    assert bench.step(3)["completeness"] == "unknown"  # nobody said who does `other`
    assert bench.step(4)["completeness"] is None


def test_a_step_heard_of_late_tells_the_next_whom_to_expect(bench: Bench) -> None:
    rank = Rank(0)
    bench.give(*rank.work(2), *rank.work(3))
    assert bench.step(2)["completeness"] == "unknown"
    bench.give(*rank.work(1))
    assert [bench.step(step)["completeness"] for step in (1, 2)] == ["unknown", "complete"]


def test_the_oldest_step_in_memory_still_knows_whom_to_expect(bench: Bench) -> None:
    ranks = [Rank(0), Rank(1)]
    last = 20
    for step in range(1, last):
        for rank in ranks:
            bench.give(*rank.work(step))
    oldest = min(bench.state.registry.attempts[1].steps)
    assert bench.step(oldest)["completeness"] == "complete"
    bench.give(*ranks[0].work(oldest, microbatch=1), *Rank(2).work(oldest))
    row = bench.step(oldest)
    assert (row["completeness"], row["expected"]["actor"]["actor_update"]) == (
        "complete",
        [0, 1, 2],
    )


def test_a_step_known_by_scalars_alone_is_unknown(bench: Bench) -> None:
    rank = Rank(0)
    bench.give(rank.hello(world_size=1), rank.log(1, loss=1.0), rank.end_step(1))
    assert bench.step(1)["completeness"] == "unknown"
    assert bench.step(1)["closed_wall"] is not None


def test_a_stage_begun_by_some_ranks_misses_the_others(bench: Bench) -> None:
    ranks = [Rank(rank) for rank in range(3)]
    hello(bench, ranks, 3)
    begun = ranks[1].begin(1)
    bench.give(*ranks[0].work(1), begun, *ranks[2].work(1, "critic_update"))
    for rank in ranks:
        bench.give(rank.begin(2))
    row = bench.step(1)
    assert row["completeness"] == "partial"
    assert row["expected"] == {"actor": {"actor_update": [0, 1, 2], "critic_update": [0, 1, 2]}}
    assert missing(row) == [
        ("actor", 1, "actor_update", "open"),
        ("actor", 2, "actor_update", "not begun"),
        ("actor", 0, "critic_update", "not begun"),
        ("actor", 1, "critic_update", "not begun"),
    ]
    bench.give(ranks[1].end(begun))
    assert missing(bench.step(1))[0] == ("actor", 2, "actor_update", "not begun")
    for at, stage in ((2, "actor_update"), (0, "critic_update"), (1, "critic_update")):
        assert bench.step(1)["completeness"] == "partial"
        bench.give(*ranks[at].work(1, stage))
    assert (bench.step(1)["completeness"], bench.step(1)["missing"]) == ("complete", [])


def test_every_part_of_a_stage_must_end(bench: Bench) -> None:
    rank = Rank(0)
    hello(bench, [rank], 1)
    parts = [rank.begin(1, microbatch=part) for part in range(3)]
    bench.give(*parts, rank.end(parts[0]), rank.end(parts[2]), rank.begin(2))
    assert missing(bench.step(1)) == [("actor", 0, "actor_update", "open")]
    bench.give(rank.end(parts[1], status="failed", error_type="ValueError"))
    assert bench.step(1)["completeness"] == "complete"  # a failed stage has ended


def test_a_hello_that_comes_late_corrects_the_verdict(bench: Bench) -> None:
    rank = Rank(0)
    bench.give(*rank.work(1), *rank.work(2), *rank.work(3))
    assert [bench.step(step)["completeness"] for step in (1, 2)] == ["unknown", "complete"]
    bench.give(rank.hello(world_size=2))
    assert [bench.step(step)["completeness"] for step in (1, 2)] == ["partial", "partial"]


def test_the_newest_incarnation_says_how_many_ranks_there_are(bench: Bench) -> None:
    old = [Rank(rank) for rank in range(4)]
    hello(bench, old, 4)
    for rank in old:
        bench.give(*rank.work(1))
    new = [Rank(rank, started=2000.0) for rank in range(2)]
    hello(bench, new, 2)
    for step in (2, 3):
        for rank in new:
            bench.give(*rank.work(step))
    bench.silence()
    assert bench.step(3, attempt=2)["completeness"] == "complete"


def test_an_unbelievable_world_size_is_not_believed(bench: Bench) -> None:
    rank = Rank(0)
    bench.give(rank.hello(world_size=10**12), *rank.work(1), rank.begin(2))
    assert bench.step(1)["completeness"] == "unknown"
    assert bench.rows.one("processes")["world_size"] is None


def test_an_attempt_that_broke_off_misses_the_stages_that_nobody_began(bench: Bench) -> None:
    rank = Rank(0)
    hello(bench, [rank], 1)
    for step in (1, 2):
        bench.give(*rank.work(step, "gen"), *rank.work(step, "actor_update"))
    bench.give(*rank.work(3, "gen"))
    bench.silence(wall=1234.0)
    row = bench.step(3)
    assert (row["close_reason"], row["closed_wall"]) == ("attempt ended", 1234.0)
    assert (row["completeness"], missing(row)) == (
        "partial", [("actor", 0, "actor_update", "not begun")],
    )  # fmt: skip


@pytest.mark.parametrize("leaves", [False, True])
def test_whether_a_killed_rank_did_more_parts_than_it_sent_is_unknown(
    bench: Bench, leaves: bool
) -> None:
    rank = Rank(0)
    hello(bench, [rank], 1)
    for microbatch in (0, 1):
        bench.give(*rank.work(1, microbatch=microbatch))
    bench.give(*rank.work(2, microbatch=0))
    if leaves:
        bench.give(rank.finish())
    else:
        bench.silence()
    assert bench.step(1)["completeness"] == "complete"
    assert bench.step(2)["completeness"] == ("complete" if leaves else "unknown")


def test_an_attempt_that_finished_misses_nothing_that_its_last_step_did_not_do(
    bench: Bench,
) -> None:
    rank = Rank(0)
    hello(bench, [rank], 1)
    bench.give(*rank.work(1, "gen"), *rank.work(1), *rank.work(2, "gen"), rank.finish())
    assert bench.step(2)["completeness"] == "complete"


def test_end_step_closes_a_step_and_those_before_it(bench: Bench) -> None:
    ranks = [Rank(0), Rank(1)]
    hello(bench, ranks, 2)
    begun = [rank.begin(2) for rank in ranks]
    bench.give(*begun, ranks[0].end_step(2))
    assert bench.step(2)["close_reason"] == "end_step"
    assert bench.step(2)["completeness"] == "partial"
    bench.give(*(rank.end(each) for rank, each in zip(ranks, begun, strict=True)))
    assert bench.step(2)["completeness"] == "complete"
    bench.give(*ranks[0].work(1))
    assert bench.step(1)["close_reason"] == "end_step"


def test_end_step_may_come_first_and_survives_a_restart(bench: Bench) -> None:
    rank = Rank(0)
    bench.give(rank.hello(world_size=1), rank.end_step(5))
    bench.restart()
    bench.give(*rank.work(5), *rank.work(4))
    assert [bench.step(step)["close_reason"] for step in (4, 5)] == ["end_step", "end_step"]
    assert bench.step(5)["completeness"] == "complete"


def test_a_rank_that_left_holds_nothing_open(bench: Bench) -> None:
    ranks = [Rank(0), Rank(1)]
    bench.give(ranks[0].begin(1), ranks[1].begin(1), ranks[0].begin(2))
    assert bench.step(1)["closed_wall"] is None
    bench.give(ranks[1].finish())
    assert bench.step(1)["closed_wall"] is not None
    assert bench.step(2)["closed_wall"] is None
    check_memory(bench.state)


def test_a_rank_that_falls_silent_and_wakes(bench: Bench) -> None:
    ranks = [Rank(0), Rank(1)]
    hello(bench, ranks, 2)
    begun = [rank.begin(1) for rank in ranks]
    bench.give(*begun)
    bench.now += 40.0
    bench.carry_out(bench.state.renew(ranks[0].sender.incarnation, bench.now, 1.0))
    bench.now += 20.0
    bench.carry_out(bench.state.expire(bench.now, 1100.0))
    quiet = bench.rows.one("processes", rank=1)
    assert quiet["lapsed_wall"] == 1100.0
    assert bench.rows.one("processes", rank=0)["lapsed_wall"] is None
    assert bench.rows.one("stages", rank=1)["status"] == "unfinished"
    loss = bench.rows.one("losses")
    assert (loss["kind"], loss["rank"], loss["stage"]) == ("stage", 1, "actor_update")
    assert loss["reason"] == "its process stopped reporting inside the stage"
    bench.give(ranks[0].end(begun[0]), ranks[0].begin(2))
    assert missing(bench.step(1)) == [("actor", 1, "actor_update", "unfinished")]
    bench.carry_out(bench.state.renew(ranks[1].sender.incarnation, bench.now, 1101.0))
    assert bench.rows.one("stages", rank=1)["status"] == "open"
    assert bench.rows.of("losses") == []
    assert missing(bench.step(1)) == [("actor", 1, "actor_update", "open")]
    bench.give(ranks[1].end(begun[1]))
    assert bench.step(1)["completeness"] == "complete"
    check_memory(bench.state)


def test_a_replaced_incarnation_is_not_waited_for(bench: Bench) -> None:
    old = [Rank(0), Rank(1)]
    for rank in old:
        bench.give(*rank.work(1), rank.begin(2))
    new = [Rank(0, started=2000.0), Rank(1, started=2000.0)]
    for rank in new:
        bench.give(*rank.work(2))
    assert bench.step(2)["closed_wall"] is None
    bench.give(new[1].begin(3), new[0].begin(3))
    assert bench.step(2)["closed_wall"] is not None
    late = old[0].begin(3)  # an old one that goes on is not waited for either
    bench.give(late, new[0].begin(4), new[1].begin(4))
    assert bench.step(3)["closed_wall"] is not None
    check_memory(bench.state)


def test_nor_is_it_after_a_restart(bench: Bench) -> None:
    bench.give(*Rank(0).work(1), *Rank(0, started=2000.0).work(2))
    bench.restart()
    new = Rank(0, started=2000.0)
    new.seq = 10
    bench.give(*new.work(3))
    assert bench.step(2)["closed_wall"] is not None


def test_an_older_incarnation_heard_of_late_is_not_waited_for(bench: Bench) -> None:
    new, old = Rank(0, started=2000.0), Rank(0, started=1000.0)
    bench.give(*new.work(2), *old.work(1), *new.work(3), *new.work(4))
    assert bench.step(3)["closed_wall"] is not None
    check_memory(bench.state)


def test_a_raw_caller_does_not_replace_the_rank_whose_name_it_bears(bench: Bench) -> None:
    rank, raw = Rank(0), Rank(0, raw=True, started=3000.0)
    bench.give(*rank.work(1), *raw.work(1, "rollout_generate"), raw.begin(2, "rollout_generate"))
    assert bench.step(1)["closed_wall"] is None
    bench.give(rank.begin(2))
    assert bench.step(1)["closed_wall"] is not None


def test_one_that_stays_far_behind_does_not_hold_every_step(bench: Bench) -> None:
    slow, rank = Rank(0, "rollout"), Rank(0)
    bench.give(*slow.work(0, "validate"))
    for step in range(1, 2 * OPEN_STEPS):
        bench.give(*rank.work(step))
    assert bench.step(0)["close_reason"] == "left behind"
    attempt = bench.state.registry.attempts[1]
    assert len(attempt.open) == OPEN_STEPS
    check_memory(bench.state)


def test_memory_stays_bounded_over_a_long_training(bench: Bench) -> None:
    ranks = [Rank(rank) for rank in range(4)]
    rollout = Rank(0, "rollout")
    hello(bench, ranks, 4)
    sizes = []
    for step in range(1, 600):
        for rank in ranks:
            begun = [rank.begin(step, microbatch=part) for part in range(2)]
            ends = [rank.end(begun[0], payload=True)]
            ends += [rank.end(begun[1])] if step % 50 else []  # now and then an end is lost
            bench.give(*begun, *ends, rank.dropped(step=step), rank.log(step, loss=1.0))
        for version in range(8):
            bench.give(*rollout.work(None, "gen", policy_version=8 * step + version, payload=True))
        bench.settle_all()
        sizes.append(held(bench))
    check_memory(bench.state)
    lost_ends = 4 * 600 // 50
    assert max(sizes[300:]) <= max(sizes[:300]) + lost_ends
    attempt = bench.state.registry.attempts[1]
    assert len(attempt.steps) <= RECENT_STEPS + 1
    bench.give(*(rank.finish() for rank in ranks))
    assert {row["status"] for row in bench.rows.of("stages", step=50)} == {"ok", "unfinished"}
    process = bench.rows.one("processes", role="actor", rank=0)
    assert process["dropped_events"] == 599
    assert len(process["dropped_seqs"]) <= 256


def test_ranks_that_never_come_back_give_their_memory_back(bench: Bench) -> None:
    ranks = [Rank(rank, started=1000.0) for rank in range(8)]
    stays = Rank(8)
    hello(bench, [*ranks, stays], 9)
    for step in range(1, 40):
        for rank in [*ranks, stays]:
            bench.give(*rank.work(step, payload=True))
            bench.give(rank.dump(step, "actor_update", "complete", path="/d"))
        bench.settle_all()
    bench.give(*(rank.begin(40) for rank in [*ranks, stays]))
    for each in ranks:
        bench.state.registry.processes[each.sender.incarnation].lease_until = -1.0
    left = 5_000.0
    bench.carry_out(bench.state.expire(bench.now, left))
    attempt = bench.state.registry.attempts[1]
    processes = [attempt.processes[each.sender.incarnation] for each in ranks]
    assert {(len(each.settled), len(each.dumps)) for each in processes} == {(39, 39)}
    bench.carry_out(bench.state.expire(bench.now, left + LONG_GONE_SECONDS - 1.0))
    assert all(each.settled and each.dumps for each in processes)
    bench.carry_out(bench.state.expire(bench.now, left + LONG_GONE_SECONDS))
    assert not any(each.settled or each.dumps for each in processes)
    # Where they stopped is known for as long as somebody may wait for them.
    assert all(len(each.unfinished) == 1 for each in processes)
    assert attempt.processes[stays.sender.incarnation].settled
    assert attempt.steps
    stays.wall = left + 2 * LONG_GONE_SECONDS
    bench.give(stays.finish())
    assert attempt.over
    bench.carry_out(bench.state.expire(bench.now, stays.wall + LONG_GONE_SECONDS))
    assert held(bench) == 0
    assert not attempt.steps
    assert not any(each.unfinished for each in processes)
    check_memory(bench.state)
    # The start of each rank is known: one that begins again at an earlier step is another attempt.
    again = Rank(0, started=50_000.0)
    bench.give(again.hello(world_size=9), again.begin(20))
    assert bench.attempt(2)["number"] == 2


@pytest.mark.parametrize("after", [0.0, 3 * LONG_GONE_SECONDS])
def test_a_rank_that_comes_back_after_very_long_is_counted_as_before(
    bench: Bench, after: float
) -> None:
    rank = Rank(0)
    bench.give(rank.hello(world_size=1), *rank.work(1, payload=True))
    bench.settle_all()
    begun = rank.begin(2)
    bench.give(begun)
    bench.silence(5_000.0)
    assert bench.rows.one("losses")["kind"] == "stage"
    bench.carry_out(bench.state.expire(bench.now, 5_000.0 + after))
    rank.wall = 5_000.0 + after
    bench.give(rank.end(begun, payload=True), *rank.work(3))
    bench.settle_all()
    bench.give(rank.finish())
    assert bench.rows.of("losses") == []
    assert {row["status"] for row in bench.rows.of("stages")} == {"ok"}
    assert {row["state"] for row in bench.rows.of("payloads")} == {"ingested"}
    assert bench.rows.of("attempts")[0]["end_reason"] == "finished"
    assert len(bench.rows.of("attempts")) == 1
    assert [bench.step(step)["closed_wall"] is not None for step in (1, 2, 3)] == [True] * 3
    check_memory(bench.state)


def held(bench: Bench) -> int:
    """Count what is remembered."""
    total = 0
    for attempt in bench.state.registry.attempts.values():
        for step in [*attempt.steps.values(), attempt.stepless]:
            total += len(step.spans) + len(step.holders)
        total += len(attempt.pending)
        for process in attempt.processes.values():
            assert len(process.settled) <= SETTLED_REMEMBERED
            total += len(process.payloads) + len(process.open_spans)
    return total
