"""What verl's workers report: stages at their step, an update in parts, the loss of bypass mode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack
from tests.support.coordinators import FakeCoordinator
from tests.support.trainers import verl_fakes
from tests.support.trainers.verl_fakes import Seen
from tests.workers.integrations.verl.conftest import Ended

from stagescope_wire.errors import CaptureError
from stagescope_wire.schema import BEGIN, END, HELLO
from stagescope_workers.integrations.verl import context, hooks, ranks
from stagescope_workers.integrations.verl.context import Context
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

Modules = dict[str, ModuleType]
Read = Callable[..., list[Ended]]
LOSSES = "verl.workers.utils.losses"


def data(*, notes: Mapping[str, object] | None = None, **changes: Any) -> Any:
    """Return a worker's TensorDict as the driver's batch becomes one."""
    told: dict[str, Any] = {"run": "r", "attempt_key": "a", "step": 3, "synchronous": True}
    reported = Context(**told | changes)
    return verl_fakes.with_notes(
        verl_fakes.tensors(),
        **{context.KEY: reported.text(), "mini_batch_size": 4, **(notes or {})},
    )


# --- whole stages -----------------------------------------------------------------------------


def test_forward_stages_stand_at_their_step_and_rank(
    verl: Modules, ended: Read, coordinator: FakeCoordinator
) -> None:
    worker = verl_fakes.outer_worker(verl)
    worker.compute_log_prob(data())
    worker.compute_ref_log_prob(data=data())
    worker.compute_log_prob(data(notes={"no_lora_adapter": True}))
    verl_fakes.inner_worker(verl, critic=True).infer_batch(data())
    assert [(end.stage, end.role, end.rank, end.clock) for end in ended(4)] == [
        ("actor_compute_log_prob", "actor", 1, (3, 2)),
        ("ref_compute_log_prob", "ref", 1, (3, 2)),
        ("ref_compute_log_prob", "ref", 1, (3, 2)),
        ("compute_values", "critic", 1, (3, 2)),
    ]
    reported = [hello.fields for hello in coordinator.of_kind(HELLO)]
    assert len(reported) == 3  # one a role
    assert {(fields["world_size"], fields["data_rank"]) for fields in reported} == {(2, 1)}
    assert {fields["layout"]["engine"] for fields in reported} == {"fsdp2"}


def test_the_actor_s_own_engine_is_no_stage_of_its_own(verl: Modules, probes: list[Probe]) -> None:
    verl_fakes.inner_worker(verl).infer_batch(data())
    assert probes == []


def test_a_stage_is_inside_the_layers_that_move_tensors(verl: Modules, seen: Seen) -> None:
    decorator = verl["verl.single_controller.base.decorator"]
    inside: list[tuple[bool, list[str]]] = []
    seen.outcomes["compute_log_prob"] = lambda *_: inside.append(
        (ranks.is_active(), list(decorator.entered))
    )
    verl_fakes.outer_worker(verl).compute_log_prob(data())
    assert inside == [(True, ["compute_log_prob"])]  # the layer once, and before the stage
    assert not ranks.is_active()


def test_a_stage_that_another_calls_is_part_of_it(verl: Modules, seen: Seen, ended: Read) -> None:
    # verl 0.7's reference with LoRA is the actor, asked by its own method.
    worker = verl_fakes.outer_worker(verl)
    seen.outcomes["compute_ref_log_prob"] = lambda *_: worker.compute_log_prob(data())
    worker.compute_ref_log_prob(data())
    assert [end.stage for end in ended(1)] == ["ref_compute_log_prob"]


def test_what_verl_raises_is_reported_and_raised(verl: Modules, seen: Seen, ended: Read) -> None:
    seen.outcomes["compute_log_prob"] = ValueError("verl's own")
    with pytest.raises(ValueError, match="own"):
        verl_fakes.outer_worker(verl).compute_log_prob(data())
    [end] = ended(1)
    assert (end.fields["status"], end.fields["error_type"]) == ("failed", "ValueError")


def test_a_sync_of_weights_is_identified_by_the_step_that_made_them(
    verl: Modules, seen: Seen, ended: Read, probes: list[Probe]
) -> None:
    worker = verl_fakes.outer_worker(verl)
    asyncio.run(worker.update_weights(global_steps=0))  # before anything told the rank its run
    assert probes == []
    worker.compute_log_prob(data(stages=False))
    asyncio.run(worker.update_weights(3))
    assert probes == []
    worker.compute_log_prob(data())
    asyncio.run(worker.update_weights(3))
    end = ended(2)[1]
    assert (end.stage, end.role, end.clock) == ("weight_sync", "actor", (3, 3))
    worker.compute_log_prob(data(version=0))
    asyncio.run(worker.update_weights(1))
    assert [end.clock for end in ended(4)[2:]] == [(3, 0), (3, 1)]


# --- an update --------------------------------------------------------------------------------


def update(
    modules: Modules, seen: Seen, batch: object, turns: int, *, critic: bool = False
) -> list[float]:
    """Run `train_mini_batch` as verl does; return its worker and when the call began and ended."""
    worker = verl_fakes.inner_worker(modules, critic=critic)
    seen.outcomes["train_batch"] = {"metrics": {"loss": 0.5, "name": "x"}}
    times: list[float] = []

    def train(*_: object) -> None:
        times.append(time.monotonic())
        for _turn in range(turns):
            worker.train_batch(batch)
        times.append(time.monotonic())

    seen.outcomes["train_mini_batch"] = train
    worker.train_mini_batch(batch)
    return times


def test_parts_of_an_update_follow_each_other_without_a_gap(
    verl: Modules, seen: Seen, ended: Read, coordinator: FakeCoordinator
) -> None:
    # 4 rows here, mini-batches of 4 over 2 data-parallel ranks: two of them an epoch.
    began, over = update(verl, seen, data(notes={"epochs": 2}), turns=4)
    ends = ended(4)
    assert {(end.stage, end.role, end.clock) for end in ends} == {("actor_update", "actor", (3, 2))}
    assert [end.part for end in ends] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [end.fields["scalars"] for end in ends] == [{"loss": 0.5}] * 4
    events = sorted(coordinator.events.items(), key=lambda item: item[0][1])
    kinds = [event.kind for _, event in events if event.kind in (BEGIN, END)]
    assert kinds == [BEGIN, END] * 4
    times = [event.mono for _, event in events if event.kind in (BEGIN, END)]
    assert times[0] <= began < over <= times[-1]
    assert times == sorted(times)


def test_a_number_of_mini_batches_is_used_before_a_size(
    verl: Modules, seen: Seen, ended: Read
) -> None:
    update(verl, seen, data(notes={"num_mini_batch": 3}), turns=3, critic=True)
    assert [(end.stage, end.part) for end in ended(3)] == [
        ("critic_update", (0, 0, number)) for number in range(3)
    ]


def test_where_their_number_is_unknown_the_last_part_ends_with_the_call(
    verl: Modules, seen: Seen, ended: Read
) -> None:
    update(verl, seen, data(notes={"mini_batch_size": None}), turns=2)
    assert [end.part for end in ended(3)] == [(0, 0, number) for number in range(3)]


def test_a_failing_mini_batch_is_the_one_that_failed(
    verl: Modules, seen: Seen, ended: Read
) -> None:
    worker, batch = verl_fakes.inner_worker(verl), data()
    results: list[object] = [{"metrics": {}}, ValueError("verl's own")]

    def train(*_: object) -> None:
        for result in results:
            seen.outcomes["train_batch"] = result
            worker.train_batch(batch)

    seen.outcomes["train_mini_batch"] = train
    with pytest.raises(ValueError, match="own"):
        worker.train_mini_batch(batch)
    assert [(end.part[2], end.fields["status"]) for end in ended(2)] == [(0, "ok"), (1, "failed")]


# --- bypass mode ------------------------------------------------------------------------------


def jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def micro(batch: Any, rows: slice) -> object:
    """Return a micro-batch, nested as verl's engines have it: responses of 2 tokens and of 3."""
    held = batch[rows].clone()
    for name in ("rollout_log_probs", "old_log_probs", "response_mask", "responses"):
        first, second = held[name]
        held[name] = torch.nested.as_nested_tensor([first[:2], second], layout=torch.jagged)
    return held


