"""What a rank says of its weights, and that it costs training nothing but the sums."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from tests.support.coordinators import FakeCoordinator, wait_for
from torch.distributed.device_mesh import init_device_mesh

from stagescope_wire.errors import InvalidInput
from stagescope_workers.checksum import checksum
from stagescope_workers.probe import weights as module
from stagescope_workers.probe.probe import Probe

MakeProbe = Callable[..., Probe]

WEIGHTS = {
    "embed.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "norm.weight": torch.ones(4),
}


def reported(coordinator: FakeCoordinator, count: int = 1) -> list[dict[str, Any]]:
    wait_for(lambda: len(coordinator.of_kind("weights")) >= count)
    return [dict(event.fields) for event in coordinator.of_kind("weights")]


def test_each_weight_is_reported_with_its_checksum(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    make_probe().record_weights(WEIGHTS, version=4, side="trainer", step=5)
    [fields] = reported(coordinator)
    assert (fields["policy_version"], fields["step"]) == (4, 5)
    assert (fields["side"], fields["kind"]) == ("trainer", "exchanged")
    assert fields["device"]["device_kind"] in ("cpu", "cuda", "npu")
    assert fields["tensors"] == [
        ("embed.weight", checksum(WEIGHTS["embed.weight"]), "bfloat16", (3, 4), None),
        ("norm.weight", checksum(WEIGHTS["norm.weight"]), "float32", (4,), None),
    ]


def test_a_generator_is_read_one_by_one_and_nothing_is_kept(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    buffer = np.zeros(1000, np.float32)

    def generate() -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
        for number in range(3):
            buffer[:] = number  # the same memory for each: what a bucketed sync does
            yield f"layer.{number}", buffer

    make_probe().record_weights(generate(), version=0, side="rollout")
    [fields] = reported(coordinator)
    assert [row[1] for row in fields["tensors"]] == [
        checksum(np.full(1000, number, np.float32)) for number in range(3)
    ]


def test_names_are_mapped(make_probe: MakeProbe, coordinator: FakeCoordinator) -> None:
    probe = make_probe()
    names = {r"^embed\.": "model.embed_tokens.", "norm": "final_norm"}
    probe.record_weights(WEIGHTS, version=1, side="trainer", names=names)
    probe.record_weights(WEIGHTS, version=2, side="trainer", names=str.upper)
    one, two = reported(coordinator, 2)
    assert [row[0] for row in one["tensors"]] == ["model.embed_tokens.weight", "final_norm.weight"]
    assert [row[0] for row in two["tensors"]] == ["EMBED.WEIGHT", "NORM.WEIGHT"]


def test_copies_are_reported(make_probe: MakeProbe, coordinator: FakeCoordinator) -> None:
    probe = make_probe()
    cut, copied = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    cut.tensor_model_parallel = True  # type: ignore[attr-defined]
    copied.tensor_model_parallel = False  # type: ignore[attr-defined]
    megatron = {"cut": cut, "copied": copied}
    probe.record_weights(megatron, version=1, side="trainer")
    probe.record_weights(megatron, version=2, side="trainer", replicated=["^cut$"])
    probe.record_weights(megatron, version=3, side="trainer", replicated=True)
    shards = [[row[4] for row in fields["tensors"]] for fields in reported(coordinator, 3)]
    assert shards == [[None, "tp copy"], ["copy", "tp copy"], ["copy", "copy"]]


def dtensors() -> list[Any]:
    """DTensor, Replicate, Shard and Partial, from where this torch has them (2.5 moved them)."""
    names = ("DTensor", "Replicate", "Shard", "Partial")
    module = importlib.import_module("torch.distributed.tensor")
    if not hasattr(module, "DTensor"):
        module = importlib.import_module("torch.distributed._tensor")
    return [getattr(module, name) for name in names]


@pytest.fixture
def pretended_ranks() -> Iterator[None]:
    """Rank 5 of 8 ranks whose collectives do nothing: none must be needed."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def test_of_a_dtensor_the_local_shard_is_summed(
    make_probe: MakeProbe, coordinator: FakeCoordinator, pretended_ranks: None
) -> None:
    DTensor, Replicate, Shard, _ = dtensors()
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    shard, norm = torch.arange(6.0).reshape(2, 3), torch.ones(4)
    weights = {
        "w": DTensor.from_local(shard, mesh, [Shard(0), Shard(1)], run_check=False),
        "norm": DTensor.from_local(norm, mesh, [Replicate(), Replicate()], run_check=False),
    }
    make_probe().record_weights(weights, version=1, side="trainer")
    [fields] = reported(coordinator)
    w, norm_row = fields["tensors"]
    assert w[1:4] == (checksum(shard), "float32", (2, 3))
    assert w[4][:2] == ((8, 6), (4, 3))
    assert w[4][2:] == ("fsdp: Shard(dim=0) 2 of 4, tp: Shard(dim=1) 1 of 2", ("fsdp", "tp"))
    assert norm_row[1] == checksum(norm)
    assert norm_row[4][:2] == ((4,), (0,))


