"""Payloads: announced, read, lost, offered again; and when a step is aggregated."""

from __future__ import annotations

import pytest
from tests.support.trainings import Bench, Delivery, Rank, check_memory

from stagescope_service.core.findings import describe
from stagescope_service.core.instructions import Aggregate, Ingest, Settled


@pytest.fixture
def bench() -> Bench:
    return Bench()


def unsent(delivery: Delivery) -> Delivery:
    return Delivery(delivery.sender, delivery.event, has_payload=False)


def test_a_payload_is_read_once_and_settled_once(bench: Bench) -> None:
    rank = Rank()
    bench.give(rank.hello(layout={"tp_rank": 1}, data_rank=5))
    begun, ended = rank.work(3, payload=True)
    out = bench.give(begun, ended, ended, ended)
    (order,) = [each for each in out if isinstance(each, Ingest)]
    assert (order.key, order.node_id) == (ended.key, "node-1")
    told = {
        "run": "r", "attempt_id": 1, "attempt_key": "job-1", "role": "actor", "rank": 0,
        "data_rank": 5, "layout": {"tp_rank": 1}, "step": 3, "policy_version": None,
        "stage": "actor_update", "occurrence": 0, "epoch": 0, "minibatch": 0, "microbatch": 0,
        "bytes": 24,
    }  # fmt: skip
    assert {name: value for name, value in order.job.items() if name in told} == told
    row = bench.rows.one("payloads")
    assert (row["state"], row["bytes"], row["announced_wall"]) == (
        "announced",
        24,
        ended.event.wall,
    )
    bench.settle(ended.key, wall=7.0)
    out = bench.give(ended)
    assert [each for each in out if isinstance(each, Ingest | Settled)] == [
        Settled(ended.key, "ingested")
    ]
    row = bench.rows.one("payloads")
    assert (row["state"], row["settled_wall"], row["reason"]) == ("ingested", 7.0, None)
    check_memory(bench.state)


def test_an_announcement_without_refs_waits_for_them(bench: Bench) -> None:
    _, ended = Rank().work(1, payload=True)
    bench.give(unsent(ended))
    assert (bench.ingests, bench.state.pending("r")) == ([], [ended.key])
    bench.give(ended)
    assert [order.key for order in bench.ingests] == [ended.key]


@pytest.mark.parametrize("state", ["lost", "refused"])
def test_a_payload_that_is_not_read_is_listed(bench: Bench, state: str) -> None:
    _, ended = Rank().work(1, payload=True)
    bench.give(ended)
    bench.settle(ended.key, state)
    loss = bench.rows.one("losses")
    assert (loss["kind"], loss["step"], loss["reason"]) == ("payload", 1, "because")
    assert bench.rows.one("stages")["status"] == "ok"  # the event itself is not lost


def test_a_payload_of_a_silent_process_is_lost_and_taken_back(bench: Bench) -> None:
    rank = Rank()
    begun, ended = rank.work(1, payload=True)
    bench.give(begun, unsent(ended))
    bench.silence()
    assert bench.rows.one("payloads")["state"] == "lost"
    assert bench.rows.one("losses")["kind"] == "payload"
    bench.give(ended)
    assert [order.key for order in bench.ingests] == [ended.key]
    assert bench.rows.one("payloads")["state"] == "announced"
    bench.settle_all()
    assert bench.rows.one("payloads")["state"] == "ingested"
    assert bench.rows.one("payloads")["reason"] is None
    assert bench.rows.of("losses") == []


def test_a_payload_that_is_being_read_outlives_its_process(bench: Bench) -> None:
    begun, ended = Rank().work(1, payload=True)
    bench.give(begun, ended)
    bench.silence()
    assert bench.rows.one("payloads")["state"] == "announced"
    bench.settle_all()
    assert bench.rows.one("payloads")["state"] == "ingested"
    check_memory(bench.state)


def test_a_payload_that_nobody_reads_any_more_may_be_offered_again(bench: Bench) -> None:
    begun, ended = Rank().work(1, payload=True)
    bench.give(begun, ended)
    bench.state.unread(ended.key)
    bench.give(ended)
    assert len(bench.ingests) == 2
    bench.state.unread(ended.key)
    bench.silence()
    assert bench.rows.one("payloads")["state"] == "lost"


def test_a_process_that_took_leave_keeps_its_payloads_until_its_lease_ends(bench: Bench) -> None:
    rank = Rank()
    begun, ended = rank.work(1, payload=True)
    bench.give(begun, unsent(ended), rank.finish())
    assert bench.rows.one("payloads")["state"] == "announced"
    bench.silence()
    assert bench.rows.one("payloads")["state"] == "lost"


def test_a_payload_that_its_process_let_go(bench: Bench) -> None:
    rank = Rank()
    begun = rank.begin(1)
    dropped = {"reason": "over 10 bytes were waiting", "bytes": 24, "tensors": {}}
    ended = rank.end(begun, payload_dropped=dropped)
    out = bench.give(begun, ended, ended)
    row = bench.rows.one("payloads")
    assert (row["state"], row["bytes"], row["reason"]) == ("dropped", 24, dropped["reason"])
    assert Settled(ended.key, "dropped") in out
    assert bench.rows.of("losses") == []  # the DROPPED event lists it, once
    check_memory(bench.state)


