from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.countdown import checkpoint
from examples.countdown.advantages import critic_advantages, group_advantages
from examples.countdown.config import EngineSwitch, PlantedNan, Settings, SkippedSync, Troubles
from examples.countdown.losses import policy_loss
from examples.countdown.rollout import Rollout
from examples.countdown.trainer import Trainer
from stagescope_workers import Probe

MakeTrainer = Callable[..., Trainer]


def run_step(trainer: Trainer, probe: Probe, step: int) -> dict[str, float]:
    rollout = Rollout(trainer.settings, probe)
    weights = trainer.weight_sync(step)
    assert weights is not None
    rollout.weight_sync(step, weights)
    batch = rollout.generate(step)
    assert (trainer.compute_rm_score(step, batch) >= 0).all()
    # A policy that was hardly warmed up earns nothing, and would not be moved by it.
    batch = batch.with_columns(rewards=np.linspace(0, 1, len(batch), dtype=np.float32))
    batch = batch.with_columns(
        old_log_probs=trainer.compute_log_prob(step, batch),
        ref_log_probs=trainer.compute_ref_log_prob(step, batch),
    )
    rewards, mask = batch.columns["rewards"], batch.response_mask
    scalars: dict[str, float] = {}
    if trainer.settings.algorithm == "ppo":
        values = trainer.compute_values(step, batch)
        advantages, returns = critic_advantages(
            rewards, values, mask, discount=1.0, gae_lambda=0.95
        )
        batch = batch.with_columns(advantages=advantages, returns=returns)
        scalars |= trainer.update_critic(step, batch)
    else:
        batch = batch.with_columns(advantages=group_advantages(rewards, batch.group_ids, mask))
    return {**scalars, **trainer.update_actor(step, batch)}


def save(trainer: Trainer, root: Path, step: int) -> Path:
    folder = checkpoint.begin(root, step)
    trainer.save(folder)
    return checkpoint.commit(folder, step, dataclasses.asdict(trainer.settings))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_resumed_step_is_the_same_to_the_last_bit(
    make_trainer: MakeTrainer, probe: Probe, tmp_path: Path, algorithm: str
) -> None:
    trainer = make_trainer(algorithm=algorithm)
    trainer.warm_up()
    run_step(trainer, probe, 1)
    save(trainer, tmp_path, 1)
    onward = run_step(trainer, probe, 2)

    resumed = make_trainer(algorithm=algorithm)
    found = checkpoint.latest(tmp_path, dataclasses.asdict(resumed.settings))
    assert found is not None
    assert found[0] == 1
    resumed.load(found[1])
    again = run_step(resumed, probe, 2)
    assert again == onward
    assert again["loss"] != 0.0
    weights = zip(trainer.policy.parameters(), resumed.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)


def test_without_the_random_state_the_step_would_differ(
    make_trainer: MakeTrainer, probe: Probe, tmp_path: Path
) -> None:
    trainer = make_trainer(groups=4)
    folder = save(trainer, tmp_path, 0)
    onward = run_step(trainer, probe, 1)
    resumed = make_trainer(groups=4)
    resumed.load(folder)
    torch.manual_seed(123)
    assert run_step(resumed, probe, 1) != onward