def train_bypassing(modules: Modules, seen: Seen, batch: object, dtype: torch.dtype) -> None:
    worker = verl_fakes.inner_worker(modules)
    seen.outcomes["train_batch"] = {"metrics": {}}

    def train(*_: object) -> None:
        for epoch in (0, 1):
            for rows in (slice(0, 2), slice(2, 4)):
                current = jagged([-1.0, -2.0], [-3.0, -4.0, -5.0]).to(dtype) * (epoch + 1)
                output = {"log_probs": current.requires_grad_()}
                modules[LOSSES].ppo_loss(None, output, micro(batch, rows))
                worker.train_batch(batch)

    seen.outcomes["train_mini_batch"] = train
    worker.train_mini_batch(batch)


def pads_jagged_rows() -> bool:
    try:
        torch.nested.to_padded_tensor(jagged([0.0], [1.0]), 0.0)
    except NotImplementedError:
        return False
    return True


@pytest.mark.skipif(not pads_jagged_rows(), reason="this torch pads no jagged rows, as verl does")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_of_the_first_epoch_has_both_streams(
    dtype: torch.dtype, verl: Modules, seen: Seen, ended: Read
) -> None:
    ids = NonTensorStack("g0_0", "g0_1", "g1_0", "g1_1")
    notes = {"epochs": 2, "num_mini_batch": 2}
    batch = data(bypass=True, notes=notes)
    batch[context.SAMPLES] = ids
    rollout = batch["rollout_log_probs"]
    train_bypassing(verl, seen, batch, dtype)
    ends = ended(4)
    assert [end.payload is None for end in ends] == [False, False, True, True]
    for end, rows in zip(ends, (slice(0, 2), slice(2, 4)), strict=False):
        tensors, strings = end.payload["tensors"], end.payload["strings"]
        assert strings["sample_ids"] == ["g0_0", "g0_1", "g1_0", "g1_1"][rows]
        widths = np.diff(np.asarray(tensors["cu_seqlens"][2])).tolist()
        assert widths == [3, 3]
        assert tensors["log_probs"][0] == str(dtype).removeprefix("torch.")
        mask = np.asarray(tensors["response_mask"][2]).reshape(2, 3)
        assert mask.tolist() == [[1, 1, 0], [1, 1, 0]]
        assert len(np.asarray(tensors["responses"][2]).reshape(-1)) == 6
        taken = np.asarray(tensors["rollout_log_probs"][2]).reshape(2, 3)
        np.testing.assert_array_equal(taken[1], rollout[rows][1].numpy())
        np.testing.assert_array_equal(taken[0], [*rollout[rows][0][:2].tolist(), 0.0])
        assert np.asarray(tensors["versions"][2]).tolist() == [2, 2]
    if dtype == torch.float32:
        found = np.asarray(ends[0].payload["tensors"]["log_probs"][2]).reshape(2, 3)
        assert found.tolist() == [[-1, -2, 0], [-3, -4, -5]]


