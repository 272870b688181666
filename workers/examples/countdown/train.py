"""The driver: `python -m examples.countdown.train --address ADDRESS --run NAME --steps 6`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

# Ray authenticates automatically only to a cluster that it finds; this one is named by its address.
# It reads the mode when it is imported: where ray is imported already, the mode is fixed.
if "ray" not in sys.modules and (Path.home() / ".ray" / "auth_token").exists():
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray

import stagescope
from examples.countdown import checkpoint
from examples.countdown.actors import RankActor, Report, RolloutActor
from examples.countdown.advantages import critic_advantages, group_advantages
from examples.countdown.batch import Batch
from examples.countdown.config import (
    ALGORITHMS,
    ENGINES,
    NONE,
    EngineSwitch,
    Pause,
    PlantedNan,
    Settings,
    SkippedSync,
    Troubles,
)
from examples.countdown.replay import Source, stored_loss, verdict
from stagescope_workers import finish


class Job:
    """The processes of one attempt and the order in which a step goes through them."""

    def __init__(
        self,
        settings: Settings,
        report: Report,
        troubles: Troubles = NONE,
        stored: Sequence[stagescope.Batch] = (),
        rescore: str | None = None,
    ) -> None:
        self.settings = settings
        # No CPU slots: the stages of a step run one after the other, and most processes wait.
        remote: Any = ray.remote(num_cpus=0)
        rank_actor, rollout_actor = remote(RankActor), remote(RolloutActor)
        self.ranks = [
            rank_actor.remote(settings, rank, report, troubles)
            for rank in range(settings.world_size)
        ]
        self.rollout = rollout_actor.remote(settings, report, troubles, stored, rescore)
        port = ray.get(self.ranks[0].listen.remote())
        ray.get([rank.join.remote(port) for rank in self.ranks])

    def pids(self) -> dict[str, int]:
        """Return the process id of each actor, by role and rank."""
        names = [*(f"actor-{rank}" for rank in range(len(self.ranks))), "rollout-0"]
        ids = ray.get([actor.pid.remote() for actor in [*self.ranks, self.rollout]])
        return dict(zip(names, ids, strict=True))

    def prepare(self, folder: Path | None) -> None:
        """Load a checkpoint, or warm up where there is none."""
        if folder is not None:
            self._on_ranks("load", folder)
        else:
            losses = self._on_ranks("warm_up")
            print(f"warm-up: {self.settings.warmup_steps} steps, loss {losses[0]:.3f}", flush=True)

    def step(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Run one step; returns the batch with all its columns and the update's scalars."""
        weights = self._on_ranks("weight_sync", step)[0]
        ray.get(self.rollout.weight_sync.remote(step, weights))
        batch: Batch = ray.get(self.rollout.generate.remote(step))
        batch = self._column(batch, "rewards", "compute_rm_score", step)
        batch = self._column(batch, "old_log_probs", "compute_log_prob", step)
        batch = self._column(batch, "ref_log_probs", "compute_ref_log_prob", step)
        scalars: dict[str, float] = {}
        rewards, mask = batch.columns["rewards"], batch.response_mask
        if self.settings.algorithm == "ppo":
            batch = self._column(batch, "values", "compute_values", step)
            advantages, returns = critic_advantages(
                rewards,
                batch.columns["values"],
                mask,
                discount=self.settings.discount,
                gae_lambda=self.settings.gae_lambda,
            )
            batch = batch.with_columns(advantages=advantages, returns=returns)
            scalars |= self._on_ranks("update_critic", step, batch=batch)[0]
        else:
            batch = batch.with_columns(advantages=group_advantages(rewards, batch.group_ids, mask))
        scalars |= self._on_ranks("update_actor", step, batch=batch)[0]
        return batch, scalars

    def save(self, root: Path, step: int) -> Path:
        """Write the checkpoint after `step`."""
        folder = checkpoint.begin(root, step)
        self._on_ranks("save", folder)
        return checkpoint.commit(folder, step, dataclasses.asdict(self.settings))

    def close(self, timeout: float) -> None:
        """Let every process send its last events; call it where training ends."""
        ray.get([actor.close.remote(timeout) for actor in [*self.ranks, self.rollout]])

    def _column(self, batch: Batch, column: str, method: str, step: int) -> Batch:
        parts = self._on_ranks(method, step, batch=batch)
        return batch.with_columns(**{column: batch.gather(parts)})

    def _on_ranks(self, method: str, *arguments: object, batch: Batch | None = None) -> list[Any]:
        shards: Sequence[tuple[Batch, ...]] = [()] * len(self.ranks)
        if batch is not None:
            shards = [(shard,) for shard in batch.shards(len(self.ranks))]
        calls = zip(self.ranks, shards, strict=True)
        answers: list[object] = ray.get(
            [rank.do.remote(method, *arguments, *shard) for rank, shard in calls]
        )
        return answers


