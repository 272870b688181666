"""The first divergent operator: real dumps that differ in one thing, and made-up edge cases."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from tests.support.dumps import Argument, ExtraCall, table, table_of
from tests.support.dumps import tensor_argument as tensor
from tests.support.small_decoder import SmallDecoder, small_decoder

from stagescope_service.compare.operators.differences import EPS, Thresholds
from stagescope_service.compare.operators.divergence import first_divergent
from stagescope_service.compare.operators.divergence_answer import OperatorDivergence

LEVELS = ("L0", "L1", "mix")
Side = Literal["a", "b"]


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def reference(level: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table(tmp_path_factory.mktemp(level), level=level)


def extra_call() -> SmallDecoder:
    model = ExtraCall()
    model.load_state_dict(small_decoder().state_dict())
    return model


def first_name(found: OperatorDivergence, side: Side = "a") -> str:
    assert found.first is not None
    argument = found.first[side]
    assert argument is not None
    return argument["name"]


def test_the_same_pass_twice_is_the_same_in_every_bit(
    reference: Path, level: str, tmp_path: Path
) -> None:
    found = first_divergent(reference, table(tmp_path, level=level), Thresholds(exact=True))
    assert found.same
    assert (found.first, found.counts, found.rows) == (None, {}, [])
    assert found.paired > 30
    assert (found.parameters_compared > 0) == (found.gradients_compared > 0) == (level != "L1")


def test_bfloat16_against_float32_is_rounding(reference: Path, level: str, tmp_path: Path) -> None:
    found = first_divergent(
        reference, table(tmp_path, small_decoder().to(torch.bfloat16), level=level)
    )
    assert found.same, found.first
    tight = Thresholds(by_dtype={"bfloat16": 1e-6, "float32": 1e-6})
    assert first_divergent(reference, tmp_path / "operators.parquet", tight).first is not None


def test_a_weight_that_differs_is_found_in_its_operator(
    reference: Path, level: str, tmp_path: Path
) -> None:
    model = small_decoder()
    model.get_parameter("blocks.0.out.weight").data.mul_(1.5)
    found = first_divergent(reference, table(tmp_path, model, level=level), limit=3)
    fields = json.loads(json.dumps(found.fields(), allow_nan=False))
    assert (fields["same"], len(fields["rows"])) == (False, 3)
    assert fields["counts"]["statistics"] > 3
    assert fields["first"]["a"]["shape"][-1] == 16
    module = "Module.blocks.0.out.Linear.forward.0"
    assert first_name(found) == (module if level == "L0" else "Functional.linear.1.forward")
    assert "output" in found.first_sections
    if level == "L1":
        assert (found.first_parameter, found.first_gradient) == (None, None)
        return
    assert found.first_parameter is not None
    assert found.first_gradient is not None
    weight = found.first_parameter
    assert weight["a"] is not None
    assert (weight["a"]["name"], weight["index"], weight["verdict"]) == (
        module, "weight", "statistics",
    )  # fmt: skip
    assert weight["relative"] == pytest.approx(1 / 3)
    assert weight["threshold"] == 4 * 2.0**-23
    assert found.first_gradient["section"] == "grad"


def test_an_extra_call_shifts_nothing(reference: Path, level: str, tmp_path: Path) -> None:
    extra = table(tmp_path, extra_call(), level=level)
    for found, alone in (
        (first_divergent(reference, extra), "only_b"),
        (first_divergent(extra, reference), "only_a"),
    ):
        assert (found.first, found.counts, found.moved) == (None, {}, 0)
        assert found.exact_alignment
        listed = getattr(found, alone)
        # The product with 0.0 and its sum, forward and backward; a module sees none of it.
        operators = [] if level == "L0" else ["linear", "__rmul__", "__add__"]
        assert [call["operator"] for call in listed] == [*operators, *reversed(operators)]
        assert found.same == (level == "L0")


def test_a_difference_behind_an_extra_call_is_still_found(tmp_path: Path) -> None:
    model = extra_call()
    model.get_parameter("blocks.1.up.weight").data.mul_(1.5)
    found = first_divergent(
        table(tmp_path / "a", level="L1"), table(tmp_path / "b", model, level="L1")
    )
    assert first_name(found, "a") == "Functional.linear.6.forward"
    assert first_name(found, "b") == "Functional.linear.7.forward"


def test_modules_against_modules_and_operators_lists_the_operators(tmp_path: Path) -> None:
    found = first_divergent(
        table(tmp_path / "a", level="L0"), table(tmp_path / "b", level="mix"), limit=5
    )
    assert (found.first, found.only_a_count) == (None, 0)
    assert len(found.only_b) == 5 < found.only_b_count


def device(name: str | int) -> Argument:
    return {"type": "torch.device", "value": name}


Call = tuple[str, Sequence[Argument | None]]
"""Name and outputs of a call."""


def write_table(path: Path, calls: Iterable[Call]) -> Path:
    return table_of(path, {name: {"input_args": [], "output": outputs} for name, outputs in calls})


def compare_calls(
    path: Path,
    a: Iterable[Call],
    b: Iterable[Call],
    *,
    exact: bool = False,
    skip_sharded: bool = False,
) -> OperatorDivergence:
    one, other = write_table(path / "a", a), write_table(path / "b", b)
    return first_divergent(one, other, Thresholds(exact=exact), skip_sharded=skip_sharded)


def compare_outputs(
    path: Path, a: Argument | None, b: Argument | None, *, exact: bool = False
) -> OperatorDivergence:
    """Compare two outputs of one operator."""
    one, other = ([("Torch.x.0.forward", [output])] for output in (a, b))
    return compare_calls(path, one, other, exact=exact)


def reading_call(
    path: Path, high: float, *before: tuple[float, float], shape: Sequence[int] = (2,)
) -> Path:
    """One call that reads a tensor of [-1, high], after calls that return other ones."""
    data: dict[str, object] = {
        f"Torch.x.{at}.forward": {"input_args": [], "output": [tensor(*extremes)]}
        for at, extremes in enumerate(before)
    }
    data["Torch.y.0.forward"] = {"input_args": [tensor(-1, high, shape=shape)], "output": []}
    return table_of(path, data)


@pytest.mark.parametrize(
    ("before", "more", "has_note"),
    [
        ([], {}, True),
        ([(-1, 3), (0, 1)], {}, True),
        ([(-1, 1)], {}, False),  # what a returned, b changed behind what is recorded
        ([(-1, 2)], {}, False),
        ([(-1, 1)], {"shape": [1, 2]}, False),  # a view of it
    ],
)
def test_an_input_that_a_recorded_call_may_have_returned_has_no_note(
    tmp_path: Path, before: list[tuple[float, float]], more: dict[str, list[int]], has_note: bool
) -> None:
    a, b = (reading_call(tmp_path / str(high), high, *before, **more) for high in (1, 2))
    found = first_divergent(a, b)
    assert found.first is not None
    assert found.first["section"] == "input_args"
    assert (found.first_note is not None) == has_note
    assert not has_note or "input_args.0 of Torch.y.0.forward" in str(found.first_note)


BF16_MIN, FP32_MIN = -3.3895313892515355e38, -3.4028234663852886e38
EMPTY = tensor(None, None)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (tensor(0, 1), None, "type"),
        (tensor(0, 1), {"type": "float", "value": 1.0}, "type"),
        (tensor(0, 1), tensor(0, 2, shape=[1, 2]), "shape"),
        (tensor(0, math.inf), tensor(-math.inf, math.inf), "non_finite"),
        (tensor(-math.inf, 1), tensor(-math.inf, 1), None),
        (tensor(-math.inf, 1), tensor(-math.inf, 2), "statistics"),
        (tensor(None, None, md5="a"), tensor(None, None, md5="b"), "checksum"),
        (tensor(0, 1, md5="a"), tensor(0, 1, md5="b"), None),
        (EMPTY, EMPTY, None),
        (tensor(0, 7, dtype="torch.int64"), tensor(0, 8, dtype="torch.int64"), "statistics"),
        (tensor(FP32_MIN, 0), tensor(BF16_MIN, 0, dtype="torch.bfloat16"), None),
        (tensor(FP32_MIN, 0), tensor(-65504.0, 0, dtype="torch.float16"), None),
        (tensor(FP32_MIN, 0), tensor(-1e9, 0), "statistics"),
        (tensor(FP32_MIN, 0), tensor(0, 3.4028234663852886e38), "statistics"),
        (tensor(0, 1, Norm=math.inf), tensor(0, 1, Norm=548.0), None),
        (tensor(0, 1, Norm=500.0), tensor(0, 1, Norm=548.0), "statistics"),
        (tensor(-3, 3, Mean=1e-9), tensor(-3, 3, Mean=-1e-9), None),
        (tensor(-3, 3, Mean=0.1), tensor(-3, 3, Mean=-0.1), "statistics"),
        ({"type": "int", "value": 1}, {"type": "int", "value": 2}, "value"),
        ({"type": "float", "value": 1.0}, {"type": "float", "value": 1.0 + 1e-7}, "value"),
        ({"type": "str", "value": "a"}, None, "value"),
        (device("npu:0"), device("npu:7"), None),
        (device("cpu"), device("npu:7"), "value"),
        (device(0), device(7), None),
        (device("npu:0"), device(7), None),
        (device("cpu"), device(7), "value"),
    ],
)  # fmt: skip
def test_verdicts(tmp_path: Path, a: Argument, b: Argument | None, verdict: str | None) -> None:
    for found in (compare_outputs(tmp_path, a, b), compare_outputs(tmp_path, b, a)):
        assert (found.first["verdict"] if found.first else None) == verdict
        assert found.counts == ({verdict: 1} if verdict else {})


def test_with_exact_every_number_and_checksum_must_be_equal(tmp_path: Path) -> None:
    close, other = tensor(0, 1.0), tensor(0, 1.0 + 1e-12)
    assert compare_outputs(tmp_path, close, other).same
    assert compare_outputs(tmp_path, close, other, exact=True).counts == {"statistics": 1}
    a, b = tensor(0, 1, md5="a"), tensor(0, 1, md5="b")
    assert compare_outputs(tmp_path, a, b, exact=True).counts == {"checksum": 1}
    assert compare_outputs(tmp_path, a, b).other_checksums == 1
    assert compare_outputs(tmp_path, a, tensor(0, 2, md5="b")).other_checksums == 0


@pytest.mark.parametrize("dtype", sorted(set(EPS) - {"float64", "complex128"}))
def test_the_threshold_is_four_eps_of_the_coarser_dtype(tmp_path: Path, dtype: str) -> None:
    for share, same in ((0.9, True), (1.1, False)):
        far = 1 - share * 4 * EPS[dtype]
        found = compare_outputs(
            tmp_path, tensor(0, 1, dtype="torch.float64"), tensor(0, far, dtype=f"torch.{dtype}")
        )
        assert found.same == same


def test_a_value_that_was_rounded_once_stays_rounded(tmp_path: Path) -> None:
    def calls(value: float) -> list[Call]:
        rounded = tensor(0, 1, dtype="torch.bfloat16")
        outputs = {"x": tensor(0, value), "y": rounded, "z": tensor(0, value)}
        return [(f"Torch.{name}.0.forward", [output]) for name, output in outputs.items()]

    found = compare_calls(tmp_path, calls(1.0), calls(1.01))
    # Before the first bfloat16 one percent is a difference, behind it none.
    assert [row["a"] and row["a"]["operator"] for row in found.rows] == ["x"]


@pytest.mark.parametrize(("has", "lacks"), [("a", "b"), ("b", "a")])
def test_a_tensor_that_one_side_lacks_is_missing_and_a_none_is_not(
    tmp_path: Path, has: Side, lacks: Side
) -> None:
    more: list[Call] = [("Torch.x.0.forward", [tensor(0, 1), tensor(0, 1), None])]
    fewer: list[Call] = [("Torch.x.0.forward", [tensor(0, 1)])]
    found = compare_calls(tmp_path, *((more, fewer) if has == "a" else (fewer, more)))
    assert found.counts == {"missing": 1}
    assert found.first is not None
    assert first_name(found, has) == "Torch.x.0.forward"
    assert found.first["index"] == "1"
    assert found.first[lacks] is None


def test_a_module_that_moved_is_paired_by_its_name(tmp_path: Path) -> None:
    calls: list[Call] = [(f"Module.m{i}.Linear.forward.0", [tensor(0, 1)]) for i in range(4)]
    found = compare_calls(tmp_path, calls, [calls[3], *calls[:3]])
    assert (found.same, found.moved, found.paired) == (True, 1, 4)


def test_wrappers_in_a_path_do_not_count(tmp_path: Path) -> None:
    wrapped = "Module._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.up.Linear.forward.0"
    names = ("Module.layers.0.up.Linear.forward.0", wrapped)
    one, other = ([(name, [tensor(0, 1)])] for name in names)
    assert compare_calls(tmp_path, one, other).same


def test_shards_of_two_ranks_are_left_out_on_request(tmp_path: Path) -> None:
    shard = [{"Shard": {"dim": 0}}]
    one, other = ([("Torch.x.0.forward", [tensor(0, high, placements=shard)])] for high in (1, 9))
    assert compare_calls(tmp_path, one, other).counts == {"statistics": 1}
    found = compare_calls(tmp_path, one, other, skip_sharded=True)
    assert (found.same, found.sharded, found.compared) == (True, 1, 0)


def test_tables_with_nothing_in_common_and_empty_ones(tmp_path: Path) -> None:
    one, other = ([(f"Torch.{name}.0.forward", [tensor(0, 1)])] for name in "xy")
    assert compare_calls(tmp_path, [], []).same
    assert compare_calls(tmp_path, one, []).only_a_count == 1
    found = compare_calls(tmp_path, one, other)
    assert (found.first, found.only_a_count, found.only_b_count) == (None, 1, 1)
    assert not found.same
