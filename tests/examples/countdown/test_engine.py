from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from examples.countdown.batch import Batch
from examples.countdown.rollout import Rollout
from examples.countdown.trainer import Trainer
from stagescope_workers import Probe

MakeTrainer = Callable[..., Trainer]


def play(trainer: Trainer, probe: Probe, step: int = 1) -> Batch:
    rollout = Rollout(trainer.settings, probe)
    weights = trainer.weight_sync(step)
    assert weights is not None
    rollout.weight_sync(step, weights)
    return rollout.generate(step)


def scored(trainer: Trainer, batch: Batch) -> Batch:
    return batch.with_columns(rewards=trainer.compute_rm_score(1, batch))


@pytest.mark.parametrize(
    ("engine", "least", "most"),
    # int8's own arithmetic, not a fault of the alignment: a shift by one would give whole units.
    [("float32", 0.0, 1e-5), ("int8", 1e-4, 5e-2)],
)
@pytest.mark.parametrize("warmup_steps", [0, 10])
def test_the_engines_log_probs_are_the_trainers_up_to_its_arithmetic(
    make_trainer: MakeTrainer,
    probe: Probe,
    engine: str,
    least: float,
    most: float,
    warmup_steps: int,
) -> None:
    trainer = make_trainer(engine=engine, warmup_steps=warmup_steps)
    trainer.warm_up()
    batch = scored(trainer, play(trainer, probe))
    old = trainer.compute_log_prob(1, batch)
    model = batch.response_mask == 1
    difference = np.abs(old - batch.rollout_log_probs)[model]
    assert least <= difference.mean() <= most
    assert old[model].std() > 0.1
    assert (batch.rollout_log_probs[model] < 0).all()
    assert not batch.rollout_log_probs[~model].any()


def test_samples_have_two_to_four_rounds_and_differ_in_length(
    make_trainer: MakeTrainer, probe: Probe
) -> None:
    trainer = make_trainer(groups=4)
    batch = play(trainer, probe)
    assert len(batch) == 16
    assert len(set(batch.sample_ids)) == 16
    assert set(batch.round_counts) <= {2, 3, 4}
    assert len(set(batch.round_counts)) > 1
    assert len({int(n) for n in (batch.turn_ids >= 0).sum(axis=1)}) > 1
    # Every round has model tokens and is one run of ones, so mask rounds are true turns.
    for mask, turns in zip(batch.response_mask, batch.turn_ids, strict=True):
        starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        assert turns[starts].tolist() == list(range(turns.max() + 1))


def test_the_same_seed_and_step_sample_the_same(make_trainer: MakeTrainer, probe: Probe) -> None:
    trainer = make_trainer()
    first, again, other = play(trainer, probe), play(trainer, probe), play(trainer, probe, 2)
    assert np.array_equal(first.responses, again.responses)
    assert np.array_equal(first.rollout_log_probs, again.rollout_log_probs)
    assert not np.array_equal(first.responses, other.responses)


def test_loading_leaves_the_trainers_weights_alone(make_trainer: MakeTrainer, probe: Probe) -> None:
    trainer = make_trainer()
    before = {name: t.clone() for name, t in trainer.policy.state_dict().items()}
    weights = trainer.weight_sync(1)
    assert weights is not None
    kept = {name: array.copy() for name, array in weights.items()}
    Rollout(trainer.settings, probe).weight_sync(1, weights)
    assert all(np.array_equal(kept[name], weights[name]) for name in kept)
    assert all(bool((before[n] == t).all()) for n, t in trainer.policy.state_dict().items())