def test_a_restart_reads_nothing_twice_and_nothing_less(bench: Bench) -> None:
    rank = Rank()
    said = [*rank.work(1, payload=True), *rank.work(1, "other", payload=True)]
    bench.give(*said)
    bench.settle(said[1].key)
    bench.restart()
    bench.ingests.clear()
    assert bench.state.pending("r") == [said[3].key]
    out = bench.give(said[1], said[3])
    assert Settled(said[1].key, "ingested") in out
    assert [order.key for order in bench.ingests] == [said[3].key]


def test_outcomes_that_nobody_waits_for_change_no_row(bench: Bench) -> None:
    _, ended = Rank().work(1, payload=True)
    bench.settle(ended.key)
    assert not bench.rows.tables
    assert bench.settled == [Settled(ended.key, "ingested")]


def test_the_step_is_aggregated_when_nothing_is_to_be_read(bench: Bench) -> None:
    ranks = [Rank(0), Rank(1)]
    ends = []
    for rank in ranks:
        begun, ended = rank.work(1, payload=True)
        bench.give(begun, ended)
        ends.append(ended)
    bench.settle(ends[0].key)
    assert bench.assembled == []
    for rank in ranks:
        bench.give(rank.begin(2))
    assert bench.step(1)["closed_wall"] is not None
    assert bench.assembled == []
    bench.settle(ends[1].key)
    assert bench.assembled == [Aggregate(1, 1)]
    late = ranks[0].work(1, "late", payload=True)
    bench.give(*late)
    assert bench.assembled == [Aggregate(1, 1)]
    bench.settle(late[1].key)
    assert bench.assembled == [Aggregate(1, 1), Aggregate(1, 1)]


def test_a_step_without_payloads_is_formed_at_its_close(bench: Bench) -> None:
    rank = Rank()
    bench.give(*rank.work(1), rank.begin(2))
    assert bench.assembled == [Aggregate(1, 1)]


def test_a_payload_settled_after_its_step_left_memory_forms_it_again(bench: Bench) -> None:
    rank = Rank()
    begun, ended = rank.work(1, payload=True)
    bench.give(begun, ended)
    for step in range(2, 30):
        bench.give(*rank.work(step))
    assert Aggregate(1, 1) not in bench.assembled
    assert 1 not in bench.state.registry.attempts[1].steps
    bench.settle(ended.key)
    assert bench.assembled[-1] == Aggregate(1, 1)


def test_payloads_of_work_without_a_step_form_no_step(bench: Bench) -> None:
    bench.give(*Rank(0, "rollout").work(None, "rollout_generate", policy_version=1, payload=True))
    bench.settle_all()
    assert bench.rows.one("payloads")["state"] == "ingested"
    assert bench.assembled == []
    assert bench.rows.of("findings") == []
    check_memory(bench.state)


def test_values_of_training_without_a_step_are_a_finding(bench: Bench) -> None:
    for rank in (Rank(0), Rank(1), Rank(0, "critic")):
        for _ in range(2):
            bench.give(*rank.work(None, policy_version=3, payload=True), *rank.work(None, "my own"))
    bench.give(*Rank(2).work(None, "mine", payload=True))
    begun = (rank := Rank(3)).begin(None, "compute_values")
    bench.give(begun, rank.end(begun, scalars={"vf_loss": 1.0}))
    found = bench.rows.of("findings", kind="stepless_values")
    assert sorted((row["role"], row["stage"], row["rank"], row["step"]) for row in found) == [
        ("actor", "actor_update", None, None),
        ("actor", "compute_values", None, None),
        ("actor", "mine", None, None),
        ("critic", "actor_update", None, None),
    ]
    [row] = [row for row in found if row["stage"] == "compute_values"]
    assert "belong to no step, and no step's numbers include them" in row["message"]
    assert row["evidence"] == {"names": ["vf_loss"], "policy_version": None}


@pytest.mark.parametrize(
    ("role", "stage", "version"),
    [("rollout", "score", None), ("actor", "rollout_generate", None), ("judge", "score", 4)],
)
def test_rollout_work_needs_no_step(
    bench: Bench, role: str, stage: str, version: int | None
) -> None:
    rank = Rank(0, role)
    begun = rank.begin(None, stage, policy_version=version)
    bench.give(begun, rank.end(begun, payload=True, scalars={"reward": 1.0}))
    assert bench.rows.one("payloads")["step"] is None
    assert bench.rows.of("findings") == []


def test_the_reason_of_a_loss_has_no_colours_of_ray() -> None:
    error = RuntimeError("\x1b[36mray::Rank.step()\x1b[39m (pid=7)\n  Value: \x1b[1;31mx\x1b[0m")
    assert describe(error) == "RuntimeError: ray::Rank.step() (pid=7) Value: x"
