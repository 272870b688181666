"""What becomes of one payload, without Ray and without a catalogue."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.support.measure import payload

from stagescope_service.engine.ingestion.intake import Intake, Outcome
from stagescope_service.engine.instructions import PayloadKey
from stagescope_service.statistics import Summary
from stagescope_service.store.artifacts import read_tensors
from stagescope_service.store.ring import Ring

JOB = {
    "run": "r", "attempt_id": 1, "attempt_key": "k", "role": "actor", "rank": 0, "step": 5,
    "stage": "actor_compute_log_prob", "occurrence": 0, "epoch": 0, "minibatch": 0,
    "microbatch": 0, "layout": {},
}  # fmt: skip


def take(tmp_path: Path, ids: list[str], **tensors: tuple[object, ...]) -> Outcome:
    taken = payload()
    taken["strings"] = {"sample_ids": ids}
    taken["tensors"] |= tensors
    intake = Intake(tmp_path, "node-1", Ring(tmp_path / "ring", 1 << 20))
    return intake.take(PayloadKey("incarnation", 1), JOB, taken)


def test_ids_of_prompts_are_refused_as_ids_of_samples(tmp_path: Path) -> None:
    outcome = take(tmp_path, ["one", "one", "two", "two"])
    assert outcome.state == "refused"
    assert "sample_ids names 'one' again in row 1: 2 rows" in str(outcome.reason)
    assert "group_ids" in str(outcome.reason)
    assert not [put for put in outcome.rows if put.table == "summaries"]
    (finding,) = [put.row for put in outcome.rows if put.table == "findings"]
    assert finding["message"] == outcome.reason


def test_pieces_of_a_sample_that_are_placed_share_its_id(tmp_path: Path) -> None:
    offsets = np.array([0, 12, 0, 12], np.int64)
    placed = ("int64", offsets.shape, offsets, None)
    outcome = take(tmp_path, ["one", "one", "two", "two"], token_offset=placed)
    assert (outcome.state, outcome.reason) == ("ingested", None)


def test_round_ids_that_cannot_be_rounds_are_said_and_lose_no_token(tmp_path: Path) -> None:
    ids = np.full((4, 12), 2**40)
    outcome = take(
        tmp_path, ["one", "two", "three", "four"], round_ids=("int64", ids.shape, ids, None)
    )
    assert outcome.state == "ingested"
    (found,) = [put.row for put in outcome.rows if put.table == "findings"]
    assert (found["kind"], found["evidence"]["tensors"]) == ("too_many_rounds", ["round_ids"])
    (row,) = [put.row for put in outcome.rows if put.table == "summaries"]
    summary = Summary.from_bytes(row["summary"])
    assert (summary.total.tokens, len(summary.rounds.keys)) == (44, 2)


def test_a_file_of_the_ring_says_itself_whose_it_is(tmp_path: Path) -> None:
    take(tmp_path, ["one", "two", "three", "four"])
    (path,) = (tmp_path / "ring").glob("*.safetensors")
    job = read_tensors(path).metadata["job"]
    assert {name: job[name] for name in JOB} == JOB
    assert (job["incarnation"], job["seq"]) == ("incarnation", 1)
