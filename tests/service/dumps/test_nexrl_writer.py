"""Anybody's dump in NexRL's layout, and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.dump_files import (
    areal_file,
    make_batch,
    nexrl_directory,
    own_directory,
    same_contents,
    slime_rollout_file,
    slime_train_file,
)
from tests.support.memory_dumps import MemoryDump

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.results import Verdict
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.nexrl_writer import write_nexrl
from stagescope_service.dumps.records import Dump, DumpContents, DumpEntry, Location
from stagescope_wire.errors import Conflict, InvalidInput, InvalidTensor, MissingExtra
from stagescope_wire.schema import Part


@pytest.mark.parametrize("mode", ["self_hosted", "remote_api", "weaver"])
@pytest.mark.parametrize("suffix", ["pt", "jsonl"])
def test_its_own_files_come_back_the_same(tmp_path: Path, mode: str, suffix: str) -> None:
    source = open_dump(nexrl_directory(tmp_path / "a", mode=mode, steps=(0, 1), suffix=suffix))
    written = write_nexrl(source, tmp_path / "b", suffix)
    assert written.left_out == []
    assert written.files == len(source.entries)
    again = open_dump(tmp_path / "b")
    assert again.problems == []
    locations = [[(e.section, e.key, e.location) for e in dump.entries] for dump in (source, again)]
    assert locations[0] == locations[1]
    for one, other in zip(source.entries, again.entries, strict=True):
        same_contents(source.read(one), again.read(other))


def test_without_torch_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_dump(nexrl_directory(tmp_path / "a", suffix="jsonl"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match="pip install torch"):
        write_nexrl(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_parts_without_a_name_in_nexrl_are_restored_from_the_index(tmp_path: Path) -> None:
    locations = [
        Location(3, stage, "actor", rank, Part(epoch=epoch, minibatch=mini))
        for stage in ("actor_compute_log_prob", "actor_update")
        for rank in (0, 1)
        for epoch in ((0, 1) if stage == "actor_update" else (0,))
        for mini in ((0, 1) if stage == "actor_update" else (0,))
    ]
    records = []
    for at, location in enumerate(locations):
        values = np.full((2, 3), at, np.float32)
        tensors = {"log_probs": ("float32", values.shape, values, None)}
        entry = DumpEntry("forward_data", location, tmp_path / str(at), 1, str(at))
        records.append(DumpContents(entry, tensors, samples=("g_0", "g_1")))
    source = MemoryDump(records)
    write_nexrl(source, tmp_path / "out")
    again = open_dump(tmp_path / "out")
    assert again.problems == []
    assert sorted(entry.location for entry in again.entries) == sorted(locations)
    found = {e.location: again.read(e).tensors["log_probs"][2][0, 0] for e in again.entries}
    assert found == {location: at for at, location in enumerate(locations)}
    assert compare([source, again]).verdict is Verdict.SAME
    again.entries[3].path.unlink()
    (lost,) = open_dump(tmp_path / "out").problems
    assert (lost.kind, lost.path) == ("missing", again.entries[3].path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"version": 2, "files": {}}', '{"version": 1, "files": {"a": {}}}', "[" * 100_000],
)
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    nexrl_directory(tmp_path / "a")
    (tmp_path / "a" / "stagescope.json").write_text(text)
    with pytest.raises(InvalidTensor, match=r"stagescope\.json"):
        open_dump(tmp_path / "a")


def test_kept_files_of_this_project(tmp_path: Path) -> None:
    def edit(kind: str, name: str, data: dict[str, Any]) -> None:
        rows = len(data["tensors"]["responses"])
        data["tensors"]["prompts"] = np.full((rows, 2), 7)

    dump = open_dump(own_directory(tmp_path / "data", steps=(5,), edit=edit))
    written = write_nexrl(dump, tmp_path / "out")
    out = tmp_path / "out"
    micros = [f"step_000005_rank{rank}_micro{micro}.pt" for rank in (0, 1) for micro in (0, 1)]
    kinds = ("forward_data", "is_loss_debug", "loss")
    assert {str(path.relative_to(out)) for path in out.rglob("*.*")} == {
        *(f"{kind}/{name}" for kind in kinds for name in micros),
        *(f"gradient/step_000005_rank{rank}.pt" for rank in (0, 1)),
        *(f"{kind}/step_000005.pt" for kind in ("old_log_probs", "trajectory")),
        "stagescope.json",
    }

    def load(name: str) -> Any:
        return torch.load(out / name, weights_only=True)

    assert written.left_out == [
        "step 5: old_log_probs: which of 2 ranks recorded which rows: NexRL's file has each row "
        "once",
        "numbers that were logged where no tensor is kept, if any. Only the service's catalogue "
        "has them: see `stagescope series`",
    ]
    batch = make_batch(16, 16, step=5)
    found = load("trajectory/step_000005.pt")
    assert found["num_trajectories"] == 16
    first = found["trajectories"][0]
    assert first["tokens"][:2] == [7, 7]
    assert first["reward"] == batch.rewards[0]
    assert first["extra_fields"]["group_id"] == "g0"
    assert [t["extra_fields"]["run_id"] for t in found["trajectories"]] == batch.runs
    assert sum(first["loss_mask"]) == batch.response_mask[0].sum()
    old = load("old_log_probs/step_000005.pt")
    np.testing.assert_array_equal(old["old_log_probs"].numpy(), batch.old_log_probs)
    info = old["batch_info"]
    assert (info["batch_size"], info["sample_ids"]) == (16, batch.samples)
    mask = batch.response_mask != 0
    rollout = load("forward_data/step_000005_rank0_micro0.pt")["rollout_log_probs"].numpy()
    np.testing.assert_array_equal(rollout[mask[:4]], batch.rollout_log_probs[:4][mask[:4]])
    loss = load("loss/step_000005_rank1_micro1.pt")
    assert (loss["rank"], loss["micro_idx"], loss["loss"]) == (1, 1, 0.5)
    assert np.isnan(loss["pg_loss"])
    assert loss["metrics"] == {"grad_norm": 1.5}
    debug = load("is_loss_debug/step_000005_rank0_micro0.pt")
    assert torch.equal(debug["effective_valid"], debug["response_mask"])
    assert debug["loss"] == 0.5
    gradient = load("gradient/step_000005_rank1.pt")
    assert (gradient["param_name"], gradient["norm"]) == ("lm_head.weight", 8.0)
    assert torch.equal(gradient["more"]["lm_head.weight#1"], torch.full((4, 4), 3.0))
    again = open_dump(tmp_path / "out")
    for entry in again.entries:
        if entry.section in ("forward_data", "is_loss"):
            first = 8 * (entry.location.rank or 0) + 4 * entry.location.part.microbatch
            assert again.read(entry).samples == tuple(batch.samples[first : first + 4])
        if entry.section == "old_log_probs":
            assert again.read(entry).samples == tuple(batch.samples)
    entry = next(e for e in again.entries if e.section == "gradients" and e.location.rank == 1)
    more = "@actor_update.0.0.0.1"
    names = ("lm_head.weight", "lm_head.weight#1")
    assert {*again.read(entry).tensors} == {*names, *(name + more for name in names)}


def test_trajectories_of_other_formats(tmp_path: Path) -> None:
    batch = make_batch(8, 16)
    dumps: dict[str, Dump] = {
        "slime": open_dump(slime_rollout_file(tmp_path / "slime.pt", batch, rollout_id=0)),
        "padded": open_dump(areal_file(tmp_path / "padded.pt", batch)),
        "ragged": open_dump(areal_file(tmp_path / "ragged.pt", batch, form="list")),
    }
    for name, dump in dumps.items():
        write_nexrl(dump, tmp_path / name, "jsonl")
        (path,) = (tmp_path / name / "trajectory").iterdir()
        found = json.loads(path.read_text())["trajectories"]
        assert [each["tokens"] for each in found] == [batch.tokens(row) for row in range(8)]
        assert [each["loss_mask"] for each in found] == [batch.loss_mask(row) for row in range(8)]
        assert [each["reward"] for each in found] == batch.rewards.tolist()
    assert (tmp_path / "ragged/trajectory/step_-00001.jsonl").exists()
    found = json.loads((tmp_path / "slime/trajectory/step_000000.jsonl").read_text())
    extra = found["trajectories"][5]["extra_fields"]
    log_probs = extra.pop("logprobs")
    assert (extra["group_id"], extra["run_id"], extra["remove_sample"]) == ("1", 5, False)
    assert extra["prompt"] == "question 5"
    mask = np.array(batch.loss_mask(5)) != 0
    assert len(log_probs) == len(mask)
    recorded = batch.rollout_log_probs[5][batch.response_mask[5] != 0]
    np.testing.assert_array_equal(np.array(log_probs)[mask], recorded)


def test_slime_rollouts_count_once_and_evaluations_are_marked(tmp_path: Path) -> None:
    batch = make_batch(8, 16)
    slime_rollout_file(tmp_path / "a/rollout/2.pt", batch, rollout_id=2)
    slime_rollout_file(tmp_path / "a/rollout/eval_2.pt", batch, rollout_id=2)
    slime_train_file(tmp_path / "a/train/2.pt", batch, rollout_id=2)
    write_nexrl(open_dump(tmp_path / "a"), tmp_path / "b")
    found = torch.load(tmp_path / "b/trajectory/step_000002.pt", weights_only=True)
    assert sorted(each["is_val"] for each in found["trajectories"]) == [False] * 8 + [True] * 8
    old = torch.load(tmp_path / "b/old_log_probs/step_000002.pt", weights_only=True)
    assert old["batch_info"]["sample_ids"] == [str(row) for row in range(8)]
    width = batch.lengths.max()
    np.testing.assert_array_equal(old["old_log_probs"].numpy(), batch.old_log_probs[:, :width])


def test_metrics_that_are_lists_stay(tmp_path: Path) -> None:
    def edit(kind: str, name: str, data: dict[str, Any]) -> None:
        if kind == "training_metrics":
            data["metrics"]["by_layer"] = [1.0, 2.0]

    nexrl_directory(tmp_path / "a", mode="remote_api", edit=edit)
    write_nexrl(open_dump(tmp_path / "a"), tmp_path / "b")
    found = torch.load(tmp_path / "b/training_metrics/step_000000.pt", weights_only=True)
    assert found["metrics"]["by_layer"] == [1.0, 2.0]


def test_several_stages_and_epochs_are_numbered_consecutively(tmp_path: Path) -> None:
    own_directory(tmp_path / "a", micros=2, ranks=1)
    attempt = tmp_path / "a/run/first/step_0"
    other = own_directory(tmp_path / "b", micros=2, ranks=1, stage="actor_compute_log_prob")
    (other / "step_0/actor_compute_log_prob").rename(attempt / "actor_compute_log_prob")
    write_nexrl(open_dump(tmp_path / "a"), tmp_path / "out")
    stages = {}
    for path in (tmp_path / "out/forward_data").iterdir():
        data = torch.load(path, weights_only=True)
        stages[data["micro_idx"]] = (data["extra_info"]["stage"], data["extra_info"]["part"])
    assert stages == {
        0: ("actor_update", "0.0.0.0"), 1: ("actor_update", "0.0.0.1"),
        2: ("actor_compute_log_prob", "0.0.0.0"), 3: ("actor_compute_log_prob", "0.0.0.1"),
    }  # fmt: skip


def test_unreadable_files_are_listed_and_the_others_written(tmp_path: Path) -> None:
    nexrl_directory(tmp_path / "a")
    (tmp_path / "a/loss/step_000000_rank0_micro0.pt").write_bytes(b"x")
    (tmp_path / "a/loss/step_000000_rank0_micro1.pt").unlink()
    written = write_nexrl(open_dump(tmp_path / "a"), tmp_path / "b")
    assert written.files == 12
    assert any("rank0_micro0" in each for each in written.left_out)
    assert any("rank0_micro1.pt does not exist" in each for each in written.left_out)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    dump = open_dump(nexrl_directory(tmp_path / "a"))
    with pytest.raises(Conflict, match="not empty"):
        write_nexrl(dump, tmp_path / "a")
    with pytest.raises(InvalidInput, match="format 'npz'"):
        write_nexrl(dump, tmp_path / "b", "npz")


def test_old_log_probs_are_those_of_their_stage_again(tmp_path: Path) -> None:
    records = []
    for stage, name in (("actor_compute_log_prob", "old"), ("ref_compute_log_prob", "ref")):
        (tmp_path / name).touch()
        for rank in range(2):
            values = np.arange(6, dtype=np.float32).reshape(2, 3)[:, rank:]  # of two widths
            mask = np.array([[1, 1, 0], [1, 1, 1]])[:, rank:]
            entry = DumpEntry(
                "old_log_probs", Location(3, stage, "actor", rank), tmp_path / name, 1, stage
            )
            tensors = {
                f"{name}_log_probs": ("float32", values.shape, values, None),
                "response_mask": ("int64", mask.shape, mask, None),
            }
            ids = (f"g{rank}_0", f"g{rank}_1")
            records.append(DumpContents(entry, tensors, samples=ids, mask="response_mask"))
    source = MemoryDump(records)
    write_nexrl(source, tmp_path / "out")
    again = open_dump(tmp_path / "out")
    assert [e.location for e in again.entries] == [Location(3, "actor_compute_log_prob")]
    for sides in ([source, again], [again, source]):
        result = compare(sides)
        assert result.verdict is Verdict.SAME, result.reason
        found = {tensor.name: tensor.found.pairs for tensor in result.pairs[0].tensors}
        assert found["old_log_probs"] == 5 + 3
