"""The background thread against a service that dies, hangs, restarts or refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from tests.support.coordinators import FakeCoordinator, FakeService, wait_for

from stagescope_wire.errors import InvalidEvent
from stagescope_workers import steady_clock
from stagescope_workers.probe.probe import Probe
from stagescope_workers.transport import sender as sender_module
from stagescope_workers.transport.calls import Reply, requested_pause
from stagescope_workers.transport.outbox import Entry

MakeProbe = Callable[..., Probe]
CAPTURE = {
    "capture_id": "c1", "run": None, "stages": ["s"], "roles": None, "ranks": "all",
    "steps": [3, 4, 5], "config": {"task": "statistics"}, "keep": [], "strict": False,
}  # fmt: skip


def stage(probe: Probe, step: int, *, rows: int = 1) -> None:
    with probe.stage("s", step=step) as entered:
        entered.record(rewards=[0.0] * rows)


def steps(coordinator: FakeCoordinator) -> list[object]:
    return [event.fields["step"] for event in coordinator.of_kind("end")]


def test_what_waited_for_a_late_service_arrives_in_order(
    make_probe: MakeProbe, service: FakeService
) -> None:
    late, service.coordinator = service.coordinator, None
    assert late is not None
    probe = make_probe()
    for step in range(300):
        stage(probe, step)
    wait_for(lambda: service.looked > 1)
    service.coordinator = late
    wait_for(lambda: len(steps(late)) == 300)
    assert steps(late) == list(range(300))
    assert len(late.batches) <= 8  # batched: 601 events
    assert len(late.events) == len({seq for _, seq in late.events})


def test_the_first_batch_knows_the_clock_of_the_service(
    make_probe: MakeProbe, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clock of a machine may be set while this runs; the probe's own goes on.
    coordinator.wall = lambda: steady_clock.now()[0] + 100.0
    probe = make_probe()
    stage(probe, 1)
    wait_for(lambda: coordinator.of_kind("end"))
    for sender in coordinator.senders:
        assert sender.clock_offset is not None
        assert sender.clock_error is not None
        assert abs(sender.clock_offset - 100.0) <= sender.clock_error + 0.01
    # The node's clock is set while the training runs.
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 7200)
    stage(probe, 2)
    monkeypatch.setattr(time, "time", real)
    wait_for(lambda: len(coordinator.of_kind("end")) == 2)
    walls = [event.wall for event in coordinator.of_kind("begin")]
    assert 0 <= walls[1] - walls[0] < 60
    assert 0 <= coordinator.of_kind("end")[1].wall - walls[1] < 60


def test_a_stage_that_continues_is_reported_while_it_runs(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    with probe.stage("s", step=1):
        wait_for(lambda: coordinator.of_kind("begin"))
        assert not coordinator.of_kind("end")


def test_receipt_in_the_batch_s_own_answer_counts(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    coordinator.settle_at_once = True
    probe = make_probe()
    stage(probe, 1)
    wait_for(lambda: probe.outbox.is_empty)


def test_new_coordinator_is_offered_the_unreceipted_payloads_again(
    make_probe: MakeProbe, service: FakeService, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    for step in (1, 2):
        stage(probe, step)
    wait_for(lambda: probe.status()["waiting_payloads"] == 2)
    coordinator.settle({3: "ingested"})
    wait_for(lambda: probe.status()["waiting_payloads"] == 1)
    service.coordinator = second = FakeCoordinator("second")
    coordinator.die()
    wait_for(lambda: second.payloads)
    assert [(seq, event.fields["step"]) for (_, seq), event in second.events.items()] == [(5, 2)]
    second.settle({5: "ingested"})
    wait_for(lambda: probe.outbox.is_empty)


def test_batch_on_the_way_when_the_coordinator_died_is_sent_again(
    make_probe: MakeProbe, service: FakeService, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    wait_for(lambda: coordinator.batches)
    coordinator.mode = "hang"
    stage(probe, 1)
    wait_for(lambda: coordinator.hanging)
    service.coordinator = second = FakeCoordinator("second")
    coordinator.die()
    wait_for(lambda: steps(second) == [1])


def test_a_service_that_is_behind_is_sent_more_events_in_fewer_calls(
    make_probe: MakeProbe, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.pause = 2.0
    probe = make_probe()
    wait_for(lambda: coordinator.batches)  # the hello
    before = len(coordinator.batches)
    began = time.monotonic()
    for step in range(200):
        stage(probe, step)
        time.sleep(0.002)
    wait_for(lambda: len(steps(coordinator)) == 200)
    assert time.monotonic() - began > 1.0
    assert len(coordinator.batches) - before <= 3
    assert "the service is behind" in caplog.text
    coordinator.pause = None
    for step in range(200, 203):
        stage(probe, step)
        wait_for(lambda: len(steps(coordinator)) == step + 1)  # noqa: B023


@pytest.mark.parametrize("pause", ["soon", -1.0, float("nan"), 1e9, None])
def test_an_invalid_pause_is_ignored(pause: Any) -> None:
    assert requested_pause({"pause": pause}) == 0.0


def test_not_ready_is_tried_again(make_probe: MakeProbe, coordinator: FakeCoordinator) -> None:
    coordinator.mode = "not_ready"
    probe = make_probe()
    stage(probe, 1)
    wait_for(lambda: coordinator.calls > 2)
    assert not coordinator.events
    coordinator.mode = "serve"
    wait_for(lambda: steps(coordinator) == [1])


def test_hung_coordinator_is_called_once_and_left_when_its_name_moves(
    make_probe: MakeProbe,
    service: FakeService,
    coordinator: FakeCoordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender_module, "CALL_SECONDS", 0.05)
    coordinator.mode = "hang"
    probe = make_probe()
    began = time.perf_counter()
    for step in range(20):
        stage(probe, step)
    assert time.perf_counter() - began < 5.0
    wait_for(lambda: probe._sender is not None and "slow" in probe._sender._warned)
    assert coordinator.calls == 1  # its answers would pile up in the hung actor
    service.coordinator = second = FakeCoordinator("second")
    wait_for(lambda: len(steps(second)) == 20)


def test_an_idle_rank_leaves_what_is_silent_before_its_poll_is_over(
    make_probe: MakeProbe,
    service: FakeService,
    coordinator: FakeCoordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its lease ends: a poll waits for 20 of its 45 seconds."""
    monkeypatch.setattr(sender_module, "CALL_SECONDS", 0.2)
    probe = make_probe()
    wait_for(lambda: coordinator.revisions and probe.outbox.is_empty)
    polls, links = len(coordinator.revisions), service.looked
    coordinator.holds_polls = True
    time_of_poll = time.monotonic()
    wait_for(lambda: time.monotonic() > time_of_poll + 0.5)
    assert service.looked == links  # it answers, and the poll may take its time
    service.silent = True
    wait_for(lambda: service.looked > links)
    service.silent = coordinator.holds_polls = False
    wait_for(lambda: len(coordinator.revisions) > polls)


