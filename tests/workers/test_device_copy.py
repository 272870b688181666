"""Copies from a device, on a pretended one: streams and events that the test drives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from tests.support.coordinators import FakeCoordinator, wait_for

from stagescope_workers import device
from stagescope_workers.device import DeviceTimer, HostCopy, PinnedPool, copy_tensor
from stagescope_workers.probe.draft import Draft
from stagescope_workers.probe.probe import Probe


class FakeEvent:
    """Complete once `stream.finished`; keeps where it was recorded."""

    made: ClassVar[list[FakeEvent]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        self.finished = threading.Event()
        self.stream: object = None
        FakeEvent.made.append(self)

    def record(self, stream: object = None) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.finished.is_set()

    def synchronize(self) -> None:
        assert self.finished.wait(10.0)

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1500.0


class LateTensor(torch.Tensor):
    """Lies about its device, as a tensor on an accelerator would tell the truth about its own."""

    @property
    def device(self) -> SimpleNamespace:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        return SimpleNamespace(type="fake", index=0)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    FakeEvent.made = []
    empty = torch.empty
    fake = SimpleNamespace(Event=FakeEvent, current_stream=lambda where: ("stream", where.index))
    monkeypatch.setattr(device, "device_backend", lambda tensor: fake)
    # Pinning needs an accelerator.
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    return fake


def late(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(LateTensor)


def test_copy_is_queued_and_finished_behind_its_event() -> None:
    pool = PinnedPool()
    copy = copy_tensor("p", late(torch.arange(6.0).reshape(2, 3)), pool)
    assert isinstance(copy, HostCopy)
    assert copy.spec == ("float32", (2, 3), None)
    assert pool.reserved == 24
    [event] = FakeEvent.made
    assert event.stream == ("stream", 0)
    assert pool.settle() == 1
    event.finished.set()
    assert pool.settle() == 0
    assert pool.reserved == 0
    assert copy.finish()[2].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_finish_waits_for_the_device() -> None:
    copy = copy_tensor("p", late(torch.ones(2, dtype=torch.bfloat16)), PinnedPool())
    assert isinstance(copy, HostCopy)
    threading.Timer(0.05, FakeEvent.made[0].finished.set).start()
    tag, _, buffer, _ = copy.finish()
    assert (tag, buffer.tolist()) == ("bfloat16", [0x3F80, 0x3F80])


def test_rows_on_a_device_are_joined_there() -> None:
    copy = copy_tensor("p", [late(torch.ones(2)), late(torch.zeros(3))], PinnedPool())
    assert isinstance(copy, HostCopy)
    assert copy.spec == ("float32", (5,), 2)
    FakeEvent.made[0].finished.set()
    _, _, buffer, offsets = copy.finish()
    assert buffer.tolist() == [1, 1, 0, 0, 0]
    assert offsets is not None
    assert offsets.tolist() == [0, 2, 5]


def test_pool_that_is_full_copies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PinnedPool(limit=10)
    monkeypatch.setattr(LateTensor, "cpu", lambda self: self.as_subclass(torch.Tensor))
    copy = copy_tensor("p", late(torch.ones(8)), pool)
    assert not isinstance(copy, HostCopy)
    np.testing.assert_array_equal(copy[2], np.ones(8))
    assert pool.blocking_copies == 1
    assert pool.reserved == 0


def test_draft_describes_what_the_device_still_writes() -> None:
    draft = Draft(PinnedPool())
    assert not list(draft.add({"old_log_probs": late(torch.ones(2, 3)), "response_mask": [[1]]}))
    assert draft.description()["tensors"]["old_log_probs"] == ["float32", [2, 3], None]
    assert draft.nbytes >= 24
    assert len(draft.problems()) == 1  # the shapes disagree: seen without any data
    FakeEvent.made[0].finished.set()
    assert draft.finish()["tensors"]["old_log_probs"][2].shape == (2, 3)


def test_device_time_is_read_off_the_training_thread(backend: SimpleNamespace) -> None:
    timer = DeviceTimer(backend)
    timer.stop()
    FakeEvent.made[1].finished.set()
    assert timer.seconds() == 1.5


def test_no_device_no_timer() -> None:
    assert DeviceTimer.start() is None or torch.cuda.is_available()


def test_device_that_hangs_hides_no_later_event(
    make_probe: Callable[..., Probe], coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    with probe.stage("first", step=1) as stage:
        stage.record(rewards=late(torch.ones(2)))
        stage.log(loss=late(torch.ones(())))
    with probe.stage("second", step=1):
        wait_for(lambda: len(coordinator.of_kind("begin")) == 2)
        assert not coordinator.of_kind("end")
    for event in FakeEvent.made:
        event.finished.set()
    wait_for(lambda: len(coordinator.of_kind("end")) == 2)
    first = coordinator.of_kind("end")[0]
    assert first.fields["stage"] == "first"
    assert first.fields["scalars"] == {"loss": 1.0}
    [payload] = coordinator.payloads.values()
    assert payload["tensors"]["rewards"][2].tolist() == [1.0, 1.0]
    assert probe.pool.reserved == 0


def test_farewell_waits_for_what_the_device_still_writes(
    make_probe: Callable[..., Probe], coordinator: FakeCoordinator
) -> None:
    coordinator.settle_at_once = True
    probe = make_probe()
    with probe.stage("first", step=1) as stage:
        stage.record(rewards=late(torch.ones(2)))
    threading.Timer(0.1, FakeEvent.made[0].finished.set).start()
    assert probe.close(10.0)
    kinds = [event.kind for batch in coordinator.batches for event in batch]
    assert kinds == ["hello", "begin", "end", "finish"]
