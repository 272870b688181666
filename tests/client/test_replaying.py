"""A stored step through a loss function: the first intermediate that differs is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stagescope
from stagescope.replaying import BITWISE, DIFFERENT, EQUAL, WITHIN, compare
from stagescope_wire.batch import Batch, BatchPart, Tensor
from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_wire.schema import Part

Loss = Callable[[Batch], dict[str, Any]]


def loss(micro: Batch) -> dict[str, Any]:
    """PPO's clipped loss, in torch."""
    given_ = micro.as_tensors()
    ratio = torch.exp(given_["log_probs"] - given_["old_log_probs"])
    gain = torch.minimum(ratio * given_["advantages"], ratio.clamp(0.8, 1.2) * given_["advantages"])
    mask = given_["response_mask"].float()
    return {
        "prob_ratio": ratio,
        "elementwise_loss": -gain * mask,
        "loss": -(gain * mask).sum() / mask.sum(),
    }


def recorded() -> Batch:
    """Four rows; two ranks, two epochs, with the intermediates that `loss` makes of them."""
    generator = np.random.default_rng(3)
    shape = (4, 6)
    mask = np.ones(shape, np.int64)
    mask[1, 4:] = 0
    tensors = {
        name: Tensor("float32", -generator.random(shape).astype(np.float32))
        for name in ("old_log_probs", "advantages")
    } | {"response_mask": Tensor("int64", mask)}
    batch = Batch(4, tensors, {"sample_ids": ("a", "b", "c", "d")}, source={"run": "r", "step": 5})
    parts = []
    for epoch in (0, 1):
        for rank in (0, 1):
            rows = np.array([2 * rank, 2 * rank + 1])
            values = -generator.random((2, 6)).astype(np.float32)
            own = {"log_probs": Tensor("float32", values)}
            part = BatchPart("actor_update", "actor", rank, Part(epoch=epoch), rows, own=own)
            made = loss(batch.microbatch(part))
            own |= {n: Tensor("float32", np.asarray(made[n])) for n in made if n != "loss"}
            numbers = {"loss": float(made["loss"])}
            names = (*own,)
            parts.append(dataclasses.replace(part, own=own, numbers=numbers, names=names))
    return dataclasses.replace(batch, parts=tuple(parts))


def planted(name: str, change: Callable[[torch.Tensor], torch.Tensor], rank: int = 1) -> Loss:
    """The loss with a change in one intermediate, and in what follows of it, on one rank."""

    def spoiled(micro: Batch) -> dict[str, object]:
        found = loss(micro)
        names = [*found]
        if micro.source["rank"] == rank:
            for each in names[names.index(name) :]:
                found[each] = change(found[each])
        return found

    return spoiled


def test_the_same_function_gives_the_same_bits() -> None:
    found = stagescope.replay(recorded(), loss)
    assert found.same
    assert found.first is None
    assert found.verdict == BITWISE
    assert len(found) == 12
    assert found.about["not_computed"] == ["log_probs"]
    assert "the same, bit by bit" in str(found)


