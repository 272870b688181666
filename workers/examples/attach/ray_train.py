"""Ray Train's `TorchTrainer` with two workers that train with DDP over gloo.

The lines that end with `# stagescope` attach it; `python -m examples.attach.ray_train`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from examples.attach.task import log_probs_of, make_batch, make_model
from stagescope_workers import finish, init  # stagescope

STEPS = 4


def train(settings: Mapping[str, object]) -> None:
    """Train on one of the workers."""
    rank = ray.train.get_context().get_world_rank()
    world_size = ray.train.get_context().get_world_size()
    model = prepare_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probe = init("ray-train", rank=rank, world_size=world_size)  # stagescope
    for step in range(1, STEPS + 1):
        with probe.stage("actor_update", step=step, model=model) as stage:  # stagescope
            loss = -log_probs_of(model, make_batch(step, rank)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stage.log(loss=loss)  # stagescope
        ray.train.report({"step": step, "loss": loss.item()})
    finish(timeout=30)  # stagescope


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="Of Ray Train's results.")
    options = parser.parse_args()
    TorchTrainer(
        train,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="ray-train", storage_path=options.directory),
    ).fit()


if __name__ == "__main__":
    main()
