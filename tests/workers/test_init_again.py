"""`init` for a rank whose probe is open: one probe, and starts that follow one another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.coordinators import FakeCoordinator, FakeService, wait_for

from stagescope_service.core.instructions import Put
from stagescope_service.core.state import State
from stagescope_wire.errors import InvalidInput, InvalidPlan
from stagescope_wire.schema import BEGIN, END, FINISH, HELLO
from stagescope_workers.probe import handshake, lifecycle
from stagescope_workers.probe.probe import Probe

Init = Callable[..., Probe]


@pytest.fixture
def init(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Init]:
    """Call the real `init`, for probes that find `service`."""
    monkeypatch.setattr(handshake, "find_link", service.find)
    made: set[Probe] = set()

    def call(**options: Any) -> Probe:
        probe = lifecycle.init("again", **{"attempt_key": "a", "world_size": 1, **options})
        made.add(probe)
        return probe

    yield call
    for probe in made:
        probe.close(0.0)
        for each in [*(start.event_sender for start in probe._earlier_starts), probe._sender]:
            if each is not None:
                each._thread.join(10.0)


def train(init: Init, steps: range, **options: object) -> Probe:
    """A notebook's cell: a probe, and some steps of two stages."""
    probe = init(**options)
    for step in steps:
        for stage in ("rollout_generate", "actor_update"):
            with probe.stage(stage, step=step) as part:
                part.log(loss=1.0)
    return probe


def in_order(coordinator: FakeCoordinator) -> list[tuple[str, str, int | None]]:
    """Return (incarnation, kind, step) of all events in the order in which they came."""
    return [
        (sender.incarnation, event.kind, event.fields.get("step"))
        for sender, batch in zip(coordinator.senders, coordinator.batches, strict=True)
        for event in batch
    ]


def stages_by_attempt(coordinator: FakeCoordinator) -> dict[int, list[int]]:
    """Return attempt id -> its steps' beginnings, as the service's state machine takes them."""
    state = State()
    numbers: dict[int, list[int]] = {}
    for sender, batch in zip(coordinator.senders, coordinator.batches, strict=True):
        for event in batch:
            out = state.handle(sender, event, event.mono)
            kinds = [o.row["kind"] for o in out if isinstance(o, Put) and o.table == "findings"]
            assert not {"step_begun_again", "superseded_work"} & {*kinds}
            if event.kind == BEGIN:
                attempt = state.registry.processes[sender.incarnation].attempt_id
                numbers.setdefault(attempt, []).append(event.fields["step"])
    return numbers


def all_sent(probe: Probe) -> None:
    wait_for(lambda: probe.status()["waiting_events"] == 0)


