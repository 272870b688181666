"""Tensors of several ranks that are put together: statistics by formula, and what cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.dumps import Argument, tabled

from stagescope_service.compare.operators.differences import Thresholds
from stagescope_service.compare.operators.divergence import first_divergent
from stagescope_service.compare.operators.divergence_answer import OperatorDivergence
from stagescope_service.compare.operators.layouts import RankTable, read_layout, read_rule
from stagescope_service.compare.operators.rank_tensors import RankTensors
from stagescope_service.dumps.formats.msprobe_directory import TENSOR_FOLDER
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import Json

Array = npt.NDArray[Any]
Calls = Mapping[str, Mapping[str, Sequence[Any]]]
"""Name of a call -> section -> its values: arrays and ints."""
MADE = np.random.default_rng(0)
HIDDEN = MADE.normal(size=(4, 6, 16)).astype(np.float32)
WEIGHT = MADE.normal(size=(8, 16)).astype(np.float32)
LINEAR = "Functional.linear.0.forward"


def described(value: Array | int, name: str) -> Argument:
    """Describe a value as msprobe does."""
    if isinstance(value, int):
        return {"type": "int", "value": value}
    numbers: dict[str, Any] = {"Max": value.max().item(), "Min": value.min().item()}
    rounded = value.astype(np.float32)  # integers, too
    numbers["Mean"], numbers["Norm"] = float(rounded.mean()), float(np.linalg.norm(rounded))
    return {"type": "torch.Tensor", "dtype": f"torch.{value.dtype}", "shape": [*value.shape],
            "data_name": name, **numbers}  # fmt: skip


def rank_table(
    root: Path, rank: int, calls: Calls, place: Mapping[str, int], *, tensors: bool
) -> RankTable:
    """Write the dump of a rank, its tensors too, and its table."""
    directory, data = root / f"rank{rank}", dict[str, dict[str, list[Argument]]]()
    for name, sections in calls.items():
        for section, values in sections.items():
            files = [f"{name}.{section}.{index}.pt" for index in range(len(values))]
            data.setdefault(name, {})[section] = [*map(described, values, files)]
            if tensors:
                (directory / TENSOR_FOLDER).mkdir(parents=True, exist_ok=True)
                for file, value in zip(files, values, strict=True):
                    if not isinstance(value, int):
                        torch.save(torch.from_numpy(value), directory / TENSOR_FOLDER / file)
    path, _ = tabled(directory, json.dumps({"task": "tensor", "level": "L1", "data": data}))
    return RankTable(rank, path, place, directory if tensors else None)


def compare(
    path: Path, ranks: Sequence[Calls], whole: Calls, *, layout: str = "tp2",
    tensors: bool = False, rules: Sequence[str] = (),
) -> OperatorDivergence:  # fmt: skip
    places = read_layout(layout, range(len(ranks)))
    found = [
        rank_table(path / "ranks", rank, calls, place, tensors=tensors)
        for rank, (calls, place) in enumerate(zip(ranks, places, strict=True))
    ]
    one = rank_table(path / "one", 0, whole, {}, tensors=tensors)
    thresholds = Thresholds(factor=100)
    return first_divergent(found, [one], thresholds, rules=[*map(read_rule, rules)])


def linear(hidden: Array, weight: Array, output: Array) -> Calls:
    return {LINEAR: {"input_args": [hidden, weight], "output": [output]}}


def column_parallel() -> list[Calls]:
    return [linear(HIDDEN, part, HIDDEN @ part.T) for part in np.split(WEIGHT, 2)]


def row_parallel() -> list[Calls]:
    halves = zip(np.split(HIDDEN, 2, -1), np.split(WEIGHT, 2, -1), strict=True)
    return [linear(hidden, weight, hidden @ weight.T) for hidden, weight in halves]


WHOLE = linear(HIDDEN, WEIGHT, HIDDEN @ WEIGHT.T)


def test_shards_of_columns_and_replicas(tmp_path: Path) -> None:
    found = compare(tmp_path, column_parallel(), WHOLE)
    assert (found.same, found.compared) == (True, 3)
    assert found.joined == {
        "the same over tp": 1, "dimension 0 over tp": 1, "dimension 2 over tp": 1,
    }  # fmt: skip


@pytest.mark.parametrize("tensors", [True, False])
def test_sums_of_parts_are_not_concatenated(tensors: bool, tmp_path: Path) -> None:
    found = compare(tmp_path, row_parallel(), WHOLE, tensors=tensors)
    assert (found.same, found.compared, found.sums_by_mean) == (True, 3, 0 if tensors else 1)
    assert found.joined == {
        "dimension 2 over tp": 1, "dimension 1 over tp": 1, "sum over tp": 1,
    }  # fmt: skip
    ranks = row_parallel()
    output = ranks[1][LINEAR]["output"]
    ranks[1] = {LINEAR: {**ranks[1][LINEAR], "output": [np.float32(1.01) * output[0]]}}
    first = compare(tmp_path / "faulty", ranks, WHOLE, tensors=tensors).first
    assert first is not None
    assert first["section"] == "output"
    assert first["a"] is not None
    # Of a sum of parts statistics tell the mean alone.
    assert (first["a"]["max"] is None, first["a"]["mean"] is None) == (not tensors, False)


def test_integers_are_as_exact_as_their_rounded_mean_and_norm(tmp_path: Path) -> None:
    ids = np.random.default_rng(3).integers(0, 150_000, (6, 50))
    ranks: list[Calls] = [linear(part, WEIGHT, HIDDEN) for part in np.split(ids, 2)]
    whole = linear(ids, WEIGHT, HIDDEN)
    found = compare(tmp_path, ranks, whole, layout="dp2")
    assert (found.same, "dimension 0 over dp" in found.joined) == (True, True)
    other = ids.copy()
    other[np.unravel_index(ids.argmax(), ids.shape)] += 2
    found = compare(tmp_path / "other", ranks, linear(other, WEIGHT, HIDDEN), layout="dp2")
    assert found.first is not None
    assert found.first["section"] == "input_args"


def test_both_sides_may_have_several_ranks(tmp_path: Path) -> None:
    """Column-parallel over two ranks and over four; rank 2 of the four has another weight."""

    def side(count: int, name: str, faulty: int | None = None) -> list[RankTable]:
        parts = np.split(WEIGHT, count)
        if faulty is not None:
            parts[faulty] = parts[faulty] * np.float32(1.5)
        return [
            rank_table(
                tmp_path / name, rank, linear(HIDDEN, part, HIDDEN @ part.T), {"tp": rank},
                tensors=True,
            )
            for rank, part in enumerate(parts)
        ]  # fmt: skip

    two, thresholds = side(2, "two"), Thresholds(factor=100)
    assert first_divergent(two, side(4, "four"), thresholds).same
    found = first_divergent(two, side(4, "faulty", 2), thresholds)
    assert found.layouts == ["tp 2", "tp 4"]
    assert found.first is not None
    assert [(s["side"], s["rank"]) for s in found.first["shards"]] == [("a", 1), ("b", 2)]


def test_gradients_of_replicas_are_summed_over_every_axis(tmp_path: Path) -> None:
    """A norm's gradient before it is reduced over rows and over the sequence."""
    name = "Module.norm.LayerNorm.parameters_grad.0"
    parts = MADE.normal(size=(4, 16)).astype(np.float32)
    ranks: list[Calls] = [{name: {"weight": [part]}} for part in parts]
    whole: Calls = {name: {"weight": [parts.sum(axis=0)]}}
    for tensors in (True, False):
        path = tmp_path / str(tensors)
        found = compare(path, ranks, whole, layout="dp2tp2", tensors=tensors)
        assert (found.same, found.joined) == (True, {"sum over dp, sum over tp": 1})


