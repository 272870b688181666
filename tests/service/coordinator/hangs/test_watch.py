"""Findings of hangs, requests for stacks and silent processes: on a real catalogue, no Ray."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.support.local import coordinator_of
from tests.support.stores import eventually, rows_of, url_of

from stagescope_service.coordinator.load import MIN_CALLS
from stagescope_service.coordinator.restore import restore
from stagescope_service.core.hangs import stack_requests
from stagescope_service.core.hangs.detection import StuckRules
from stagescope_service.core.hangs.stack_requests import RankRequest
from stagescope_service.core.instructions import ReadWatchdogs
from stagescope_service.core.state import State
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.sql import SqlStore
from stagescope_service.views.hangs.stuck import stuck_rows
from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_wire.schema import BEGIN, END, END_STEP, FINISH, HELLO, STACKS, Sender

T = TypeVar("T")
RULES = StuckRules(min_seconds=10.0)


class Clocked:
    """A coordinator whose clocks the test moves; `now` is wall and monotonic time alike."""

    def __init__(self, store: SqlStore, folder: Path, now: float = 1000.0) -> None:
        self.now, self.store, self.folder = now, store, folder
        self._seqs: dict[str, int] = {}
        self.renew()

    def renew(self) -> None:
        """Begin anew, as a coordinator after a crash."""
        snapshot = self.store.snapshot()
        state = State(lease_seconds=45.0)
        restore(state, snapshot, self.now)
        self.coordinator = coordinator_of(
            self.store, self.folder, state=state, poll_seconds=20.0,
            stuck_seconds=RULES.min_seconds, stuck_factor=RULES.factor,
            wall=lambda: self.now, mono=lambda: self.now,
        )  # fmt: skip
        self.coordinator.parts.adopt(snapshot)
        self.queue = self.coordinator.work.queue

    @property
    def watchdogs(self) -> list[ReadWatchdogs]:
        """Whose watchdogs are to be read."""
        return [each for each in self.queue if isinstance(each, ReadWatchdogs)]

    def watchdog(self, incarnation: str, fields: Mapping[str, object]) -> None:
        """Take in what a watchdog wrote."""
        written = self.coordinator.parts.hangs.watchdog(incarnation, fields, self.now)
        self.run(self.coordinator.parts.runner.carry_out(written))

    def run(self, call: Coroutine[object, Any, T]) -> T:
        return asyncio.run(call)

    def say(self, rank: int, kind: str, **fields: object) -> None:
        name = f"rank-{rank}"
        seq = self._seqs[name] = self._seqs.get(name, 0) + 1
        sender = Sender(name, "r", "a", "actor", rank, node_id="node", clock_offset=0.0)
        event = (1, kind, seq, self.now, self.now, fields)
        self.run(self.coordinator.parts.intake.record(sender.wire(), [event]))

    def begin(self, rank: int, step: int, stage: str = "actor_update") -> None:
        self.say(rank, BEGIN, step=step, stage=stage)

    def end(self, rank: int, step: int, stage: str = "actor_update") -> None:
        self.say(rank, END, step=step, stage=stage)

    def poll(self, rank: int) -> list[RankRequest]:
        sender = Sender(f"rank-{rank}", "r", "a", "actor", rank).wire()
        answer = self.run(self.coordinator.parts.intake.poll(sender, 0, [], 0.0))
        requests: list[RankRequest] = answer["requests"]
        return requests

    def pass_time(self, seconds: float, polling: tuple[int, ...] = (0, 1)) -> None:
        """Let time pass in which these ranks poll."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            for rank in polling:
                self.coordinator.parts.state.renew(f"rank-{rank}", self.now, self.now)
            self.run(self.coordinator.parts.leases.expire())

    def findings(self, kind: str = "stage_stuck") -> list[dict[str, Any]]:
        return [row for row in rows_of(self.store, "findings") if row["kind"] == kind]

    def stacks(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(r["incarnation"], r["request_id"]): r for r in rows_of(self.store, "stacks")}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Clocked]:
    store = SqlStore(url_of(tmp_path))
    store.open()
    yield Clocked(store, tmp_path)
    store.close()


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    found = Catalogue(url_of(tmp_path))
    yield found
    found.close()


