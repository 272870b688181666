"""A complete verl training on CPU: `cd workers; python -m examples.verl_cpu.train --steps 4`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import click

from examples.verl_cpu.settings import Settings, Trainer, environment, hydra_overrides


def train(settings: Settings) -> None:
    """Train to the last step with verl's own `run_ppo`; returns when it is done."""
    settings.directory.mkdir(parents=True, exist_ok=True)
    env = environment(settings)
    os.environ.update(env)
    if (Path.home() / ".ray" / "auth_token").exists():
        # Ray authenticates by itself only to a cluster that it finds; this one may be named.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Only now: verl, transformers and ray read the environment when they are imported.
    import hydra
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from examples.verl_cpu.assets import make_assets

    make_assets(settings.assets, settings.seed)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", hydra_overrides(settings, env))
    validate_config(config, need_reference_policy(config), need_critic(config))
    run_ppo(config, _task_runner(settings.trainer))


def _task_runner(trainer: Trainer) -> type:
    if trainer == "v1":
        from verl.trainer.main_ppo import TaskRunnerV1

        return TaskRunnerV1
    from verl.trainer.main_ppo_v0 import TaskRunner

    return TaskRunner


@click.command()
@click.option("--trainer", type=click.Choice(get_args(Trainer)), default="v1", show_default=True)
@click.option("--steps", default=4, show_default=True, help="Train up to this step.")
@click.option("--save-freq", default=1, show_default=True, help="Steps between checkpoints.")
@click.option("--directory", type=Path, required=True, help="All that is read and written.")
@click.option("--address", help="Ray cluster to join; default: a cluster of its own.")
@click.option("--ranks", default=2, show_default=True, help="Training processes.")
@click.option("--seed", default=0, show_default=True)
@click.argument("overrides", nargs=-1)
def main(
    trainer: Trainer,
    steps: int,
    save_freq: int,
    directory: Path,
    address: str | None,
    ranks: int,
    seed: int,
    overrides: tuple[str, ...],
) -> None:
    """Train with verl; OVERRIDES are of its configuration: key=value."""
    train(Settings(trainer, steps, save_freq, directory.resolve(), address, ranks, seed, overrides))


if __name__ == "__main__":
    main()