def test_a_cell_that_is_run_again_is_a_new_attempt(
    init: Init, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(init, range(1, 4))
    second = train(init, range(1, 4), settings={"lr": 2})
    third = train(init, range(1, 6))
    assert first is second is third is lifecycle.current()
    all_sent(third)
    order = in_order(coordinator)
    names = list(dict.fromkeys(name for name, _, _ in order))
    assert [name for name, kind, _ in order if kind == HELLO] == names
    # What an earlier start said is there before the next one's first word.
    assert [name for name, _, _ in order] == sorted((name for name, _, _ in order), key=names.index)
    assert [name for name, kind, _ in order if kind == FINISH] == names[:2]
    hellos = [event for batch in coordinator.batches for event in batch if event.kind == HELLO]
    assert [hello.fields["settings"] for hello in hellos] == [{}, {"lr": 2}, {}]
    assert stages_by_attempt(coordinator) == {
        1: [1, 1, 2, 2, 3, 3],
        2: [1, 1, 2, 2, 3, 3],
        3: [1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
    }
    reported = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert [line.partition(" for run")[0] for line in reported if "init was called" in line] == [
        "init was called again"
    ]
    assert sum("a new attempt begins" in line for line in reported) == 2
    assert third.close(10.0)


def test_the_last_init_says_at_once_whether_the_probe_is_strict(init: Init, tmp_path: Path) -> None:
    probe = init()
    probe.log(step=-1, loss=1.0)
    with pytest.raises(InvalidPlan):
        init(strict=True, plan=tmp_path / "none.yaml")
    with pytest.raises(InvalidInput):
        probe.log(step=-1, loss=1.0)
    assert init() is probe
    probe.log(step=-1, loss=1.0)


def test_init_in_a_loop_continues_in_its_attempt(init: Init, coordinator: FakeCoordinator) -> None:
    for step in range(1, 6):
        for stage in ("rollout_generate", "actor_update", "actor_update"):
            with init().stage(stage, step=step):
                pass
    all_sent(init())
    assert len({name for name, _, _ in in_order(coordinator)}) == 1
    assert set(stages_by_attempt(coordinator)) == {1}
    assert [e.fields["occurrence"] for e in coordinator.of_kind(BEGIN)] == [0, 0, 1] * 5


def test_init_inside_a_stage_leaves_that_stage_whole(
    init: Init, coordinator: FakeCoordinator
) -> None:
    with init().stage("actor_update", step=5) as stage:
        with init() as inner, inner.stage("actor_compute_log_prob", step=4):
            pass
        stage.record(rewards=torch.ones(2))
    all_sent(init())
    assert [(e.fields["stage"], e.fields["step"]) for e in coordinator.of_kind(END)] == [
        ("actor_compute_log_prob", 4), ("actor_update", 5),
    ]  # fmt: skip
    assert not coordinator.of_kind(FINISH)


def test_other_ranks_and_attempts_have_probes_of_their_own(init: Init) -> None:
    probes = [init(), init(rank=1), init(role="ref"), init(attempt_key="b")]
    assert len(set(probes)) == 4
    assert init(rank=1) is probes[1]
    probes[1].close(0.0)
    assert init(rank=1) not in probes


def test_starts_that_are_not_reported_are_bounded_and_all_arrive(
    init: Init, service: FakeService, coordinator: FakeCoordinator
) -> None:
    service.coordinator = None
    before = threading.active_count()
    probe = init()
    for _ in range(20):
        train(init, range(1, 3))
    assert threading.active_count() - before <= 5
    assert probe.status()["waiting_events"] == 20 * 8 + 5 + 4
    service.coordinator = coordinator
    assert probe.close(30.0)
    order = in_order(coordinator)
    names = list(dict.fromkeys(name for name, _, _ in order))
    assert len(names) == 5
    assert [name for name, kind, _ in order if kind == FINISH] == names
    assert len(coordinator.of_kind(END)) == 20 * 4


@pytest.mark.parametrize("settled", [True, False])
def test_closing_waits_for_the_payloads_of_earlier_starts(
    init: Init, coordinator: FakeCoordinator, settled: bool
) -> None:
    with init().stage("actor_update", step=2) as stage:
        stage.record(rewards=torch.ones(2))
    probe = train(init, range(1, 2))
    all_sent(probe)
    assert probe.status()["waiting_payloads"] == 1
    if settled:
        [seq] = [seq for _, seq in coordinator.payloads]
        coordinator.settle({seq: "ingested"})
    assert probe.close(20.0 if settled else 0.2) is settled
    assert init() is not probe


def test_a_start_that_waits_for_an_earlier_one_is_connected_as_that_one_is(
    init: Init, coordinator: FakeCoordinator
) -> None:
    probe = train(init, range(2, 3))
    all_sent(probe)
    coordinator.mode = "hang"
    train(init, range(1, 2))
    # At the exit of the process there is somebody to wait for.
    assert probe.status()["connected"]
    assert probe.status()["waiting_events"] == 1 + 1 + 4


def test_rollouts_of_several_steps_are_one_start(init: Init, coordinator: FakeCoordinator) -> None:
    for step in (3, 1, 2):
        with init(role="rollout").stage("rollout_generate", step=step):
            pass
    all_sent(init(role="rollout"))
    assert len({name for name, _, _ in in_order(coordinator)}) == 1


def findings(coordinator: FakeCoordinator) -> list[Mapping[str, Any]]:
    """Return the findings that the service's state machine makes of what came."""
    state = State()
    return [
        order.row
        for sender, batch in zip(coordinator.senders, coordinator.batches, strict=True)
        for event in batch
        for order in state.handle(sender, event, event.mono)
        if isinstance(order, Put) and order.table == "findings"
    ]


@pytest.mark.parametrize(
    ("stages", "step"), [(("rollout_generate", "actor_update"), 7), (("actor_update",), 1)]
)
def test_a_cell_of_one_step_that_is_run_again_is_a_finding(
    init: Init,
    coordinator: FakeCoordinator,
    caplog: pytest.LogCaptureFixture,
    stages: tuple[str, ...],
    step: int,
) -> None:
    for go in range(3):
        probe = init()
        for stage in stages:
            with probe.stage(stage, step=step) as part:
                part.log(loss=0.01 * go)
        assert probe.refused["step_begun_again"] == go
        all_sent(probe)
    found = findings(coordinator)
    assert len(found) == 2  # seen twice, and one and the same
    assert {row["finding_id"] for row in found} == {found[0]["finding_id"]}
    reported = found[0]
    assert (reported["kind"], reported["severity"]) == ("step_begun_again", "error")
    assert (reported["step"], reported["stage"], reported["rank"]) == (step, stages[0], 0)
    assert "both count in step" in reported["message"]
    assert "probe.close() before init" in reported["advice"]
    assert sum("both count in step" in record.getMessage() for record in caplog.records) == 2


def test_the_latter_half_of_a_step_that_is_run_again_is_a_finding(
    init: Init, coordinator: FakeCoordinator
) -> None:
    with init().stage("rollout_generate", step=1):
        pass
    for _ in range(2):
        probe = init()
        for stage in ("actor_compute_log_prob", "actor_update"):
            with probe.stage(stage, step=1):
                pass
        all_sent(probe)
    assert [row["stage"] for row in findings(coordinator)] == ["actor_compute_log_prob"]


@pytest.mark.parametrize(
    ("role", "parts"),
    [
        ("actor", [{"minibatch": 0}, {"minibatch": 1}, {"minibatch": 2}]),
        ("actor", [{"occurrence": 0}, {"occurrence": 1}, {"occurrence": 2}]),
        ("rollout", [{}, {}, {}]),
    ],
)
def test_numbered_passes_and_rollouts_are_no_new_attempt(
    init: Init, coordinator: FakeCoordinator, role: str, parts: list[dict[str, int]]
) -> None:
    for step in (1, 2):
        for part in parts:
            with init(role=role).stage("actor_update", step=step, **part):
                pass
    all_sent(init(role=role))
    assert findings(coordinator) == []


def test_a_stage_that_was_never_ended_is_named_where_no_new_attempt_begins(
    init: Init, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    train(init, range(1, 4)).begin("actor_update", step=4)
    probe = train(init, range(1, 3))
    all_sent(probe)
    assert len({name for name, _, _ in in_order(coordinator)}) == 1
    [line] = [r.getMessage() for r in caplog.records if "no new attempt begins" in r.getMessage()]
    assert "step 1 comes after step 4" in line
    assert "since stage actor_update of step 4 was begun and has not been ended" in line