def test_tokens_that_do_not_lie_under_the_mask_are_left_out(
    verl: Modules, seen: Seen, ended: Read
) -> None:
    batch = data(bypass=True, notes={"num_mini_batch": 1})
    worker = verl_fakes.inner_worker(verl)
    narrow = batch.clone()
    narrow["responses"] = batch["responses"][:, :2]
    seen.outcomes["train_batch"] = {"metrics": {}}

    def train(*_: object) -> None:
        verl[LOSSES].ppo_loss(None, {"log_probs": torch.zeros(4, 3)}, narrow)
        worker.train_batch(batch)

    seen.outcomes["train_mini_batch"] = train
    worker.train_mini_batch(batch)
    tensors = ended(1)[0].payload["tensors"]
    assert set(tensors) == {
        "log_probs", "rollout_log_probs", "response_mask", "cu_seqlens", "versions"
    }  # fmt: skip


def test_a_loss_outside_an_update_is_not_changed(
    verl: Modules, seen: Seen, probes: list[Probe]
) -> None:
    verl[LOSSES].ppo_loss(None, {"log_probs": jagged([-1.0], [-2.0])}, data(bypass=True))
    assert (seen.names, probes) == (["ppo_loss"], [])


def test_the_log_probs_alone_are_requested_of_the_actor_alone(
    verl: Modules, seen: Seen, ended: Read, probes: list[Probe]
) -> None:
    batch = data(bypass=True, stages=False, notes={"num_mini_batch": 1})
    update(verl, seen, batch, turns=1, critic=True)
    verl_fakes.outer_worker(verl).compute_log_prob(batch)
    assert probes == []
    update(verl, seen, batch, turns=1)
    assert [end.stage for end in ended(1)] == ["actor_update"]


# --- captures ---------------------------------------------------------------------------------


