"""The engine's directory of a checkpoint scores stored rollouts as the engine sampled them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from examples.countdown import checkpoint
from examples.countdown.export import export
from examples.countdown.rollout import Rollout
from examples.countdown.trainer import Trainer
from stagescope_wire.batch import Batch, Tensor
from stagescope_workers import Probe
from stagescope_workers.consistency.ctranslate2_engine import CTranslate2Engine
from stagescope_workers.consistency.stored import rescore

NAMES = ("prompts", "responses", "response_mask", "turn_ids", "rollout_log_probs")


@pytest.mark.parametrize(("kind", "least", "most"), [("float32", 0.0, 1e-5), ("int8", 1e-4, 5e-2)])
def test_a_float32_rollout_scored_again(
    make_trainer: Callable[..., Trainer],
    probe: Probe,
    tmp_path: Path,
    kind: str,
    least: float,
    most: float,
) -> None:
    trainer = make_trainer(engine="float32", warmup_steps=10)
    rollout = Rollout(trainer.settings, probe)
    weights = trainer.weight_sync(1)
    assert weights is not None
    rollout.weight_sync(1, weights)
    made = rollout.generate(1)
    known = made.trajectories()
    arrays = {name: np.asarray(known[name]) for name in NAMES}
    batch = Batch(
        len(made),
        {name: Tensor(str(values.dtype), values) for name, values in arrays.items()},
        {"sample_ids": made.sample_ids, "group_ids": made.group_ids},
    )
    checkpoint.save_weights(tmp_path / "policy", trainer.policy)
    folder = tmp_path / "engine"
    done = CliRunner().invoke(export, [str(tmp_path), str(folder), "--engine", kind])
    assert done.exit_code == 0, done.output
    found = rescore(batch, CTranslate2Engine(folder), "rollout_log_probs")
    assert found.numbers["counts/tokens"] == made.response_mask.sum()
    assert least <= found.numbers["logprob_abs_diff/mean"] <= most
    assert found.aligned
