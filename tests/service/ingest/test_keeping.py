"""What becomes a file of its own, without Ray and without a catalogue."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from tests.support.measure import ingest_job, payload

from stagescope_service.core.instructions import PayloadKey
from stagescope_service.ingest.kept_files import Keeper
from stagescope_service.ingest.reader import Outcome, PayloadReader
from stagescope_service.store.kept import read_kept
from stagescope_service.store.ring import Ring
from stagescope_service.store.tensorfile import write_tensors
from stagescope_wire.errors import InvalidTensor, NotFound

JOB = ingest_job(
    stage="actor_update", layout={"tp_rank": 0}, settings={}, keep=["old_log_probs", "loss"],
    scalars={"loss": 0.5, "grad_norm": math.inf},
)  # fmt: skip


class Node:
    """An intake with a disk of its own."""

    def __init__(self, directory: Path, reserve: int = 0) -> None:
        self.keeper = Keeper(directory, "node-1", reserve)
        self.intake = PayloadReader(directory, "node-1", Ring(directory / "ring", 0), self.keeper)

    def take(self, seq: int = 1, value: object = None, **job: object) -> Outcome:
        given = payload() if value is None else value
        return self.intake.read(PayloadKey("incarnation", seq), ingest_job(**{**JOB, **job}), given)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def kept(outcome: Outcome) -> list[dict[str, Any]]:
    rows = [dict(put.row) for put in outcome.rows if put.table == "artifacts"]
    return [row for row in rows if row["kind"] == "kept"]


def findings(outcome: Outcome, kind: str = "not_kept") -> list[dict[str, Any]]:
    rows = [dict(put.row) for put in outcome.rows if put.table == "findings"]
    return [row for row in rows if row.get("kind", kind) == kind]


def test_a_file_alone_tells_what_it_holds(node: Node) -> None:
    taken = payload()
    taken["strings"] |= {"answers": ["12", "", "7", "8"]}
    taken["meta"] = {"temperature": 0.7}
    (row,) = kept(node.take(value=taken))
    found = read_kept(Path(row["path"]))
    assert {*found.tensors} == {"old_log_probs", "response_mask"}
    assert found.sections == {
        "old_log_probs": ["old_log_probs", "response_mask"], "loss": ["loss"]
    }  # fmt: skip
    assert found.scalars == {"loss": 0.5, "grad_norm": math.inf}
    assert found.strings == taken["strings"]
    assert found.meta == {"temperature": 0.7}
    assert found.job["layout"] == {"tp_rank": 0}
    assert (found.job["incarnation"], found.job["seq"]) == ("incarnation", 1)
    assert "keep" not in found.job
    with safetensors.safe_open(row["path"], "np") as file:  # and any other tool opens it
        own = json.loads(file.metadata()["stagescope"])["metadata"]
        assert own["scalars"] == {"loss": 0.5, "grad_norm": "inf"}
        assert np.array_equal(
            file.get_tensor("old_log_probs"), taken["tensors"]["old_log_probs"][2]
        )
    assert row["checksum"].startswith("sha256:")
    assert row["sections"] == found.sections
    assert row["tensors"]["response_mask"][0] == "int64"
    assert (row["role"], row["rank"], row["minibatch"], row["deleted_wall"]) == (
        "actor",
        0,
        0,
        None,
    )


def test_numbers_alone_are_a_file(node: Node) -> None:
    (row,) = kept(node.take(value={"schema": 1, "tensors": {}, "strings": {}, "meta": {}}))
    found = read_kept(Path(row["path"]))
    assert (found.tensors, found.scalars["loss"]) == ({}, 0.5)
    with safetensors.safe_open(row["path"], "np") as file:
        assert [*file.keys()] == []


def test_texts_alone_are_a_file_of_trajectories(node: Node) -> None:
    taken = {"schema": 1, "tensors": {}, "strings": {"output": ["a", "b"]}, "meta": {}}
    assert kept(node.take(value=taken, scalars={}, keep=["old_log_probs"])) == []
    (row,) = kept(node.take(value=taken, scalars={}, keep=["trajectories"]))
    found = read_kept(Path(row["path"]))
    assert (found.sections, found.strings) == ({"trajectories": []}, {"output": ["a", "b"]})


def test_nothing_is_overwritten_by_the_next_part(node: Node) -> None:
    seqs = iter(range(100))
    paths = [
        kept(node.take(next(seqs), rank=rank, epoch=epoch, minibatch=mini, microbatch=micro))[0]
        for rank in range(2)
        for epoch in range(2)
        for mini in range(2)
        for micro in range(3)
    ]
    assert len({row["path"] for row in paths}) == 24
    assert all(Path(row["path"]).exists() for row in paths)
    # Made anew, a rank does the same work under another name.
    again = node.intake.read(PayloadKey("other", 0), JOB, payload())
    assert kept(again)[0]["path"] not in {row["path"] for row in paths}


def test_read_again_after_a_crash_it_is_the_same_file(node: Node) -> None:
    first, second = kept(node.take())[0], kept(node.take())[0]
    same = ("artifact_id", "path", "checksum", "bytes")
    assert [first[name] for name in same] == [second[name] for name in same]


def test_nothing_is_kept_that_nobody_named(node: Node) -> None:
    assert kept(node.take(keep=[])) == []
    assert kept(node.take(keep=["batch_inputs"])) == []
    assert node.keeper.not_kept == 0


def test_a_disk_without_room_is_said_and_statistics_go_on(tmp_path: Path) -> None:
    node = Node(tmp_path, reserve=1 << 60)
    outcome = node.take()
    assert outcome.state == "ingested"
    assert [put.table for put in outcome.rows].count("summaries") == 1
    assert kept(outcome) == []
    (said,) = findings(outcome)
    assert "must stay free" in said["message"]
    assert (said["evidence"]["not_kept"], said["over_wall"]) == (1, None)
    assert node.keeper.not_kept == 1
    assert findings(node.take(2))[0]["finding_id"] == said["finding_id"]
    assert node.keeper.reason
    node.keeper.reserve_bytes = 0  # there is room again
    outcome = node.take(3)
    assert len(kept(outcome)) == 1
    assert findings(outcome) == []  # the coordinator says that it is over
    assert (node.keeper.reason, node.keeper.not_kept) == ("", 2)


def test_a_disk_that_refuses_leaves_nothing_behind(node: Node, tmp_path: Path) -> None:
    (tmp_path / "r").write_text("a file where a directory is to be")
    outcome = node.take()
    assert outcome.state == "ingested"
    assert kept(outcome) == []
    assert len(findings(outcome)) == 1
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".safetensors")] == []


def test_too_many_texts_are_not_kept(node: Node) -> None:
    taken = payload()
    taken["strings"] |= {"prompt_texts": ["x" * (5 << 20)] * 4}
    outcome = node.take(value=taken)
    assert (outcome.state, kept(outcome)) == ("ingested", [])
    assert "names, texts and metadata" in findings(outcome)[0]["message"]


def test_other_files_are_no_kept_ones(tmp_path: Path) -> None:
    values = np.zeros(3, np.float32)
    write_tensors(tmp_path / "a.safetensors", {"x": ("float32", (3,), values, None)}, {"job": {}})
    with pytest.raises(InvalidTensor, match="not a kept file of a stage"):
        read_kept(tmp_path / "a.safetensors")
    with pytest.raises(NotFound):
        read_kept(tmp_path / "b.safetensors")


def test_a_tensor_that_was_written_too_early_is_a_finding(node: Node) -> None:
    taken = payload()
    taken["meta"] = {"written_after_hand_over": ["prob_ratio"]}
    (said,) = findings(node.take(value=taken), "tensor_written")
    assert "prob_ratio" in said["message"]
    assert (said["step"], said["stage"]) == (5, "actor_update")
