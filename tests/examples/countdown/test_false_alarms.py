"""What the doctor finds in healthy trainings of the example: real models, engines and updates.

The ranks of a training share one process, policy and optimizer, and update it one after the other;
each reports with a probe of its own over HTTP to a service without Ray.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
import torch
from tests.support.api import Service, service

from examples.countdown.advantages import critic_advantages, group_advantages
from examples.countdown.batch import Batch
from examples.countdown.collective import Collective
from examples.countdown.config import Settings
from examples.countdown.rollout import Rollout
from examples.countdown.trainer import Trainer
from stagescope_service.rules.document import defaults
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.replay import replay
from stagescope_workers import Probe, init

RANKS: Final = 4
STEPS: Final = 50
SETTINGS: Final = Settings(world_size=RANKS, groups=8, group_size=4, epochs=1, minibatches=1)


class Training:
    """A run of the example in this process."""

    def __init__(self, live: Service, run: str, settings: Settings, warm: Trainer) -> None:
        self.settings = settings
        self._live = live
        self.run = run
        self.probes = {
            (role, rank): self._probe(role, rank)
            for role in (("actor", "critic") if settings.algorithm == "ppo" else ("actor",))
            for rank in range(RANKS)
        }
        self.rollout = Rollout(settings, self._probe("rollout", 0))
        first = Trainer(settings, Collective(0, 1), self._of(0), self._of(0, "critic"))
        first.policy.load_state_dict(warm.policy.state_dict())
        first.reference.load_state_dict(warm.policy.state_dict())
        self.rewards: list[np.ndarray] = []
        """Of each step: float32 [groups, samples]."""
        self.norms: list[float] = []
        """Of each step: the mean gradient norm of its updates."""
        self.seconds: dict[str, list[list[float]]] = {}
        """Of each method and step: how long it took on each rank, by this process's clock."""
        self.ranks = [first]
        for rank in range(1, RANKS):
            other = copy.copy(first)
            other.probe, other.critic_probe = self._of(rank), self._of(rank, "critic")
            self.ranks.append(other)

    def _probe(self, role: str, rank: int) -> Probe:
        assert self._live.tokens is not None
        return init(
            self.run, role=role, rank=rank, world_size=1 if role == "rollout" else RANKS,
            attempt_key="a1", url=self._live.server.url, token=self._live.tokens.operate,
            settings=dataclasses.asdict(self.settings),
            layout={"dp_rank": rank, "dp_size": RANKS, "device_kind": "cpu"}, strict=True,
        )  # fmt: skip

    def _of(self, rank: int, role: str = "actor") -> Probe:
        return self.probes.get((role, rank), self.probes["actor", rank])

    def _each(self, method: str, step: int, batch: Batch | None = None) -> list[Any]:
        """Call a method of each rank, with its part of a batch if there is one."""
        parts = [()] * RANKS if batch is None else [(shard,) for shard in batch.shards(RANKS)]
        answers, seconds = [], []
        for trainer, part in zip(self.ranks, parts, strict=True):
            begin = time.perf_counter()
            answers.append(getattr(trainer, method)(step, *part))
            seconds.append(time.perf_counter() - begin)
        self.seconds.setdefault(method, []).append(seconds)
        return answers

    def step(self, step: int) -> None:
        """One step in the order of `train.py`."""
        weights, *_ = self._each("weight_sync", step)
        assert weights is not None
        self.rollout.weight_sync(step, weights)
        batch = self.rollout.generate(step)
        for column, method in (
            ("rewards", "compute_rm_score"),
            ("old_log_probs", "compute_log_prob"),
            ("ref_log_probs", "compute_ref_log_prob"),
            *((("values", "compute_values"),) if self.settings.algorithm == "ppo" else ()),
        ):
            batch = batch.with_columns(**{column: batch.gather(self._each(method, step, batch))})
        rewards, mask = batch.columns["rewards"], batch.response_mask
        if self.settings.algorithm == "ppo":
            advantages, returns = critic_advantages(
                rewards, batch.columns["values"], mask, discount=1.0, gae_lambda=0.95
            )
            batch = batch.with_columns(advantages=advantages, returns=returns)
            self._each("update_critic", step, batch)
        else:
            batch = batch.with_columns(advantages=group_advantages(rewards, batch.group_ids, mask))
        updates = self._each("update_actor", step, batch)
        self.rewards.append(rewards.reshape(self.settings.groups, self.settings.group_size))
        self.norms.append(float(np.mean([update["grad_norm"] for update in updates])))

    def so(self, last: int) -> set[str]:
        """Return the symptoms that this small training has up to a step, by its own numbers.

        It is given few samples and steps, and no more: half of its puzzles may be too hard for
        every sample of a group, the reward of 32 samples moves by more than it rises in 20 steps
        (PPO's critic begins at 0 and learns nothing in 50), and single batches of eight samples
        have gradients of many times the usual norm, which the trainer clips to 1. Its ranks take
        turns on a machine that has other work: one may be slow step after step, by the clock. They
        take turns with one model, too: the first updates it before the others score their samples.
        """
        found = {"current_differs"}
        newest = np.concatenate(self.rewards[max(0, last - 10) : last])
        equal = newest.min(axis=1) == newest.max(axis=1)
        # What was found stays so while its share is within two standard errors of a half.
        least = 0.5 - 1.0 / np.sqrt(equal.size)
        if equal.mean() >= least:
            found.add("groups_equal")
        if (newest.max(axis=1) == newest.min()).mean() >= least:
            found.add("groups_all_wrong")
        means = np.array([rewards.mean() for rewards in self.rewards[:last]])
        half = last // 2
        early, late = means[:half], means[half:]
        error = np.sqrt(early.var(ddof=1) / half + late.var(ddof=1) / (last - half))
        if late.mean() - early.mean() < 3.0 * error:
            found.add("reward_flat")
        if max(self.norms[:last]) > 10.0 * np.median(self.norms[:last]):
            found.add("gradient_spikes")
        for by_step in self.seconds.values():
            newest = np.array(by_step[max(0, last - 10) : last])
            slowest = newest.argmax(axis=1)
            others = np.median(np.sort(newest, axis=1)[:, :-1], axis=1)
            # A little less than what makes a straggler: the stage is a part of the call.
            slow = newest.max(axis=1) > np.maximum(1.4 * others, others + 0.04)
            if np.bincount(slowest[slow], minlength=RANKS).max() >= 0.4 * len(newest):
                found.add("straggler")
        return found

    def close(self) -> None:
        for probe in [*self.probes.values(), self.rollout.probe]:
            probe.close(60.0)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("healthy") / "home", page_size=200) as running:
        yield running


