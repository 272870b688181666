"""The first non-finite operator: planted NaNs, real masks, and made-up edge cases."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.dumps import Argument, Masked, table, table_of
from tests.support.dumps import tensor_argument as tensor
from tests.support.small_decoder import small_decoder
from torch import nn

from stagescope_service.compare.operators.non_finite import first_non_finite, non_finite_of_rank
from stagescope_service.dumps.msprobe.operator_table import write_operator_table


def planted(value: float, layer: str = "blocks.1.down") -> nn.Module:
    model = small_decoder()
    model.get_parameter(f"{layer}.weight").data[0, 0] = value
    return model


@pytest.mark.parametrize(
    ("level", "value", "name", "argument"),
    [
        ("L0", -math.inf, "Module.blocks.1.down.Linear.forward.0", ("parameters", "weight")),
        ("L1", math.inf, "Functional.linear.7.forward", ("input_args", "1")),
        ("mix", math.nan, "Functional.linear.7.forward", ("input_args", "1")),
    ],
)
def test_the_layer_with_the_planted_weight_is_named(
    tmp_path: Path, level: str, value: float, name: str, argument: tuple[str, str]
) -> None:
    found = non_finite_of_rank(table(tmp_path, planted(value), level=level))
    assert found.first is not None
    assert found.first["name"] == name
    assert found.certain
    (bad,) = found.bad_inputs
    assert (bad["section"], bad["index"]) == argument
    assert found.masks == 0


@pytest.mark.parametrize(("level", "masks"), [("L1", 2), ("mix", 3)])
def test_a_mask_of_minus_infinity_is_no_culprit(tmp_path: Path, level: str, masks: int) -> None:
    found = non_finite_of_rank(table(tmp_path, Masked(), level=level))
    assert (found.first, found.culprits, found.masks) == (None, 0, masks)
    assert found.first_masks[0] == "Tensor.masked_fill.0.forward"


def test_behind_a_mask_the_real_culprit_is_named(tmp_path: Path) -> None:
    model = Masked()
    model.lm_head.weight.data[0, 0] = math.nan
    for level, name in (
        ("L0", "Module.lm_head.Linear.forward.0"),
        ("mix", "Functional.linear.0.forward"),
    ):
        found = non_finite_of_rank(table(tmp_path / level, model, level=level))
        assert found.first is not None
        assert (found.first["name"], found.certain) == (name, True)


def test_without_its_operators_a_module_with_minus_infinity_is_only_perhaps_a_mask(
    tmp_path: Path,
) -> None:
    found = non_finite_of_rank(table(tmp_path, Masked(), level="L0"))
    assert found.first is not None
    assert found.first["name"] == "Module.scores.Scores.forward.0"
    assert not found.certain


FINE = tensor(0.0, 1.0)
MINUS = tensor(-math.inf, 1.0)
PLUS = tensor(0.0, math.inf)
NAN = tensor(math.nan, math.nan)
FLT_MAX = tensor(-3.4028234663852886e38, 0.0)


def write_table(path: Path, *calls: tuple[str, Sequence[Argument], Sequence[Argument]]) -> Path:
    """A dump of (name, inputs, outputs)."""
    data = {
        name: {"input_args" if "forward" in name else "input": inputs, "output": outputs}
        for name, inputs, outputs in calls
    }
    return table_of(path, data)


@pytest.mark.parametrize(
    ("name", "inputs", "output", "named"),
    [
        ("Tensor.masked_fill_.0.forward", [FINE], MINUS, False),
        ("Torch.where.0.forward", [FINE, FINE, MINUS], MINUS, False),
        ("Torch.full.0.forward", [], tensor(math.inf, math.inf), False),
        ("Tensor.__add__.0.forward", [FINE, MINUS], MINUS, False),
        ("Tensor.float.0.forward", [MINUS], MINUS, False),
        ("Functional.log_softmax.0.forward", [MINUS], MINUS, False),
        ("Torch.empty.0.forward", [], NAN, False),
        ("Tensor.__add__.0.forward", [FINE, FLT_MAX], FLT_MAX, False),
        ("Torch.log.0.forward", [FINE], MINUS, True),
        ("Torch.sum.0.forward", [MINUS], MINUS, True),
        ("Functional.linear.0.forward", [MINUS, FINE], MINUS, True),
        ("Tensor.masked_fill.0.forward", [NAN], NAN, True),
        ("Functional.softmax.0.forward", [MINUS], NAN, True),
        ("Tensor.__mul__.0.forward", [FINE, FINE], PLUS, True),
        ("Tensor.__add__.0.forward", [PLUS], MINUS, True),
        ("Tensor.__add__.0.backward", [MINUS], MINUS, True),
        ("Functional.dropout.0.backward", [FINE], PLUS, True),
    ],
)
def test_masks_and_culprits_are_distinguished(
    tmp_path: Path, name: str, inputs: list[Argument], output: Argument, named: bool
) -> None:
    found = non_finite_of_rank(write_table(tmp_path, (name, inputs, [output])))
    assert (found.culprits == 1) == (found.first is not None) == named


def test_a_parameter_is_no_mask(tmp_path: Path) -> None:
    name = "Module.bias.AddBias.forward.0"
    for parameters, certain in (({"bias": MINUS}, True), ({"bias": FINE}, False)):
        record = {"input_args": [FINE], "output": [MINUS], "parameters": parameters}
        found = non_finite_of_rank(table_of(tmp_path, {name: record}, level="L0"))
        assert found.first is not None
        assert found.certain == certain


def test_gradients_of_saved_values_come_after_these(tmp_path: Path) -> None:
    """msprobe writes a gradient beside its value, though the loss was computed in between."""
    bad = tensor(math.inf, math.inf, shape=[])
    saved = {"logits_grad.0.debug": bad, "loss.0.debug": bad}
    (tmp_path / "debug.json").write_text(json.dumps({"level": "debug", "data": saved}))
    write_operator_table(tmp_path, tmp_path / "o.parquet")
    found = non_finite_of_rank(tmp_path / "o.parquet")
    assert found.first is not None
    assert (found.first["name"], found.culprits) == ("loss.0.debug", 2)
    (tmp_path / "debug.json").write_text(json.dumps({"data": {"logits_grad.0.debug": bad}}))
    write_operator_table(tmp_path, tmp_path / "o.parquet")
    alone = non_finite_of_rank(tmp_path / "o.parquet")
    assert alone.first is not None
    assert alone.first["name"] == "logits_grad.0.debug"


def test_a_bad_input_alone_is_no_result(tmp_path: Path) -> None:
    path = write_table(tmp_path, ("Torch.isnan.0.forward", [NAN], [FINE]))
    assert non_finite_of_rank(path).first is None


def test_ranks_in_another_order_are_listed_and_come_last(tmp_path: Path) -> None:
    forward = [("Torch.a.0.forward", [FINE], [FINE]), ("Torch.b.0.forward", [FINE], [NAN])]
    usual = write_table(tmp_path / "usual", *forward, ("Torch.c.0.forward", [NAN], [NAN]))
    cut = write_table(tmp_path / "cut", *forward)
    other = write_table(tmp_path / "other", ("Torch.x.0.forward", [FINE], [NAN]))
    late = write_table(tmp_path / "late", forward[0], ("Torch.b.0.forward", [FINE], [FINE]),
                       ("Torch.c.0.forward", [FINE], [NAN]))  # fmt: skip
    found = first_non_finite({0: other, 1: late, 2: usual, 3: usual, 4: cut})
    assert found == {"earliest": 2, "together": [2, 3, 4], "order_differs": [0]}


def test_if_only_other_orders_found_anything_finite_inputs_go_first(tmp_path: Path) -> None:
    fine = write_table(tmp_path / "fine", ("Torch.a.0.forward", [FINE], [FINE]))
    bad_inputs = write_table(tmp_path / "got", ("Torch.y.0.forward", [NAN], [NAN]))
    finite_inputs = write_table(tmp_path / "made", ("Torch.z.0.forward", [FINE], [NAN]))
    found = first_non_finite({0: fine, 1: fine, 2: bad_inputs, 3: finite_inputs})
    assert found == {"earliest": 3, "together": [3], "order_differs": [2, 3]}
    assert first_non_finite({0: fine}) == {"earliest": None, "together": [], "order_differs": []}