def test_a_planted_change_is_found_at_its_intermediate() -> None:
    def change(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value.reshape(-1)[value.numel() // 2 if value.dim() else 0] += 0.25
        return value

    found = stagescope.replay(recorded(), planted("elementwise_loss", change))
    first = found.first
    assert not found.same
    assert first is not None
    assert (first["name"], first["rank"], first["part"]) == ("elementwise_loss", 1, "0.0.0.0")
    assert (first["coordinate"], first["sample_id"]) == ([1, 0], "d")
    assert first["computed"] - first["stored"] == pytest.approx(0.25)
    assert first["max_abs"] == pytest.approx(0.25)
    assert first["mean_abs"] == pytest.approx(0.25 / 12)
    assert (first["differ"], first["compared"]) == (1, 12)
    assert set(found.where(name="prob_ratio")["verdict"]) == {BITWISE}
    text = str(found)
    assert "first difference: elementwise_loss (actor_update, rank 1, part 0.0.0.0)" in text
    assert "of sample d" in text.replace("\n", " ")
    assert max(map(len, text.splitlines())) <= 80


def test_a_rounding_is_within_tolerance_unless_none_is_allowed() -> None:
    def change(value: torch.Tensor) -> torch.Tensor:
        return value * (1 + 2**-23)

    found = stagescope.replay(recorded(), planted("prob_ratio", change))
    assert found.same
    assert found.verdict == WITHIN
    assert found.first is not None
    assert found.first["name"] == "prob_ratio"
    assert "same within tolerance; first" in str(found)
    strict = stagescope.replay(recorded(), planted("prob_ratio", change), tolerance=0.0)
    assert not strict.same


def test_numpy_functions_files_and_whole_batches(tmp_path: Path) -> None:
    def in_numpy(micro: Batch) -> Mapping[str, object]:
        return {"prob_ratio": np.exp(micro["log_probs"] - micro["old_log_probs"])}

    path = recorded().save(tmp_path / "batch.safetensors")
    assert stagescope.replay(path, in_numpy).same
    (micro, *_) = recorded().microbatches()
    assert stagescope.replay(dataclasses.replace(micro, others={}), in_numpy).same


def test_missing_and_non_numeric_results_are_reported() -> None:
    def other(micro: Batch) -> dict[str, object]:
        return {"kl_loss": 1.0}

    with pytest.raises(NotFound, match="is stored: kl_loss; expected some of elementwise_loss, lo"):
        stagescope.replay(recorded(), other)
    with pytest.raises(InvalidInput, match="returned a float"):
        stagescope.replay(recorded(), lambda micro: 1.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidInput, match="loss is a str"):
        stagescope.replay(recorded(), lambda micro: {"loss": "0.5"})
    found = stagescope.replay(recorded(), lambda micro: {**loss(micro), "kl_loss": 1.0})
    assert found.about["not_stored"] == ["kl_loss"]


@pytest.mark.parametrize("wrong", [(2, 7), (2, 1), (2,), (1, 6), (0, 6)])
def test_an_intermediate_of_another_shape_is_refused(wrong: tuple[int, ...]) -> None:
    def narrower(micro: Batch) -> dict[str, object]:
        return {**loss(micro), "prob_ratio": np.zeros(wrong, np.float32)}

    output = rf"prob_ratio .* has shape \[{', '.join(map(str, wrong))}\] \(actor_update, rank 0"
    with pytest.raises(InvalidInput, match=rf"{output}.*expected \[2, 6\]"):
        stagescope.replay(recorded(), narrower)
    with pytest.raises(InvalidInput, match=r"loss .* has shape \[2\].*expected \[\]"):
        stagescope.replay(recorded(), lambda micro: {**loss(micro), "loss": np.zeros(2)})


def test_a_batch_whose_tensors_have_other_rows_is_refused() -> None:
    batch = recorded()
    tensors = {**batch.tensors, "advantages": Tensor("float32", np.zeros((3, 6), np.float32))}
    with pytest.raises(InvalidInput, match=r"tensor advantages has shape \(3, 6\); expected 4"):
        stagescope.replay(dataclasses.replace(batch, tensors=tensors), loss)


# --- the comparison itself -----------------------------------------------------------------------
def tensor(values: object, dtype: str = "float32") -> Tensor:
    return Tensor(dtype, np.asarray(values, dtype if dtype != "bfloat16" else np.uint16))


def test_nan_at_the_same_index_is_equal() -> None:
    a, b = tensor([1, np.nan, np.inf]), tensor([1, np.nan, np.inf])
    assert compare(a, b, None).verdict == BITWISE
    found = compare(a, tensor([1, 2, np.inf]), None)
    assert (found.verdict, found.coordinate, found.max_abs) == (DIFFERENT, (1,), np.inf)


def test_whole_numbers_are_exact_beyond_two_to_the_53() -> None:
    a, b = tensor([2**53], "int64"), tensor([2**53 + 1], "int64")
    assert compare(a, b, None).verdict == DIFFERENT
    assert compare(a, a, None).verdict == BITWISE


def test_another_dtype_with_the_same_values_is_equal() -> None:
    half = Tensor("bfloat16", np.array([0x3F80, 0x4000], np.uint16))
    assert compare(tensor([1, 2]), half, None).verdict == EQUAL
    assert compare(tensor([1, 2.01]), half, None).verdict == WITHIN


def test_another_shape_is_different() -> None:
    found = compare(tensor([1, 2]), tensor([[1, 2]]), None)
    assert (found.verdict, found.compared, found.coordinate) == (DIFFERENT, 0, None)


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=30), st.data()
)  # every float, NaN and infinities too
def test_one_changed_element_is_found_with_its_coordinate(
    values: list[float], data: st.DataObject
) -> None:
    a = tensor(values)
    at = data.draw(st.integers(0, len(values) - 1))
    mask = np.ones(len(values), bool)
    mask[data.draw(st.integers(0, len(values) - 1))] = False
    changed = np.array(values, np.float32)
    changed[at] = 7.0 if changed[at] != 7.0 else 8.0
    found = compare(a, tensor(changed), mask)
    if mask[at]:
        assert (found.coordinate, found.differ, found.outside) == ((at,), 1, 0)
    else:
        assert (found.verdict, found.outside) == (BITWISE, 1)