def train(made: Clocked, steps: int = 4) -> int:
    """Two ranks do steps of 2 s; return the step that comes next."""
    for rank in (0, 1):
        made.say(rank, HELLO, world_size=2, watchdog=f"/w/{rank}.txt")
    for step in range(1, steps + 1):
        for rank in (0, 1):
            made.begin(rank, step)
        made.now += 2.0
        for rank in (0, 1):
            made.end(rank, step)
    return steps + 1


def hang(made: Clocked) -> int:
    """Let rank 0 begin a step that rank 1 never begins; return the step."""
    step = train(made)
    made.begin(0, step)
    return step


def test_a_hang_makes_one_finding_and_is_over_when_the_rank_goes_on(made: Clocked) -> None:
    step = hang(made)
    made.pass_time(8.0)
    assert made.findings() == []
    made.pass_time(60.0)
    [found] = made.findings()
    assert (found["rank"], found["step"], found["stage"]) == (1, step, "actor_update")
    assert found["message"].startswith(
        f"rank 1 of actor has not begun actor_update in step {step}: quiet for 1"
    )
    assert (found["severity"], found["over_wall"]) == ("error", None)
    assert found["evidence"]["history_steps"] == 4
    first = found["first_wall"]
    made.begin(1, step)
    made.pass_time(5.0)
    [found] = made.findings()
    assert (found["severity"], found["first_wall"]) == ("info", first)
    assert found["over_wall"] == pytest.approx(made.now, abs=5.0)


def test_a_whole_role_is_one_finding(made: Clocked) -> None:
    step = hang(made)
    made.begin(1, step)
    made.pass_time(30.0)
    [found] = made.findings()
    assert found["rank"] is None
    assert found["message"].startswith("every rank of actor has not ended actor_update")
    made.end(0, step)
    made.pass_time(3.0)
    over = {row["rank"]: row["over_wall"] for row in made.findings()}
    assert over[None] is not None
    made.pass_time(30.0)  # now rank 1 alone has not ended it
    assert {row["rank"] for row in made.findings() if row["over_wall"] is None} == {1}


def test_a_finding_outlives_the_coordinator_and_is_over_after_it(made: Clocked) -> None:
    step = hang(made)
    made.pass_time(30.0)
    [before] = made.findings()
    made.renew()
    made.pass_time(10.0)
    assert made.findings() == [before]
    made.begin(1, step)
    made.pass_time(5.0)
    assert made.findings()[0]["over_wall"] is not None


def test_a_finding_of_a_job_that_died_stuck_is_not_over(made: Clocked) -> None:
    hang(made)
    made.pass_time(30.0)
    made.pass_time(120.0, polling=())
    assert made.coordinator.parts.state.registry.attempts[1].over
    assert [row["over_wall"] for row in made.findings()] == [None]


def test_nobody_was_waited_for_in_a_job_that_died_before_a_rank_was_stuck(made: Clocked) -> None:
    """The ranks were killed at once: that one of them is behind says nothing."""
    hang(made)
    made.pass_time(2.0)
    made.pass_time(20.0, polling=())
    assert [row["rank"] for row in made.findings()] == [1]
    made.pass_time(120.0, polling=())
    assert made.coordinator.parts.state.registry.attempts[1].over
    assert made.findings() == []


def test_a_hang_that_somebody_interrupts_keeps_its_finding(made: Clocked) -> None:
    hang(made)
    made.pass_time(30.0)
    ended_by: dict[str, Any] = {"error_type": "KeyboardInterrupt", "interrupted": True}
    drain = made.coordinator.drain
    made.run(drain(run=None, timeout=0.0, attempt_key="a", ended_by=ended_by))
    made.pass_time(10.0, polling=())
    attempt = made.coordinator.parts.state.registry.attempts[1]
    assert (attempt.over, attempt.end_reason) == (True, "it was interrupted")
    assert [row["over_wall"] for row in made.findings()] == [None]


