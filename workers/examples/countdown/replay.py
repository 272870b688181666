"""Training from stored rollouts: no engine, the same numbers.

`train --replay RUN:STEP` begins at the checkpoint before the step. It reads the step's rollouts
from the service, or with `--replay-from` from a file or directory. It reports whether the losses
are equal to the stored ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import stagescope
from examples.countdown.batch import Batch, make_batch
from examples.countdown.config import Settings
from examples.countdown.environment import Sample, make_samples, play
from examples.countdown.tokenizer import PAD_ID
from stagescope_wire.batch import Gap
from stagescope_workers import Probe

_NOTHING: Final = ([PAD_ID], [0.0])
"""The round of a sample that continues where the stored one had ended: it is not an answer."""


class ReplayedRollout:
    """Plays the puzzles of stored steps with the tokens that an engine had sampled."""

    def __init__(
        self, settings: Settings, probe: Probe, stored: Sequence[stagescope.Batch]
    ) -> None:
        self.settings = settings
        self.probe = probe
        self.policy_version = -1
        self._rollouts = stagescope.ReplayRollouts(*stored)
        self._stored = {batch.step: batch for batch in stored}

    def weight_sync(self, step: int, weights: Mapping[str, np.ndarray]) -> None:
        """Note the version of the trainer's weights, which are not used."""
        with self.probe.stage("weight_sync", step=step, policy_version=step - 1):
            self.policy_version = step - 1

    def generate(self, step: int) -> Batch:
        """Play this step's puzzles again.

        Raises:
            NotFound: a sample is not stored.
            RuntimeError: the environment's answers differ from the stored ones.
        """
        with self.probe.stage(
            "rollout_generate", step=step, policy_version=self.policy_version
        ) as stage:
            batch = self.play(step)
            stage.record(batch.trajectories())
            stage.log(**batch.counts())
        return batch

    def play(self, step: int) -> Batch:
        """Return the stored step, replayed in the environment; raises as `generate`."""
        samples = make_samples(self.settings, step)
        rounds = {sample.uid: self._rounds(step, sample) for sample in samples}
        play(samples, lambda playing: [next(rounds[s.uid], _NOTHING) for s in playing])
        engine = next(iter(self._stored[step].strings.get("engine_ids", ())), "")
        batch = make_batch(samples, self.policy_version, engine)
        check_same(batch, self._stored[step])
        return batch

    def _rounds(self, step: int, sample: Sample) -> Iterator[tuple[list[int], list[float]]]:
        group, _, index = sample.uid.rpartition("-")
        found = self._rollouts.get(group, index, step=step, prompt=sample.prompt)
        assert found is not None  # strict
        ids, mask = found.tensor("responses"), found.tensor("response_mask")
        turns, log_probs = found.tensor("turn_ids"), found.tensor("rollout_log_probs")
        model = [np.flatnonzero((turns == turn) & (mask == 1)) for turn in range(turns.max() + 1)]
        return iter([(ids[i].tolist(), log_probs[i].tolist()) for i in model if len(i)])


class Source(NamedTuple):
    """The steps of a run to replay."""

    run: str
    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read `RUN:STEP` or `RUN:FIRST-LAST`."""
        run, _, steps = text.rpartition(":")
        first, _, last = steps.partition("-")
        if not (run and first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"{text!r}: expected RUN:STEP or RUN:FIRST-LAST")
        return cls(run, int(first), int(last or first))

    def batches(self, path: Path | None) -> list[stagescope.Batch]:
        """Return the stored steps: from the service, or from a file or directory.

        Raises:
            NotFound: one of them is not kept.
        """
        steps = range(self.first, self.last + 1)
        if path is None:
            with stagescope.attach() as session:
                return [session.step(step, run=self.run).batch() for step in steps]
        return [read_step(path, step, self.run) for step in steps]


def read_step(path: Path, step: int, run: str) -> stagescope.Batch:
    """Return a stored step without a service: from a batch's file, or the service's data_dir.

    If several attempts of the run have the step, the one that wrote last counts.

    Raises:
        NotFound: nothing of this step is kept.
    """
    if path.is_file():
        return stagescope.Batch.load(path)
    from stagescope_service.dumps.formats.own_file import PayloadFile, open_payloads
    from stagescope_service.dumps.joining.join import join
    from stagescope_service.store.tensorfile import describe_file

    files = [file for file in sorted(path.rglob("*.safetensors")) if file.name[0] != "."]
    dump = open_payloads(map(PayloadFile, files), str(path))
    found: dict[Path, object] = {}
    for entry in dump.entries:
        job: Any = describe_file(entry.path).metadata["job"]
        if entry.location.step == step and job.get("run") == run:
            found[entry.path] = job.get("attempt_key")
    newest = max(found, key=lambda file: file.stat().st_mtime, default=None)
    chosen = [PayloadFile(file) for file, key in found.items() if newest and key == found[newest]]
    gaps = [Gap("file", problem.message) for problem in dump.problems]
    return join(open_payloads(chosen, str(path)), step, gaps=gaps)


def check_same(batch: Batch, stored: stagescope.Batch) -> None:
    """Raise RuntimeError where the replayed rollouts are not the stored ones, bit by bit."""
    rows = {uid: row for row, uid in enumerate(batch.sample_ids)}
    index = [rows[uid] for uid in stored.sample_ids or ()]
    for name in ("responses", "response_mask", "rollout_log_probs"):
        replayed = np.asarray(getattr(batch, name))[index]
        if not np.array_equal(replayed, stored[name]):
            raise RuntimeError(
                f"{name} of step {stored.step} differ from the stored ones: the environment, or "
                "the settings of the run, have changed"
            )


def stored_loss(stored: stagescope.Batch) -> float | None:
    """Return the loss of a stored step as the trainer reports it; None where none was stored."""
    if "actor_update" not in stored.stages():
        return None
    parts = stored.parts_of("actor_update")
    losses = [p.numbers["loss"] for p in parts if p.rank == 0 and "loss" in p.numbers]
    total = 0.0
    for each in losses:  # in the order of the updates: another order rounds differently
        total += each
    return total / len(losses) if losses else None


def verdict(loss: float, stored: stagescope.Batch) -> str:
    """Describe whether a replayed step's loss equals the stored one, bit by bit."""
    before = stored_loss(stored)
    if before is None:
        return f"step {stored.step} was stored without its loss: nothing to compare with"
    if loss == before:
        return f"step {stored.step}: loss {loss!r} is the stored one, bit by bit"
    return f"step {stored.step}: loss {loss!r} is not the stored {before!r}"