def test_a_partial_sum_has_no_location(
    make_probe: MakeProbe, coordinator: FakeCoordinator, pretended_ranks: None
) -> None:
    DTensor, _, _, Partial = dtensors()
    mesh = init_device_mesh("cpu", (8,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    make_probe().record_weights({"w": partial}, version=1, side="trainer")
    [fields] = reported(coordinator)
    shape, offsets, placement, dims = fields["tensors"][0][4]
    assert (shape, offsets, dims) == ((2,), None, ())
    assert placement.endswith("5 of 8")


def test_what_cannot_be_summed_is_unknown_and_said_once(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    absent = {f"meta.{number}": torch.ones(2, device="meta") for number in range(5)}
    probe.record_weights({**absent, **WEIGHTS}, version=1, side="trainer")
    [fields] = reported(coordinator)
    assert [row[1] is None for row in fields["tensors"]] == [True] * 5 + [False] * 2
    assert fields["tensors"][0] == ("meta.0", None, "float32", (2,), None)
    [refused] = coordinator.fields("refused")
    assert "meta.0" in refused["message"]
    assert "4 more" in refused["message"]


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"side": "engine"}, "side is 'engine'"),
        ({"kind": "sent"}, "kind is 'sent'"),
        ({"version": None}, "version is None"),
        ({"version": "three"}, "version is 'three'"),
        ({"names": {"(": ""}}, "not a regular expression"),
        ({"names": 3}, "names is a int"),
        ({"names": lambda name: 7}, "a weight is called 7"),
        ({"replicated": ["("]}, "not a regular expression"),
        ({"names": lambda name: "same"}, "two weights are called same"),
    ],
)
def test_what_is_wrong_is_reported(
    make_probe: MakeProbe, coordinator: FakeCoordinator, given: Mapping[str, object], wrong: str
) -> None:
    call: dict[str, Any] = {"version": 1, "side": "trainer", **given}
    make_probe().record_weights(WEIGHTS, **call)  # never raises
    with pytest.raises(InvalidInput, match=wrong):
        make_probe(strict=True).record_weights(WEIGHTS, **call)


@pytest.mark.parametrize("weights", [3, torch.ones(2), [torch.ones(2)], [("a",)]])
def test_what_are_no_named_tensors_is_refused(make_probe: MakeProbe, weights: Any) -> None:
    make_probe().record_weights(weights, version=1, side="trainer")
    with pytest.raises(InvalidInput, match="weights"):
        make_probe(strict=True).record_weights(weights, version=1, side="trainer")


def test_a_generator_that_raises_hurts_nobody(make_probe: MakeProbe) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise RuntimeError("out of memory")

    probe = make_probe()
    probe.record_weights(broken(), version=1, side="trainer")
    assert probe.refused == {"record_weights": 1}


def test_what_a_device_sums_is_fetched_later(
    make_probe: MakeProbe, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The largest checksum there is: its int64 is -1.
    monkeypatch.setattr(module, "checksum", lambda value: torch.tensor(-1))
    probe = make_probe()
    probe.record_weights(WEIGHTS, version=1, side="trainer")
    [fields] = reported(coordinator)
    assert [row[1] for row in fields["tensors"]] == [(1 << 64) - 1] * 2
    assert probe.pool.reserved == 0