def describe(step: int, batch: Batch, scalars: dict[str, float], seconds: float) -> str:
    """Return one line about a step: its reward and losses, and the engine's mismatch."""
    mask = batch.response_mask == 1
    distance = np.abs(batch.columns["old_log_probs"] - batch.rollout_log_probs)[mask]
    played = zip(batch.answers, batch.puzzles, batch.results, strict=True)
    solved = np.mean([answer == p.target and answer in results for answer, p, results in played])
    return (
        f"step {step}: reward {batch.columns['rewards'].mean():.3f}, solved {solved:.0%}, "
        f"loss {scalars['loss']:+.4f}, entropy {scalars['entropy']:.3f}, "
        f"mismatch mean |d| {distance.mean():.2e} max {distance.max():.2e}, "
        f"{batch.round_counts.mean():.1f} rounds, {mask.sum()} tokens, {seconds:.1f} s"
    )


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[None]:
    ray.init(
        address=address, namespace="countdown", log_to_driver=True, logging_level=logging.WARNING
    )
    try:
        yield
    finally:
        ray.shutdown()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which steps are trained; see the command's options."""

    steps: int
    save_every: int = 1
    pace: float = 0.0
    resume: bool = False


def train(
    settings: Settings,
    report: Report,
    root: Path,
    schedule: Schedule,
    *,
    troubles: Troubles = NONE,
    pid_file: Path | None = None,
) -> None:
    """Train on the Ray cluster that this process has joined, with checkpoints in `root`."""
    found = checkpoint.latest(root, dataclasses.asdict(settings)) if schedule.resume else None
    last, folder = found or (0, None)
    report = dataclasses.replace(report, resumed_from_step=last if found else None)
    job = Job(settings, report, troubles)
    if pid_file is not None:
        _write_pids(pid_file, job)
    print(f"{'resumed after step ' + str(last) if found else 'started'}: {job.pids()}")
    job.prepare(folder)
    for step in range(last + 1, schedule.steps + 1):
        begin = time.monotonic()
        batch, scalars = job.step(step)
        if step % schedule.save_every == 0 or step == schedule.steps:
            job.save(root, step)
        seconds = time.monotonic() - begin
        print(describe(step, batch, scalars, seconds), flush=True)
        time.sleep(max(0.0, schedule.pace - seconds))
    job.close(timeout=30)
    finish(run=report.run, timeout=30)


def replay(
    stored: Sequence[stagescope.Batch], report: Report, root: Path, rescore: str | None = None
) -> bool:
    """Train once more from stored rollouts, with no engine; nothing is saved.

    Args:
        stored: batches of consecutive steps.
        report: the report of the new run.
        root: checkpoints of the stored run; the one before the first step is loaded.
        rescore: see the command's options.

    Returns:
        Whether every loss equals the stored one, bit by bit.
    """
    settings = Settings.from_dict(stored[0].meta["settings"])
    first = stored[0].step or 0
    folder = None
    if first > 1:
        folder = checkpoint.after(root, first - 1, dataclasses.asdict(settings))
    same = True
    job = Job(settings, report, stored=stored, rescore=rescore)
    job.prepare(folder)
    for each in stored:
        begin = time.monotonic()
        batch, scalars = job.step(each.step or 0)
        print(describe(each.step or 0, batch, scalars, time.monotonic() - begin))
        print(verdict(scalars["loss"], each), flush=True)
        same &= scalars["loss"] == stored_loss(each)
    job.close(timeout=30)
    finish(run=report.run, timeout=30)
    return same


def _write_pids(path: Path, job: Job) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"driver": os.getpid(), "workers": job.pids()})
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


