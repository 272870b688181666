"""Counts that differ by what rounding moves are no divergence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.support.dumps import tabled

from stagescope_service.compare.operators.differences import Thresholds
from stagescope_service.compare.operators.divergence import OperatorDivergence, first_divergent

Values = Sequence[float] | Sequence[Sequence[float]]
Calls = Sequence[tuple[str, list[Values], Values]]
"""Name, inputs and output of each call."""


def tensor(values: Values, dtype: str) -> dict[str, object]:
    """Describe a tensor as msprobe does: of integers without mean and norm."""
    array = np.asarray(values, np.float64)
    whole = dtype.startswith("int")
    return {
        "type": "torch.Tensor",
        "dtype": f"torch.{dtype}",
        "shape": [*array.shape],
        "Max": float(array.max()),
        "Min": float(array.min()),
        "Mean": None if whole else float(array.mean()),
        "Norm": None if whole else float(np.linalg.norm(array)),
    }


def compare(
    path: Path,
    a: Calls,
    b: Calls,
    *,
    dtype: str = "float32",
    first: str = "float32",
    exact: bool = False,
) -> OperatorDivergence:
    """Compare calls; a matrix product in dtype `first` comes before them on both sides."""
    sides = []
    for name, calls in (("a", a), ("b", b)):
        matrix = tensor([[1.0, 2.0]], first)
        data = {"Torch.matmul.0.forward": {"input_args": [matrix], "output": [matrix]}}
        for operator, inputs, output in calls:
            data[f"{operator}.0.forward"] = {
                "input_args": [tensor(each, dtype) for each in inputs],
                "output": [tensor(output, dtype)],
            }
        document = {"task": "statistics", "level": "L1", "data": data}
        sides.append(tabled(path / name, json.dumps(document))[0])
    one, other = sides
    return first_divergent(one, other, Thresholds(exact=exact))


def histogram(*counts: float) -> Calls:
    return [("Torch.histc", [[0.0, 3.0]], counts)]


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_one_token_of_another_expert(tmp_path: Path, dtype: str) -> None:
    a, b = histogram(31, 2, 20, 11), histogram(30, 2, 21, 11)
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
    assert compare(tmp_path, histogram(*a), histogram(*b), first=first).same == same


def test_another_operator_counts_nothing(tmp_path: Path) -> None:
    a: Calls = [("Torch.relu", [[0.0, 3.0]], (31, 2))]
    b: Calls = [("Torch.relu", [[0.0, 3.0]], (30, 3))]
    assert not compare(tmp_path, a, b).same


@pytest.mark.parametrize(
    "operator",
    ["Torch.unique", "Tensor.scatter_add", "Tensor.cumsum", "Tensor.sum",
     "NPU.npu_moe_init_routing", "Distributed.all_to_all_single"],
)  # fmt: skip
@pytest.mark.parametrize(("other", "same"), [((30, 2, 21), True), ((3, 2, 48), False)])
def test_integers_that_a_call_makes_are_counts(
    tmp_path: Path, operator: str, other: Values, same: bool
) -> None:
    a: Calls = [(operator, [[0.0, 3.0]], (31, 2, 20))]
    b: Calls = [(operator, [[0.0, 3.0]], other)]
    found = compare(tmp_path, a, b, dtype="int64")
    assert (found.same, found.near_counts) == (same, int(same))


@pytest.mark.parametrize(
    ("operator", "inputs", "other"),
    [
        ("Torch.argmax", [[0.0, 3.0]], [[0.0, 3.0]]),
        ("Torch.topk", [[0.0, 3.0]], [[0.0, 3.0]]),
        ("Torch.multinomial", [[0.0, 3.0]], [[0.0, 3.0]]),
        ("Tensor.__getitem__", [[0.0, 3.0]], [[0.0, 3.0]]),
        ("Distributed.broadcast", [[0.0, 3.0]], [[0.0, 3.0]]),
        ("Torch.x", [], []),  # made of no tensor: data
        ("Functional.embedding", [(31, 2, 20)], [(30, 2, 21)]),
        ("Functional.cross_entropy", [[0.0], (31, 2, 20)], [[0.0], (30, 2, 21)]),
    ],
)
def test_indexes_ids_and_labels_are_no_counts(
    tmp_path: Path, operator: str, inputs: list[Values], other: list[Values]
) -> None:
    a: Calls = [(operator, inputs, (31, 2, 20))]
    b: Calls = [(operator, other, (30, 2, 21))]
    found = compare(tmp_path, a, b, dtype="int64")
    assert found.first is not None
    assert found.first["section"] == ("output" if inputs == other else "input_args")


@pytest.mark.parametrize(
    ("call", "name", "a", "b", "same"),
    [
        ("Distributed.all_to_all_single", "output_split_sizes", (31, 33), (30, 34), True),
        ("Distributed.all_to_all_single", "output_split_sizes", (31, 33), (3, 61), False),
        ("Torch.split", "split_size_or_sections", (31, 33), (30, 34), True),
        ("Tensor.permute", "dims", (0, 1), (1, 0), False),
    ],
)
def test_sizes_of_parts(
    tmp_path: Path, call: str, name: str, a: Sequence[int], b: Sequence[int], same: bool
) -> None:
    sides = []
    for side, sizes in (("a", a), ("b", b)):
        matrix = tensor([[1.0, 2.0]], "float32")
        listed = [{"type": "int", "value": size} for size in sizes]
        record = {"input_args": [matrix], "input_kwargs": {name: listed}, "output": [matrix]}
        document = {"task": "statistics", "data": {f"{call}.0.forward": record}}
        sides.append(tabled(tmp_path / side, json.dumps(document))[0])
    one, other = sides
    found = first_divergent(one, other)
    assert (found.same, found.near_counts) == (same, 2 * same)


def test_an_argument_that_is_named_for_counts(tmp_path: Path) -> None:
    for name, same in (("group_list", True), ("index", False)):
        sides = []
        for counts in ((31, 2), (30, 3)):
            matrix = tensor([[1.0, 2.0]], "float32")
            record = {"input_args": [matrix], "input_kwargs": {name: tensor(counts, "int64")}}
            document = {"data": {"NPU.npu_grouped_matmul.0.forward": record}}
            sides.append(tabled(tmp_path / name / str(counts[0]), json.dumps(document))[0])
        one, other = sides
        assert first_divergent(one, other).same == same


def test_what_is_made_of_counts_alone(tmp_path: Path) -> None:
    def routed(counts: list[float], scale: float, hidden: float = 1.0) -> Calls:
        shares = [each / sum(counts) for each in counts]
        ends = [*np.cumsum(counts)]
        return [
            *histogram(*counts),
            ("Tensor.to", [counts], counts),
            ("Tensor.cumsum", [counts], ends),
            ("Tensor.__truediv__", [counts, [sum(counts)]], shares),
            ("Torch.mul", [[[hidden, 1.0]], [scale]], [[hidden, scale]]),
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
        return [*histogram(*counts), ("NPU.npu_grouped_matmul", hidden, [[result, 1.0]])]

    found = compare(tmp_path, product([31, 2], 5.0), product([30, 3], 5.1))
    assert found.first is not None
    assert found.first["section"] == "output"
