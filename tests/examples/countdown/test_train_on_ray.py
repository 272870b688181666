from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from examples.countdown import checkpoint
from examples.countdown.actors import Report
from examples.countdown.config import Settings
from examples.countdown.train import Job, describe

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SETTINGS = Settings(algorithm="ppo", groups=4, warmup_steps=3, warmup_rows=8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200_000_000,
        log_to_driver=False,
        namespace="countdown-test",
    )
    yield
    ray.shutdown()


def test_two_ranks_train_stop_and_resume_to_the_same_numbers(cluster: None, tmp_path: Path) -> None:
    job = Job(SETTINGS, Report("countdown-test", "first"))
    pids = job.pids()
    assert set(pids) == {"actor-0", "actor-1", "rollout-0"}
    assert len(set(pids.values())) == 3
    job.prepare(None)
    job.step(1)
    folder = job.save(tmp_path, 1)
    assert json.loads((folder / "meta.json").read_text())["step"] == 1
    batch, scalars = job.step(2)
    job.close(5.0)

    again = Job(SETTINGS, Report("countdown-test", "second", resumed_from_step=1))
    found = checkpoint.latest(tmp_path, dataclasses.asdict(SETTINGS))
    assert found == (1, folder)
    again.prepare(folder)
    batch_again, scalars_again = again.step(2)
    again.close(5.0)

    assert scalars_again == scalars
    assert np.array_equal(batch_again.responses, batch.responses)
    mask = batch.response_mask == 1
    mismatch = np.abs(batch.columns["old_log_probs"] - batch.rollout_log_probs)[mask].mean()
    assert 1e-5 < mismatch < 5e-2
    assert set(batch.columns) >= {"rewards", "ref_log_probs", "values", "advantages", "returns"}
    assert f"{mask.sum()} tokens" in describe(2, batch, scalars, 1.0)