def test_a_replica_that_differs_is_named(tmp_path: Path) -> None:
    ranks = column_parallel()
    changed = HIDDEN.copy()
    changed[0, 0, 0] += 5.0
    ranks[1] = {LINEAR: {**ranks[1][LINEAR], "input_args": [changed, np.split(WEIGHT, 2)[1]]}}
    found = compare(tmp_path, ranks, WHOLE)
    assert found.first is not None
    (shard,) = found.first["shards"]
    assert (shard["rank"], shard["coordinates"], shard["evidence"]) == (1, {"tp": 1}, "replicas")


def test_a_parameter_of_replicas_must_agree_in_every_bit(tmp_path: Path) -> None:
    """A difference that rounding explains between the sides is none between copies."""
    changed = WEIGHT * np.float32(1 + 5e-6)
    rows = np.split(HIDDEN, 2)
    ranks = [linear(rows[0], WEIGHT, rows[0] @ WEIGHT.T)]
    ranks.append(linear(rows[1], changed, rows[1] @ WEIGHT.T))
    found = compare(tmp_path, ranks, WHOLE, layout="dp2")
    assert (found.same, found.first) == (False, None)
    (parameter,) = found.unequal_parameters
    assert (parameter["name"], parameter["index"]) == (LINEAR, "1")
    assert [shard["rank"] for shard in parameter["shards"]] == [1]


def test_a_sum_that_one_rank_did_not_receive_is_a_replica_that_differs(tmp_path: Path) -> None:
    """A result of a row-parallel layer after its all-reduce, which failed on a rank."""
    ranks = row_parallel()
    total = HIDDEN @ WEIGHT.T
    outputs = [total, ranks[1][LINEAR]["output"][0]]
    module = "Module.down.RowLinear.forward.0"
    calls = [
        {module: {**rank[LINEAR], "output": [output]}}
        for rank, output in zip(ranks, outputs, strict=True)
    ]
    found = compare(tmp_path, calls, {module: WHOLE[LINEAR]})
    assert found.first is not None
    assert [shard["rank"] for shard in found.first["shards"]] == [1]