def test_event_that_the_service_refuses_costs_no_other(
    make_probe: MakeProbe, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    probe = make_probe()
    wait_for(lambda: coordinator.batches)
    coordinator.refuses = {3: "no"}
    stage(probe, 1)
    stage(probe, 2)
    wait_for(lambda: steps(coordinator) == [2])
    coordinator.settle({5: "ingested"})
    wait_for(lambda: probe.outbox.is_empty)
    assert not probe.close(10.0)
    assert any("(events refused: 1)" in text for text in caplog.messages), caplog.messages


def test_event_over_which_the_service_stumbles_is_found_and_dropped(
    make_probe: MakeProbe,
    coordinator: FakeCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = coordinator.record

    def stumble(
        sender: tuple[object, ...], events: Any, payloads: Mapping[int, object]
    ) -> Future[Reply]:
        if any(event[1] == "end" and event[5]["step"] == 3 for event in events):
            future: Future[Reply] = Future()
            future.set_exception(InvalidEvent("cannot read this"))
            return future
        return record(sender, events, payloads)

    monkeypatch.setattr(coordinator, "record", stumble)
    monkeypatch.setattr("stagescope_workers.transport.calls.MAX_BACKOFF", 0.05)
    probe = make_probe()
    for step in range(6):
        stage(probe, step)
    wait_for(lambda: steps(coordinator) == [0, 1, 2, 4, 5], 60.0)
    wait_for(lambda: coordinator.of_kind("dropped"))
    assert probe.outbox.dropped == {"event": 1, "payload": 1}
    coordinator.settle(dict.fromkeys(range(20), "ingested"))
    wait_for(lambda: probe.outbox.is_empty)
    assert not probe.close(10.0)
    assert any("events dropped here: 1" in text for text in caplog.messages), caplog.messages


def test_bounds_hold_while_nobody_is_there_and_drops_are_reported_later(
    make_probe: MakeProbe, service: FakeService
) -> None:
    late, service.coordinator = service.coordinator, None
    assert late is not None
    probe = make_probe(max_pending_bytes=10_000, max_pending_events=50)
    for step in range(100):
        stage(probe, step, rows=100)
    assert probe.outbox.bytes <= 10_000
    assert probe.outbox.waiting <= 50
    service.coordinator = late
    wait_for(lambda: late.of_kind("dropped"))
    wait_for(lambda: not probe.outbox.waiting and not probe.outbox.has_drops)
    told: dict[str, int] = {}
    for event in late.of_kind("dropped"):
        told[event.fields["what"]] = told.get(event.fields["what"], 0) + event.fields["count"]
    kept = len(late.events) - len(late.of_kind("dropped"))
    assert told["event"] + kept == 201
    assert told["payload"] + len(late.payloads) == 100


def test_a_batch_brings_the_plan_where_the_poll_is_late(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    wait_for(lambda: coordinator._polls)  # the second: the first returns at once
    coordinator.holds_polls = True
    old = dict(coordinator.plan)
    coordinator.order(CAPTURE)
    stage(probe, 1)
    wait_for(lambda: probe.plan.revision == 1)
    stage(probe, 2)
    wait_for(lambda: coordinator.senders[-1].plan_revision == 1)
    # The poll's answer was written before the order: it does not undo what came after it.
    answer = coordinator._answer() | {"plan": old, "receipts": {}, "requests": []}
    polls = len(coordinator.revisions)
    coordinator._polls[0][3].set_result(answer)
    wait_for(lambda: len(coordinator.revisions) > polls)  # it was read
    assert probe.plan.revision == 1
    assert [capture["capture_id"] for capture in probe.plan.captures] == ["c1"]
    coordinator.holds_polls = False


def test_another_coordinator_may_have_an_older_plan(
    make_probe: MakeProbe, service: FakeService, coordinator: FakeCoordinator
) -> None:
    coordinator.order(CAPTURE)
    coordinator.order(CAPTURE)
    probe = make_probe()
    wait_for(lambda: probe.plan.revision == 2)
    service.coordinator = second = FakeCoordinator("second")
    second.plan = {"revision": 1, "captures": []}
    coordinator.die()
    stage(probe, 1)
    wait_for(lambda: probe.plan.revision == 1)
    assert not probe.plan.captures


def test_plan_is_applied_and_acknowledged(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    stage(probe, 4)
    coordinator.order(CAPTURE)
    wait_for(lambda: 1 in coordinator.revisions)
    assert probe.plan.revision == 1
    # Step 4 had begun before the order came; step 3 never did here.
    [missed] = coordinator.fields("dump")
    assert (missed["state"], missed["step"]) == ("missed", 4)


def test_thread_outlives_a_mistake_of_its_own(
    make_probe: MakeProbe, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "MAX_BACKOFF", 0.05)
    probe = make_probe()
    wait_for(lambda: coordinator.batches)
    failed = threading.Event()
    next_batch = probe.outbox.next_batch

    def fail_once(**options: Any) -> list[Entry]:
        if failed.is_set():
            return next_batch(**options)
        failed.set()
        raise RuntimeError("a mistake")

    monkeypatch.setattr(probe.outbox, "next_batch", fail_once)
    stage(probe, 1)
    wait_for(lambda: steps(coordinator) == [1])
    assert failed.is_set()


def test_retries_draw_nothing_from_the_trainings_generators() -> None:
    program = """
import random
import numpy
import torch
from stagescope_workers import init

def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

before = states()
probe = init(run="r", role="actor", rank=0, world_size=1)
with probe.stage("actor_update", step=1) as stage:
    stage.record(log_probs=torch.zeros(2, 3), response_mask=torch.ones(2, 3))
assert not probe.close(timeout=1.5)
assert states() == before
"""
    nowhere = {"STAGESCOPE_URL": "http://127.0.0.1:9", "STAGESCOPE_TOKEN": "t" * 40}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
