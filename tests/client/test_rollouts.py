"""Stored trajectories in the place of a rollout worker."""

from __future__ import annotations

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.step_batches import step_batch

from stagescope import ReplayRollouts
from stagescope.rollouts import Key
from stagescope_wire.errors import Conflict, InvalidInput, NotFound


def test_a_trajectory_is_found_by_group_and_run(tmp_path: Path) -> None:
    batch = step_batch()
    path = batch.save(tmp_path / "batch.safetensors")
    for source in (batch, path, str(path)):
        rollouts = ReplayRollouts(source)
        found = rollouts.get("g1", 1)
        assert found is not None
        assert found.sample_id == "g1_1"
        assert found.all_tokens() == [3, 4, 5, 16, 17, 18, 19]
        assert found.tensor("rollout_log_probs").tolist() == [-1, -2, -3, -4]
        assert found.tensor("old_log_probs").tolist() == [-1, -2, -3, -4]  # bfloat16
        assert found.reward == 0
        assert (found.step, found.strings["task_id"]) == (5, "b")


def test_each_is_served_once_by_default() -> None:
    rollouts = ReplayRollouts(step_batch())
    rollouts.get("g0", "0")
    with pytest.raises(Conflict, match="group_id 'g0', run_id '0' of step 5 was served before"):
        rollouts.get("g0", "0")
    again = ReplayRollouts(step_batch(), once=False)
    assert again.get("g0", 0) is again.get("g0", 0)


def test_what_is_missing_is_named_with_what_is_near() -> None:
    rollouts = ReplayRollouts(step_batch())
    with pytest.raises(NotFound) as caught:
        rollouts.get("g1", 7)
    assert "no trajectory of group_id 'g1', run_id '7' is stored (4 are)" in str(caught.value)
    assert "group_id 'g1', run_id '1' of step 5" in caught.value.expected
    with pytest.raises(NotFound):
        rollouts.get("g0", 0, step=6)
    lenient = ReplayRollouts(step_batch(), strict=False)
    assert [lenient.get("g9", 0), lenient.get("g9", 0)] == [None, None]
    assert lenient.missed == {Key("g9", "0"): 2}


def test_several_steps_are_served_in_turn() -> None:
    rollouts = ReplayRollouts(step_batch(5), step_batch(6))
    assert len(rollouts) == 8
    steps = [found.step for _ in range(2) if (found := rollouts.get("g0", 0)) is not None]
    assert steps == [5, 6]
    found = rollouts.get("g0", 1, step=6)
    assert found is not None
    assert found.step == 6


def test_at_the_end_it_reports_what_was_never_requested(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "stagescope.rollouts"),
        ReplayRollouts(step_batch()) as rollouts,
    ):
        rollouts.get("g0", 0)
    assert [key[:2] for key in rollouts.unasked] == [("g0", "1"), ("g1", "0"), ("g1", "1")]
    (record,) = caplog.records
    assert "1 of 4 stored trajectories were served; 3 were never requested" in record.message
    caplog.clear()
    with ReplayRollouts(step_batch()) as whole:
        for key in whole.keys:
            whole.get(*key[:2])
    assert not caplog.records


def test_another_prompt_is_refused() -> None:
    rollouts = ReplayRollouts(step_batch())
    with pytest.raises(InvalidInput, match="has another prompt"):
        rollouts.get("g0", 0, prompt=[1, 9])
    assert rollouts.get("g0", 0, prompt=[1, 2]) is not None


def test_one_key_for_two_rows_and_directories_are_refused(tmp_path: Path) -> None:
    batch = step_batch()
    strings = {**batch.strings, "run_ids": ("0", "0", "1", "2")}
    with pytest.raises(InvalidInput, match="two trajectories have group_id 'g0', run_id '0'"):
        ReplayRollouts(dataclasses.replace(batch, strings=strings))
    with pytest.raises(InvalidInput, match="is a directory"):
        ReplayRollouts(tmp_path)
    with pytest.raises(NotFound, match="no response_mask"):
        ReplayRollouts(dataclasses.replace(batch, tensors={}))


def test_threads_share_it() -> None:
    rollouts = ReplayRollouts(*map(step_batch, range(50)))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: rollouts.get("g1", 0), range(50)))
    assert {each.step for each in found if each is not None} == set(range(50))