@click.command()
@click.option("--address", required=True, help="Ray cluster to join, host:port or 'auto'.")
@click.option("--run", default="countdown", show_default=True, help="Name of the run.")
@click.option("--steps", default=6, show_default=True, help="Train up to this step.")
@click.option("--algorithm", type=click.Choice(ALGORITHMS), default="grpo", show_default=True)
@click.option("--engine", type=click.Choice(ENGINES), default="int8", show_default=True)
@click.option("--ranks", default=2, show_default=True, help="Training processes.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--warmup-steps",
    default=Settings().warmup_steps,
    show_default=True,
    help="Supervised steps before the first RL step.",
)
@click.option(
    "--checkpoint-dir",
    default="checkpoints",
    show_default=True,
    type=click.Path(path_type=Path, resolve_path=True),
    help="Folder of the checkpoints, a folder a run.",
)
@click.option("--save-every", default=1, show_default=True, help="Steps between checkpoints.")
@click.option("--step-seconds", default=0.0, show_default=True, help="Seconds of a step, at least.")
@click.option("--resume", is_flag=True, help="Go on after the last complete checkpoint.")
@click.option("--attempt-key", help="Names this start of the training; default: the Ray job.")
@click.option("--capture", help="YAML file with captures, active without the service.")
@click.option(
    "--keep",
    metavar="WORDS",
    help="Have the service keep this of every step: 'all', or 'trajectories,is_loss,loss'.",
)
@click.option(
    "--replay",
    "source",
    metavar="RUN:STEP",
    type=Source.parse,
    help="Train from the stored rollouts of this step (or FIRST-LAST) of a run, with no engine, "
    "as RUN.replay. The exit status is 1 if a loss differs from the stored one.",
)
@click.option(
    "--replay-from",
    type=click.Path(path_type=Path, exists=True),
    help="Where they are stored: a file of `stagescope batch`, or a data_dir [default: the "
    "service].",
)
@click.option(
    "--rescore",
    type=click.Choice(ENGINES),
    help="With --replay: this engine scores the stored tokens, as RUN.ENGINE.",
)
@click.option("--pause-at-step", type=int, help="Make a stage of this step last --pause-seconds.")
@click.option("--pause-stage", default="actor_update", show_default=True)
@click.option("--pause-seconds", default=120.0, show_default=True)
@click.option(
    "--plant-nan",
    metavar="STEP:RANK:MODULE",
    type=PlantedNan.parse,
    help="From a step on a rank's module puts out NaN: 4:1:model.layers.1.mlp.down_proj.",
)
@click.option(
    "--skip-sync",
    type=SkippedSync.parse,
    metavar="STEP:NAME",
    help="Leave one weight, such as lm_head.weight, out of this step's sync.",
)
@click.option(
    "--switch-engine",
    metavar="STEP:TYPE",
    type=EngineSwitch.parse,
    help="From a step on the rollout engine computes in another type: 4:float32.",
)
@click.option("--pid-file", type=Path, help="Write the process ids of driver and workers here.")
def main(
    address: str,
    run: str,
    steps: int,
    algorithm: str,
    engine: str,
    ranks: int,
    seed: int,
    warmup_steps: int,
    checkpoint_dir: Path,
    save_every: int,
    step_seconds: float,
    resume: bool,
    attempt_key: str | None,
    capture: str | None,
    keep: str | None,
    source: Source | None,
    replay_from: Path | None,
    rescore: str | None,
    pause_at_step: int | None,
    pause_stage: str,
    pause_seconds: float,
    plant_nan: PlantedNan | None,
    switch_engine: EngineSwitch | None,
    skip_sync: SkippedSync | None,
    pid_file: Path | None,
) -> None:
    """Train a small Qwen2 to reach targets by arithmetic, reporting to stagescope."""
    kept = None if keep is None else {"what": keep.split(",")}
    if source is not None:
        try:
            stored = source.batches(replay_from)
            report = Report(f"{source.run}.{rescore or 'replay'}", attempt_key, keep=kept)
            with _cluster(address):
                same = replay(stored, report, checkpoint_dir / source.run, rescore)
        except (stagescope.StagescopeError, checkpoint.CheckpointNotFound) as error:
            raise click.ClickException(str(error)) from error
        sys.exit(0 if same else 1)
    settings = Settings(
        algorithm=algorithm,
        engine=engine,
        world_size=ranks,
        seed=seed,
        warmup_steps=warmup_steps,
    )
    pause = Pause(pause_at_step, pause_stage, pause_seconds) if pause_at_step else None
    with _cluster(address):
        train(
            settings,
            Report(run, attempt_key, capture, keep=kept),
            checkpoint_dir / run,
            Schedule(steps, save_every, step_seconds, resume),
            troubles=Troubles(pause, plant_nan, switch_engine, skip_sync),
            pid_file=pid_file,
        )


if __name__ == "__main__":
    main()