def test_the_reference_stays_and_the_policy_moves(make_trainer: MakeTrainer, probe: Probe) -> None:
    trainer = make_trainer()
    trainer.warm_up()
    before = [p.clone() for p in trainer.reference.parameters()]
    scalars = run_step(trainer, probe, 1)
    assert scalars["kl"] > 0
    pairs = zip(before, trainer.reference.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    moved = zip(before, trainer.policy.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in moved)


def test_warming_up_teaches(make_trainer: MakeTrainer) -> None:
    short = make_trainer(warmup_steps=1, warmup_rows=16).warm_up()
    longer = make_trainer(warmup_steps=20, warmup_rows=16).warm_up()
    assert longer < 0.8 * short


def test_an_interrupted_checkpoint_is_not_there(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    settings = dataclasses.asdict(trainer.settings)
    assert checkpoint.latest(tmp_path, settings) is None
    save(trainer, tmp_path, 3)
    trainer.save(checkpoint.begin(tmp_path, 4))  # and then the job is killed
    found = checkpoint.latest(tmp_path, settings)
    assert found is not None
    assert found[0] == 3
    # The next attempt writes the same step again.
    save(trainer, tmp_path, 4)
    found = checkpoint.latest(tmp_path, settings)
    assert found is not None
    assert found[0] == 4


def test_old_checkpoints_go(tmp_path: Path) -> None:
    for step in range(1, 6):
        checkpoint.commit(checkpoint.begin(tmp_path, step), step, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000003",
        "step_000004",
        "step_000005",
    ]
    assert json.loads((tmp_path / "step_000005" / "meta.json").read_text())["step"] == 5


def test_resuming_under_other_settings_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer()
    save(trainer, tmp_path, 1)
    other = dataclasses.asdict(dataclasses.replace(trainer.settings, engine="float32", seed=7))
    with pytest.raises(ValueError, match="other settings: engine, seed"):
        checkpoint.latest(tmp_path, other)


def test_settings_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="6 groups do not divide into 2 mini-batches on 2 ranks"):
        Settings(groups=6)


def test_the_policy_loss_is_clipped_where_the_ratio_leaves_its_interval() -> None:
    ratio = torch.tensor([[1.5, 0.5, 1.1]])
    advantages = torch.tensor([[1.0, -1.0, 1.0]])
    zeros = torch.zeros(1, 3)
    result = policy_loss(
        ratio.log(),
        zeros,
        old_log_probs=zeros,
        ref_log_probs=ratio.log(),
        advantages=advantages,
        mask=torch.tensor([[1.0, 1.0, 1.0]]),
        clip=0.2,
        kl_coefficient=1.0,
        entropy_coefficient=0.0,
    )
    assert float(result.loss) == pytest.approx(-(1.2 - 0.8 + 1.1))
    assert float(result.clipped) == 2.0
    assert result.clipped_side.tolist() == [[1, -1, 0]]
    assert float(result.kl) == 0.0


def test_shards_and_mini_batches_cover_every_row_once(
    make_trainer: MakeTrainer, probe: Probe
) -> None:
    trainer = make_trainer(groups=4)
    rollout = Rollout(trainer.settings, probe)
    weights = trainer.weight_sync(1)
    assert weights is not None
    rollout.weight_sync(1, weights)
    batch = rollout.generate(1)
    shards = batch.shards(2)
    together = batch.gather([shard.rollout_log_probs for shard in shards])
    assert np.array_equal(together, batch.rollout_log_probs)
    parts = list(trainer._minibatches(batch))
    assert [(epoch, index) for epoch, index, _ in parts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for epoch in range(2):
        ids = [uid for e, _, part in parts if e == epoch for uid in part.sample_ids]
        assert sorted(ids) == sorted(batch.sample_ids)
    part = parts[0][2]
    rows = [batch.sample_ids.index(uid) for uid in part.sample_ids]
    assert np.array_equal(part.responses, batch.responses[rows, : part.responses.shape[1]])


def test_a_planted_nan_stays_in_its_layer_and_spares_the_weights(
    make_trainer: MakeTrainer, probe: Probe
) -> None:
    planted = PlantedNan.parse("2:0:model.layers.1.mlp.down_proj")
    trainer = make_trainer(troubles=Troubles(nan=planted))
    first = run_step(trainer, probe, 1)
    assert np.isfinite(list(first.values())).all()
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    second = run_step(trainer, probe, 2)
    assert not np.isfinite(second["loss"])
    for name, value in trainer.policy.state_dict().items():
        assert torch.isfinite(value).all(), name
        assert torch.equal(value, before[name]), name


def test_the_engine_switches_its_type_at_a_step(make_trainer: MakeTrainer, probe: Probe) -> None:
    trainer = make_trainer()
    rollout = Rollout(trainer.settings, probe, Troubles(switch=EngineSwitch.parse("2:float32")))
    means = []
    for step in (1, 2):
        weights = trainer.weight_sync(step)
        assert weights is not None
        rollout.weight_sync(step, weights)
        batch = rollout.generate(step)
        batch = batch.with_columns(rewards=np.zeros(len(batch), np.float32))
        old = trainer.compute_log_prob(step, batch)
        means.append(np.abs(old - batch.rollout_log_probs)[batch.response_mask == 1].mean())
    assert means[1] < means[0] / 10


@pytest.mark.parametrize("text", ["", "2", "2:0", "2:0:", "a:0:m", "2:b:m"])
def test_plants_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="STEP:RANK:MODULE"):
        PlantedNan.parse(text)


@pytest.mark.parametrize("text", ["", "2", "2:fp4", "x:int8"])
def test_switches_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="STEP:int8"):
        EngineSwitch.parse(text)


def test_a_sync_that_is_skipped_leaves_the_engine_what_it_had(
    make_trainer: MakeTrainer, probe: Probe
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    trainer = make_trainer(troubles=Troubles(skip=SkippedSync.parse(f"2:{name}")))
    rollout = Rollout(trainer.settings, probe)
    first = trainer.weight_sync(1)
    assert first is not None
    rollout.weight_sync(1, first)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.add_(1.0)
    second, third = trainer.weight_sync(2), trainer.weight_sync(3)
    assert second is not None
    assert third is not None
    assert set(first) - set(second) == {name}
    rollout.weight_sync(2, second)
    assert np.array_equal(rollout._weights[name], first[name])
    assert all(np.array_equal(rollout._weights[other], second[other]) for other in second)
    rollout.weight_sync(3, third)
    assert np.array_equal(rollout._weights[name], third[name])


@pytest.mark.parametrize("text", ["", "2", "2:", "1:lm_head.weight", "x:lm_head.weight"])
def test_a_skipped_sync_is_of_a_step_that_has_one_before(text: str) -> None:
    with pytest.raises(ValueError, match="STEP:NAME"):
        SkippedSync.parse(text)
