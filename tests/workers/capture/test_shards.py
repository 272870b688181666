"""What a capture takes of a model: values, gradients before the optimizer uses them, shards."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stagescope_wire.errors import InvalidPlan  # noqa: E402
from stagescope_workers.capture.shards import Shards, local_shard, shard_bytes  # noqa: E402


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def test_gradients_are_those_that_the_optimizer_used() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    shards = Shards(net, parameters=["0.*"], gradients=["1.weight"])
    before = net[0].weight.detach().clone()
    used = []
    for _ in range(2):
        net(torch.ones(1, 3)).sum().backward()
        used.append(net[1].weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    tensors, locations, error = shards.finish()
    assert error is None
    assert locations == {}
    assert set(tensors) == {
        "parameter/0.weight", "parameter/0.bias", "gradient/1.weight", "gradient.1/1.weight",
    }  # fmt: skip
    assert torch.equal(tensors["gradient/1.weight"], used[0])
    assert torch.equal(tensors["gradient.1/1.weight"], used[1])
    assert torch.equal(tensors["parameter/0.weight"], net[0].weight)
    assert not torch.equal(tensors["parameter/0.weight"], before)
    kept = tensors["parameter/0.weight"].clone()
    optimizer.step()  # the hook is gone, and what was taken is nobody else's memory
    with torch.no_grad():
        net[0].weight.zero_()
    assert torch.equal(tensors["parameter/0.weight"], kept)


def test_without_an_optimizer_the_gradients_of_the_end_are_used() -> None:
    net = model()
    shards = Shards(net, parameters=[], gradients=["*"])
    net(torch.ones(1, 3)).sum().backward()
    tensors, _, _ = shards.finish()
    assert set(tensors) == {f"gradient/{name}" for name, _ in net.named_parameters()}


def test_another_models_optimizer_is_none_of_ours() -> None:
    net, other = model(), model()
    shards = Shards(net, parameters=[], gradients=["*"])
    other(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    tensors, _, error = shards.finish()
    assert tensors == {}
    assert error is not None
    assert error.startswith("none of the 4 parameters had a gradient")


def test_several_chunks_are_numbered_and_sized() -> None:
    chunks = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    tensors, _, _ = Shards(chunks, parameters=["*.bias"], gradients=[]).finish()
    assert set(tensors) == {"parameter/0.bias", "parameter/1.bias"}
    assert shard_bytes(chunks, ["*.bias"]) == 2 * 2 * 4
    assert shard_bytes(chunks, []) == 0


@pytest.mark.parametrize("net", [None, object(), [None]])
def test_a_stage_without_a_model_is_reported(net: object) -> None:
    with pytest.raises(InvalidPlan, match="need the stage's model"):
        Shards(net, parameters=["*"], gradients=[])


def test_names_that_are_not_there_are_reported() -> None:
    with pytest.raises(InvalidPlan, match="no parameter name matches lm_head"):
        Shards(model(), parameters=["lm_head"], gradients=[])


def test_a_tensor_that_cannot_be_copied_ends_nothing() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    shards = Shards(net, parameters=[], gradients=["0.weight"])
    broken: Any = Broken()
    shards._gradients = {"0.weight": broken}
    optimizer.param_groups[0]["params"].append(broken)
    shards._before_step(optimizer, (), {})
    tensors, _, error = shards.finish()
    assert tensors == {}
    assert "no such memory" in str(error)


class Broken:
    """A parameter whose gradient cannot be read."""

    @property
    def grad(self) -> None:
        raise RuntimeError("no such memory")


SHARDED = """
    import sys
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:
        from torch.distributed._tensor import Shard, distribute_tensor
    from stagescope_workers.capture.shards import local_shard
    rank = int(sys.argv[1])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(10.0).reshape(5, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    if rank == 1:  # alone: nothing of it may wait for the other
        local, place = local_shard(sharded)
        begin = place["offset"][0]
        assert torch.equal(local, whole[begin : begin + len(local)]), (local, place)
        assert place["shape"] == [5, 2] and place["mesh"] == [2], place
        assert place["offset"] == [3, 0], place
        assert "0" in place["placements"][0], place
        print("alone")
    torch.distributed.barrier()
"""


def test_a_shard_says_where_it_lies_without_asking_the_others(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SHARDED), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    reported = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "alone" in reported[1]


def test_a_whole_tensor_has_no_location() -> None:
    tensor = torch.ones(2)
    assert local_shard(tensor) == (tensor, {})
