from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.dump_files import (
    all_problems,
    areal_batch,
    areal_file,
    make_batch,
    read_first,
    rows_in,
)

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.records import mapping
from stagescope_wire.errors import InvalidTensor

BATCH = make_batch(6, 20)


@pytest.mark.parametrize("form", ["dict", "tensordict"])
def test_padded_batches(tmp_path: Path, form: str) -> None:
    dump = open_dump(areal_file(tmp_path / "batch_data.pt", BATCH, form=form))
    assert (dump.kind, dump.problems, len(dump.entries)) == ("areal", [], 1)
    record = dump.read(dump.entries[0])
    expected = areal_batch(BATCH)
    for theirs, ours in {"input_ids": "tokens", "logprobs": "rollout_log_probs",
                         "loss_mask": "loss_mask", "versions": "versions",
                         "rewards": "rewards"}.items():  # fmt: skip
        np.testing.assert_array_equal(record.tensors[ours][2], expected[theirs].numpy())
    assert record.tensors["rollout_log_probs"][0] == "float32"
    assert mapping(record.about, "alignment")["rollout_log_probs"] == "index t is token t"
    assert (record.mask, record.samples) == ("loss_mask", None)


def test_lists_of_trajectories_are_ragged_rows(tmp_path: Path) -> None:
    record = read_first(areal_file(tmp_path / "one.pt", BATCH, form="list"))
    assert record.tensors["tokens"][0] == "int32"
    assert rows_in(record, "tokens") == [BATCH.tokens(row) for row in range(6)]
    assert rows_in(record, "loss_mask") == [BATCH.loss_mask(row) for row in range(6)]
    assert record.tensors["rewards"][1] == (6,)
    padded = areal_batch(BATCH)
    parts = [{name: values[rows] for name, values in padded.items()}
             for rows in (slice(2), slice(2, None))]  # fmt: skip
    torch.save(parts, tmp_path / "several.pt")
    record = read_first(tmp_path / "several.pt")
    assert rows_in(record, "tokens") == padded["input_ids"].tolist()


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
    path = areal_file(tmp_path / "batch_data.pt", BATCH, form="list")
    parts = torch.load(path, weights_only=False)
    parts[2] = {**parts[2], **change} if isinstance(change, dict) and change else change
    torch.save(parts, path)
    record = read_first(path)
    assert rows_in(record, "tokens") == [BATCH.tokens(row) for row in range(6) if row != 2]
    assert "rollout_log_probs" in record.tensors
    assert len(record.problems) == 1
    assert "trajectory 2: " in all_problems(record)
    assert why in all_problems(record)


def test_log_probs_of_several_float_dtypes_are_widened(tmp_path: Path) -> None:
    path = areal_file(tmp_path / "batch_data.pt", BATCH, form="list")
    expected = read_first(path).tensors["rollout_log_probs"][2]
    parts = torch.load(path, weights_only=False)
    for row, dtype in ((2, torch.float64), (3, torch.bfloat16)):
        parts[row]["logprobs"] = parts[row]["logprobs"].to(dtype)
    torch.save(parts, path)
    record = read_first(path)
    assert record.tensors["rollout_log_probs"][0] == "float64"
    np.testing.assert_allclose(record.tensors["rollout_log_probs"][2], expected, rtol=2**-8)
    assert record.about["upcast"] == {"rollout_log_probs": "bfloat16, float32, float64"}


def test_after_the_advantages_everything_is_shifted(tmp_path: Path) -> None:
    batch = areal_batch(BATCH)
    more = {"prox_logp": batch["logprobs"] - 0.1, "advantages": torch.zeros(6, 1)}
    torch.save({**batch, **more}, tmp_path / "a.pt")
    dump = open_dump(tmp_path / "a.pt")
    records = {entry.section: dump.read(entry) for entry in dump.entries}
    assert [*records] == ["trajectories", "old_log_probs", "advantages"]
    assert {*records["old_log_probs"].tensors} == {"old_log_probs", "loss_mask", "attention_mask"}
    alignment = mapping(records["trajectories"].about, "alignment")
    assert alignment["rollout_log_probs"] == alignment["old_log_probs"] == "index t is token t + 1"


def test_several_files_are_stages_and_other_forms_are_refused(tmp_path: Path) -> None:
    no_tensors = [[{"input_ids": 1, "loss_mask": 2, "logprobs": 3, "versions": 4}]]
    torch.save(no_tensors, tmp_path / "a.pt")
    with pytest.raises(InvalidTensor, match="holds a list"):
        read_first(tmp_path / "a.pt")
    torch.save([{**areal_batch(BATCH), "rewards": torch.zeros(3)}], tmp_path / "b.pt")
    with pytest.raises(InvalidTensor, match="rows"):
        read_first(tmp_path / "b.pt")
    assert [e.location.stage for e in open_dump(tmp_path / "b.pt").entries] == [None]
    assert [e.location.stage for e in open_dump(tmp_path).entries] == ["a", "b"]
