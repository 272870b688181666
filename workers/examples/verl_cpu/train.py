"""A complete verl training on CPU, without a changed line of verl and with nothing downloaded.

    cd workers
    python -m examples.verl_cpu.train --trainer v1 --steps 4 --directory /tmp/run [key=value ...]

verl's own code runs: `run_ppo`, its task runner, agent loop, reward loop, servers' manager and
weight synchronisation, with V1 (`--trainer v1`, synchronous, with TransferQueue) or V0
(`--trainer v0`, `RayPPOTrainer`). Two ranks of FSDP2 hold actor, reference and critic. The model
is a tiny Qwen2 with random weights, and the task is sums with a calculator. A step is 4 prompts
with 4 samples each and takes 1 to 4 seconds. `key=value` overrides verl's configuration::

    algorithm.rollout_correction.bypass_mode=true algorithm.rollout_correction.rollout_is=token

Two things are not verl's, since they need an accelerator. One is the inference engine
(`engine.py`, transformers in bfloat16, which `server.py` registers with verl). The others are a
few assumptions about the device (`platform.py` lists them).

The directory gets `assets/` (model, tokenizer, prompts), `checkpoints/` and, for each start, one
`metrics-N.jsonl` with verl's metrics of each step. If you rerun the command, it continues after
the last checkpoint.

With `--address` the training joins a Ray cluster. The cluster needs no GPU, but CPU slots: one a
rank, two for TransferQueue (V1), and one that stays free to start actors in. Its nodes must see
this source tree and the directory at the same paths.
"""

# pyright: reportMissingImports=false
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
    import hydra  # type: ignore[import-not-found]
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from examples.verl_cpu.assets import make_assets

    make_assets(settings.assets, settings.seed)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", hydra_overrides(settings, env))
    validate_config(config, need_reference_policy(config), need_critic(config))
    run_ppo(config, _task_runner(settings.trainer))


def _task_runner(trainer: Trainer) -> object:
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
