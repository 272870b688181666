"""Stored rollouts in the place of the engine: the same batch, the same loss."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagescope
from examples.countdown.batch import Batch
from examples.countdown.config import Settings
from examples.countdown.replay import ReplayedRollout, Source, read_step, stored_loss, verdict
from examples.countdown.rescore import RescoredRollout
from examples.countdown.rollout import Rollout
from examples.countdown.trainer import Trainer
from stagescope_service.store.tensorfile import WireTensor, write_tensors
from stagescope_wire.batch import BatchPart, Tensor
from stagescope_wire.schema import Part
from stagescope_workers import Probe

SETTINGS = Settings(groups=2, world_size=1, warmup_steps=2, warmup_rows=4)


def stored(batch: Batch, step: int, settings: Settings = SETTINGS) -> stagescope.Batch:
    """What the service gives back of a rollout."""
    reported: dict[str, Any] = batch.trajectories()
    arrays = {name: value for name, value in reported.items() if isinstance(value, np.ndarray)}
    texts = {name: value for name, value in reported.items() if _is_texts(value)}
    return stagescope.Batch(
        rows=len(batch),
        tensors={name: Tensor(value.dtype.name, value) for name, value in arrays.items()},
        strings={name: tuple(value) for name, value in texts.items()},
        meta={"settings": dataclasses.asdict(settings)},
        source={"run": "countdown", "step": step},
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


@pytest.fixture
def rollout(make_trainer: Callable[..., Trainer], probe: Probe) -> Batch:
    """A rollout of a real engine."""
    made = Rollout(SETTINGS, probe)
    made.weight_sync(3, make_trainer(warmup_steps=20).weight_sync(3) or {})
    return made.generate(3)


def test_the_same_batch_without_an_engine(rollout: Batch, probe: Probe, tmp_path: Path) -> None:
    path = stored(rollout, 3).save(tmp_path / "step.safetensors")
    replayed = ReplayedRollout(SETTINGS, probe, [stagescope.Batch.load(path)])
    replayed.weight_sync(3, {})
    again = replayed.generate(3)
    for field in dataclasses.fields(Batch):
        mine, theirs = getattr(rollout, field.name), getattr(again, field.name)
        same = np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
        assert same, field.name


def test_a_step_is_read_from_files_of_the_newest_attempt(rollout: Batch, tmp_path: Path) -> None:
    batch = stored(rollout, 3)
    for number, (run, key) in enumerate([("r", "first"), ("r", "second"), ("other", "third")]):
        job = {"run": run, "attempt_key": key, "step": 3, "stage": "rollout_generate",
               "role": "rollout", "rank": 0}  # fmt: skip
        rewards = np.full(batch.rows, float(number))
        path = tmp_path / f"{key}.safetensors"
        tensors: dict[str, WireTensor] = {"rewards": ("float64", rewards.shape, rewards, None)}
        write_tensors(path, tensors, {"job": job, "strings": {}})
        os.utime(path, (number, number))
    (tmp_path / "damaged.safetensors").write_bytes(b"x")
    found = read_step(tmp_path, 3, "r")
    assert found["rewards"].tolist() == [1.0] * batch.rows
    assert [gap.kind for gap in found.gaps] == ["file"]
    assert str(read_step(batch.save(tmp_path / "step.safetensors"), 3, "r")) == str(batch)
    with pytest.raises(stagescope.NotFound):
        read_step(tmp_path, 4, "r")


def test_another_engine_scores_the_same_tokens(
    rollout: Batch, probe: Probe, make_trainer: Callable[..., Trainer]
) -> None:
    weights = make_trainer(warmup_steps=20).weight_sync(3) or {}
    found = {}
    for engine in ("int8", "float32"):
        rescored = RescoredRollout(SETTINGS, probe, [stored(rollout, 3)], engine)
        rescored.weight_sync(3, weights)
        found[engine] = rescored.generate(3)
        assert np.array_equal(found[engine].responses, rollout.responses)
        assert np.array_equal(found[engine].response_mask, rollout.response_mask)
    inside = rollout.response_mask == 1
    distance = {
        engine: np.abs(batch.rollout_log_probs - rollout.rollout_log_probs)
        for engine, batch in found.items()
    }
    # The engine that wrote them scores them as it did, up to the order of its sums.
    assert distance[SETTINGS.engine][inside].max() < 0.05
    assert distance["float32"][inside].mean() > 2 * distance["int8"][inside].mean()
    assert not any(each[~inside].any() for each in distance.values())


def test_what_is_missing_or_was_changed_ends_it(rollout: Batch, probe: Probe) -> None:
    complete = stored(rollout, 3)
    fewer = complete.take(np.arange(len(rollout) - 1))
    with pytest.raises(stagescope.NotFound, match="group_id 's3g1', run_id '3' of step 3"):
        ReplayedRollout(SETTINGS, probe, [fewer]).generate(3)
    ids = rollout.responses.copy()
    row, at = np.argwhere((rollout.response_mask == 0) & (rollout.turn_ids >= 0))[0]
    ids[row, at] += 1  # what the environment said
    other = dataclasses.replace(
        complete, tensors={**complete.tensors, "responses": Tensor("int64", ids)}
    )
    with pytest.raises(RuntimeError, match="responses of step 3 differ from the stored ones"):
        ReplayedRollout(SETTINGS, probe, [other]).generate(3)
    with pytest.raises(stagescope.InvalidInput, match="has another prompt"):
        ReplayedRollout(dataclasses.replace(SETTINGS, seed=1), probe, [complete]).generate(3)


def test_no_engine_is_loaded() -> None:
    text = "import sys; import examples.countdown.replay; print('ctranslate2' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("text", "source"), [("a:b:5", Source("a:b", 5, 5)), ("r:5-7", Source("r", 5, 7))]
)
def test_a_source_is_read(text: str, source: Source) -> None:
    assert Source.parse(text) == source


@pytest.mark.parametrize("text", ["r", "r:", ":5", "r:x", "r:5-x"])
def test_what_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected RUN:STEP"):
        Source.parse(text)


def test_the_verdict_is_on_bits(rollout: Batch) -> None:
    rows = np.arange(len(rollout))
    losses = [0.1, 0.2, 0.7]
    parts = tuple(
        BatchPart("actor_update", "actor", rank, Part(minibatch=at), rows, numbers={"loss": loss})
        for at, loss in enumerate(losses)
        for rank in (0, 1)
    )
    complete = dataclasses.replace(stored(rollout, 3), parts=parts)
    assert stored_loss(complete) == (0.1 + 0.2 + 0.7) / 3
    assert "is the stored one, bit by bit" in verdict((0.1 + 0.2 + 0.7) / 3, complete)
    assert "is not the stored" in verdict(1 / 3 + 1e-12, complete)
    assert "nothing to compare" in verdict(1.0, stored(rollout, 3))
