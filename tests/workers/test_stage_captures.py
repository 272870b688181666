"""Stages and captures together: a matching stage is collected, and its dump reported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.coordinators import FakeCoordinator, FakeService, wait_for

from stagescope_wire.errors import StagescopeError
from stagescope_workers.probe.probe import Probe

MakeProbe = Callable[..., Probe]

pytest.importorskip("msprobe")


def capture_plan(directory: Path, **changes: object) -> dict[str, object]:
    capture = {
        "stages": ["actor_update"], "steps": [2], "data_dir": str(directory),
        "config": {"task": "statistics", "level": "L1", "statistics": {}},
    }  # fmt: skip
    return {"captures": [capture | changes]}


def run(probe: Probe, step: int, fail: bool = False) -> None:
    model = torch.nn.Linear(4, 2)
    with probe.stage("actor_update", step=step, model=model):
        model(torch.ones(3, 4)).sum().backward()
        if fail:
            raise ZeroDivisionError


def dumps(coordinator: FakeCoordinator, count: int) -> list[Mapping[str, Any]]:
    wait_for(lambda: len(coordinator.of_kind("dump")) >= count, 30.0)
    return [dict(event.fields) for event in coordinator.of_kind("dump")]


def test_local_plan_captures_its_step_without_a_service(
    make_probe: MakeProbe, service: FakeService, tmp_path: Path
) -> None:
    late, service.coordinator = service.coordinator, None
    assert late is not None
    probe = make_probe(plan=capture_plan(tmp_path))
    for step in (1, 2, 3):
        run(probe, step)
    service.coordinator = late
    armed, done = dumps(late, 2)
    assert (armed["state"], done["state"], done["error"]) == ("armed", "complete", None)
    assert {(found["step"], found["stage"]) for found in (armed, done)} == {(2, "actor_update")}
    assert done["capture_id"] == armed["capture_id"] == "init-0"
    assert done["bytes"] > 0
    assert list(Path(done["path"]).rglob("dump.json"))
    assert "test-run/attempt-a/step_2/actor_update" in done["path"]
    [end] = [event for event in late.of_kind("end") if event.fields["step"] == 2]
    assert late.of_kind("dump")[1].seq > end.seq  # the dump's writing is not the stage's time


def test_ranks_without_a_key_dump_into_one_tree(
    make_probe: MakeProbe, coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    coordinator.attempt_key = "unkeyed"
    for rank in (0, 1):
        probe = make_probe(attempt_key=None, rank=rank, plan=capture_plan(tmp_path))
        assert probe._sender is not None
        wait_for(functools.partial(getattr, probe._sender, "is_connected"))
        run(probe, 2)
    found = dumps(coordinator, 4)
    paths = {Path(each["path"]) for each in found if each["state"] == "complete"}
    [tree] = {path.relative_to(tmp_path).parts[:4] for path in paths}
    assert tree == ("test-run", "unkeyed", "step_2", "actor_update")
    assert {each["path"] for each in found} == {str(path) for path in paths}


def test_stage_that_raises_under_capture_continues_raising(
    make_probe: MakeProbe, coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    probe = make_probe(plan=capture_plan(tmp_path))
    with pytest.raises(ZeroDivisionError):
        run(probe, 2, fail=True)
    assert dumps(coordinator, 2)[1]["state"] == "truncated"


def test_strict_capture_raises_and_the_stage_is_ended(
    make_probe: MakeProbe, coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    level = {"task": "statistics", "level": "L0"}
    probe = make_probe(plan=capture_plan(tmp_path, config=level, strict=True))
    with pytest.raises(StagescopeError), probe.stage("actor_update", step=2):
        pytest.fail("a strict capture without its model must not begin")
    assert coordinator.fields("end")[0]["status"] == "failed"


def test_operators_that_report_elsewhere_are_not_captured_here(
    make_probe: MakeProbe, coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    probe = make_probe(plan=capture_plan(tmp_path), captures=False)
    run(probe, 2)
    wait_for(lambda: len(coordinator.of_kind("end")) == 1, 30.0)
    assert coordinator.of_kind("dump") == []
    assert list(tmp_path.iterdir()) == []


def test_operators_out_of_reach_are_reported_as_skipped(
    make_probe: MakeProbe, coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    strict = capture_plan(tmp_path, strict=True)
    probe = make_probe(plan=strict, captures="they run in a server of their own")
    run(probe, 2)
    [skipped] = dumps(coordinator, 1)
    assert (skipped["state"], skipped["error"]) == ("skipped", "they run in a server of their own")
    assert (skipped["capture_id"], skipped["stage"], skipped["step"]) == (
        "init-0", "actor_update", 2
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