def test_a_finding_of_a_job_that_took_leave_is_over(made: Clocked) -> None:
    hang(made)
    made.pass_time(30.0)
    for rank in (0, 1):
        made.say(rank, FINISH)
    made.pass_time(5.0)
    assert [row["severity"] for row in made.findings()] == ["info"]


# --- no step closes any more ------------------------------------------------------------------


def test_a_training_without_a_closed_step_is_found_and_is_over_when_one_closes(
    made: Clocked,
) -> None:
    step = train(made, 5)
    made.pass_time(590.0)
    assert made.findings("training_quiet") == []
    made.pass_time(20.0)
    (row,) = made.findings("training_quiet")
    assert (row["step"], row["severity"], row["over_wall"]) == (4, "warning", None)
    assert row["message"] == (
        "no step closed for 10 min after step 4; the longest wait for a step before was 2 s, and "
        "the processes still answer"
    )
    made.renew()
    made.pass_time(10.0)
    assert [row["over_wall"] for row in made.findings("training_quiet")] == [None]
    for rank in (0, 1):
        made.begin(rank, step)
    made.pass_time(10.0)
    (row,) = made.findings("training_quiet")
    assert row["severity"] == "info"
    assert row["over_wall"] is not None


def test_the_ranks_that_a_quiet_training_waits_for_are_named(made: Clocked) -> None:
    step = train(made, 5)
    made.begin(0, step)
    made.pass_time(610.0)
    (row,) = made.findings("training_quiet")
    assert row["message"].endswith(". actor rank 1 did not reach the newest step")
    assert row["evidence"]["behind"] == [["actor", 1]]
    made.pass_time(60.0, polling=())
    (row,) = made.findings("training_quiet")
    assert row["over_wall"] is not None  # the end of the attempt has findings of its own


def test_raw_calls_do_not_say_whether_a_training_goes_on(made: Clocked) -> None:
    for step in range(1, 6):
        call = {"run": "raw", "rank": 0, "step": step, "stage": "s"}
        made.run(made.coordinator.raw_calls.record("begin", f"d{step}", call, None))
        made.now += 2.0
    made.pass_time(700.0)
    assert rows_of(made.store, "attempts")[-1]["last_closed_step"] == 4
    assert made.findings("training_quiet") == []


def test_a_training_whose_steps_take_long_is_not_quiet(made: Clocked) -> None:
    train(made, 3)
    made.now += 300.0
    step = train(made, 5)
    made.pass_time(1_400.0)
    assert made.findings("training_quiet") == []
    made.pass_time(200.0)
    assert [row["step"] for row in made.findings("training_quiet")] == [step - 2]


# --- stacks -----------------------------------------------------------------------------------


def answer(made: Clocked, rank: int, request_id: str, **fields: object) -> None:
    threads = [{"name": "t", "ident": 1, "is_training": True, "stack": "  in f"}]
    made.say(rank, STACKS, **{"request_id": request_id, "threads": threads, **fields})


def test_a_finding_asks_for_the_stacks_of_the_stuck_rank_and_of_another_once(made: Clocked) -> None:
    hang(made)
    made.pass_time(15.0)
    request_id = made.findings()[0]["evidence"]["request_id"]
    wanted = [{"what": STACKS, "request_id": request_id}]
    assert made.poll(0) == made.poll(1) == wanted
    assert made.poll(1) == wanted  # an answer of a poll can be lost
    answer(made, 1, request_id, step=5, stage="actor_update")
    assert made.poll(1) == []
    row = made.stacks()["rank-1", request_id]
    assert (row["state"], row["step"], row["stage"]) == ("answered", 5, "actor_update")
    assert row["threads"][0]["stack"] == "  in f"
    made.pass_time(100.0)
    assert len(made.stacks()) == 2
    assert made.stacks()["rank-0", request_id]["state"] == "not answered"


def ask(made: Clocked, ranks: list[int] | None = None, seconds: float = 10.0) -> dict[str, Any]:
    return made.run(
        made.coordinator.ask_stacks(attempt_id=1, role=None, ranks=ranks, seconds=seconds, by="me")
    )


