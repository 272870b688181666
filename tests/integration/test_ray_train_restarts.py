"""A training of Ray Train that fails once: its restart from a checkpoint is the next attempt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from tests.support.cluster import Service

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    # Ray Train reads all of Ray Data's settings, its old ones, too.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]

STEPS = 6
FAILS_AFTER = 3


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # As users have them: the ranks before still seem to be live when the next ones begin.
    home = tmp_path_factory.mktemp("home")
    made = Service.start(home, address, lease_seconds=45.0, poll_seconds=20.0)
    yield made
    made.stop()


def trainer_loop() -> Any:
    """Return the function by value: Ray Train's workers cannot import the tests."""

    def train(settings: Mapping[str, Any]) -> None:
        import os
        import tempfile
        import time
        from pathlib import Path

        import ray.train

        from stagescope_workers import finish, init

        context, checkpoint = ray.train.get_context(), ray.train.get_checkpoint()
        rank, last = context.get_world_rank(), 0
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                last = int((Path(folder) / "step").read_text())
        probe = init(settings["run"], rank=rank, world_size=context.get_world_size())
        for step in range(last + 1, settings["steps"] + 1):
            with probe.stage("actor_update", step=step) as stage:
                stage.log(loss=1.0 / step)
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "step").write_text(str(step))
                saved = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"step": step}, checkpoint=saved)
            if step == settings["fails_after"] and checkpoint is None and rank == 1:
                while probe.status()["waiting_events"]:
                    time.sleep(0.01)
                if settings["killed"]:
                    os._exit(1)
                raise RuntimeError("it fails once")
        finish(timeout=30)

    return train


@pytest.mark.parametrize("killed", [False, True])
def test_a_failed_training_goes_on_as_the_next_attempt(
    service: Service, tmp_path: Path, killed: bool
) -> None:
    run = f"ray-train-{'killed' if killed else 'failed'}"
    settings = {"run": run, "steps": STEPS, "fails_after": FAILS_AFTER, "killed": killed}
    TorchTrainer(
        trainer_loop(),
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=run, storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    with service.session() as session:
        attempts = {row["attempt"]: row for row in session.attempts(run)}
        assert {*attempts} == {1, 2}
        steps = {
            number: {row["step"]: row["complete"] for row in session.steps(run, number)}
            for number in attempts
        }
        # Rank 0 may have gone on by a step, and the newest checkpoint may not have been saved.
        first = min(steps[2])
        assert min(steps[1]) == 1 < first <= FAILS_AFTER + 1 <= max(steps[1]) + 1
        assert attempts[2]["resumed_from_step"] == first - 1
        assert steps[2] == dict.fromkeys(range(first, STEPS + 1), "complete")
