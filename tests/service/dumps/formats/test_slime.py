from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.dump_files import (
    GROUP,
    Batch,
    all_problems,
    make_batch,
    read_first,
    rows_in,
    slime_rollout_file,
    slime_train_file,
)

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.records import Dump, DumpContents, mapping
from stagescope_wire.errors import InvalidTensor, NotFound


def read(dump: Dump, section: str, stage: str) -> DumpContents:
    (found,) = [e for e in dump.entries if (e.section, e.location.stage) == (section, stage)]
    return dump.read(found)


def change_sample(path: Path, at: int, **changes: object) -> Path:
    data = torch.load(path, weights_only=True)
    data["samples"][at] = {**data["samples"][at], **changes}
    torch.save(data, path)
    return path


@pytest.fixture
def batch() -> Batch:
    return make_batch(8, 24)


def test_a_rollout(tmp_path: Path, batch: Batch) -> None:
    dump = open_dump(slime_rollout_file(tmp_path / "data_7.pt", batch, rollout_id=7))
    assert (dump.kind, dump.problems) == ("slime", [])
    assert [entry.location.step for entry in dump.entries] == [7]
    record = read(dump, "trajectories", "rollout_generate")
    assert record.samples == tuple(map(str, range(8)))
    assert record.groups == tuple(str(row // GROUP) for row in range(8))
    assert rows_in(record, "tokens") == [batch.tokens(row) for row in range(8)]
    responses = [batch.tokens(row)[len(batch.prompts[row]) :] for row in range(8)]
    assert rows_in(record, "responses") == responses
    masks = [batch.of_row("response_mask", row) for row in range(8)]
    assert rows_in(record, "response_mask") == masks
    log_probs = [batch.of_row("rollout_log_probs", row) for row in range(8)]
    assert rows_in(record, "rollout_log_probs") == log_probs
    assert record.mask == "response_mask"
    assert record.tensors["versions"][2].tolist() == [3] * 8
    np.testing.assert_array_equal(record.tensors["rewards"][2], batch.rewards)
    assert record.row_texts["prompt"][3] == "question 3"
    assert record.row_texts["metadata"][0] == '{"source": "made"}'
    assert "teacher_log_probs" not in record.tensors


def test_no_mask_is_a_mask_of_ones_and_of_removed_samples_one_of_zeros(
    tmp_path: Path, batch: Batch
) -> None:
    record = read_first(slime_rollout_file(tmp_path / "a.pt", batch, loss_mask=None))
    assert rows_in(record, "response_mask") == [[1] * int(length) for length in batch.lengths]
    record = read_first(slime_rollout_file(tmp_path / "b.pt", batch, remove_sample=True))
    assert not record.tensors["response_mask"][2].any()
    assert record.about["removed_samples"] == 8


def test_rewards_of_several_kinds_and_versions_of_several_forms(
    tmp_path: Path, batch: Batch
) -> None:
    path = tmp_path / "a.pt"
    slime_rollout_file(path, batch, reward={"acc": 1.0, "format": 0.5}, weight_versions=["1", "2"])
    record = read_first(path)
    assert record.tensors["rewards/acc"][2].tolist() == [1.0] * 8
    assert record.tensors["versions"][2].tolist() == [1] * 8  # of each sample its first
    assert record.row_texts["weight_versions"][0] == "1 2"
    assert record.about["samples_of_mixed_versions"] == 8
    slime_rollout_file(path, batch, weight_versions=["step-4"])
    record = read_first(change_sample(path, 1, weight_versions=["step-3", "step-4"]))
    assert record.tensors["versions"][2].tolist() == [4, 3] + [4] * 6
    assert record.about["version_names"] == {"4": "step-4", "3": "step-3"}
    assert record.about["samples_of_mixed_versions"] == 1
    record = read_first(change_sample(path, 1, weight_versions=[]))
    assert "versions" not in record.tensors
    assert mapping(record.about, "left_out")["versions"] == "1 samples have none"


def test_a_train_file_pairs_with_its_rollout(tmp_path: Path, batch: Batch) -> None:
    slime_rollout_file(tmp_path / "rollout_data/3.pt", batch, rollout_id=3)
    slime_train_file(tmp_path / "train_data/3.pt", batch, rollout_id=3)
    slime_rollout_file(tmp_path / "rollout_data/eval_3.pt", batch, rollout_id=3)
    dump = open_dump(tmp_path)
    locations = [(entry.section, entry.location.stage) for entry in dump.entries]
    assert locations == [
        ("trajectories", "actor_update"), ("trajectories", "eval"),
        ("trajectories", "rollout_generate"), ("old_log_probs", "actor_update"),
        ("advantages", "actor_update"),
    ]  # fmt: skip
    rollout = read(dump, "trajectories", "rollout_generate")
    train = read(dump, "trajectories", "actor_update")
    assert train.samples == rollout.samples
    assert train.groups is None
    for name in ("tokens", "responses", "response_mask"):
        assert rows_in(train, name) == rows_in(rollout, name)
    old = read(dump, "old_log_probs", "actor_update")
    assert {*old.tensors} == {"old_log_probs", "response_mask"}
    assert old.mask == "response_mask"
    assert old.tensors["old_log_probs"][0] == "float32"
    assert rows_in(old, "old_log_probs") == [batch.of_row("old_log_probs", r) for r in range(8)]
    advantages = read(dump, "advantages", "actor_update")
    assert {*advantages.tensors} == {"advantages", "returns", "response_mask"}
    shards = train.about["dp_shards"]
    assert isinstance(shards, list)
    assert shards[1]["partition"] == [1, 3, 5, 7]


def test_samples_are_named_by_their_index_if_it_is_unique(tmp_path: Path, batch: Batch) -> None:
    record = read_first(slime_rollout_file(tmp_path / "a.pt", batch, index=None))
    assert record.samples is None
    record = read_first(slime_rollout_file(tmp_path / "b.pt", batch, index=4))
    assert record.samples is None
    assert "8 rows are named 4" in str(record.about["samples"])


def test_a_response_longer_than_its_tokens_is_left_out(tmp_path: Path, batch: Batch) -> None:
    record = read_first(slime_rollout_file(tmp_path / "a.pt", batch, response_length=10_000))
    assert "responses" not in record.tensors
    assert "longer" in str(mapping(record.about, "left_out")["responses"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (None, "sample at 2: it is a NoneType"),
        (5, "sample at 2: it is a number, 5"),
        ("x", "sample at 2: it is a text"),
        ({"loss_mask": [1, 1]}, "sample 2: loss_mask has 2 values"),
        ({"loss_mask": []}, "sample 2: loss_mask has 0 values"),  # a mask cannot be NaN
        ({"rollout_log_probs": "z"}, "sample 2: rollout_log_probs has 0 values"),
    ],
)
def test_a_sample_that_does_not_fit_is_named_and_the_others_are_read(
    tmp_path: Path, batch: Batch, change: Any, why: str
) -> None:
    path = slime_rollout_file(tmp_path / "a.pt", batch)
    data = torch.load(path, weights_only=True)
    data["samples"][2] = {**data["samples"][2], **change} if isinstance(change, dict) else change
    torch.save(data, path)
    record = read_first(path)
    others = [row for row in range(8) if row != 2]
    assert record.samples == tuple(map(str, others))
    masks = [batch.of_row("response_mask", row) for row in others]
    assert rows_in(record, "response_mask") == masks
    (problem,) = record.problems
    assert (problem.kind, problem.path) == ("damaged", path)
    assert why in problem.message
    assert problem.message.endswith("7 of the 8 rows were read")


def test_a_sample_that_does_not_fit_is_in_no_section(tmp_path: Path, batch: Batch) -> None:
    train = change_sample(slime_train_file(tmp_path / "b.pt", batch), 5, log_probs=torch.zeros(3))
    for section in ("trajectories", "old_log_probs", "advantages"):
        record = read(open_dump(train), section, "actor_update")
        assert record.samples == tuple(str(row) for row in range(8) if row != 5)
        assert "sample 5: log_probs has 3 values" in all_problems(record)


def test_what_is_no_number_is_named_and_the_rest_is_read(tmp_path: Path, batch: Batch) -> None:
    path = change_sample(slime_rollout_file(tmp_path / "a.pt", batch), 3, reward="x")
    values: list[object] = [*batch.of_row("rollout_log_probs", 2)]
    values[1] = "y"
    record = read_first(change_sample(path, 2, rollout_log_probs=values))
    assert record.samples == tuple(map(str, range(8)))
    assert np.isnan(record.tensors["rewards"][2]).tolist() == [row == 3 for row in range(8)]
    assert np.isnan(record.tensors["rollout_log_probs"][2]).sum() == 1
    assert "sample 3: reward is no number: a text" in all_problems(record)
    words = "sample 2: rollout_log_probs is no number: at index 1 a text"
    assert words in all_problems(record)


def test_two_files_of_one_rollout_are_never_mixed(tmp_path: Path, batch: Batch) -> None:
    for name in ("a.pt", "copy_of_a.pt"):
        slime_rollout_file(tmp_path / name, batch)
    dump = open_dump(tmp_path)
    assert {each.path.name for each in dump.entries} == {"a.pt"}
    assert [(each.kind, each.path.name) for each in dump.problems] == [("refused", "copy_of_a.pt")]


@pytest.mark.parametrize("lacking", [None, []])
def test_log_probs_that_a_sample_lacks_are_nan(
    tmp_path: Path, batch: Batch, lacking: object
) -> None:
    path = change_sample(slime_rollout_file(tmp_path / "a.pt", batch), 2, rollout_log_probs=lacking)
    values: list[object] = [*batch.of_row("rollout_log_probs", 4)]
    values[0] = None
    record = read_first(change_sample(path, 4, rollout_log_probs=values))
    assert record.samples == tuple(map(str, range(8)))
    rows = [np.isnan(row).sum() for row in rows_in(record, "rollout_log_probs")]
    assert rows == [0, 0, batch.lengths[2], 0, 1, 0, 0, 0]
    assert record.about["null_values"] == {"rollout_log_probs": 1}
    train = change_sample(slime_train_file(tmp_path / "b.pt", batch), 2, log_probs=lacking)
    old = read(open_dump(train), "old_log_probs", "actor_update").tensors["old_log_probs"]
    assert (old[0], np.isnan(old[2]).sum()) == ("float32", batch.lengths[2])


def test_other_files_are_problems(tmp_path: Path, batch: Batch) -> None:
    slime_rollout_file(tmp_path / "0.pt", batch)
    torch.save({"model": torch.zeros(2)}, tmp_path / "weights.pt")
    (tmp_path / "log.txt").write_text("x")
    problems = open_dump(tmp_path).problems
    assert {(p.kind, p.path.name) for p in problems} == {
        ("unknown", "weights.pt"), ("unknown", "log.txt"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        {"rollout_id": 1, "samples": 5},
        {"rollout_id": 1, "samples": [1, 2]},
        {"format_version": 9, "rollout_id": 1, "samples": []},
    ],
)
def test_other_forms_are_refused(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(InvalidTensor):
        read_first(tmp_path / "a.pt")


def test_no_samples_at_all(tmp_path: Path) -> None:
    torch.save({"rollout_id": 1, "samples": []}, tmp_path / "a.pt")
    assert read_first(tmp_path / "a.pt").tensors == {}
    torch.save({"rollout": 1}, tmp_path / "a.pt")
    with pytest.raises(NotFound, match="no dump of a known format"):
        open_dump(tmp_path / "a.pt")