def test_the_ranks_of_a_sum_that_differs_are_named(tmp_path: Path) -> None:
    """Two rows of two ranks; a part of the sum of the second row is wrong."""
    ranks = []
    for rows in np.split(HIDDEN, 2):
        for hidden, weight in zip(np.split(rows, 2, -1), np.split(WEIGHT, 2, -1), strict=True):
            ranks.append(linear(hidden, weight, hidden @ weight.T))
    ranks[3] = {LINEAR: {**ranks[3][LINEAR], "output": [ranks[3][LINEAR]["output"][0] * 1.5]}}
    found = compare(tmp_path, ranks, WHOLE, layout="dp2tp2", tensors=True)
    assert found.first is not None
    assert [(s["rank"], s["evidence"]) for s in found.first["shards"]] == [(2, "sum"), (3, "sum")]


def test_too_many_bytes_are_not_read(tmp_path: Path) -> None:
    table = rank_table(tmp_path, 0, WHOLE, {}, tensors=True)
    size = max(path.stat().st_size for path in (tmp_path / "rank0" / TENSOR_FOLDER).iterdir())
    tensors = RankTensors([table], most_bytes=size)
    found = tensors.read(0, 0)
    assert found is not None
    assert np.array_equal(found, HIDDEN)
    assert tensors.read(0, 0) is None


def test_a_file_of_another_shape_than_recorded_is_not_read(tmp_path: Path) -> None:
    ranks = column_parallel()
    ranks[1] = {LINEAR: {**ranks[1][LINEAR], "output": [ranks[1][LINEAR]["output"][0] * 1.5]}}
    compare(tmp_path, ranks, WHOLE, tensors=True)
    for path in tmp_path.glob("*/rank*/dump_tensor_data/*.output.0.pt"):
        torch.save(torch.zeros(3), path)
    tables = [RankTable(rank, tmp_path / f"ranks/rank{rank}/operators.parquet", {"tp": rank},
                        tmp_path / f"ranks/rank{rank}") for rank in range(2)]  # fmt: skip
    one = RankTable(0, tmp_path / "one/rank0/operators.parquet", {}, tmp_path / "one/rank0")
    found = first_divergent(tables, [one], Thresholds(factor=100))
    assert found.first is not None
    assert [shard["evidence"] for shard in found.first["shards"]] in ([], ["extremes"])


def test_sequence_parallel_is_dimension_1(tmp_path: Path) -> None:
    ranks: list[Calls] = [
        {"Functional.silu.0.forward": {"input_args": [part], "output": [part / 2]}}
        for part in np.split(HIDDEN, 2, 1)
    ]
    whole: Calls = {"Functional.silu.0.forward": {"input_args": [HIDDEN], "output": [HIDDEN / 2]}}
    found = compare(tmp_path, ranks, whole)
    assert (found.same, found.joined) == (True, {"dimension 1 over tp": 2})


def test_uneven_shards_are_weighted_by_their_elements(tmp_path: Path) -> None:
    name = "Functional.silu.0.forward"
    ranks: list[Calls] = [{name: {"output": [part]}} for part in np.split(HIDDEN, [1], 0)]
    found = compare(tmp_path, ranks, {name: {"output": [HIDDEN]}}, layout="dp2")
    assert (found.same, found.joined) == (True, {"dimension 0 over dp": 1})


def test_a_fused_weight_is_cut_in_each_of_its_matrices(tmp_path: Path) -> None:
    """Queries, keys and values of a rank's heads lie one after the other."""
    fused = MADE.normal(size=(48, 16)).astype(np.float32)
    parts = [np.concatenate(each) for each in
             zip(*(np.split(matrix, 2) for matrix in np.split(fused, 3)), strict=True)]  # fmt: skip
    parts[1] = parts[1] * np.float32(1.01)
    ranks = [linear(HIDDEN, part, HIDDEN @ part.T) for part in parts]
    found = compare(tmp_path, ranks, linear(HIDDEN, fused, HIDDEN @ fused.T), tensors=True)
    assert found.first is not None
    assert [(s["rank"], s["evidence"]) for s in found.first["shards"]] == [(1, "values")]


