"""What identifies a process or a call is no number."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.dumps import table_of, tensor_argument

from stagescope_service.compare.operators.differences import Thresholds
from stagescope_service.compare.operators.divergence import first_divergent
from stagescope_service.compare.operators.divergence_answer import OperatorDivergence

Value = dict[str, object] | list[object] | str | int | None
"""A value as msprobe records it."""
TENSOR: Value = tensor_argument(0.0, 1.0)


def group(*ranks: int, framework: str = "torch") -> Value:
    return {"type": f"{framework}.ProcessGroup", "group_ranks": [*ranks], "group_id": str(ranks)}


def number(value: int) -> Value:
    return {"type": "int", "value": value}


def text(value: str) -> Value:
    return {"type": "str", "value": value}


def reduction(value: str) -> Value:
    return {"type": "torch.distributed.ReduceOp", "value": f"RedOpType.{value}"}


def peer(op: str, rank: int, tag: int) -> Value:
    return {"class_type": "torch.distributed.P2POp", "tensor": TENSOR, "op": op, "peer": rank,
            "tag": tag, "group_id": f"{rank:08x}"}  # fmt: skip


def compare(
    path: Path, call: str, args: tuple[list[Value], list[Value]], **keywords: tuple[Value, Value]
) -> OperatorDivergence:
    one, other = (
        table_of(path / str(side), {f"{call}.0.forward": {
            "input_args": [TENSOR, *inputs],
            "input_kwargs": {name: values[side] for name, values in keywords.items()},
            "output": [TENSOR],
        }})
        for side, inputs in enumerate(args)
    )  # fmt: skip
    return first_divergent(one, other, Thresholds(exact=True))


@pytest.mark.parametrize(
    ("call", "a", "b"),
    [
        ("Distributed.all_reduce", [reduction("SUM"), None], [reduction("SUM"), group(2, 3)]),
        ("Distributed.send", [number(1)], [number(3)]),
        ("Distributed.recv", [number(0), None, number(7)], [number(2), None, number(8)]),
        ("Distributed.broadcast", [number(0), text("tp")], [number(4), text("dp")]),
        ("Distributed.batch_isend_irecv", [[peer("isend", 1, 0)]], [[peer("irecv", 0, 5)]]),
        ("NPU.npu_mm_all_reduce_base", [TENSOR, text("group_0")], [TENSOR, text("group_4")]),
        ("Distributed.new_group", [[number(0), number(1)]], [[number(2), number(3)]]),
        ("Distributed.new_subgroups", [number(2), None], [number(4), None]),
        ("Torch.x", [text("<Handle object at 0x7f10>")], [text("<Handle object at 0x8f00>")]),
        ("Mint.cat", [group(0, framework="mindspore")], [group(1, framework="mindspore")]),
    ],
)
def test_arguments_that_identify(tmp_path: Path, call: str, a: list[Value], b: list[Value]) -> None:
    found = compare(tmp_path, call, (a, b))
    assert found.same, found.first
    assert found.identifiers > 0


@pytest.mark.parametrize(
    ("call", "name", "a", "b"),
    [
        ("Distributed.broadcast", "src", number(0), number(2)),
        ("Distributed.reduce", "group_dst", number(0), number(1)),
        ("NPU.npu_moe_distribute_dispatch", "ep_rank_id", number(0), number(1)),
        ("NPU.npu_moe_distribute_dispatch", "group_ep", text("10.0.0.1"), text("10.0.0.2")),
        ("Functional.linear", "process_group", group(0), group(1)),
        ("Distributed.new_group", "ranks", [number(0), number(1)], [number(2), number(3)]),
        ("Distributed.all_gather_into_tensor", "async_op", {"type": "bool", "value": True},
         {"type": "bool", "value": False}),
        ("Torch.rand", "generator",
         {"type": "torch.Generator", "value": "<torch._C.Generator object at 0x7f>"},
         {"type": "torch.Generator", "value": "<torch._C.Generator object at 0x8f>"}),
        ("Torch.cuda.x", "device", {"type": "torch.device", "value": 0},
         {"type": "torch.device", "value": 3}),
    ],
)  # fmt: skip
def test_keywords_that_identify(tmp_path: Path, call: str, name: str, a: Value, b: Value) -> None:
    assert compare(tmp_path, call, ([], []), **{name: (a, b)}).same


@pytest.mark.parametrize(
    ("call", "a", "b"),
    [
        ("Distributed.all_reduce", [reduction("SUM"), None], [reduction("AVG"), None]),
        ("Distributed.all_to_all_single", [[number(3), number(5)]], [[number(4), number(4)]]),
        ("Functional.dropout", [number(0)], [number(1)]),
        ("Torch.x", [text("<Mean object at 0x7f10>")], [text("<Sum object at 0x8f00>")]),
        ("Torch.x", [text("0x7f10")], [text("0x8f00")]),
        ("Torch.einsum", [text("ij,jk")], [text("ij,kj")]),
        ("NPU.npu_mm_all_reduce_base", [text("sum")], [text("max")]),
    ],
)
def test_arguments_that_measure(tmp_path: Path, call: str, a: list[Value], b: list[Value]) -> None:
    found = compare(tmp_path, call, (a, b))
    assert found.first is not None
    assert (found.first["verdict"], found.identifiers) == ("value", 0)


def test_a_source_of_a_scatter_is_data(tmp_path: Path) -> None:
    values: tuple[Value, Value] = ({"type": "float", "value": 1.0}, {"type": "float", "value": 2.0})
    assert compare(tmp_path, "Tensor.scatter", ([], []), src=values).first is not None


def test_a_call_that_was_recomputed_on_one_side(tmp_path: Path) -> None:
    one, other = (
        table_of(tmp_path / str(recomputed), {"Functional.linear.0.forward": {
            "input_args": [TENSOR], "output": [TENSOR], "is_recompute": recomputed,
        }})
        for recomputed in (False, True)
    )  # fmt: skip
    found = first_divergent(one, other)
    assert (found.same, found.identifiers) == (True, 1)