class Strict:
    """A capture that is strict, and cannot be carried out."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: object, **__: object) -> None:
        raise self.error


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_strict_capture_alone_is_raised(
    where: str, verl: Modules, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = verl_fakes.outer_worker(verl)
    monkeypatch.setattr(Stage, where, Strict(RuntimeError("ours")))
    assert worker.compute_log_prob(data()) == "the result of compute_log_prob"
    monkeypatch.setattr(Stage, where, Strict(CaptureError("no msprobe")))
    for call in (worker.compute_log_prob, verl_fakes.inner_worker(verl).train_mini_batch):
        with pytest.raises(CaptureError, match="no msprobe"):
            call(data())


def test_verl_s_own_error_comes_before_a_strict_capture_s(
    verl: Modules, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "end", Strict(CaptureError("no msprobe")))
    seen.outcomes["compute_log_prob"] = seen.outcomes["train_mini_batch"] = ValueError("own")
    for call in (
        verl_fakes.outer_worker(verl).compute_log_prob,
        verl_fakes.inner_worker(verl).train_mini_batch,
    ):
        with pytest.raises(ValueError, match="own"):
            call(data())


def test_verl_s_own_debugger_steps_aside_for_ours(verl: Modules, seen: Seen) -> None:
    module = verl["verl.utils.profiler.precision_debugger_profile"]
    profiler = module.PrecisionDebuggerProfiler()
    annotated: list[object] = []

    def annotate(*_: object) -> None:
        annotated.append(profiler.annotate(role="actor_compute_log_prob"))

    annotate()
    worker = verl_fakes.outer_worker(verl)
    for name in ("compute_log_prob", "update_actor"):
        seen.outcomes[name] = annotate
        getattr(worker, name)(data())
    seen.outcomes["update_actor"] = annotate
    worker.update_actor(data(stages=False))  # ours will not capture it
    annotated.append(profiler.annotate(role="train_batch"))  # verl raises there where strict
    theirs, ours = "the result of annotate", hooks._unchanged
    assert annotated == [theirs, ours, ours, theirs, ours]
    assert hooks._unchanged(annotate) is annotate


@pytest.mark.skipif(not pads_jagged_rows(), reason="this torch pads no jagged rows, as verl does")
def test_the_loss_of_every_epoch_says_which_tokens_it_clips(
    verl: Modules, seen: Seen, ended: Read
) -> None:
    batch = data(notes={"epochs": 2, "num_mini_batch": 1})
    batch["advantages"] = torch.tensor([[1.0, -1.0, 1.0]] * 4)
    old = batch["old_log_probs"]
    config = {"clip_ratio": 0.2, "clip_ratio_high": 0.3, "policy_loss": {"loss_mode": "vanilla"}}
    worker = verl_fakes.inner_worker(verl)
    seen.outcomes["train_batch"] = {"metrics": {}}
    ratios = [torch.tensor([1.31, 0.79, 0.1]), torch.tensor([1.29, 3.1, 1.31])]

    def train(*_: object) -> None:
        for ratio in ratios:
            verl[LOSSES].ppo_loss(config, {"log_probs": old + ratio.log()}, batch)
            worker.train_batch(batch)

    seen.outcomes["train_mini_batch"] = train
    worker.train_mini_batch(batch)
    found = [np.asarray(end.payload["tensors"]["clipped"][2]).reshape(4, 3) for end in ended(2)]
    # A gradient vanishes above 1.3 and below 0.8, but not where the advantage pulls back.
    assert found[0].tolist() == [[1, -1, 0]] * 4
    assert found[1].tolist() == [[0, 1, 1]] * 4  # 3.1: dual clipping, at 3 by default


@pytest.mark.parametrize("mode", ["gspo", "cispo"])
def test_a_loss_with_other_bounds_says_nothing_of_clipping(
    mode: str, verl: Modules, seen: Seen, ended: Read
) -> None:
    batch = data(notes={"num_mini_batch": 1})
    batch["advantages"] = torch.ones(4, 3)
    config = {"clip_ratio": 0.2, "policy_loss": {"loss_mode": mode}}
    worker = verl_fakes.inner_worker(verl)
    seen.outcomes["train_batch"] = {"metrics": {}}

    def train(*_: object) -> None:
        verl[LOSSES].ppo_loss(config, {"log_probs": batch["old_log_probs"]}, batch)
        worker.train_batch(batch)

    seen.outcomes["train_mini_batch"] = train
    worker.train_mini_batch(batch)
    assert [end.payload for end in ended(1)] == [None]
