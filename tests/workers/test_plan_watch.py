"""Which captures are in force here, and which came too late."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.coordinators import FakeCoordinator, wait_for
from tests.support.dumps import capture_request

from stagescope_wire.errors import InvalidPlan
from stagescope_wire.plan import CaptureRequest
from stagescope_workers.probe.options import ProbeOptions
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.rank_plan import PlanWatch, read_plan

CONFIG = {"task": "statistics", "level": "L1"}


def capture(**changes: object) -> CaptureRequest:
    base: dict[str, object] = {
        "capture_id": "c", "run": None, "stages": "all", "roles": None, "ranks": "all",
        "steps": "all", "config": CONFIG, "keep": [],
    }  # fmt: skip
    return capture_request(**{**base, **changes})


def watch(*, captures: bool = True, **arguments: Any) -> PlanWatch:
    return PlanWatch(ProbeOptions(run="r", rank=1, captures=captures), **arguments)


@pytest.mark.parametrize(
    ("changes", "orders"),
    [
        ({}, True),
        ({"run": "r"}, True),
        ({"run": "other"}, False),
        ({"roles": ["critic"]}, False),
        ({"ranks": [0]}, False),
        ({"ranks": [0, 1]}, True),
        ({"stages": ["actor_update"]}, True),
        ({"stages": ["weight_sync"]}, False),
        ({"steps": [4]}, False),
        ({"steps": {"every": 5, "start": 0, "count": None}}, True),
        ({"steps": {"every": 5, "start": 0, "count": 1}}, False),
        ({"config": None, "keep": ["responses"]}, False),
        ({"config": None, "config_path": "/x.json"}, True),
    ],
)
def test_only_what_concerns_this_stage_is_found(
    changes: Mapping[str, object], orders: bool
) -> None:
    found = watch()
    found.apply({"revision": 3, "captures": [capture(**changes)]})
    assert bool(found.begin(5, "actor_update")) is orders
    assert found.revision == 3


def test_local_captures_stay_when_the_service_plan_changes() -> None:
    found = watch(local=[capture(capture_id="local")])
    found.apply({"revision": 1, "captures": [capture(capture_id="served")]})
    assert [item["capture_id"] for item in found.begin(1, "s")] == ["local", "served"]
    found.apply({"revision": 2, "captures": []})
    assert [item["capture_id"] for item in found.begin(1, "s")] == ["local"]


@pytest.mark.parametrize(
    ("steps", "late"),
    [
        ([3, 4, 5, 6], [(4, "a"), (5, "a")]),
        ("all", [(4, "a"), (5, "a")]),
        ({"every": 1, "start": 5, "count": None}, [(5, "a")]),
    ],
)
def test_late_capture_is_missed_once_for_what_had_begun(
    steps: object, late: list[tuple[int, str]]
) -> None:
    missed: list[tuple[int, str]] = []
    found = watch(on_missed=lambda _, step, stage: missed.append((step, stage)))
    for step, stage in ((4, "a"), (4, "b"), (5, "a")):
        found.begin(step, stage)
    for revision in (1, 2):
        found.apply({"revision": revision, "captures": [capture(steps=steps, stages=["a"])]})
    assert missed == late
    assert found.begin(6, "a")


def test_what_the_service_keeps_by_itself_is_not_missed_here() -> None:
    missed: list[object] = []
    found = watch(on_missed=lambda capture, step, stage: missed.append(capture["capture_id"]))
    found.begin(4, "a")
    found.apply({"revision": 1, "captures": [capture(config=None, keep=["trajectories"])]})
    assert missed == []
    assert found.keep_selectors(4, "a") == {"trajectories"}
    # But for what the training left out, since nothing kept it.
    found.leave_out(4, "a", tensors=["prob_ratio"], numbers=["pg_loss", "lr"])
    found.leave_out(5, "a", tensors=["entropy"])  # not begun here
    for word in ("is_loss", "prob_ratio", "loss", "entropy", "forward_data"):
        late = capture(capture_id=word, config=None, keep=[word])
        found.apply({"revision": 2, "captures": [late]})
    assert missed == ["is_loss", "prob_ratio", "loss"]


def test_an_unagreed_request_is_reported_once_and_runs_nothing_before_it_is_agreed_on() -> None:
    requested: list[str] = []
    missed: list[int] = []
    found = watch(
        on_estimate_requested=lambda spec: requested.append(spec["capture_id"]),
        on_missed=lambda _, step, __: missed.append(step),
    )
    found.begin(4, "a")
    spec = {"capture_id": "c", "stages": ["a"], "agreement": 1}
    first = capture(**spec, steps=[], phase="asked", asked_revision=1)
    found.apply({"revision": 1, "captures": [first]})
    found.apply({"revision": 2, "captures": [first]})
    assert (requested, missed, found.begin(5, "a")) == (["c"], [], [])
    found.apply({"revision": 3, "captures": [capture(**spec, steps=[4, 6], phase="agreed")]})
    assert (requested, missed, len(found.begin(6, "a"))) == (["c"], [4], 1)
    again = capture(**{**spec, "agreement": 2}, steps=[], phase="asked", asked_revision=4)
    found.apply({"revision": 4, "captures": [again]})
    assert (requested, found.begin(7, "a")) == (["c", "c"], [])


def test_a_request_for_others_is_not_estimated_here() -> None:
    requested: list[object] = []
    found = watch(on_estimate_requested=requested.append)
    for change in ({"ranks": [7]}, {"roles": ["critic"]}, {"run": "other"}, {"config": None}):
        spec = capture(**{"capture_id": str(change), "steps": [], "phase": "asked", **change})
        found.apply({"revision": 1, "captures": [spec]})
    assert not requested


def test_plan_from_a_dict_and_from_a_file_is_in_force_without_a_service(tmp_path: Path) -> None:
    spec = {"stages": ["s"], "steps": {"every": 2}, "config": CONFIG}
    [from_dict] = read_plan({"captures": [spec]})
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump({"captures": [spec]}))
    [from_file] = read_plan(file)
    for given in (from_dict, from_file):
        found = watch(local=[given])
        assert found.begin(2, "s")
        assert not found.begin(3, "s")
        assert given["capture_id"]


def test_plan_that_is_none_is_named() -> None:
    with pytest.raises(InvalidPlan, match="expected captures"):
        read_plan({"capture": []})
    with pytest.raises(InvalidPlan, match="cannot be read"):
        read_plan("/no/such/plan.yaml")


def test_wrong_plan_does_not_keep_init_from_working(
    make_probe: Callable[..., Probe], coordinator: FakeCoordinator
) -> None:
    probe = make_probe(plan="/no/such/plan.yaml")
    with probe.stage("s", step=1):
        pass
    wait_for(lambda: coordinator.of_kind("end"))
    assert coordinator.of_kind("refused")[0].fields["what"] == "init"
    with pytest.raises(InvalidPlan):
        make_probe(plan="/no/such/plan.yaml", strict=True)


def test_a_process_without_captures_neither_carries_out_nor_misses_any() -> None:
    missed: list[object] = []
    found = watch(
        local=[capture(capture_id="local")],
        captures=False,
        on_missed=lambda *what: missed.append(what),
    )
    assert found.begin(5, "actor_update") == []
    found.apply({"revision": 2, "captures": [capture(steps=[5])]})
    assert (found.begin(6, "actor_update"), found.revision, missed) == ([], 2, [])
