"""Counts that differ by what rounding moves are no divergence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.support.dumps import Argument, table_of, tensor_argument

from stagescope_service.compare.operators.differences import Thresholds
from stagescope_service.compare.operators.divergence import first_divergent
from stagescope_service.compare.operators.divergence_answer import OperatorDivergence

Values = Sequence[float] | Sequence[Sequence[float]]
Calls = Sequence[tuple[str, list[Values], Values]]
"""Name, inputs and output of each call."""


def tensor(values: Values, dtype: str = "float32") -> Argument:
    """Describe a tensor as msprobe does: of integers without mean and norm."""
    array = np.asarray(values, np.float64)
    numbers = {"Mean": float(array.mean()), "Norm": float(np.linalg.norm(array))}
    more = {} if dtype.startswith("int") else numbers
    return tensor_argument(
        float(array.min()), float(array.max()), shape=array.shape, dtype=f"torch.{dtype}", **more
    )


def compare(
    path: Path, a: Calls, b: Calls, *, dtype: str = "float32", first: str = "float32",
    exact: bool = False,
) -> OperatorDivergence:  # fmt: skip
    """Compare calls; a matrix product in dtype `first` comes before them on both sides."""
    matrix = tensor([[1.0, 2.0]], first)
    before = {"Torch.matmul.0.forward": {"input_args": [matrix], "output": [matrix]}}
    one, other = (
        table_of(path / name, before | {
            f"{operator}.0.forward": {
                "input_args": [tensor(each, dtype) for each in inputs],
                "output": [tensor(output, dtype)],
            }
            for operator, inputs, output in calls
        })
        for name, calls in (("a", a), ("b", b))
    )  # fmt: skip
    return first_divergent(one, other, Thresholds(exact=exact))


def counting(counts: Values, operator: str = "Torch.histc") -> Calls:
    return [(operator, [[0.0, 3.0]], counts)]


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_one_token_of_another_expert(tmp_path: Path, dtype: str) -> None:
    a, b = counting((31, 2, 20, 11)), counting((30, 2, 21, 11))
    found = compare(tmp_path, a, b, dtype=dtype)
    assert (found.same, found.near_counts) == (True, 1)
    assert not compare(tmp_path, a, b, dtype=dtype, exact=True).same


@pytest.mark.parametrize(
    ("first", "a", "b", "same"),
    [
        ("float32", (31, 2, 20, 11), (33, 2, 18, 11), False),
        ("float32", (31, 2, 20, 11), (3, 40, 11, 10), False),
        ("float32", (31, 2, 20, 11), (31, 2, 20, 15), False),  # more tokens
        ("float32", (31, 2, 20, 11), (31.5, 2, 19.5, 11), False),  # no counts
        ("bfloat16", (3100, 200, 2000, 1100), (3050, 190, 2050, 1110), True),
        ("bfloat16", (3100, 200, 2000, 1100), (2900, 200, 2200, 1100), False),
        ("float32", (3100, 200, 2000, 1100), (3050, 190, 2050, 1110), False),
    ],
)
def test_rounding_moves_few(
    tmp_path: Path, first: str, a: Sequence[float], b: Sequence[float], same: bool
) -> None:
    assert compare(tmp_path, counting(a), counting(b), first=first).same == same


def test_another_operator_counts_nothing(tmp_path: Path) -> None:
    a, b = counting((31, 2), "Torch.relu"), counting((30, 3), "Torch.relu")
    assert not compare(tmp_path, a, b).same


@pytest.mark.parametrize(
    "operator",
    ["Torch.unique", "Tensor.scatter_add", "Tensor.cumsum", "NPU.npu_moe_init_routing",
     "Distributed.all_to_all_single"],
)  # fmt: skip
@pytest.mark.parametrize(("other", "same"), [((30, 2, 21), True), ((3, 2, 48), False)])
def test_integers_that_a_call_makes_are_counts(
    tmp_path: Path, operator: str, other: Values, same: bool
) -> None:
    a, b = counting((31, 2, 20), operator), counting(other, operator)
    found = compare(tmp_path, a, b, dtype="int64")
    assert (found.same, found.near_counts) == (same, int(same))


@pytest.mark.parametrize(
    ("operator", "inputs", "other"),
    [
        *((name, [[0.0, 3.0]], [[0.0, 3.0]]) for name in (
            "Torch.argmax", "Torch.topk", "Torch.multinomial", "Tensor.__getitem__",
            "Distributed.broadcast",
        )),
        ("Torch.x", [], []),  # made of no tensor: data
        ("Functional.embedding", [(31, 2, 20)], [(30, 2, 21)]),
        ("Functional.cross_entropy", [[0.0], (31, 2, 20)], [[0.0], (30, 2, 21)]),
    ],
)  # fmt: skip
def test_indexes_ids_and_labels_are_no_counts(
    tmp_path: Path, operator: str, inputs: list[Values], other: list[Values]
) -> None:
    a: Calls = [(operator, inputs, (31, 2, 20))]
    b: Calls = [(operator, other, (30, 2, 21))]
    found = compare(tmp_path, a, b, dtype="int64")
    assert found.first is not None
    assert found.first["section"] == ("output" if inputs == other else "input_args")


MATRIX = tensor([[1.0, 2.0]])


def sizes(*values: int) -> list[Argument]:
    return [{"type": "int", "value": value} for value in values]


@pytest.mark.parametrize(
    ("call", "name", "a", "b", "near"),
    [
        ("Distributed.all_to_all_single", "output_split_sizes", sizes(31, 33), sizes(30, 34), 2),
        ("Distributed.all_to_all_single", "output_split_sizes", sizes(31, 33), sizes(3, 61), 0),
        ("Torch.split", "split_size_or_sections", sizes(31, 33), sizes(30, 34), 2),
        ("Tensor.permute", "dims", sizes(0, 1), sizes(1, 0), 0),
        ("NPU.grouped_matmul", "group_list", tensor((31, 2), "int64"), tensor((30, 3), "int64"), 1),
        ("NPU.grouped_matmul", "index", tensor((31, 2), "int64"), tensor((30, 3), "int64"), 0),
    ],
)
def test_arguments_that_are_named_for_sizes_and_counts(
    tmp_path: Path, call: str, name: str, a: Argument, b: Argument, near: int
) -> None:
    one, other = (
        table_of(tmp_path / side, {f"{call}.0.forward": {
            "input_args": [MATRIX], "input_kwargs": {name: value}, "output": [MATRIX],
        }})
        for side, value in (("a", a), ("b", b))
    )  # fmt: skip
    found = first_divergent(one, other)
    assert (found.same, found.near_counts) == (near > 0, near)


def test_what_is_made_of_counts_alone(tmp_path: Path) -> None:
    def routed(counts: list[float], scale: float) -> Calls:
        shares = [each / sum(counts) for each in counts]
        return [
            *counting(counts),
            ("Tensor.to", [counts], counts),
            ("Tensor.cumsum", [counts], [*np.cumsum(counts)]),
            ("Tensor.__truediv__", [counts, [sum(counts)]], shares),
            ("Torch.mul", [[[1.0, 1.0]], [scale]], [[1.0, scale]]),
        ]

    found = compare(tmp_path / "1", routed([31, 2, 20], 2.0), routed([30, 3, 20], 2.0))
    assert (found.same, found.near_counts) == (True, 7)
    # The first that differs in numbers is named.
    found = compare(tmp_path / "2", routed([31, 2, 20], 2.0), routed([30, 3, 20], 2.5))
    assert found.first is not None
    assert found.first["a"] is not None
    assert found.first["a"]["operator"] == "mul"


def test_a_product_with_counts_is_compared_as_usual(tmp_path: Path) -> None:
    def product(counts: list[float], result: float) -> Calls:
        hidden: list[Values] = [[[1.0, 2.0]], counts]
        return [*counting(counts), ("NPU.npu_grouped_matmul", hidden, [[result, 1.0]])]

    found = compare(tmp_path, product([31, 2], 5.0), product([30, 3], 5.1))
    assert found.first is not None
    assert found.first["section"] == "output"