def test_sizes_of_shards_are_no_difference(tmp_path: Path) -> None:
    name = "Tensor.view.0.forward"

    def view(hidden: Array, width: int, start: int) -> Calls:
        return {name: {"input_args": [hidden, width, start], "output": [hidden]}}

    parts = np.split(HIDDEN, 2, -1)
    found = compare(tmp_path, [view(part, 8, 0) for part in parts], view(HIDDEN, 16, 0))
    assert (found.same, found.not_joined) == (True, 0)
    assert found.joined["a size of the shard"] == 1
    # An offset into the vocabulary depends on the rank.
    ranks = [view(part, 8, 8 * at) for at, part in enumerate(parts)]
    found = compare(tmp_path / "offset", ranks, view(HIDDEN, 16, 0))
    assert (found.same, found.not_joined) == (True, 1)
    assert "depends on the rank" in found.unjoined[0]["reason"]


def test_a_rule_says_what_shapes_do_not(tmp_path: Path) -> None:
    name = "Torch.foreign.0.forward"
    parts = [HIDDEN * np.float32(weight) for weight in (0.25, 0.75)]
    ranks: list[Calls] = [{name: {"output": [part]}} for part in parts]
    whole: Calls = {name: {"output": [HIDDEN]}}
    assert not compare(tmp_path / "none", ranks, whole, tensors=True).same
    rule = ["Torch.foreign.*.output.0=tp:sum"]
    found = compare(tmp_path / "sum", ranks, whole, tensors=True, rules=rule)
    assert (found.same, found.joined) == (True, {"sum over tp": 1})
    found = compare(tmp_path / "skip", ranks, whole, rules=["Torch.*=tp:skip"])
    assert (found.same, found.unjoined[0]["reason"]) == (True, "left out by a shard rule")


@pytest.mark.parametrize("rule", ["Torch.absent.*=tp:sum", "Torch.foreign.*=ep:0"])
def test_a_rule_that_counts_for_no_tensor_is_refused(tmp_path: Path, rule: str) -> None:
    calls: Calls = {"Torch.foreign.0.forward": {"output": [HIDDEN]}}
    with pytest.raises(InvalidInput, match="counts for no tensor"):
        compare(tmp_path, [calls, calls], calls, rules=["Torch.foreign.*=tp:same", rule][::-1])


def test_a_bias_that_is_added_after_the_sum_is_not_missing(tmp_path: Path) -> None:
    bias = np.ones(8, np.float32)
    biased: Calls = {
        LINEAR: {"input_args": [HIDDEN, WEIGHT, bias], "output": [HIDDEN @ WEIGHT.T + bias]}
    }
    found = compare(tmp_path, row_parallel(), biased)
    assert (found.same, found.compared, found.not_joined) == (True, 2, 2)
    assert "such as a bias" in found.unjoined[0]["reason"]


def test_the_placements_of_a_dtensor_say_how_it_is_put_together(tmp_path: Path) -> None:
    name = "Torch.foreign.0.forward"

    def table(folder: str, value: Array, placements: Json) -> Path:
        output = [{**described(value, ""), "placements": placements}]
        data = {"task": "statistics", "level": "L1", "data": {name: {"output": output}}}
        return tabled(tmp_path / folder, json.dumps(data))[0]

    def compared(folder: str, parts: Sequence[Array], *placements: Json) -> OperatorDivergence:
        ranks = [
            RankTable(rank, table(f"{folder}{rank}", part, [*placements]), {"tp": rank})
            for rank, part in enumerate(parts)
        ]
        return first_divergent(ranks, table("one", HIDDEN, None), Thresholds(factor=100))

    halves = [HIDDEN * np.float32(weight) for weight in (0.25, 0.75)]
    found = compared("sum", halves, {"Partial": {"reduce_op": "sum"}})
    assert (found.same, found.joined) == (True, {"sum over tp": 1})
    # Placements that the shapes contradict do not count, as those of backward calls.
    for number, wrong in enumerate(({"Shard": {"dim": 1}}, {"Shard": 7}, [], "Shard")):
        found = compared(f"wrong{number}", [HIDDEN, HIDDEN], wrong)
        assert (found.same, found.joined) == (True, {"the same over tp": 1})


def test_what_cannot_be_put_together_is_said(tmp_path: Path) -> None:
    name = "Torch.foreign.0.forward"
    ranks: list[Calls] = [{name: {"output": [HIDDEN[:, :5]]}} for _ in range(2)]
    found = compare(tmp_path, ranks, {name: {"output": [HIDDEN]}})
    assert (found.compared, found.not_joined) == (0, 1)
    assert found.unjoined[0]["reason"] == (
        "[4, 5, 16] of 2 ranks and [4, 6, 16] make no tensor in common"
    )


@pytest.mark.parametrize("layout", ["tp2", "xp4", "tp2tp2", "2", ""])
def test_a_layout_of_another_form_is_refused(layout: str) -> None:
    with pytest.raises(InvalidInput):
        read_layout(layout, range(4))


@pytest.mark.parametrize("rule", ["x", "x=tp", "x=tp:total", "x=xp:0", "=tp:0"])
def test_a_rule_of_another_form_is_refused(rule: str) -> None:
    with pytest.raises(InvalidInput):
        read_rule(rule)
