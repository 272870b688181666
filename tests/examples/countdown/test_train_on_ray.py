from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.examples.countdown.test_replay import stored

from examples.countdown import checkpoint
from examples.countdown.actors import Report
from examples.countdown.batch import Batch
from examples.countdown.config import Settings
from examples.countdown.train import Job, describe

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SETTINGS = Settings(algorithm="ppo", groups=4, warmup_steps=3, warmup_rows=8)


class Trained(NamedTuple):
    """What a training of two ranks did in its first steps, and the checkpoint after step 1."""

    pids: dict[str, int]
    steps: list[tuple[Batch, dict[str, float]]]
    checkpoints: Path
    folder: Path


@pytest.fixture(scope="module")
def trained(address: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    job = Job(SETTINGS, Report("countdown-test", "first"))
    pids = job.pids()
    job.prepare(None)
    first = job.step(1)
    folder = job.save(checkpoints, 1)
    made = Trained(pids, [first, job.step(2)], checkpoints, folder)
    job.close(5.0)
    return made


def test_two_ranks_train_stop_and_resume_to_the_same_numbers(trained: Trained) -> None:
    assert set(trained.pids) == {"actor-0", "actor-1", "rollout-0"}
    assert len(set(trained.pids.values())) == 3
    assert json.loads((trained.folder / "meta.json").read_text())["step"] == 1
    batch, scalars = trained.steps[1]

    again = Job(SETTINGS, Report("countdown-test", "second", resumed_from_step=1))
    found = checkpoint.latest(trained.checkpoints, dataclasses.asdict(SETTINGS))
    assert found == (1, trained.folder)
    again.prepare(trained.folder)
    batch_again, scalars_again = again.step(2)
    again.close(5.0)

    assert scalars_again == scalars
    assert np.array_equal(batch_again.responses, batch.responses)
    mask = batch.response_mask == 1
    mismatch = np.abs(batch.columns["old_log_probs"] - batch.rollout_log_probs)[mask].mean()
    assert 1e-5 < mismatch < 5e-2
    assert set(batch.columns) >= {"rewards", "ref_log_probs", "values", "advantages", "returns"}
    assert f"{mask.sum()} tokens" in describe(2, batch, scalars, 1.0)


@pytest.mark.parametrize("first", [1, 2])
def test_a_replayed_step_has_the_same_loss_bit_by_bit(trained: Trained, first: int) -> None:
    batches = [
        stored(batch, step, SETTINGS)
        for step, (batch, _) in enumerate(trained.steps, 1)
        if step >= first
    ]
    again = Job(SETTINGS, Report("countdown-test.replay", "second"), stored=batches)
    reported = dataclasses.asdict(SETTINGS)
    again.prepare(checkpoint.after(trained.checkpoints, first - 1, reported) if first > 1 else None)
    for each in batches:
        assert each.step is not None
        batch, scalars = trained.steps[each.step - 1]
        batch_again, scalars_again = again.step(each.step)
        assert scalars_again == scalars
        assert np.array_equal(batch_again.columns["old_log_probs"], batch.columns["old_log_probs"])
    again.close(5.0)
    with pytest.raises(ValueError, match="no checkpoint after step 7"):
        checkpoint.after(trained.checkpoints, 7, reported)
