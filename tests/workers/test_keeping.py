"""What a rank hands over to be kept, and what it does not copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.coordinators import FakeCoordinator, wait_for

from stagescope_wire.errors import InvalidPlan, InvalidTensor
from stagescope_workers.device import PinnedPool
from stagescope_workers.payload import datum_columns
from stagescope_workers.probe.draft import Draft
from stagescope_workers.probe.probe import Probe

MakeProbe = Callable[..., Probe]


def payloads(coordinator: FakeCoordinator, count: int) -> list[Mapping[str, Any]]:
    wait_for(lambda: len(coordinator.payloads) >= count)
    return [payload for _, payload in sorted(coordinator.payloads.items())]


def test_a_configuration_travels_in_the_settings(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    make_probe(keep={"every_n_steps": 2, "what": ["loss"]}, settings={"lr": 1e-3})
    settings = coordinator.fields("hello")[0]["settings"]
    assert settings["lr"] == 1e-3
    assert (settings["keep"]["every_n_steps"], settings["keep"]["what"]) == (2, ["loss"])


def test_a_configuration_that_cannot_be_right_is_refused_and_the_rest_reported(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    keep = {"evry_n_steps": 2, "what": ["loss"]}
    probe = make_probe(keep=keep)
    with probe.stage("actor_update", step=2) as stage:
        assert not stage.wants("loss")
    wait_for(lambda: coordinator.of_kind("end"))
    [refused] = coordinator.of_kind("refused")
    assert "no field 'evry_n_steps'" in refused.fields["message"]
    with pytest.raises(InvalidPlan, match="no field 'evry_n_steps'"):
        make_probe(keep=keep, strict=True)


def test_a_stage_asks_before_it_copies(make_probe: MakeProbe) -> None:
    probe = make_probe(keep={"every_n_steps": 2, "what": ["is_loss"]})
    for step, is_kept in ((2, True), (3, False)):
        with probe.stage("actor_update", step=step) as stage:
            assert stage.wants("prob_ratio") is is_kept
            assert stage.wants("is_loss") is is_kept
            assert not stage.wants("input_ids")
    assert probe.wants("prob_ratio", stage="actor_update", step=4)
    assert not make_probe().wants("prob_ratio", stage="actor_update", step=4)


def test_a_misspelt_name_is_never_wanted_and_said_once_per_stage(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe(keep={"every_n_steps": 1, "what": ["is_loss", "lr_of_mine"]})
    for step in (1, 2):
        with probe.stage("actor_update", step=step) as stage:
            assert not stage.wants("prob_ratios")
            assert not stage.wants("is_los")
            assert stage.wants("lr_of_mine")
            assert not stage.wants("hidden_states")  # a name of the training's own
            assert not stage.wants(5)  # type: ignore[arg-type]
    wait_for(lambda: len(coordinator.of_kind("end")) == 2)
    said = [event.fields["message"] for event in coordinator.of_kind("refused")]
    assert ["prob_ratio," in text for text in said] == [True, False, False, False]
    assert ["is_loss," in text for text in said] == [False, True, False, False]
    assert probe.refused["wants"] == 4  # 5 is no name, each time it is asked
    assert not probe.wants("x", stage=["actor_update"])  # type: ignore[arg-type]
    strict = make_probe(strict=True, attempt_key="b")
    for _ in range(2):
        with pytest.raises(InvalidTensor, match="prob_ratios"):
            strict.wants("prob_ratios", stage="actor_update", step=1)


def test_a_capture_of_the_plan_is_kept_as_soon_as_it_is_heard_of(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe(captures=False)  # keeping is the service's, whoever captures operators
    assert not probe.wants("prob_ratio", stage="actor_update", step=7)
    capture = {
        "capture_id": "a", "run": None, "stages": "all", "roles": None, "ranks": [0],
        "steps": [7], "keep": ["is_loss_debug"], "phase": "agreed",
    }  # fmt: skip
    coordinator.order(capture)
    wait_for(lambda: probe.wants("prob_ratio", stage="actor_update", step=7))
    assert not probe.wants("prob_ratio", stage="actor_update", step=8)
    coordinator.order()
    wait_for(lambda: not probe.wants("prob_ratio", stage="actor_update", step=7))


def test_what_the_service_has_runs_keep_is_kept_too(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe(keep={"steps": [1], "what": ["loss"]})
    keep = {"every_n_steps": 2, "what": ["is_loss"], "parameters": ["bias"]}
    coordinator.plan = {"revision": 1, "captures": [], "keep": keep}
    coordinator.tick()
    wait_for(lambda: probe.wants("prob_ratio", stage="actor_update", step=4))
    assert not probe.wants("prob_ratio", stage="actor_update", step=1)
    assert probe.wants("loss", stage="actor_update", step=1)
    with probe.stage("actor_update", step=4, model=torch.nn.Linear(3, 2)):
        pass
    (taken,) = payloads(coordinator, 1)
    assert [*taken["tensors"]] == ["parameter/bias"]


def test_numbers_alone_make_a_payload_only_where_they_are_kept(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe(keep={"steps": [2], "what": ["loss"]})
    for step in (1, 2):
        with probe.stage("actor_update", step=step) as stage:
            stage.log(loss=0.5, grad_norm=1.0)
    with probe.stage("weight_sync", step=2) as stage:
        stage.log(bytes=3.0)
    wait_for(lambda: len(coordinator.of_kind("end")) == 3)
    announced = [event.fields["payload"] for event in coordinator.of_kind("end")]
    assert announced == [None, {"tensors": {}, "bytes": 0, "meta": {}}, None]
    (empty,) = payloads(coordinator, 1)
    assert (empty["tensors"], empty["strings"]) == ({}, {})


def test_gradients_by_configuration_are_no_dump(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe(keep={"every_n_steps": 2, "gradients": ["weight"], "parameters": ["bias"]})
    model = torch.nn.Linear(3, 2)
    for step in (1, 2):
        for minibatch in range(2):
            with probe.stage("actor_update", step=step, model=model, minibatch=minibatch):
                model(torch.ones(1, 3)).sum().backward()
    taken = payloads(coordinator, 2)
    assert [set(each["tensors"]) for each in taken] == [{"gradient/weight", "parameter/bias"}] * 2
    first, second = (each["tensors"]["gradient/weight"][2] for each in taken)
    assert (first[0, 0], second[0, 0]) == (3.0, 4.0)  # nobody cleared them between
    assert coordinator.of_kind("dump") == []


def test_what_is_handed_over_is_copied_later_and_is_as_it_was(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe(strict=True)
    given = {
        "prob_ratio": torch.rand(4, 6, requires_grad=True), "half": torch.rand(3).bfloat16(),
        "turned": torch.rand(4, 6).t(), "numbers": np.arange(3), "rows": [[1], [2, 3]],
    }  # fmt: skip
    with probe.stage("actor_update", step=1) as stage:
        stage.hand_over(given, sample_ids=["a"] * 4)
    (payload,) = payloads(coordinator, 1)
    tensors = payload["tensors"]
    assert {*tensors} == {*given}
    ratio = given["prob_ratio"]
    assert isinstance(ratio, torch.Tensor)
    assert np.array_equal(tensors["prob_ratio"][2], ratio.detach().numpy())
    assert not np.shares_memory(tensors["prob_ratio"][2], ratio.detach().numpy())
    assert (tensors["half"][0], tensors["half"][2].dtype) == ("bfloat16", np.uint16)
    assert tensors["turned"][1] == (6, 4)
    assert tensors["rows"][3].tolist() == [0, 1, 3]
    assert payload["strings"]["sample_ids"] == ["a"] * 4
    assert payload["meta"] == {}


def test_what_is_written_after_it_was_handed_over_is_missing_and_named() -> None:
    draft = Draft(PinnedPool(0))
    good, bad = torch.zeros(5), torch.zeros(5)
    assert [*draft.add({"good": good, "bad": bad}, borrowed=True)] == []
    bad[2] = 1.0
    payload = draft.finish()
    assert {*payload["tensors"]} == {"good"}
    assert payload["meta"] == {"written_after_hand_over": ["bad"]}
    assert draft.finish() == payload  # offered again, it is the same
    assert draft.description()["tensors"]["good"] == ["float32", [5], None]


def test_datums_are_columns(make_probe: MakeProbe, coordinator: FakeCoordinator) -> None:
    probe = make_probe(strict=True)
    with probe.stage("actor_update", step=1) as stage:
        stage.record_datums(
            [
                {"model_input": [1, 2, 3], "loss_fn_inputs": {"advantages": [0, 1]}, "kind": "a"},
                {"model_input": [4], "loss_fn_inputs": {"advantages": [0.5]}, "weight": 2.0},
            ]
        )
        stage.log(loss=0.25)
    (payload,) = payloads(coordinator, 1)
    tag, shape, values, offsets = payload["tensors"]["datums/model_input"]
    assert (tag, shape, values.tolist(), offsets.tolist()) == (
        "int64", (4,), [1, 2, 3, 4], [0, 3, 4]
    )  # fmt: skip
    tag, _, values, offsets = payload["tensors"]["datums/loss_fn_inputs.advantages"]
    assert (tag, values.tolist(), offsets.tolist()) == ("float64", [0.0, 1.0, 0.5], [0, 2, 3])
    weight = payload["tensors"]["datums/weight"][2]
    assert np.isnan(weight[0])
    assert weight[1] == 2.0
    assert payload["strings"]["datums/kind"] == ["a", ""]
    assert payload["meta"]["datums"] == {"count": 2, "absent": {"kind": [1], "weight": [0]}}


@pytest.mark.parametrize("datums", [{"a": [1]}, "text", [3], [{"a": [1]}, {"a": "b"}]])
def test_what_is_no_list_of_datums_is_refused(datums: Any) -> None:
    with pytest.raises(InvalidTensor, match=r"datums|datum"):
        datum_columns(datums)
