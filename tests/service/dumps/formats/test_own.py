from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.batches import wire
from tests.support.dump_files import make_batch, nexrl_directory, own_directory

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.own import open_files
from stagescope_service.dumps.records import Dump, DumpContents, Location
from stagescope_service.store.tensorfile import write_tensors
from stagescope_wire.errors import InvalidInput, InvalidTensor, NotFound
from stagescope_wire.schema import Part


def one(dump: Dump, section: str, rank: int = 0, micro: int = 0) -> DumpContents:
    place = (section, rank, Part(microbatch=micro))
    (found,) = [e for e in dump.entries if (e.section, e.location.rank, e.location.part) == place]
    return dump.read(found)


def test_a_payload_is_split_into_sections(tmp_path: Path) -> None:
    attempt = own_directory(tmp_path, steps=(2, 1))
    dump = open_dump(attempt, step=1)
    assert (dump.kind, dump.problems) == ("own", [])
    assert dump.about["attempts"] == ["run@first"]
    first = [entry.section for entry in dump.entries if entry.location.rank == 0]
    assert sorted(set(first)) == ["advantages", "forward_data", "gradients", "is_loss", "loss",
                                  "metrics", "old_log_probs", "trajectories"]  # fmt: skip
    assert dump.entries[0].location == Location(1, "actor_update", "actor", 0, Part())
    batch = make_batch(16, 16, step=1)

    record = one(dump, "trajectories", 1, 1)
    assert {*record.tensors} == {"responses", "response_mask", "rollout_log_probs", "rewards"}
    assert record.mask == "response_mask"
    assert record.samples == tuple(batch.samples[12:])
    assert record.groups == tuple(batch.groups[12:])
    np.testing.assert_array_equal(record.tensors["responses"][2], batch.responses[12:])

    record = one(dump, "is_loss")
    assert {*record.tensors} == {
        "log_probs", "old_log_probs", "advantages", "prob_ratio", "response_mask",
    }  # fmt: skip
    assert record.mask == "response_mask"
    record = one(dump, "forward_data")
    assert {*record.tensors} == {"entropy", "log_probs", "response_mask"}
    loss = one(dump, "loss")
    assert loss.numbers["loss"] == 0.5
    assert np.isnan(loss.numbers["pg_loss"])
    assert loss.about["meta"] == {"temperature": 1.0}
    assert one(dump, "metrics").numbers == {"grad_norm": 1.5}
    # Gradients of the second update have their number.
    record = one(dump, "gradients", 1)
    assert {name: wire[2][0, 0] for name, wire in record.tensors.items()} == {
        "lm_head.weight": 2.0, "lm_head.weight#1": 3.0,
    }  # fmt: skip
    assert record.mask is None


def test_shards_datums_and_texts(tmp_path: Path) -> None:
    def edit(kind: str, name: str, data: dict[str, Any]) -> None:
        rows = len(data["strings"]["sample_ids"])
        data["tensors"]["datums/loss_fn_inputs.advantages"] = np.ones((rows, 2), np.float32)
        data["strings"] |= {"answers": ["a"] * rows, "datums/kind": ["b"] * rows}
        location = {"shape": [8, 4], "offset": [4, 0], "placements": ["Shard(0)"], "mesh": [2]}
        data["meta"]["shards"] = {"gradient/lm_head.weight": location}

    dump = open_dump(own_directory(tmp_path, edit=edit))
    gradients = one(dump, "gradients")
    assert gradients.about["shards"] == {
        "lm_head.weight": {"global_shape": [8, 4], "offset": [4, 0]}
    }
    assert gradients.samples is None
    datums = one(dump, "datums")
    assert {*datums.tensors} == {"loss_fn_inputs/advantages"}
    assert datums.row_texts == {"kind": ("b",) * 4}
    assert one(dump, "trajectories").row_texts == {"answers": ("a",) * 4}
    assert one(dump, "old_log_probs").row_texts == {}


@pytest.mark.parametrize("below", ["", "run", "run/first", "run/first/step_0",
                                   "run/first/step_0/actor_update"])  # fmt: skip
def test_any_folder_above_the_files(tmp_path: Path, below: str) -> None:
    own_directory(tmp_path)
    dump = open_dump(tmp_path / below)
    locations = {
        (entry.location.step, entry.location.stage, entry.location.rank) for entry in dump.entries
    }
    assert locations == {(0, "actor_update", 0), (0, "actor_update", 1)}


