"""A saved batch is a side of a comparison: with the run that it was made of it is the same."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.command_line import invoke
from tests.support.dump_files import (
    areal_file,
    make_batch,
    nexrl_directory,
    own_directory,
    slime_rollout_file,
    slime_train_file,
)
from tests.support.step_batches import step_batch

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.results import Verdict
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.own_file import PayloadFile, open_payloads
from stagescope_service.dumps.joining.join import join
from stagescope_service.dumps.records import Location
from stagescope_wire.batch import Batch, Gap, Tensor
from stagescope_wire.errors import InvalidInput, InvalidTensor, NotFound


def saved(directory: Path, path: Path, **changes: Any) -> Path:
    files = map(PayloadFile, directory.rglob("*.safetensors"))
    batch = join(open_payloads(files, "run"), 0, source={"run": "run"})
    return dataclasses.replace(batch, **changes).save(path / "batch.safetensors")


def changed(path: Path, name: str, row: int, token: int) -> Path:
    """The batch with one value moved by a quarter."""
    batch = Batch.load(path)
    values = batch[name].copy()
    values[row, token] += 0.25
    tensors = {**batch.tensors, name: Tensor(batch.tensor(name).dtype, values)}
    return dataclasses.replace(batch, tensors=tensors).save(path)


def test_a_batch_is_the_same_as_what_it_was_made_of(tmp_path: Path) -> None:
    directory = own_directory(tmp_path / "run", ranks=2, micros=2)
    dump = open_dump(saved(directory, tmp_path))
    assert dump.kind == "batch"
    own = open_dump(directory)
    shards = [e for e in own.entries if e.section not in ("gradients", "parameters")]
    assert {(e.section, e.location) for e in dump.entries} == {
        (e.section, e.location) for e in shards
    }
    for order in ([own, dump], [dump, own]):
        result = compare(order)
        assert result.verdict is Verdict.SAME, result.reason
        alone = [f.section for f in result.pairs[0].findings if f.kind not in ("note",)]
        assert alone == ["gradients"]  # which are not in a batch
    names = {(t.section, t.name): t.found.pairs for t in result.pairs[0].tensors}
    whole = {(t.section, t.name): t.found.pairs for t in compare([own, own]).pairs[0].tensors}
    assert names == {key: pairs for key, pairs in whole.items() if key[0] != "gradients"}
    side = result.sides[0]
    assert (side.kind, side.steps, side.ranks) == ("batch", (0,), (0, 1))


def test_a_changed_value_is_found_at_its_sample_and_position(tmp_path: Path) -> None:
    directory = own_directory(tmp_path / "run")
    path = changed(saved(directory, tmp_path), "old_log_probs", 5, 0)
    result = compare([open_dump(directory), open_dump(path)])
    assert result.exit_status == 1
    assert result.first is not None
    assert (result.first.name, result.first.section) == ("old_log_probs", "old_log_probs")
    assert result.first.location is not None
    assert result.first.location.sample == Batch.load(path).strings["sample_ids"][5]
    assert result.first.location.coordinates == ((1, 0), (1, 0))


def test_a_batch_of_another_projects_dump_is_the_same_as_that(tmp_path: Path) -> None:
    batch = make_batch(6, 12)
    sources = {
        "nexrl": nexrl_directory(tmp_path / "nexrl", steps=(0,), mode="weaver"),
        "slime": slime_rollout_file(tmp_path / "slime.pt", batch),
        "train": slime_train_file(tmp_path / "train.pt", batch),
        "areal": areal_file(tmp_path / "areal.pt", batch),
    }
    for name, source in sources.items():
        path = join(opened := open_dump(source), opened.entries[0].location.step).save(
            tmp_path / f"{name}.safetensors"
        )
        result = compare([open_dump(source), open_dump(path)])
        assert result.verdict is Verdict.SAME, (name, result.reason)
        assert sum(t.found.pairs for t in result.pairs[0].tensors) > 100


def test_a_batch_that_was_split_otherwise_is_the_same(tmp_path: Path) -> None:
    few = own_directory(tmp_path / "few", ranks=1, micros=2, rows=8)
    many = own_directory(tmp_path / "many", ranks=2, micros=4, rows=2)
    one, other = (saved(directory, directory, parts=()) for directory in (few, many))
    assert compare([open_dump(one), open_dump(other)]).verdict is Verdict.SAME


def test_every_pass_and_part_of_a_batch_is_there(tmp_path: Path) -> None:
    batch = step_batch()
    dump = open_dump(batch.save(tmp_path / "b.safetensors"))
    dump = pickle.loads(pickle.dumps(dump))
    locations = {entry.location for entry in dump.entries if entry.section == "forward_data"}
    assert locations == {
        Location(5, "actor_update", "actor", part.rank, part.part) for part in batch.parts
    }
    found = {}
    for part in batch.parts:
        for section in ("forward_data", "loss"):
            (entry,) = [e for e in dump.entries if e.section == section and e.location ==
                        Location(5, "actor_update", "actor", part.rank, part.part)]  # fmt: skip
            record = dump.read(entry)
            found[section, part.rank, part.part.epoch] = record
            if section == "forward_data":
                micro = batch.microbatch(part)
                assert (record.tensors["log_probs"][2] == micro["log_probs"]).all()
                assert record.samples == micro.sample_ids
                assert record.mask == "response_mask"
    assert (found["forward_data", 0, 1].tensors["log_probs"][2] == 0.5).all()
    assert found["loss", 1, 1].numbers == {"loss": 1.25}
    assert [p.kind for p in dump.problems] == ["gap"]
    result = compare([dump, dump])
    assert result.verdict is Verdict.SAME  # a gap says what is not there, not what differs
    assert any("nothing of actor 7" in f.message for f in result.pairs[0].findings)


def test_a_microbatch_keeps_its_part_and_ragged_rows_their_lengths(tmp_path: Path) -> None:
    (micro, *_) = step_batch().microbatches()
    dump = open_dump(micro.save(tmp_path / "m.safetensors"))
    assert {entry.location for entry in dump.entries} == {Location(5, "actor_update", "actor", 0)}
    slime = slime_rollout_file(tmp_path / "s.pt", make_batch(4, 9))
    dump = open_dump(join(open_dump(slime), 0).save(tmp_path / "s.safetensors"))
    (entry,) = dump.entries
    theirs = open_dump(slime)
    for name, (tag, _, values, offsets) in theirs.read(theirs.entries[0]).tensors.items():
        mine = dump.read(entry).tensors[name]
        assert mine[0] == tag
        assert (mine[2] == values).all()
        np.testing.assert_array_equal(mine[3], offsets)


def test_a_directory_of_one_batch_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"/a does not exist"):
        step_batch().save(tmp_path / "a" / "b.safetensors")
    assert not (tmp_path / "a").exists()  # a mistyped directory is not made
    (tmp_path / "a").mkdir()
    step_batch().save(tmp_path / "a" / "b.safetensors")
    assert open_dump(tmp_path / "a").kind == "batch"
    assert open_dump(tmp_path / "a", step=5).entries
    with pytest.raises(NotFound, match="holds nothing of step 6; expected one of its steps: 5"):
        open_dump(tmp_path / "a", step=6)
    step_batch().save(tmp_path / "a" / "c.safetensors")
    with pytest.raises(InvalidInput, match=r"holds 2 batches: b\.safetensors, c\.safetensors"):
        open_dump(tmp_path / "a")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(NotFound, match="no dump of a known format"):
        open_dump(tmp_path / "d")


def test_gaps_are_named_by_the_command(tmp_path: Path) -> None:
    directory = own_directory(tmp_path / "run")
    path = saved(directory, tmp_path, gaps=(Gap("tensor", "actor_update recorded x: not kept"),))
    result = invoke("compare", str(path), str(directory), "--json")
    said = json.loads(result.stdout)
    assert (result.exit_code, said["verdict"]) == (0, "same")
    assert [side["kind"] for side in said["sides"]] == ["batch", "own"]
    assert said["sides"][0]["about"]["source"]["run"] == "run"
    text = invoke("compare", str(path), str(directory)).stdout
    assert "batch, step 0, 2 ranks" in text
    assert "A: the batch lacks: actor_update recorded x: not kept" in text


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_truncated_file_is_reported(tmp_path: Path, suffix: str) -> None:
    whole = tmp_path / f"whole.{suffix}"
    if suffix == "pt":
        slime_rollout_file(whole, make_batch(4, 8))
    else:
        step_batch().save(whole)
    size = whole.stat().st_size
    file = tmp_path / f"cut.{suffix}"
    file.write_bytes(whole.read_bytes()[: size - 64])
    with pytest.raises(InvalidTensor) as error:
        open_dump(file)
    if suffix == "safetensors":
        assert error.match(r"holds \d+ bytes of tensors; expected \d+, as its header says")
    done = invoke("compare", str(file), str(whole))
    assert done.exit_code == 2
    assert "no dump of a known format" not in done.output
