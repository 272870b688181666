from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.dump_files import areal_batch, areal_file, make_batch

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.records import mapping
from stagescope_wire.errors import InvalidTensor


@pytest.mark.parametrize("form", ["dict", "tensordict"])
def test_padded_batches(tmp_path: Path, form: str) -> None:
    batch = make_batch(6, 20)
    dump = open_dump(areal_file(tmp_path / "batch_data.pt", batch, form=form))
    assert (dump.kind, dump.problems, len(dump.entries)) == ("areal", [], 1)
    record = dump.read(dump.entries[0])
    expected = areal_batch(batch)
    assert record.mask == "loss_mask"
    for theirs, ours in {"input_ids": "tokens", "logprobs": "rollout_log_probs",
                         "loss_mask": "loss_mask", "versions": "versions",
                         "rewards": "rewards"}.items():  # fmt: skip
        np.testing.assert_array_equal(record.tensors[ours][2], expected[theirs].numpy())
    assert record.tensors["rollout_log_probs"][0] == "float32"
    assert mapping(record.about, "alignment")["rollout_log_probs"] == "index t is token t"
    assert record.samples is None


def test_a_list_of_trajectories_is_ragged_rows(tmp_path: Path) -> None:
    batch = make_batch(6, 20)
    dump = open_dump(areal_file(tmp_path / "batch_data.pt", batch, form="list"))
    record = dump.read(dump.entries[0])
    tag, _, values, offsets = record.tensors["tokens"]
    assert tag == "int32"
    assert offsets is not None
    rows = [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert rows == [batch.tokens(row) for row in range(6)]
    assert record.tensors["rewards"][1] == (6,)
    masks = record.tensors["loss_mask"]
    assert masks[2].tolist() == [m for row in range(6) for m in batch.loss_mask(row)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (None, "it is a NoneType"),
        ("x", "it is a text"),
        ({}, "[] rows"),
        ({"rewards": torch.zeros(2)}, "[1, 2] rows"),
        ({"loss_mask": torch.zeros(1, 3)}, "loss_mask has 3 values for"),
        ({"logprobs": torch.zeros(1, 3)}, "logprobs has 3 values for"),
        ({"logprobs": "x"}, "logprobs has 0 values for"),
    ],
)
def test_a_trajectory_that_does_not_fit_is_named_and_the_others_are_read(
    tmp_path: Path, change: object, why: str
) -> None:
    batch = make_batch(6, 20)
    path = areal_file(tmp_path / "batch_data.pt", batch, form="list")
    parts = torch.load(path, weights_only=False)
    parts[2] = {**parts[2], **change} if isinstance(change, dict) and change else change
    torch.save(parts, path)
    dump = open_dump(path)
    record = dump.read(dump.entries[0])
    _, _, values, offsets = record.tensors["tokens"]
    assert offsets is not None
    rows = [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert rows == [batch.tokens(row) for row in range(6) if row != 2]
    assert "rollout_log_probs" in record.tensors
    (problem,) = record.problems
    assert "trajectory 2: " in problem.message
    assert why in problem.message


def test_log_probs_of_several_float_dtypes_are_widened(tmp_path: Path) -> None:
    path = areal_file(tmp_path / "batch_data.pt", make_batch(6, 20), form="list")
    parts = torch.load(path, weights_only=False)
    whole = open_dump(path)
    expected = whole.read(whole.entries[0]).tensors["rollout_log_probs"][2]
    parts[2]["logprobs"] = parts[2]["logprobs"].to(torch.float64)
    parts[3]["logprobs"] = parts[3]["logprobs"].to(torch.bfloat16)
    torch.save(parts, path)
    dump = open_dump(path)
    record = dump.read(dump.entries[0])
    assert record.tensors["rollout_log_probs"][0] == "float64"
    np.testing.assert_allclose(record.tensors["rollout_log_probs"][2], expected, rtol=2**-8)
    assert record.about["upcast"] == {"rollout_log_probs": "bfloat16, float32, float64"}


def test_a_dict_of_several_rows_in_a_list(tmp_path: Path) -> None:
    batch = areal_batch(make_batch(6, 20))
    parts = [{name: values[:2] for name, values in batch.items()},
             {name: values[2:] for name, values in batch.items()}]  # fmt: skip
    torch.save(parts, tmp_path / "a.pt")
    dump = open_dump(tmp_path / "a.pt")
    record = dump.read(dump.entries[0])
    width = batch["input_ids"].shape[1]
    assert record.tensors["tokens"][2].tolist() == batch["input_ids"].reshape(-1).tolist()
    offsets = record.tensors["tokens"][3]
    assert offsets is not None
    assert np.diff(offsets).tolist() == [width] * 6


def test_after_the_advantages_everything_is_shifted(tmp_path: Path) -> None:
    batch = areal_batch(make_batch(4, 16))
    more = {"prox_logp": batch["logprobs"] - 0.1, "advantages": torch.zeros(4, 1)}
    torch.save({**batch, **more}, tmp_path / "a.pt")
    dump = open_dump(tmp_path / "a.pt")
    assert [e.section for e in dump.entries] == ["trajectories", "old_log_probs", "advantages"]
    records = {e.section: dump.read(e) for e in dump.entries}
    assert {*records["old_log_probs"].tensors} == {"old_log_probs", "loss_mask", "attention_mask"}
    alignment = mapping(records["trajectories"].about, "alignment")
    assert alignment["rollout_log_probs"] == alignment["old_log_probs"] == "index t is token t + 1"


def test_other_forms_are_refused(tmp_path: Path) -> None:
    batch = areal_batch(make_batch(4, 16))
    torch.save(
        [[{"input_ids": 1, "loss_mask": 2, "logprobs": 3, "versions": 4}]], tmp_path / "a.pt"
    )
    dump = open_dump(tmp_path / "a.pt")
    with pytest.raises(InvalidTensor, match="holds a list"):
        dump.read(dump.entries[0])
    torch.save([{**batch, "rewards": torch.zeros(3)}], tmp_path / "b.pt")
    dump = open_dump(tmp_path / "b.pt")
    with pytest.raises(InvalidTensor, match="rows"):
        dump.read(dump.entries[0])