def test_files_that_the_catalogue_lists(tmp_path: Path) -> None:
    path = tmp_path / "anywhere.safetensors"
    place = Location(7, "actor_update", "actor", 3)
    found = []
    for value in (1.0, 2.0):  # a file that was replaced is read anew
        tensors = {"loss": wire(np.array(value)), f"x{value}": wire(np.zeros(1))}
        write_tensors(path, tensors, {"strings": {}})
        os.utime(path, (value, value))
        dump = pickle.loads(pickle.dumps(open_files("run@1:7", [(path, place)])))
        assert dump.name == "run@1:7"
        records = [dump.read(entry) for entry in dump.entries]
        assert {record.entry.location for record in records} == {place}
        found.append([(dict(record.numbers), [*record.tensors]) for record in records])
    assert found == [
        [({"loss": 1.0}, []), ({}, ["x1.0"])],
        [({"loss": 2.0}, []), ({}, ["x2.0"])],
    ]


def test_packed_payloads_have_row_offsets(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors: dict[str, Any] = {
        "old_log_probs": wire(np.arange(5, dtype=np.float32)),
        "response_mask": wire(np.ones(5, np.int64)),
        "rewards": wire(np.ones(2)),
        "responses": wire(np.arange(5)),
        "cu_seqlens": wire(np.array([0, 2, 5], np.int32)),
        "rollout_log_probs": wire(np.arange(5, dtype=np.float32), [0, 2, 5]),
    }
    write_tensors(path, tensors, {})
    dump = open_files("a", [(path, Location(0))])
    records = {entry.section: dump.read(entry) for entry in dump.entries}
    assert {*records} == {"trajectories", "old_log_probs"}
    for record in records.values():
        assert record.mask == "response_mask"
        for name, (_, _, _, offsets) in record.tensors.items():
            assert (offsets is None) == (name == "rewards")
            assert offsets is None or offsets.tolist() == [0, 2, 5]


def test_the_later_of_two_files_of_one_place_is_read(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        path = tmp_path / f"{name}.safetensors"
        write_tensors(path, {"loss": wire(np.array(float(number)))}, {"job": 5})
        os.utime(path, (number, number))
    location = Location(0, "actor_update", "actor", 0)
    files = [(tmp_path / f"{name}.safetensors", location) for name in ("new", "old")]
    dump = open_files("x", files)
    assert [dump.read(entry).numbers for entry in dump.entries] == [{"loss": 1.0}]
    assert [(p.kind, p.path.stem) for p in dump.problems] == [("superseded", "old")]


def test_missing_damaged_and_unknown_files_are_problems(tmp_path: Path) -> None:
    attempt = own_directory(tmp_path)
    files = sorted((attempt / "step_0/actor_update").rglob("*rank1*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].unlink()
    (attempt / "notes.txt").write_text("x")
    dump = open_dump(attempt)
    assert {problem.kind for problem in dump.problems} >= {"damaged", "unknown"}
    assert {entry.location.rank for entry in dump.entries} == {0}
    assert "bytes of tensors" in next(p for p in dump.problems if p.kind == "damaged").message


def test_a_microbatch_that_others_have_is_missing(tmp_path: Path) -> None:
    attempt = own_directory(tmp_path, ranks=3)
    gone = sorted(attempt.rglob("*rank2*.safetensors"))[0]
    gone.unlink()
    problems = open_dump(attempt).problems
    assert {problem.kind for problem in problems} == {"missing"}
    assert all(p.entry is not None and p.entry.location.rank == 2 for p in problems)
    assert len(problems) == 8  # sections


def test_operator_dumps_beside_them_are_ignored(tmp_path: Path) -> None:
    attempt = own_directory(tmp_path)
    rank = attempt / "step_0/actor_update/step0/rank0"
    (rank / "dump_tensor_data").mkdir(parents=True)
    for name in ("dump.json", "stack.json", "dump_tensor_data/Functional.x.pt"):
        (rank / name).write_text("{}")
    assert open_dump(attempt).problems == []


def test_two_attempts_are_not_one_dump(tmp_path: Path) -> None:
    own_directory(tmp_path, key="first")
    own_directory(tmp_path, key="second")
    with pytest.raises(InvalidInput, match="2 attempts: run@first, run@second"):
        open_dump(tmp_path)
    assert open_dump(tmp_path / "run/second").about["attempts"] == ["run@second"]


def test_two_formats_are_not_one_dump(tmp_path: Path) -> None:
    own_directory(tmp_path)
    nexrl_directory(tmp_path / "debug")
    with pytest.raises(InvalidInput, match="own, nexrl"):
        open_dump(tmp_path)
    assert open_dump(tmp_path, kind="own").entries
    with pytest.raises(InvalidInput, match="kind 'else'"):
        open_dump(tmp_path, kind="else")


def test_reading_a_deleted_or_damaged_file_is_an_error(tmp_path: Path) -> None:
    dump = open_dump(own_directory(tmp_path))
    dump.entries[0].path.write_bytes(b"\xff" * 16)
    with pytest.raises(InvalidTensor, match="claims a header"):
        dump.read(dump.entries[0])
    dump.entries[0].path.unlink()
    with pytest.raises(NotFound):
        dump.read(dump.entries[0])