@pytest.fixture(scope="module")
def warm() -> Iterator[Trainer]:
    """A policy that has imitated worked examples."""
    threads = torch.get_num_threads()
    probe = init("warm-up", rank=0, world_size=1, url="http://127.0.0.1:9")
    trainer = Trainer(dataclasses.replace(SETTINGS, world_size=1), Collective(0, 1), probe)
    trainer.warm_up()
    probe.close(0.0)
    yield trainer
    torch.set_num_threads(threads)


CASES: Final[tuple[dict[str, object], ...]] = (
    {}, {"engine": "float32"}, {"algorithm": "ppo"}, {"seed": 3},
)  # fmt: skip
ASKED: Final = range(10, STEPS + 1, 10)
"""Steps after which the doctor is asked."""


@pytest.mark.parametrize("changes", CASES, ids=lambda changes: "-".join(map(str, changes.values())))
def test_nothing_is_found_but_what_is_so(
    changes: dict[str, Any], live: Service, warm: Trainer
) -> None:
    """Of four trainings of 50 steps, each asked five times."""
    run = "-".join(["healthy", *map(str, changes.values())])
    training = Training(live, run, dataclasses.replace(SETTINGS, **changes), warm)
    for step in range(1, STEPS + 1):
        training.step(step)
    training.close()
    for last in ASKED:
        answer = live.get(f"/runs/{run}/diagnosis", step=last, limit=200)
        assert (answer["steps"], answer["measured"]) == (last, last)
        found = {
            row["rule"]: row["for"]
            for row in answer["rows"]
            if row["verdict"] == "found" and row["last_step"] is None
        }
        wrong = {rule: why for rule, why in found.items() if rule not in training.so(last)}
        assert not wrong, (last, wrong)
    for by, key in (("engine", f"ctranslate2-{training.settings.engine}"), ("staleness", 0)):
        answer = live.get(f"/steps/{STEPS}/anatomy", run=run, by=by)
        assert [(row["label"], answer["left_out"]) for row in answer["rows"]] == [(str(key), 0)]
    fired, steps = replay(live.catalogue, run, defaults(), most=STEPS)
    assert (steps, [each["message"] for each in fired]) == (STEPS, [])
    measured = RunHistory(live.catalogue, run).measured
    assert {step.verdict for step in measured} == {"comparable"}, measured
