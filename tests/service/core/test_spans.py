"""Stages and their parts: begun, ended, overlapping, repeated, lost; scalars, drops, dumps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.service.core.test_any_order import crash
from tests.support.trainings import Bench, Delivery, Rank, Rows, check_memory

from stagescope_service.core.arrival import Arrival
from stagescope_service.core.findings import MAX_REASONS, Refusals, finding
from stagescope_service.core.spans import RAW_SEQ
from stagescope_service.core.state import State
from stagescope_service.store.contract import Put


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_stage_with_its_times(bench: Bench) -> None:
    rank = Rank()
    begun = rank.begin(1, epoch=1, minibatch=2, microbatch=3, device_time=True)
    ended = rank.end(begun, status="failed", error_type="ValueError", error_message="no")
    bench.give(begun, ended)
    row = bench.rows.one("stages")
    assert row["work_key"] == "1||actor_update|0.1.2.3"
    assert (row["begin_wall"], row["end_wall"]) == (begun.event.wall, ended.event.wall)
    assert (row["begin_mono"], row["end_mono"]) == (begun.event.mono, ended.event.mono)
    assert (row["begin_seq"], row["end_seq"]) == (1, 2)
    assert (row["status"], row["error_type"], row["error_message"]) == (
        "failed",
        "ValueError",
        "no",
    )
    assert (row["device_time"], row["superseded"]) == (True, False)


@pytest.mark.parametrize("order", [*itertools.permutations(range(2))])
def test_begin_and_end_in_any_order(bench: Bench, order: tuple[int, ...]) -> None:
    rank = Rank()
    said = rank.work(1)
    bench.give(*(said[place] for place in order), *said)
    row = bench.rows.one("stages")
    assert (row["status"], row["begin_seq"], row["end_seq"]) == ("ok", 1, 2)
    check_memory(bench.state)


def test_an_end_without_its_beginning_still_says_when_it_began(bench: Bench) -> None:
    rank = Rank()
    begun = rank.begin(1)
    bench.give(rank.end(begun))
    row = bench.rows.one("stages")
    assert (row["begin_wall"], row["begin_seq"], row["status"]) == (begun.event.wall, None, "ok")


@pytest.mark.parametrize(
    ("offset", "ahead", "begun"),
    [
        (None, 0.0, 1000.25),
        (None, 1e8, 1030.0),  # a clock of the year 2001, or of 2100: nothing begins in the future
        (None, -500.0, 500.25),  # taken in later, from files
        (-1e8, 1e8, 1000.25),
        (40.0, -40.0, 1000.25),
        (90.0, 0.0, 1030.0),
    ],
)
@pytest.mark.parametrize("lost", [False, True])
def test_a_stage_begins_on_the_services_clock(
    offset: float | None, ahead: float, begun: float, lost: bool
) -> None:
    state = State()
    rank = Rank(started=1000.0 + ahead)
    sender = dataclasses.replace(rank.sender, clock_offset=offset)
    began = rank.begin(1)
    out = [] if lost else state.handle(sender, began.event, 0.0, Arrival(wall=1030.0))
    ended = rank.end(began)
    out += state.handle(sender, ended.event, 0.0, Arrival(wall=1030.0))
    rows = [put.row for put in out if isinstance(put, Put) and put.table == "stages"]
    (found,) = [row["begun_wall"] for row in rows if "begun_wall" in row]
    assert found == pytest.approx(begun)


def test_stages_of_one_name_overlap(bench: Bench) -> None:
    rank = Rank()
    first, second = rank.begin(1, occurrence=0), rank.begin(1, occurrence=1)
    bench.give(first, second, rank.end(first))
    assert {row["occurrence"]: row["status"] for row in bench.rows.of("stages")} == {
        0: "ok", 1: "open",
    }  # fmt: skip


PARTS_TWICE = [(0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (0, 2, 1, 3), (3, 0, 2, 1)]


@pytest.mark.parametrize("order", PARTS_TWICE)
def test_a_part_done_twice_by_one_process(bench: Bench, order: tuple[int, ...]) -> None:
    rank = Rank()
    said = [*rank.work(1), *rank.work(1)]
    bench.give(*(said[place] for place in order))
    rows = bench.rows.of("stages")
    assert [(row["begin_seq"], row["end_seq"], row["superseded"]) for row in rows] == [
        (1, 2, True), (3, 4, False),
    ]  # fmt: skip
    found = bench.rows.one("findings")
    assert (found["kind"], found["step"], found["rank"]) == ("superseded_work", 1, 0)
    check_memory(bench.state)


def test_a_part_done_again_after_its_step_left_memory(bench: Bench) -> None:
    rank = Rank()
    for step in range(1, 30):
        bench.give(*rank.work(step))
    bench.give(*rank.work(3))
    rows = bench.rows.of("stages", step=3)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert rows[0]["begin_seq"] == 5  # what was there stays


def test_training_that_goes_back_inside_its_process_is_said(bench: Bench) -> None:
    rank = Rank()
    for step, occurrence in ((7, 0), (7, 1), (8, 0)):  # a further pass of a step is none
        bench.give(*rank.work(step, occurrence=occurrence))
    bench.give(*rank.work(7, "rollout_generate"), *rank.work(6, "actor_compute_log_prob"))
    assert not bench.rows.of("findings")
    bench.give(*rank.work(7, "actor_update", occurrence=2))
    found = bench.rows.one("findings")
    assert (found["kind"], found["severity"], found["step"]) == ("step_begun_again", "error", 7)
    assert "actor rank 0 began actor_update of step 7 again after step 8" in found["message"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(6))))
def test_training_that_goes_back_is_said_in_any_order(bench: Bench, order: tuple[int, ...]) -> None:
    rank = Rank()
    said = [*rank.work(7), *rank.work(8), *rank.work(7, occurrence=1)]
    bench.give(rank.log(None), *(said[place] for place in order))
    found = bench.rows.one("findings")
    assert (found["kind"], found["evidence"]) == ("step_begun_again", {"after_step": 8})


def test_every_step_that_is_done_again_is_said(bench: Bench) -> None:
    rank = Rank()
    for step, occurrence in ((1, 0), (2, 0), (3, 0), (4, 0), (2, 1)):
        bench.give(*rank.work(step, occurrence=occurrence))
    bench = crash(bench, bench.rows)
    for step, occurrence in ((3, 1), (4, 1), (5, 0), (6, 0)):
        bench.give(*rank.work(step, occurrence=occurrence))
    found = {row["step"]: row["evidence"]["after_step"] for row in bench.rows.of("findings")}
    assert found == {2: 4, 3: 4, 4: 3}


def test_training_that_goes_back_to_a_step_that_left_memory_is_said(bench: Bench) -> None:
    rank = Rank()
    for step in [*range(1, 20), 3]:
        bench.give(*rank.work(step))
    kinds = {row["kind"]: row["step"] for row in bench.rows.of("findings")}
    assert kinds["step_begun_again"] == 3


def test_ends_that_do_not_say_where_they_began(bench: Bench) -> None:
    rank = Rank()
    for _ in range(2):
        begun = rank.begin(1)
        bench.give(begun, rank.end(begun, tell=False))
    rows = bench.rows.of("stages")
    assert [(row["begin_seq"], row["end_seq"]) for row in rows] == [(1, 2), (3, 4)]
    late = Rank(1)
    begun = late.begin(1)
    bench.give(late.end(begun, tell=False), begun, begun)
    row = bench.rows.one("stages", rank=1)
    assert (row["begin_seq"], row["end_seq"], row["status"]) == (1, 2, "ok")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (1, 3, 0, 2)])
def test_two_incarnations_did_the_same(bench: Bench, order: tuple[int, ...]) -> None:
    old, new = Rank(0, "rollout"), Rank(0, "rollout", started=2000.0)
    said = [*old.work(1), *new.work(1)]
    bench.give(*(said[place] for place in order))
    flags = {row["incarnation"]: row["superseded"] for row in bench.rows.of("stages")}
    assert flags == {old.sender.incarnation: True, new.sender.incarnation: False}
    assert bench.rows.one("findings")["kind"] == "superseded_work"


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_rank_made_anew_answers_also_for_parts_that_it_does_not_have(
    bench: Bench, order: tuple[int, ...]
) -> None:
    killed, resumed = Rank(started=1000.0), Rank(started=1100.0)
    pieces = [
        killed.work(3, microbatch=0),
        killed.work(3, microbatch=1),
        resumed.work(3, microbatch=0),
    ]
    for place in order:
        bench.give(*pieces[place])
    answering = bench.rows.of("stages", superseded=False)
    assert [row["incarnation"] for row in answering] == [resumed.sender.incarnation]
    assert len(bench.rows.of("findings", kind="superseded_work")) == 1
    bench.restart()


def test_a_rank_that_goes_on_where_its_predecessor_stopped_leaves_its_parts(bench: Bench) -> None:
    killed, resumed = Rank(started=1000.0), Rank(started=1100.0)
    bench.give(*killed.work(3, microbatch=0), *killed.work(3, microbatch=1))
    bench.give(*resumed.work(3, microbatch=1), *resumed.work(3, microbatch=2))
    answering = {
        row["microbatch"]: row["incarnation"] for row in bench.rows.of("stages", superseded=False)
    }
    names = [each.sender.incarnation for each in (killed, resumed, resumed)]
    assert answering == dict(enumerate(names))


def test_a_closed_step_is_formed_again_once_another_answers(bench: Bench) -> None:
    rank = Rank()
    bench.give(*rank.work(1, payload=True), rank.begin(2))
    bench.settle_all()
    assert bench.step(1)["closed_wall"] is not None
    aggregated = len(bench.assembled)
    bench.give(*rank.work(1))  # done again, and nothing handed over
    assert len(bench.assembled) > aggregated


def test_a_finding_keeps_when_it_was_made_first(bench: Bench) -> None:
    rank = Rank()
    said = [*rank.work(1), *rank.work(1), *rank.work(1)]
    bench.give(*said)
    found = bench.rows.one("findings")
    assert (found["first_wall"], found["last_wall"]) == (said[2].event.wall, said[4].event.wall)


def test_an_end_after_the_lapse_takes_the_loss_back(bench: Bench) -> None:
    rank = Rank()
    begun = rank.begin(1)
    bench.give(begun)
    bench.silence()
    assert bench.rows.one("stages")["status"] == "unfinished"
    assert bench.rows.one("losses")["kind"] == "stage"
    bench.give(rank.end(begun))
    assert bench.rows.one("stages")["status"] == "ok"
    assert bench.rows.of("losses") == []
    assert bench.rows.one("processes")["lapsed_wall"] is None


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_finish_before_other_events(bench: Bench, order: tuple[int, ...]) -> None:
    rank = Rank()
    said = [*rank.work(1), rank.finish()]
    bench.give(*(said[place] for place in order))
    assert bench.rows.one("stages")["status"] == "ok"
    assert bench.rows.of("losses") == []
    assert bench.rows.one("processes")["finished_wall"] == said[2].event.wall
    assert bench.attempt()["ended_wall"] == said[2].event.wall
    assert bench.step(1)["closed_wall"] is not None


@pytest.mark.parametrize("first", ["begin", "finish"])
def test_a_finish_inside_a_stage(bench: Bench, first: str) -> None:
    rank = Rank()
    begun, left = rank.begin(1), rank.finish()
    bench.give(*((begun, left) if first == "begin" else (left, begun)))
    assert bench.rows.one("stages")["status"] == "unfinished"
    loss = bench.rows.one("losses")
    assert loss["reason"] == "its process reported its end inside the stage"
    assert loss["wall"] == left.event.wall


def raw_call(rank: Rank, kind: str, delivery: int, **fields: object) -> Delivery:
    said = rank.say(kind, **fields)
    event = type(said.event)(kind, RAW_SEQ + delivery, said.event.wall, said.event.mono, fields)
    return Delivery(said.sender, event, raw=True)


def test_raw_calls_have_no_order(bench: Bench) -> None:
    raw = Rank(0, raw=True)
    begun = raw_call(raw, "begin", 900, step=1, stage="s")
    ended = raw_call(raw, "end", 100, step=1, stage="s", status="ok")
    bench.give(begun, begun, ended, ended)
    row = bench.rows.one("stages")
    assert (row["status"], row["begin_seq"], row["end_seq"]) == ("ok", RAW_SEQ + 900, RAW_SEQ + 100)
    again = raw_call(raw, "begin", 50, step=1, stage="s")
    bench.give(again, raw_call(raw, "end", 20, step=1, stage="s", status="ok"))
    rows = bench.rows.of("stages")
    assert [(row["begin_seq"] - RAW_SEQ, row["superseded"]) for row in rows] == [
        (900, True), (50, False),
    ]  # fmt: skip


def test_scalars_finite_or_not(bench: Bench) -> None:
    values = {
        "a": 1, "b": float("nan"), "c": -math.inf, "d": np.float32(0.5), "e": np.int64(3),
        "f": True, "g": 10**400,
    }  # fmt: skip
    long = {"n" * 200: 0.5, "n" * 201: 1.5}
    bench.give(Rank().say("log", step=1, scalars={**values, **long, "bad": "1.0", "worse": None}))
    rows = {row["name"]: row["value"] for row in bench.rows.of("scalars")}
    assert math.isnan(rows.pop("b"))
    assert rows.pop("n" * 200) == 0.5
    assert rows == {"a": 1.0, "c": -math.inf, "d": 0.5, "e": 3.0, "f": 1.0}
    assert all(type(value) is float for value in rows.values())
    found = bench.rows.one("findings")
    assert (found["kind"], found["message"]) == (
        "refused_scalar",
        f"not numbers: bad (str), g (int), {'n' * 60}… (a name of more than 200 characters), "
        "worse (NoneType)",
    )


def test_drops_are_counted_once_however_often_they_are_told(bench: Bench) -> None:
    rank = Rank()
    said = [
        rank.dropped("event", 3, step=1, stage="s"),
        rank.dropped("payload", 2, bytes=10),
        rank.dropped("scalar", 7),
    ]
    bench.give(*said, *reversed(said), *said)
    row = bench.rows.one("processes")
    assert (row["dropped_events"], row["dropped_payloads"], row["dropped_bytes"]) == (3, 2, 10)
    losses = {row["kind"]: row["count"] for row in bench.rows.of("losses")}
    assert losses == {"event": 3, "payload": 2, "scalar": 7}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_was_said_of_a_dump_last_stands(bench: Bench, order: tuple[int, ...]) -> None:
    rank = Rank()
    said = [
        rank.dump(1, "s", "armed", estimate={"bytes": 9}, path="/first"),
        rank.dump(1, "s", "failed", path="/d", bytes=3, error="disk full"),
    ]
    bench.give(*(said[place] for place in order))
    row = bench.rows.one("dumps")
    assert (row["state"], row["path"], row["bytes"]) == ("failed", "/d", 3)
    assert row["estimate"] == {"bytes": 9}
    assert bench.rows.one("losses")["reason"] == "dump failed: disk full"
    bench.give(rank.dump(1, "s", "complete"))
    assert bench.rows.of("losses") == []


def test_a_refused_call_makes_a_finding(bench: Bench) -> None:
    bench.give(Rank().refused("mask", step=4, stage="s"))
    found = bench.rows.one("findings")
    assert (found["kind"], found["step"], found["message"]) == ("refused_mask", 4, "wrong shape")


def test_reasons_of_refusals_are_told_apart_up_to_a_bound() -> None:
    refusals = Refusals()

    def refuse(message: str, wall: float = 5.0) -> Put:
        found = finding("refused_call", message, run="r", attempt_id=1, wall=wall)
        return refusals.add(found)

    names = ["".join(each) for each in itertools.product("abcdefgh", repeat=2)]
    rows = Rows()
    for name in names:
        rows.apply([refuse(f"no field {name}"), refuse("step is -1", 3.0)])
    found = rows.of("findings")
    assert len(found) == MAX_REASONS + 1
    assert sum(row["count"] for row in found) == 2 * len(names)
    [step] = [row for row in found if row["message"] == "step is -1"]
    assert (step["count"], step["first_wall"]) == (len(names), 3.0)
    [others] = [row for row in found if row["message"] == "no field hh"]
    assert others["count"] == len(names) - (MAX_REASONS - 1)


def test_different_numbers_that_are_none_are_findings_of_their_own(bench: Bench) -> None:
    rank = Rank()
    for part, scalars in enumerate(({"loss": None}, {"kl": "x"}, {"loss": None})):
        begun = rank.begin(1, microbatch=part)
        bench.give(begun, rank.end(begun, scalars=scalars))
    found = bench.rows.of("findings", kind="refused_scalar")
    assert sorted(row["message"] for row in found) == [
        "not numbers: kl (str)", "not numbers: loss (NoneType)",
    ]  # fmt: skip


class Strange:
    def __repr__(self) -> str:
        return "strange\x00\ud800"


HOSTILE: list[dict[str, object]] = [
    {"error_message": "\ud800\x00", "error_type": 7, "device_seconds": "1"},
    {"scalars": {1: 2.0, "\ud800": 1.0}, "begin_wall": "x", "begin_mono": True},
    {"payload": {"tensors": Strange(), "bytes": "7", "meta": {3: Strange(), "n": math.nan}}},
    {"payload": {"meta": {"deep": [[[[{"x": {1, 2}}]]]]}, "bytes": 1 << 80}},
    {"payload_dropped": {"reason": Strange(), "bytes": -1.5}},
    {"begin_seq": "1"},
    {"begin_seq": 1 << 90},
    {"scalars": [1, 2], "payload": 7},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=str)
def test_strange_fields_spoil_no_row(
    bench: Bench, fields: Mapping[str, object], tmp_path: Path
) -> None:
    from stagescope_service.core.instructions import Delete, Put
    from stagescope_service.store.sql import SqlStore

    rank = Rank()
    hello = rank.hello(
        world_size="2", data_rank=1.5, layout={"tp_rank": "0", "host": 7, 3: Strange()},
        fingerprint={"x": Strange()}, settings={"y": {1}}, pid="no", resumed_from_step=True,
    )  # fmt: skip
    out = bench.give(
        hello,
        rank.say("end", step=1, stage="s", **fields),
        rank.say("dump", step=1, stage="s", capture_id=7, bytes="x", estimate=Strange()),
        rank.say("dropped", what=Strange(), count="many", bytes=[]),
        rank.say("refused", what=None, message=Strange()),
    )
    store = SqlStore(f"sqlite:///{tmp_path}/catalogue.db")
    store.open()
    try:
        store.submit([each for each in out if isinstance(each, Put | Delete)]).result(30)
    finally:
        store.close()