def test_who_can_be_asked_is_asked_and_the_others_are_named(made: Clocked) -> None:
    train(made)
    made.run(
        made.coordinator.raw_calls.record(
            "begin", "d", {"run": "r", "rank": 2, "step": 5, "stage": "s"}, None
        )
    )
    reply = ask(made)
    assert reply["asked"] == [{"role": "actor", "rank": 0}, {"role": "actor", "rank": 1}]
    [refused] = reply["refused"]
    assert (refused["rank"], "raw calls" in refused["reason"]) == (2, True)
    assert [row["action"] for row in rows_of(made.store, "audit")] == ["ask_stacks"]
    reply = ask(made, [1, 9])
    assert [row["rank"] for row in reply["asked"]] == [1]
    assert [row["rank"] for row in reply["refused"]] == [9]
    made.say(0, FINISH)
    assert "reported its end" in ask(made, [0])["refused"][0]["reason"]


def test_no_more_are_asked_at_once_than_can_be_kept(
    made: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(made)
    monkeypatch.setattr(stack_requests, "MAX_ASKED", 1)
    with pytest.raises(InvalidInput, match="2 processes"):
        ask(made)
    with pytest.raises(NotFound, match="over"):
        made.run(
            made.coordinator.ask_stacks(attempt_id=77, role=None, ranks=None, seconds=1.0, by="me")
        )


def test_a_waiting_poll_is_answered_at_once(made: Clocked) -> None:
    train(made)

    async def asked_meanwhile() -> Mapping[str, Any]:
        sender = Sender("rank-1", "r", "a", "actor", 1).wire()
        polling = asyncio.create_task(made.coordinator.parts.intake.poll(sender, 0, [], 20.0))
        await asyncio.sleep(0)
        await made.coordinator.ask_stacks(attempt_id=1, role=None, ranks=[1], seconds=10.0, by="me")
        return await asyncio.wait_for(polling, 10.0)

    answered = made.run(asked_meanwhile())
    assert [request["what"] for request in answered["requests"]] == [STACKS]


def test_a_request_outlives_the_coordinator_until_its_deadline(made: Clocked) -> None:
    train(made)
    request_id = ask(made, [0, 1], seconds=10.0)["request_id"]
    made.renew()
    assert made.poll(1) == [{"what": STACKS, "request_id": request_id}]
    answer(made, 1, request_id)
    made.pass_time(12.0)
    states = {name: row["state"] for (name, _), row in made.stacks().items()}
    assert states == {"rank-0": "not answered", "rank-1": "answered"}
    assert made.poll(0) == []
    answer(made, 0, request_id)  # late, and kept all the same
    assert made.stacks()["rank-0", request_id]["state"] == "answered"


def test_stacks_of_any_form_are_kept_in_bounds(made: Clocked) -> None:
    train(made)
    threads = [5, {"stack": "x" * 300_000}, {"stack": "y" * 10, "ident": "no", "name": 7}]
    answer(made, 0, "r1", threads=threads)
    row = made.stacks()["rank-0", "r1"]
    assert [len(thread["stack"]) for thread in row["threads"]] == [256_000, 0]
    assert row["truncated"]
    answer(made, 0, "r2", threads="nonsense")
    assert made.stacks()["rank-0", "r2"]["threads"] == []
    sender = Sender("rank-0", "r", "a", "actor", 0).wire()
    nameless: tuple[object, ...] = (1, STACKS, 99, 1.0, 1.0, {"threads": []})
    refused = made.run(made.coordinator.parts.intake.record(sender, [nameless]))["refused"]
    assert "request_id" in refused[99]


# --- watchdogs --------------------------------------------------------------------------------


def test_the_file_of_a_silent_process_is_read_until_it_says_something(made: Clocked) -> None:
    train(made)
    made.pass_time(28.0, polling=(0,))
    assert made.watchdogs == []
    made.pass_time(10.0, polling=(0,))
    assert {order.node_id for order in made.watchdogs} == {"node"}
    assert all(order.paths == {"rank-1": "/w/1.txt"} for order in made.watchdogs)
    threads = [{"name": "t", "ident": 1, "is_training": True, "stack": "  a in f\n  b in hold"}]
    written = {"request_id": "watchdog-1", "source": "watchdog", "threads": threads, "step": 4}
    made.watchdog("rank-1", {**written, "stage": "actor_update"})
    made.queue.clear()
    made.pass_time(60.0, polling=(0,))
    assert made.watchdogs == []
    [found] = made.findings("interpreter_held")
    assert found["message"].endswith(": b in hold")
    assert (found["rank"], found["step"], found["stage"]) == (1, 4, "actor_update")
    row = made.stacks()["rank-1", "watchdog-1"]
    assert (row["source"], row["state"]) == ("watchdog", "answered")


def test_the_step_in_which_a_watchdog_stands_is_known_though_its_beginning_never_came(
    made: Clocked,
) -> None:
    step = train(made)
    written = {"request_id": "watchdog-1", "source": "watchdog", "threads": [], "step": step}
    made.watchdog("rank-1", {**written, "stage": "actor_update"})
    assert step in {row["step"] for row in rows_of(made.store, "steps")}
    [closed] = [row for row in rows_of(made.store, "steps") if row["step"] == step - 1]
    assert closed["closed_wall"] is None  # the other rank is still in it
    made.begin(0, step)
    [closed] = [row for row in rows_of(made.store, "steps") if row["step"] == step - 1]
    assert closed["completeness"] == "complete"


def test_a_file_that_says_nothing_is_not_read_for_ever(made: Clocked) -> None:
    train(made)
    made.pass_time(300.0, polling=(0,))
    made.queue.clear()
    # The watchdog of a process that began to hold the lock 300 s ago writes about now.
    made.pass_time(60.0, polling=(0,))
    assert 1 <= len(made.watchdogs) <= 4  # seldom, the longer it lasts
    made.pass_time(3400.0, polling=(0,))
    made.queue.clear()
    made.pass_time(300.0, polling=(0,))
    assert made.watchdogs == []


def test_a_process_that_does_not_answer_is_looked_at_though_it_polled_lately(made: Clocked) -> None:
    train(made)
    ask(made, [1], seconds=3.0)
    made.pass_time(8.0)
    assert made.watchdogs[0].paths == {"rank-1": "/w/1.txt"}


def test_a_watchdog_s_words_without_a_step_are_kept(made: Clocked) -> None:
    train(made)
    made.watchdog(
        "rank-1", {"request_id": "watchdog-1", "source": "watchdog", "step": "x", "threads": []}
    )
    assert made.stacks()["rank-1", "watchdog-1"]["step"] == 4
    made.watchdog("nobody", {"request_id": "w", "source": "watchdog"})


# --- the catalogue says the same --------------------------------------------------------------


def test_the_catalogue_is_judged_as_the_state_is(made: Clocked, catalogue: Catalogue) -> None:
    step = hang(made)
    made.pass_time(30.0)
    [found] = made.findings()
    [row] = stuck_rows(catalogue, 1, step, found["first_wall"], RULES)
    evidence = found["evidence"]
    assert (row["rank"], row["status"], row["step"]) == (1, evidence["status"], step)
    for name in ("seconds", "limit_seconds", "usual_seconds", "history_steps", "ranks_begun"):
        assert row[name] == pytest.approx(evidence[name]), name
    assert stuck_rows(catalogue, 1, step - 1, made.now, RULES) == []
    made.begin(1, step)
    assert stuck_rows(catalogue, 1, step, made.now, RULES) == []
    made.pass_time(60.0)
    rows = stuck_rows(catalogue, 1, step, made.now, RULES)
    assert [(row["rank"], row["whole_role"]) for row in rows] == [(0, True), (1, True)]
    made.end(0, step)
    made.pass_time(40.0, polling=(0,))
    [row] = stuck_rows(catalogue, 1, step, made.now, RULES)
    assert (row["rank"], row["status"], row["process"]) == (1, "not ended", "silent")
    made.pass_time(60.0, polling=(0,))
    [row] = stuck_rows(catalogue, 1, step, made.now, RULES)
    assert (row["rank"], row["process"]) == (1, "gone")


def test_a_rank_that_steps_closed_without_is_named_and_nobody_else(
    made: Clocked, catalogue: Catalogue
) -> None:
    for rank in (0, 1):
        made.say(rank, HELLO, world_size=3)
    for step in range(1, 5):
        for rank in (0, 1):
            made.begin(rank, step)
        made.pass_time(2.0, polling=(0, 1))
        for rank in (0, 1):
            made.end(rank, step)
    for rank in (0, 1):
        made.begin(rank, 5)
    made.pass_time(40.0, polling=(0, 1))
    [found] = [each for each in made.findings() if each["kind"] == "stage_stuck"]
    assert "rank 2 of actor, which no process reports for, has not begun" in found["message"]
    assert "of the other ranks were asked for" in found["advice"]
    [row] = stuck_rows(catalogue, 1, 5, made.now, RULES)
    assert (row["rank"], row["status"], row["process"]) == (2, "not begun", "unheard")
    assert (row["step"], row["ranks"], row["ranks_begun"]) == (5, 3, 2)


# --- processes that do not answer ---------------------------------------------------------------


def worked(made: Clocked, ranks: int = 3, steps: int = 3) -> None:
    """Let ranks do steps of 2 s; all stand after the last one then."""
    for rank in range(ranks):
        made.say(rank, HELLO, world_size=ranks)
    for step in range(1, steps + 1):
        for rank in range(ranks):
            made.begin(rank, step)
        made.pass_time(2.0, polling=tuple(range(ranks)))
        for rank in range(ranks):
            made.end(rank, step)


def stuck_now(made: Clocked, catalogue: Catalogue, step: int) -> list[tuple[object, ...]]:
    rows = stuck_rows(catalogue, 1, step, made.now, RULES)
    return [(row["rank"], row["status"], row["process"], row["since_wall"]) for row in rows]


@pytest.mark.parametrize("closed", [False, True])
def test_a_process_that_stops_between_stages_is_named(
    made: Clocked, catalogue: Catalogue, closed: bool
) -> None:
    worked(made)
    if closed:
        made.say(0, END_STEP, step=3)
    made.pass_time(5.0, polling=(0, 1, 2))
    heard = made.now
    made.pass_time(29.0, polling=(0, 2))
    assert stuck_now(made, catalogue, 3) == []
    made.pass_time(10.0, polling=(0, 2))
    assert stuck_now(made, catalogue, 3) == [(1, "between stages", "silent", heard)]
    [found] = made.findings("process_silent")
    assert (found["rank"], found["step"], found["over_wall"]) == (1, 3, None)
    assert found["evidence"]["since_wall"] == heard
    assert "after actor_update of step 3" in found["message"]


@pytest.mark.parametrize("quiet_first", [False, True])
def test_nobody_is_accused_where_a_job_dies_at_once(made: Clocked, quiet_first: bool) -> None:
    worked(made)
    if quiet_first:
        made.pass_time(40.0, polling=(0, 2))
    made.pass_time(2.0, polling=(0, 2))  # their last polls are not of one moment
    made.pass_time(40.0, polling=())
    assert {row["rank"] for row in made.findings("process_silent")} == {0, 1, 2}
    made.pass_time(90.0, polling=())
    assert made.coordinator.parts.state.registry.attempts[1].over
    # One that was quiet long before the others may be why they died.
    found = [(row["rank"], row["over_wall"]) for row in made.findings("process_silent")]
    assert found == ([(1, None)] if quiet_first else [])


def test_a_silent_process_holds_up_its_step_and_those_that_the_others_went_on_to(
    made: Clocked, catalogue: Catalogue
) -> None:
    worked(made, steps=4)
    heard = made.now
    for step in (5, 6):
        for rank in (0, 2):
            made.begin(rank, step)
        made.pass_time(20.0, polling=(0, 2))
        for rank in (0, 2):
            made.end(rank, step)
    [found] = made.findings("process_silent")
    [link] = found["see"]
    assert (link["path"], link["shows"]) == ("/steps/4/stuck?run=r", "host and pid")
    for step in (4, 5, 6):
        assert stuck_now(made, catalogue, step) == [(1, "between stages", "silent", heard)]
    assert stuck_now(made, catalogue, 3) == []


def test_who_waits_for_a_process_that_is_gone_is_not_named_with_it(
    made: Clocked, catalogue: Catalogue
) -> None:
    worked(made, steps=4)
    heard = made.now
    # What rank 1 did in step 5 was never sent: the step closes without it once its lease ends.
    for rank in (0, 2):
        made.begin(rank, 5)
    made.pass_time(2.0, polling=(0, 2))
    for rank in (0, 2):
        made.end(rank, 5)
        made.begin(rank, 6)
    made.pass_time(100.0, polling=(0, 2))
    assert stuck_now(made, catalogue, 6) == [(1, "between stages", "gone", heard)]
    made.renew()
    made.pass_time(60.0, polling=(0, 2))
    assert stuck_now(made, catalogue, 6) == [(1, "between stages", "gone", heard)]
    # All of them stood still in one part until it was known that one of them was silent.
    assert all(row["over_wall"] is not None for row in made.findings())


def test_a_process_that_stops_inside_a_stage_keeps_its_first_clock(
    made: Clocked, catalogue: Catalogue
) -> None:
    worked(made)
    for rank in range(3):
        made.begin(rank, 4)
    heard = made.now
    made.pass_time(42.0, polling=(0, 2))
    assert stuck_now(made, catalogue, 4) == [(1, "not ended", "silent", heard)]
    # Its lease ends; the others, which wait for it inside, are not named in its place.
    made.pass_time(60.0, polling=(0, 2))
    assert stuck_now(made, catalogue, 4) == [(1, "not ended", "gone", heard)]
    made.renew()
    made.pass_time(60.0, polling=(0, 2))
    assert stuck_now(made, catalogue, 4) == [(1, "not ended", "gone", heard)]
    [found] = made.findings("process_silent")
    assert (found["over_wall"], found["evidence"]["since_wall"]) == (None, heard)
    # It may have ended the stage, and stopped before that was sent.
    assert "after the begin of actor_update of step 4; others may" in found["message"]
    # That all of them stand was news only until it was known why.
    assert [(row["rank"], row["over_wall"] is None) for row in made.findings()] == [(None, False)]
    made.poll(1)
    made.pass_time(6.0, polling=(0, 1, 2))
    [found] = made.findings("process_silent")
    assert found["over_wall"] is not None
    assert [row[0] for row in stuck_now(made, catalogue, 4)] == [0, 1, 2]


def test_a_rank_that_is_made_anew_ends_the_silence_of_its_predecessor(
    made: Clocked, catalogue: Catalogue
) -> None:
    worked(made, ranks=2)
    made.pass_time(60.0, polling=(0,))
    assert [row[0] for row in stuck_now(made, catalogue, 3)] == [1]
    anew = Sender("anew", "r", "a", "actor", 1, node_id="node", clock_offset=0.0, started=made.now)
    event = (1, BEGIN, 1, made.now, made.now, {"step": 4, "stage": "actor_update"})
    made.run(made.coordinator.parts.intake.record(anew.wire(), [event]))
    made.pass_time(6.0, polling=(0,))
    [found] = made.findings("process_silent")
    assert found["over_wall"] is not None


def test_nobody_awaits_the_ranks_of_a_start_that_was_killed_and_made_again(made: Clocked) -> None:
    worked(made, ranks=3)
    for rank in (0, 1):
        made.begin(rank, 4)
    made.pass_time(3.0, polling=())

    def again(rank: int, step: int) -> None:
        sender = Sender(f"again-{rank}", "r", "b", "actor", rank, node_id="node", clock_offset=0.0)
        event = (1, BEGIN, step, made.now, made.now, {"step": step, "stage": "actor_update"})
        made.run(made.coordinator.parts.intake.record(sender.wire(), [event]))

    for rank in (0, 1):
        again(rank, 2)
    for _ in range(12):
        made.pass_time(10.0, polling=())
        for rank in (0, 1):
            made.coordinator.parts.state.renew(f"again-{rank}", made.now, made.now)
    # Not the third rank either, which was not made again.
    assert made.findings() == made.findings("process_silent") == []


def test_a_service_that_was_held_up_calls_nobody_silent(made: Clocked) -> None:
    worked(made, ranks=2)
    made.now += 300.0
    made.run(made.coordinator.parts.leases.expire())
    made.pass_time(10.0, polling=(0, 1))
    assert made.findings("process_silent") == []


@pytest.mark.parametrize("arrives", [True, False])
def test_who_left_while_the_disk_was_full_is_not_stuck(
    made: Clocked, tmp_path: Path, arrives: bool
) -> None:
    step = train(made)
    for rank in (0, 1):
        made.begin(rank, step)
    there, away = tmp_path / "catalogue.db", tmp_path / "away.db"
    os.rename(there, away)
    waiting = made.store.submit([])
    eventually(lambda: not made.store.health().healthy)
    made.pass_time(200.0, polling=())  # both end their stage and leave, and nobody hears of it
    os.rename(away, there)
    waiting.result(30)
    eventually(lambda: made.store.health().healthy)
    made.pass_time(5.0, polling=())
    assert made.findings() == []
    if arrives:
        for rank in (0, 1):
            made.end(rank, step)
            made.say(rank, FINISH)
    made.pass_time(35.0, polling=())
    assert made.findings() == []
    silent = {row["rank"] for row in made.findings("process_silent")}
    assert silent == (set() if arrives else {0, 1})


def test_a_hang_from_before_the_disk_was_full_is_found_after_it(
    made: Clocked, tmp_path: Path
) -> None:
    step = hang(made)
    there, away = tmp_path / "catalogue.db", tmp_path / "away.db"
    os.rename(there, away)
    waiting = made.store.submit([])
    eventually(lambda: not made.store.health().healthy)
    made.pass_time(200.0)
    os.rename(away, there)
    waiting.result(30)
    eventually(lambda: made.store.health().healthy)
    made.pass_time(40.0)
    [found] = made.findings()
    assert (found["rank"], found["step"], found["over_wall"]) == (1, step, None)
    assert found["evidence"]["seconds"] > 200.0


def test_nobody_is_silent_or_stuck_while_events_arrive_late(made: Clocked) -> None:
    worked(made, ranks=2)
    made.begin(0, 4)

    def wait(seconds: int, age: float) -> None:
        for _ in range(seconds):
            for _ in range(MIN_CALLS):
                made.coordinator.parts.load.arrived(age)
            made.pass_time(1.0, polling=())

    wait(120, age=60.0)
    assert made.findings("process_silent") == made.findings() == []
    assert all(each.live for each in made.coordinator.parts.state.registry.processes.values())
    assert made.findings("service_behind")
    while not made.findings("process_silent"):
        assert made.now < 2000.0
        wait(1, age=0.1)
    assert {row["rank"] for row in made.findings("process_silent")} == {0, 1}


def test_after_a_restart_a_lease_is_whole_from_when_calls_are_answered(made: Clocked) -> None:
    worked(made, ranks=2)
    polled = 300.0
    made.pass_time(polled, polling=(0, 1))
    made.renew()
    made.now += 20.0  # what else a coordinator opens before it answers
    made.coordinator.parts.leases.begin()
    made.pass_time(29.0, polling=())
    assert made.findings("process_silent") == []
    processes = made.coordinator.parts.state.registry.processes.values()
    assert [process.lapsed for process in processes] == [False, False]
    # Polls are not stored: that it had polled until the restart must not count against it.
    made.pass_time(9.0, polling=(0,))
    [found] = made.findings("process_silent")
    assert found["rank"] == 1
    assert re.search(r"not heard in the 3\d s since the service restarted", found["message"])


def test_a_restart_is_no_word_of_a_silent_process(made: Clocked) -> None:
    worked(made, ranks=2)
    made.pass_time(35.0, polling=(0,))
    [before] = made.findings("process_silent")
    made.renew()
    made.pass_time(10.0, polling=(0,))
    assert made.findings("process_silent") == [before]
    made.pass_time(60.0, polling=(0,))
    [found] = made.findings("process_silent")
    assert found["over_wall"] is None
    made.poll(1)
    made.pass_time(6.0, polling=(0, 1))
    [found] = made.findings("process_silent")
    assert found["over_wall"] is not None
