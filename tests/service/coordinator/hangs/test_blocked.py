"""Findings of collectives that cannot finish: when the ranks are asked, and what ends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.service.coordinator.hangs.test_watch import Clocked, hang, train
from tests.support.stores import url_of

from stagescope_service.store.sql import SqlStore
from stagescope_wire.collectives.records import OFF, Call, GroupRecord, RankRecord
from stagescope_wire.schema import HELLO, STACKS

KIND = "collective_blocked"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Clocked]:
    store = SqlStore(url_of(tmp_path))
    store.open()
    yield Clocked(store, tmp_path)
    store.close()


def record(rank: int, entered: int, waits: float | None) -> dict[str, Any]:
    """Return what a rank recorded; `waits`: seconds in its last collective, None: it is done."""
    call = Call(entered, "all_reduce", False, waits is None, ((4,),), ((4,),), ("Float",), waits)
    calls = (call,) if entered else ()
    return RankRecord(
        "recorded", rank, (GroupRecord("0", "default_pg", (0, 1), entered, calls),)
    ).wire()


def answer(made: Clocked, rank: int, collectives: dict[str, Any] | None) -> list[str]:
    """Answer every request of a rank; return their ids."""
    stack = f'  File "/job/trainer.py", line {rank}, in work{rank}'
    threads = [{"name": "t", "ident": 1, "is_training": True, "stack": stack}]
    answered = []
    for request in made.poll(rank):
        answered.append(request["request_id"])
        fields = {"request_id": request["request_id"], "threads": threads, "step": 5}
        sent = fields if collectives is None else {**fields, "collectives": collectives}
        made.say(rank, STACKS, stage="actor_update", **sent)
    return answered


def open_findings(made: Clocked, kind: str = KIND) -> list[dict[str, Any]]:
    return [row for row in made.findings(kind) if row["over_wall"] is None]


def test_the_answers_to_a_hang_name_its_collective_until_a_waiting_rank_goes_on(
    made: Clocked,
) -> None:
    step = hang(made)
    made.pass_time(15.0)
    assert answer(made, 0, record(0, 8, 14.0))
    made.pass_time(1.0)
    assert made.findings(KIND) == []  # rank 1 may still answer
    assert answer(made, 1, record(1, 7, None))
    made.pass_time(1.0)
    [found] = open_findings(made)
    assert found["message"] == (
        "rank 0 waits in all_reduce #8 of all ranks; rank 1 has not entered it: "
        "it is in work1 (trainer.py:1) (waiting for 14 s)"
    )
    assert (found["severity"], found["step"], found["role"]) == ("error", step, "actor")
    assert found["evidence"]["collectives"][0]["waiting"][0]["place"] == "work0 (trainer.py:0)"
    made.renew()  # a coordinator that restarts knows of it
    made.pass_time(5.0)
    assert open_findings(made)
    made.begin(1, step)
    made.pass_time(3.0)
    assert open_findings(made)  # rank 0 still waits
    made.end(0, step)
    made.pass_time(3.0)
    assert open_findings(made) == []


def test_a_collective_that_runs_at_that_moment_is_none_and_is_asked_for_again(
    made: Clocked,
) -> None:
    hang(made)
    made.pass_time(15.0)
    for rank in (0, 1):
        assert answer(made, rank, record(rank, 8 - rank, 2.0 if rank == 0 else None))
    made.pass_time(4.0)
    assert made.findings(KIND) == []
    made.pass_time(10.0)
    for rank in (0, 1):
        assert answer(made, rank, record(rank, 8 - rank, 11.0 if rank == 0 else None))
    made.pass_time(2.0)
    assert open_findings(made)
    made.pass_time(200.0)
    assert answer(made, 0, None) == []  # it has its name


def test_a_first_step_has_no_history_and_its_hang_is_named_all_the_same(made: Clocked) -> None:
    for rank in (0, 1):
        made.say(rank, HELLO, world_size=2)
        made.begin(rank, 1)
    made.pass_time(35.0)
    assert answer(made, 0, None) == []
    made.pass_time(10.0)  # over first_factor times min_seconds
    for rank in (0, 1):
        assert answer(made, rank, record(rank, 1 - rank, 41.0 if rank == 0 else None))
    made.pass_time(2.0)
    [found] = open_findings(made)
    assert (found["severity"], made.findings("stage_stuck")) == ("warning", [])


def test_a_long_first_step_in_which_all_ranks_compute_is_no_finding(made: Clocked) -> None:
    for rank in (0, 1):
        made.say(rank, HELLO, world_size=2)
        made.begin(rank, 1)
    asked = 0
    for _ in range(30):
        made.pass_time(20.0)
        for rank in (0, 1):
            asked += len(answer(made, rank, record(rank, 3, 1.0)))  # both entered it just now
    assert made.findings(KIND) == []
    assert 2 * 3 <= asked <= 2 * 7  # ten minutes: after longer and longer pauses


def test_ranks_that_record_nothing_are_told_what_to_set(made: Clocked) -> None:
    hang(made)
    made.pass_time(15.0)
    for rank in (0, 1):
        assert answer(made, rank, RankRecord(OFF, rank).wire())
    made.pass_time(2.0)
    [found] = open_findings(made, "collectives_not_recorded")
    assert "TORCH_FR_BUFFER_SIZE=2000" in found["advice"]
    made.pass_time(100.0)
    assert answer(made, 0, None) == []


def test_a_hang_without_process_groups_says_nothing_of_them(made: Clocked) -> None:
    hang(made)
    made.pass_time(15.0)
    for rank in (0, 1):
        assert answer(made, rank, RankRecord("none").wire())
    made.pass_time(2.0)
    assert made.findings(KIND) == made.findings("collectives_not_recorded") == []


def test_a_rank_that_is_asked_alone_accuses_none(made: Clocked) -> None:
    train(made)
    asked = made.coordinator.ask_stacks(attempt_id=1, role=None, ranks=[0], seconds=10.0, by="me")
    made.run(asked)
    assert answer(made, 0, record(0, 8, 60.0))
    made.pass_time(2.0)
    assert made.findings(KIND) == []
