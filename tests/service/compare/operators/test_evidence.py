"""Memory that no call reads is no evidence and hides no fault: real dumps, and edge cases."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from tests.support.dumps import Argument, table, table_of, tensor_argument
from tests.support.families import (
    FAMILIES,
    NAN,
    leftovers,
    nan_weight,
    one_pass,
    other_element,
    scaled_gradient,
    scaled_weight,
)
from torch import nn
from torch.distributed import fsdp

from stagescope_service.compare.operators.differences import Thresholds
from stagescope_service.compare.operators.divergence import first_divergent
from stagescope_service.compare.operators.evidence import Use, infrastructure_stacks, use_of
from stagescope_service.compare.operators.non_finite import non_finite_of_rank
from stagescope_service.dumps.msprobe.operator_query import iterate_rows

Arguments = Sequence[Argument | None]
LEVELS = ("L0", "L1", "mix")
FAULTS: Mapping[str, tuple[tuple[Callable[[nn.Module, str], None], str], ...]] = {
    "llama": ((nan_weight, "model.layers.0.mlp.down_proj"),),
    "convolutions": ((scaled_weight, "conv2"), (scaled_gradient, "conv1")),
    "mixtral": (
        (scaled_weight, "model.layers.0.mlp.experts"),
        (nan_weight, "model.norm"),
        (other_element, "lm_head"),
    ),
}


def captured(
    path: Path, model: nn.Module, *, level: str, byte: int = 0xEE, backwards: bool = False
) -> Path:
    with leftovers(byte):
        return table(path, model, level=level, body=lambda: one_pass(model, backwards=backwards))


def calls_inside(path: Path, module: str) -> set[str]:
    """The calls of a module and of all that it calls, forward and backward (level mix)."""
    parents = {row["name"]: row["parent"] for row in iterate_rows(path, columns=["name", "parent"])}

    def inside(name: str | None) -> bool:
        while name is not None and not name.startswith(f"Module.{module}."):
            name = parents.get(name)
        return name is not None

    names = {name for name in parents if inside(name)}
    return names | {name.replace("forward", "backward") for name in names}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planted_fault_is_named_whatever_memory_held(family: str, tmp_path: Path) -> None:
    make = FAMILIES[family]
    references = {level: captured(tmp_path / level, make(), level=level) for level in LEVELS}
    for level, reference in references.items():
        same = captured(tmp_path / level / "same", make(), level=level, byte=NAN)
        found = first_divergent(reference, same)
        assert found.same, found.first
        # The experts' permutation is written into an empty tensor, where torch multiplies groups.
        written = family == "mixtral" and level != "L0" and hasattr(torch, "_grouped_mm")
        assert (found.not_read > 0) == written
        assert non_finite_of_rank(same).first is None
    for number, (plant, module) in enumerate(FAULTS[family]):
        tables = {}
        for level in LEVELS:
            model = make()
            plant(model, module)
            tables[level] = captured(tmp_path / level / f"{number}", model, level=level, byte=NAN)
        names = calls_inside(tables["mix"], module)
        for level in LEVELS:
            found = first_divergent(references[level], tables[level])
            assert found.first is not None
            assert found.first["b"] is not None
            assert found.first["b"]["name"] in names, (level, module)
            bad = non_finite_of_rank(tables[level])
            assert (bad.first is not None) == (plant is nan_weight)
            assert bad.first is None or (bad.first["name"] in names and bad.certain)


@pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="this torch has no fully_shard")
def test_healthy_shards_give_no_finding_and_a_division_by_zero_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.fsdp_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), str(tmp_path)],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(240) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for level in LEVELS:
        for rank in range(2):
            healthy = tmp_path / level / "healthy" / f"rank{rank}" / "operators.parquet"
            faulty = tmp_path / level / "faulty" / f"rank{rank}" / "operators.parquet"
            fine = non_finite_of_rank(healthy)
            assert (fine.first, fine.culprits) == (None, 0)
            assert (fine.not_read > 0) == (level != "L0")
            bad = non_finite_of_rank(faulty)
            assert bad.first is not None
            assert bad.certain
            assert bad.bad_inputs == []
            expected = "Module.blocks.1.FSDPFaulty.forward.0" if level == "L0" else "truediv"
            assert expected in bad.first["name"]


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_gradients_that_are_zero_but_for_rounding_are_no_difference(
    level: str, tmp_path: Path
) -> None:
    make = FAMILIES["convolutions"]
    one = captured(tmp_path / "one", make(), level=level)
    other = captured(tmp_path / "other", make(), level=level, backwards=True)
    found = first_divergent(one, other)
    assert (found.first, found.counts) == (None, {})
    # The biases of both convolutions.
    assert found.zero_gradients == 2
    assert not first_divergent(one, other, Thresholds(exact=True)).same


def write_table(
    path: Path, name: str, inputs: Arguments, outputs: Arguments, **kwargs: Argument
) -> Path:
    section = "input_args" if name.endswith("forward") else "input"
    return table_of(path, {name: {section: inputs, "input_kwargs": kwargs, "output": outputs}})


A, B, LEFT = (tensor_argument(0, high) for high in (1, 2, 7))
BAD = tensor_argument(math.nan, math.nan)
ROWS: Argument = {"type": "slice", "value": [0, 1, None]}
OTHER_ROWS: Argument = {"type": "slice", "value": [1, 2, None]}

Call = tuple[Arguments, Arguments]
"""Inputs and outputs of a call."""


@pytest.mark.parametrize(
    ("operator", "a", "b", "first"),
    [
        # What a destination held before it is written.
        ("Tensor.__setitem__", ([A, ROWS, A], [None]), ([LEFT, ROWS, A], [None]), None),
        ("Tensor.__setitem__", ([A, ROWS, A], [None]), ([LEFT, ROWS, B], [None]), "2"),
        ("Tensor.__setitem__", ([A, ROWS, A], [None]), ([LEFT, OTHER_ROWS, A], [None]), "1"),
        ("Tensor.copy_", ([A, A], [A]), ([LEFT, A], [A]), None),
        ("Tensor.copy_", ([A, A], [A]), ([LEFT, A], [B]), "0"),
        ("Tensor.zero_", ([A], [A]), ([BAD], [A]), None),
        ("Tensor.index_copy_", ([A, A, A], [A]), ([LEFT, A, A], [LEFT]), None),
        ("Tensor.index_copy_", ([A, A, A], [A]), ([A, A, A], [B]), "0"),
        ("Tensor.index_add_", ([A, A, A], [A]), ([LEFT, A, A], [LEFT]), "0"),
        ("Distributed.all_gather_into_tensor", ([A, A], [A]), ([LEFT, A], [A]), None),
        # Views, and what copies a part.
        ("Tensor.narrow", ([A, A], [A]), ([LEFT, A], [LEFT]), None),
        ("Tensor.narrow", ([A], [A]), ([A], [B]), "0"),
        ("Tensor.__getitem__", ([A, ROWS], [A]), ([LEFT, ROWS], [LEFT]), None),
        ("Tensor.__getitem__", ([A, A], [A]), ([LEFT, A], [A]), None),
        ("Tensor.__getitem__", ([A, A], [A]), ([LEFT, A], [B]), "0"),
        ("Torch.where", ([A, A, A], [A]), ([A, LEFT, A], [A]), None),
        ("Torch.where", ([A, A, A], [A]), ([B, LEFT, A], [A]), "0"),
        ("Torch.zeros_like", ([A], [A]), ([LEFT], [A]), None),
        # What computes, and what is not known.
        ("Tensor.__add__", ([A], [A]), ([LEFT], [LEFT]), "0"),
        ("Custom.unknown_", ([A], [A]), ([LEFT], [LEFT]), "0"),
        # Another shape is a difference of the program, not of what lay in memory.
        ("Tensor.narrow", ([A], [A]), ([tensor_argument(0, 1, shape=[3])], [A]), "0"),
    ],
)
def test_which_values_of_a_call_are_evidence(
    tmp_path: Path, operator: str, a: Call, b: Call, first: str | None
) -> None:
    name = f"{operator}.0.forward"
    one, other = (write_table(tmp_path / side, name, *call) for side, call in (("a", a), ("b", b)))
    found = first_divergent(one, other)
    assert (None if found.first is None else found.first["index"]) == first
    assert first is not None or found.not_read > 0


def test_earlier_values_of_an_out_argument_are_no_evidence(tmp_path: Path) -> None:
    name = "Torch.add.0.forward"
    one = write_table(tmp_path / "a", name, [A, A], [A], out=A)
    assert first_divergent(one, write_table(tmp_path / "b", name, [A, A], [A], out=BAD)).same
    found = first_divergent(one, write_table(tmp_path / "c", name, [A, B], [A], out=BAD))
    assert found.first is not None
    assert found.first["index"] == "1"


@pytest.mark.parametrize(
    ("operator", "inputs", "output", "bad_inputs"),
    [
        ("Tensor.narrow", [BAD], BAD, None),
        ("Tensor.narrow", [A], BAD, []),
        ("Tensor.copy_", [BAD, A], BAD, []),
        ("Tensor.copy_", [BAD, BAD], BAD, ["1"]),
        ("Tensor.index_copy_", [BAD, A, A], BAD, None),
        ("Tensor.index_copy_", [A, A, BAD], BAD, ["2"]),
        ("Tensor.__mul__", [BAD, A], BAD, ["0"]),
    ],
)
def test_which_bad_results_are_evidence(
    tmp_path: Path, operator: str, inputs: Arguments, output: Argument, bad_inputs: list[str] | None
) -> None:
    found = non_finite_of_rank(write_table(tmp_path, f"{operator}.0.forward", inputs, [output]))
    assert (found.first is None) == (bad_inputs is None) == (found.not_read == 1)
    assert [row["index"] for row in found.bad_inputs] == (bad_inputs or [])


def test_a_bias_whose_gradient_really_differs_is_found(tmp_path: Path) -> None:
    gradient = tensor_argument(-0.1, 0.1, shape=[4, 8, 8, 8], Norm=0.25)
    name = "Functional.conv2d.0.backward"

    def result(largest: float, *shape: int) -> Path:
        output = tensor_argument(0, largest, shape=shape)
        return write_table(tmp_path / f"{largest} {shape}", name, [gradient], [output])

    zero, rounding, real = (result(largest, 8) for largest in (1e-9, 8e-8, 1e-4))
    assert first_divergent(zero, rounding).zero_gradients == 1
    assert first_divergent(zero, real).counts == {"statistics": 1}
    # A gradient of the results' own size is no sum of them.
    small, large = (result(largest, 4, 8, 8, 8) for largest in (1e-9, 8e-8))
    assert first_divergent(small, large).counts == {"statistics": 1}


def test_a_backward_call_and_a_module_have_evidence_alone() -> None:
    assert use_of("Tensor", "narrow", "backward", "input", "0") == Use.EVIDENCE
    assert use_of("Module", "copy_", "forward", "input_args", "0") == Use.EVIDENCE
    assert use_of(None, None, None, None, None) == Use.EVIDENCE


def test_a_call_is_of_infrastructure_only_where_its_innermost_frame_is() -> None:
    site = "/env/lib/python3.11/site-packages/torch"
    gather = f"File {site}/distributed/fsdp/_fully_shard/_fsdp_collectives.py, line 270, in gather"
    wrapper = f"File {site}/distributed/fsdp/fully_sharded_data_parallel.py, line 850, in forward"
    dispatch = f"File {site}/_ops.py, line 1279, in __call__"
    module = f"File {site}/nn/modules/module.py, line 1789, in _call_impl"
    linear = f"File {site}/nn/modules/linear.py, line 134, in forward"
    own = "File /home/me/torch_fsdp/model.py, line 3, in forward"
    copied = f"File {site}/../stagescope_workers/payload.py, line 206, in _from_dense"
    stacks = {
        "gather": [gather, module, own],
        "dispatched": [dispatch, gather, own],
        "model inside": [own, module, wrapper],
        "layer inside": [linear, module, wrapper, own],
        "module inside": [module, wrapper, own],
        "recorded": [copied, own],
        "none": [],
        "odd": ["no frame"],
    }
    assert infrastructure_stacks(stacks) == {"gather", "dispatched", "recorded"}
