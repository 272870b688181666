"""What the example hands over to be kept is all that a step is trained from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.examples.countdown.test_training import run_step
from tests.support.coordinators import FakeCoordinator, FakeService, wait_for
from tests.support.measure import ingest_job

from examples.countdown.batch import Batch
from examples.countdown.environment import Puzzle
from examples.countdown.rollout import Rollout
from examples.countdown.trainer import Trainer
from stagescope_service.core.instructions import PayloadKey
from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.store.kept import Kept, read_kept
from stagescope_service.store.ring import Ring
from stagescope_wire.keep import matching_selectors, read_keep
from stagescope_workers import Probe
from stagescope_workers.probe import handshake
from stagescope_workers.probe.options import checked_options


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> FakeCoordinator:
    service = FakeService(FakeCoordinator())
    monkeypatch.setattr(handshake, "find_link", service.find)
    assert service.coordinator is not None
    return service.coordinator


def keeping_probe(what: list[str]) -> Probe:
    probe = Probe(checked_options({"run": "r", "strict": True, "keep": {"what": what}}))
    probe.start()
    return probe


def stored_files(
    coordinator: FakeCoordinator, probe: Probe, folder: Path, *stages: str
) -> dict[tuple[str, str], Kept]:
    """Have an intake keep what a probe sent; (stage, part) -> what its file holds."""
    wait_for(lambda: probe.status()["waiting_events"] == 0)
    intake = PayloadReader(folder, "node-1", Ring(folder / "ring", 0))
    hello = next(e for (who, _), e in coordinator.events.items() if who == probe.incarnation)
    keep = read_keep(hello.fields["settings"]["keep"])
    found = {}
    for (incarnation, seq), payload in sorted(coordinator.payloads.items()):
        end = coordinator.events[incarnation, seq].fields
        if incarnation != probe.incarnation or end["stage"] not in stages:
            continue
        assert keep is not None
        place = {"role": "actor", "rank": 0, "stage": end["stage"], "step": end["step"]}
        job = ingest_job(**{**end, **place, "keep": matching_selectors(keep, **place)})
        outcome = intake.read(PayloadKey(incarnation, seq), job, payload)
        (row,) = [put.row for put in outcome.rows if put.table == "artifacts"]
        part = f"{end['epoch']}.{end['minibatch']}"
        found[end["stage"], part] = read_kept(Path(row["path"]))
    return found


def batch_of(kept: Kept) -> Batch:
    """Make the batch again of what was kept of its rollout."""
    arrays = {name: tensor[2] for name, tensor in kept.tensors.items()}
    offsets = kept.tensors["results"][3]
    assert offsets is not None
    results = np.split(arrays["results"], offsets[1:-1])
    told = zip(arrays["numbers"], arrays["targets"], kept.strings["solutions"], strict=True)
    return Batch(
        puzzles=tuple(
            Puzzle(tuple(map(int, numbers)), int(target), tuple(solution.split()))
            for numbers, target, solution in told
        ),
        answers=tuple(int(text) if text else None for text in kept.strings["answers"]),
        results=tuple(tuple(map(int, row)) for row in results),
        sample_ids=tuple(kept.strings["sample_ids"]),
        group_ids=tuple(kept.strings["group_ids"]),
        prompts=arrays["prompts"],
        responses=arrays["responses"],
        response_mask=arrays["response_mask"],
        turn_ids=arrays["turn_ids"],
        rollout_log_probs=arrays["rollout_log_probs"],
        policy_version=int(arrays["versions"][0, 0]),
        engine=kept.strings["engine_ids"][0],
    )


def assert_same(one: object, other: object) -> None:
    for name, value in vars(one).items():
        again = vars(other)[name]
        if isinstance(value, np.ndarray):
            assert value.dtype == again.dtype, name
            assert np.array_equal(value, again), name
        else:
            assert value == again, name


def test_a_kept_rollout_is_the_batch_to_the_last_bit(
    make_trainer: Callable[..., Trainer], coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    trainer = make_trainer()
    trainer.warm_up()
    probe = keeping_probe(["trajectories"])
    rollout = Rollout(trainer.settings, probe)
    weights = trainer.weight_sync(1)
    assert weights is not None
    rollout.weight_sync(1, weights)
    batch = rollout.generate(1)
    kept = stored_files(coordinator, probe, tmp_path, "rollout_generate")["rollout_generate", "0.0"]
    assert_same(batch, batch_of(kept))
    assert kept.meta["seed"] == trainer.settings.seed * 100_003 + 1
    assert (kept.meta["temperature"], kept.meta["top_k"]) == (1.0, 0)
    assert kept.strings["run_ids"][:4] == ["0", "1", "2", "3"]
    probe.close(0.0)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_every_minibatch_of_a_kept_step_has_a_file_of_its_loss(
    make_trainer: Callable[..., Trainer],
    probe: Probe,
    coordinator: FakeCoordinator,
    tmp_path: Path,
    algorithm: str,
) -> None:
    trainer = make_trainer(algorithm=algorithm)
    trainer.warm_up()
    trainer.probe = trainer.critic_probe = own = keeping_probe(["is_loss", "loss", "forward_data"])
    scalars = run_step(trainer, probe, 1)
    stages = ("actor_update", "critic_update")
    found = stored_files(coordinator, own, tmp_path, *stages)
    losses = [
        found["actor_update", f"{epoch}.{index}"].scalars["loss"]
        for epoch in range(2)
        for index in range(2)
    ]
    assert sum(losses) / 4 == pytest.approx(scalars["loss"], rel=1e-12)
    assert len(found) == (4 if algorithm == "grpo" else 8)
    for (stage, _), kept in found.items():
        if stage == "critic_update":
            assert kept.scalars["loss"] > 0
        else:
            check_loss(kept, trainer.settings.kl_coefficient)
    own.close(0.0)


def check_loss(kept: Kept, kl_coefficient: float) -> None:
    """The numbers of a file give its loss again."""
    values: dict[str, Any] = {name: tensor[2] for name, tensor in kept.tensors.items()}
    ratio = np.exp(values["log_probs"] - values["old_log_probs"])
    assert np.allclose(values["prob_ratio"], ratio, rtol=1e-6)
    gain = np.minimum(ratio * values["advantages"], ratio.clip(0.8, 1.2) * values["advantages"])
    distance = values["ref_log_probs"] - values["log_probs"]
    each = -gain + kl_coefficient * (np.expm1(distance) - distance)
    valid = values["effective_valid"]
    assert np.allclose(values["elementwise_loss"] * valid, each * valid, atol=1e-6)
    mean = (values["elementwise_loss"] * valid).sum(dtype=np.float64) / valid.sum()
    assert mean == pytest.approx(kept.scalars["loss"], abs=1e-6)
    assert values["entropy"].shape == valid.shape
    assert {"is_loss", "loss", "forward_data"} == {*kept.sections}
