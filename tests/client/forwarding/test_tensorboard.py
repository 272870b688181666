"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.support.api import Service
from tests.support.measure import payload
from tests.support.runs.forwarded import K3, LOG_PROB, PAGE, RUN, Board, Training, handed, published

from stagescope import Session
from stagescope.forwarding import PREFIX

# Clients of others: what they warn of is theirs.
pytestmark = pytest.mark.filterwarnings("default")


def test_tensorboard_has_the_numbers_and_the_pages(
    live: Service, training: Training, asked: Session, board: Board, said: list[str]
) -> None:
    training.do(1, 3)
    outcome = asked.forward(RUN, board.target, page_url=f"{PAGE}/", report=said.append)
    assert outcome.to_dicts() == [
        {"target": board.target, "steps": 3, "again": 0, "findings": 0, "waiting": None,
         "problem": None}
    ]  # fmt: skip
    expected = [(step, float(np.float32(published(live, step)))) for step in (1, 2, 3)]
    assert board.scalars(K3) == expected
    names = live.get("/steps/3/metrics", run=RUN)["metrics"]
    own = {"step/attempt", "step/complete", "step/comparable"}
    verdict = live.get("/steps/3/metrics", run=RUN)["comparable"]
    own -= {"step/comparable"} if verdict == "unknown" else set()
    assert set(board.tags()["scalars"]) == {f"{PREFIX}{name}" for name in {*names, *own}}
    assert board.scalars("step/complete") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert board.texts()[3] == (
        f"[step 3]({PAGE}/#/runs/{RUN}/steps/3?attempt=1): attempt 1, {verdict}, complete"
    )
    assert said == []


def test_nothing_is_written_twice(training: Training, asked: Session, board: Board) -> None:
    training.do(1, 2)
    asked.forward(RUN, board.target)
    assert [asked.forward(RUN, board.target)[0][n] for n in ("steps", "again")] == [0, 0]
    assert len(board.files) == 1
    training.do(3, 3)
    assert asked.forward(RUN, board.target)[0]["steps"] == 1
    assert [step for step, _ in board.scalars(K3)] == [1, 2, 3]
    assert asked.forward(RUN, board.target, anew=True)[0]["steps"] == 3


def test_a_step_that_was_begun_again_is_written_again(
    live: Service, training: Training, asked: Session, board: Board, said: list[str]
) -> None:
    training.do(1, 4)
    asked.forward(RUN, board.target)
    resumed = training.restart(after=2)
    resumed.do(3, 5)
    outcome = asked.forward(RUN, board.target, report=said.append)
    assert (outcome[0]["steps"], outcome[0]["again"]) == (3, 2)
    again = [f"{board.target}: step {step} again: attempt 2 began it again" for step in (3, 4)]
    assert [line for line in said if " again: " in line] == again
    assert [value for step, value in board.scalars("step/attempt") if step >= 3] == [
        1.0, 1.0, 2.0, 2.0, 2.0,
    ]  # fmt: skip
    # A new directory gets the steps in force alone.
    other = Board(board.path / "other")
    asked.forward(RUN, other.target)
    assert other.scalars("step/attempt") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_a_step_that_was_aggregated_again_is_written_with_those_after_it(
    live: Service, training: Training, asked: Session, board: Board, said: list[str]
) -> None:
    training.do(1, 4)
    asked.forward(RUN, board.target)
    before = published(live, 2)
    # A further part of the stage arrives after the step was closed.
    training.ranks[1].stage(LOG_PROB, 2, payload(seed=77, first_sample=90), microbatch=1)
    assert published(live, 2) != before
    asked.forward(RUN, board.target, report=said.append)
    assert [line.removeprefix(f"{board.target}: ") for line in said if " again: " in line] == [
        "step 2 again: it is not as it was",
        "step 3 again: an earlier step was, and hides it",
        "step 4 again: an earlier step was, and hides it",
    ]
    assert [step for step, _ in board.scalars(K3)] == [1, 2, 3, 4, 2, 3, 4]
    assert board.scalars(K3)[4][1] == float(np.float32(published(live, 2)))
    assert asked.forward(RUN, board.target)[0]["steps"] == 0


def test_what_was_not_measured_is_not_written(
    live: Service, training: Training, asked: Session, board: Board
) -> None:
    for step in (1, 2):
        for rank, each in enumerate(training.ranks):
            copied = handed(step, rank)
            tensors = copied["tensors"]
            tensors["old_log_probs"] = tensors["rollout_log_probs"]
            # In step 2 the ranks hand nothing over.
            each.stage(LOG_PROB, step, copied if step == 1 else None)
    training.begin(3)
    assert live.get("/steps/1/metrics", run=RUN)["comparable"] == "not measured"
    assert published(live, 1) == 0.0
    asked.forward(RUN, board.target)
    tags = {tag.removeprefix(PREFIX) for tag in board.tags()["scalars"]}
    assert K3 not in tags
    assert "step/comparable" not in tags
    assert {"logprob/old_mean", "counts/tokens", "step/complete"} <= tags
    assert not any(tag.startswith(("rollout_corr", "logprob_abs", "tail", "per_")) for tag in tags)
    assert [step for step, _ in board.scalars("counts/tokens")] == [1]
    assert board.texts()[2].endswith("attempt 1, no numbers, complete")


def test_a_nan_is_a_nan_and_findings_are_text(
    training: Training, asked: Session, board: Board, said: list[str]
) -> None:
    training.do_broken(1)
    outcome = asked.forward(RUN, board.target, report=said.append)
    ((step, value),) = board.scalars(K3)
    assert step == 1
    assert math.isnan(value)
    assert outcome[0]["findings"] >= 1
    found = [tag for tag in board.tags()["tensors"] if "/findings/" in tag]
    assert len(found) == outcome[0]["findings"]
    text = board.texts(found[0].removeprefix(PREFIX))[1]
    assert text.startswith("**error** ")
    assert f"/#/runs/{RUN}/steps/1?attempt=1" in text
    assert "Try: " in text
    assert "`stagescope tokens 1" in text
    assert any(" error " in line for line in said)
    assert asked.forward(RUN, board.target)[0]["findings"] == 0


def test_other_event_files_are_named(
    training: Training, asked: Session, board: Board, said: list[str]
) -> None:
    board.path.mkdir()
    (board.path / "events.out.tfevents.1.host.1.0").write_bytes(b"")
    asked.forward(RUN, board.target, report=said.append)
    assert "--load_fast=false" in said[0]
