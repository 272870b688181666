"""Faults of engines and trainers: weights, versions, temperature, cuts and caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from tests.service.rules.benchmark.faults.streams import Change, delayed, disturb, fault, when
from tests.service.rules.benchmark.play import Training
from tests.service.rules.benchmark.scene import HEALTHY, Place, Restart, Sampler, Sampling, Scene
from tests.service.rules.planted import Batch, retokenise
from tests.support.sampler import Scores, min_p, other_model, temperature, top_k, top_p


def sampled(
    how: Sampling, since: int = 1, ranks: tuple[int, ...] | None = None,
    engines: tuple[int, ...] | None = None, until: int = 10**9, attempts: tuple[int,
    ...] | None = None,
) -> Sampler:  # fmt: skip
    """Return how engines sample in some steps, ranks, engines and attempts; None: in all."""

    def sample(place: Place) -> Sampling:
        is_so = since <= place.step <= until and all(
            wanted is None or own in wanted
            for own, wanted in (
                (place.rank, ranks), (place.engine, engines), (place.attempt, attempts),
            )
        )  # fmt: skip
        return how if is_so else HEALTHY

    return sample


def by(scores: Scores) -> Sampling:
    """Return an engine whose log-probs, sampled and reported, are others."""
    return Sampling(sampled=scores)


def trained_by(scores: Scores) -> Sampling:
    """Return a trainer whose log-probs are others."""
    return Sampling(trained=scores)


def served(version: int) -> Sampling:
    """Return an engine that serves one policy version."""
    return Sampling(version=version)


def stale_prefix(batch: Batch) -> None:
    """Later rounds read keys and values of old weights from a cache, further off in each step."""
    size = 0.01 * (batch.step - 7)
    for number in range(1, 6):
        disturb(batch, size * number, batch.rounds == number)


def one_round(number: int) -> Change:
    """Return a change after which one round alone was sampled after another template."""
    return lambda batch: disturb(batch, 0.12, batch.rounds == number)


def later_rounds(batch: Batch) -> None:
    """Positions drift after each tool's answer."""
    for number in range(1, 6):
        disturb(batch, 0.04 * number, batch.rounds == number)


def retokenised(batch: Batch) -> None:
    """Prompts of later turns hold another split of the same text, and these turns differ."""
    retokenise(batch)
    later = np.array([turn.number for turn in batch.turns]) > 0
    disturb(batch, 0.08, later[:, None])


def _weights_reported(training: Training, step: int) -> None:
    if step >= 11:
        training.bench.report(
            training.run, "weights_differ", "12 of 311 tensors of actor 2's engine differ from "
            "the sent ones", step=step, role="rollout", rank=2,
        )  # fmt: skip


def _replica_reported(training: Training, step: int) -> None:
    if step >= 9:
        training.bench.report(
            training.run, "replica_weights_differ", "engine replica 1 has other weights than "
            "replica 0", step=step,
        )  # fmt: skip


def _weights_checked(training: Training, step: int) -> None:
    if step in (20, 30):
        training.bench.report(
            training.run, "weights_differ", "1 of 311 tensors of the engine differs from the sent "
            "one: lm_head.weight", step=step,
        )  # fmt: skip


def ahead(ranks: tuple[int, ...]) -> Change:
    """Return a change after which the first rows of some ranks are of a version to come."""

    def change(batch: Batch) -> None:
        assert batch.versions is not None
        if batch.rank in ranks:
            batch.versions[0] = batch.step + 2

    return change


def lags(place: Place) -> Sampling:
    """Let one engine sample with the version before the trainer's."""
    return served(place.step - 1) if place.engine == 1 else HEALTHY


def behind(by: int) -> Sampler:
    """Return engines that sample with an older version of the policy."""
    return lambda place: served(max(place.step - by, 1))


def told(batch: Batch) -> None:
    """Record the versions of the engine that lags."""
    assert batch.versions is not None
    assert batch.engine is not None
    is_old = np.array(batch.engine) == "engine-1"
    batch.versions[is_old] = batch.step - 1


def package(name: str, *versions: str) -> Callable[[int], Mapping[str, object]]:
    """Return what the ranks of each attempt say of a package."""
    return lambda attempt: {"fingerprint": {"packages": {name: versions[attempt - 1]}}}


_T: Final = "the engine samples at another temperature than the trainer scores"
_CUT: Final = "the engine renormalises over a cut vocabulary, and the trainer does not"
_RANK: Final = "one rank's trainer computes with other weights, or on a bad card"
_ENGINE: Final = "one engine instance serves other weights than the others"
_NEVER: Final = "engines keep old weights while the trainer goes on, so the mismatch grows"
_ROUNDS: Final = "later rounds were sampled in another context than they are scored in"
_UNSAID: Final = "the engine lacks the last updates, and its tokens do not say so"
_DRIFT: Final = "old versions sampled the tokens, and the policy moved since"

_BASE: Final = Scene()

ENGINES: Final = (
    fault("temperature", "engine at 0.7", "sampling_differs", _T, _BASE.but(seed=41),
           sample=sampled(by(temperature(0.7)))),
    fault("temperature", "engine at 1.2 from 12", "sampling_differs", _T,
           _BASE.but(ranks=8, seed=42), sample=sampled(by(temperature(1.2)), 12)),
    fault("temperature", "trainer at 0.6 from 9", "sampling_differs", _T,
           _BASE.but(model="sure", seed=43), sample=sampled(trained_by(temperature(0.6)), 9)),
    fault("temperature of one engine", "engine 2 of 4 at 0.8", "sampling_differs engine_apart",
           _T, _BASE.but(engines=4, rows=8, seed=44),
           sample=sampled(by(temperature(0.8)), 10, engines=(2,))),
    fault("temperature of one engine", "the engine of rank 1 at 1.3", "sampling_differs", _T,
           _BASE.but(seed=45), where="1", sample=sampled(by(temperature(1.3)), 8, (1,))),
    fault("truncated vocabulary", "top-p 0.9", "sampling_differs", _CUT, _BASE.but(seed=46),
           sample=sampled(by(top_p(0.9)))),
    fault("truncated vocabulary", "top-k 20 from 10", "sampling_differs", _CUT,
           _BASE.but(model="unsure", seed=47), sample=sampled(by(top_k(20)), 10)),
    fault("truncated vocabulary", "top-k 5 on one rank", "sampling_differs", _CUT,
           _BASE.but(seed=48), where="3", sample=sampled(by(top_k(5)), 9, (3,))),
    fault("truncated vocabulary", "min-p 0.1 from 14", "sampling_differs", _CUT,
           _BASE.but(ranks=2, rows=8, seed=49), sample=sampled(by(min_p(0.1)), 14)),
    fault("one rank's weights", "rank 2 has other weights from 10", "rank_apart", _RANK,
           _BASE.but(seed=50), where="rank 2", sample=sampled(trained_by(other_model(0.3)), 10,
           (2,))),
    fault("one rank's weights", "rank 7 of 8 slightly off", "rank_apart", _RANK,
           _BASE.but(ranks=8, seed=51), where="rank 7",
           sample=sampled(trained_by(other_model(0.12)), 20, (7,))),
    fault("one rank's weights", "rank 1 of 2 lacks its adapter", "rank_apart", _RANK,
           _BASE.but(ranks=2, rows=8, seed=52), where="rank 1",
           sample=sampled(trained_by(other_model(0.4, rank=8)), 6, (1,))),
    fault("one rank's weights", "rank 0 off from the begin", "rank_apart", _RANK,
           _BASE.but(model="sure", uneven=True, seed=53), where="rank 0",
           sample=sampled(trained_by(other_model(0.5)), 1, (0,))),
    fault("stale engine", "engine 1 of 3 stays at version 10", "engine_apart", _ENGINE,
           _BASE.but(engines=3, rows=8, update=0.02, seed=54), where="engine-1",
           sample=sampled(served(10), 11, engines=(1,))),
    fault("stale engine", "engine 3 of 4 stays at version 16", "engine_apart", _ENGINE,
           _BASE.but(engines=4, rows=8, update=0.03, model="sure", seed=55), where="engine-3",
           sample=sampled(served(16), 17, engines=(3,))),
    fault("stale engine", "the engine of rank 2, without ids of engines", "rank_apart", _ENGINE,
           _BASE.but(update=0.03, seed=56), where="rank 2", sample=sampled(served(8), 9, (2,))),
    fault("never synced", "no sync after 1", "mismatch_grows", _NEVER,
           _BASE.but(update=0.015, seed=57), sample=sampled(served(1))),
    fault("never synced", "no sync after 12", "mismatch_grows", _NEVER,
           _BASE.but(steps=40, update=0.02, syncs=True, seed=58), sample=sampled(served(12), 13)),
    fault("never synced", "no sync after 8 on eight ranks", "mismatch_grows", _NEVER,
           _BASE.but(ranks=8, update=0.02, model="sure", seed=59), sample=sampled(served(8), 9)),
    fault("sync breaks weights", "worse from the first sync", "mismatch_jump_at_first_sync",
           "the engine's own weights agree, and the synced ones do not", _BASE.but(syncs=True,
           seed=60),
           sample=sampled(by(other_model(0.2)), 2)),
    fault("sync breaks weights", "much worse from the first sync", "mismatch_jump_at_first_sync",
           "the engine's own weights agree, and the synced ones do not",
           _BASE.but(syncs=True, model="sure", ranks=2, rows=8, seed=61),
           sample=sampled(by(other_model(0.8)), 2)),
    fault("worse since a restart", "another package since attempt 2", "mismatch_jump_at_restart",
           "only the restart lies between the good steps and the bad ones",
           _BASE.but(restarts=(Restart(14, 16),), seed=62), where="attempt 2",
           sample=sampled(by(other_model(0.12)), attempts=(2,)),
           hello=package("vllm", "0.31.0", "0.32.0")),
    fault("worse since a restart", "fp8 since attempt 3", "mismatch_jump_at_restart",
           "only the restart lies between the good steps and the bad ones",
           _BASE.but(steps=40, restarts=(Restart(10, 12), Restart(27, 26)), model="sure", seed=63),
           where="attempt 3", sample=sampled(by(other_model(0.25)), attempts=(3,))),
    fault("worse at once", "other precision from 17", "mismatch_jump",
           "all ranks and tokens differ more since one step inside an attempt", _BASE.but(seed=64),
           sample=sampled(by(other_model(0.1)), 17)),
    fault("worse at once", "one expert scaled from 9", "mismatch_jump",
           "all ranks and tokens differ more since one step inside an attempt",
           _BASE.but(ranks=8, model="sure", outliers=0.005, seed=65),
           sample=sampled(by(other_model(0.6, rank=4)), 9)),
    fault("stale prefix cache", "later rounds from 8", "mismatch_rises_with_rounds", _ROUNDS,
           _BASE.but(rows=8, rounds=4, usual=20, seed=66), change=when(stale_prefix, 8)),
    fault("stale prefix cache", "positions drift from the begin", "mismatch_rises_with_rounds",
           _ROUNDS, _BASE.but(rounds=5, rows=8, usual=18, model="sure", seed=67),
           change=later_rounds),
    fault("one round", "the second round alone from 12",
           "round_apart",
           "one round alone was sampled in another context", _BASE.but(rows=8, seed=68),
           change=when(one_round(1), 12)),
    fault("one round", "the first round alone from the begin",
           "round_apart",
           "one round alone was sampled in another context", _BASE.but(rows=8, ranks=2, seed=68),
           change=one_round(0)),
    fault("retokenised turns", "every prompt of a later turn", "retokenised", _ROUNDS,
           _BASE.but(rounds=1, rows=4, group=2, reward="smooth", seed=69), change=retokenised,
           keep=("trajectories",)),
    fault("retokenised turns", "from 14", "retokenised", _ROUNDS,
           _BASE.but(rounds=1, rows=8, group=2, reward="smooth", seed=70),
           change=when(retokenised, 14),
           keep=("trajectories",)),
    fault("engine received other weights", "a checksum of rank 2 differs", "weights_differ",
           "the engine holds other weights than were sent", _BASE.but(seed=71),
           sample=sampled(by(other_model(0.2)), 11, (2,)), event=_weights_reported),
    fault("engine received other weights", "a replica differs", "weights_differ",
           "the engine holds other weights than were sent", _BASE.but(engines=2, seed=72),
           sample=sampled(by(other_model(0.3)), 9, engines=(1,)), event=_replica_reported),
    fault("engine received other weights", "checked in every tenth step", "weights_differ",
           "the engine holds other weights than were sent", _BASE.but(steps=36, seed=80),
           sample=sampled(by(other_model(0.2)), 11), event=_weights_checked),
    fault("versions ahead", "versions ahead on all ranks", "versions_impossible",
           "tokens are of versions that the trainer does not have",
           _BASE.but(ages=(0, 1), seed=73), change=ahead((0, 1, 2, 3)),
           true=frozenset({"staleness"})),
    fault("versions ahead", "versions ahead on one rank", "versions_impossible",
           "tokens are of versions that the trainer does not have",
           _BASE.but(ages=(0,), ranks=8, seed=74), change=when(ahead((4,)), 12)),
    fault("policy drift", "old versions and large updates", "staleness", _DRIFT,
           _BASE.but(ages=(0, 1, 3), update=0.06, seed=75)),
    fault("policy drift", "half of the rows two versions old", "staleness", _DRIFT,
           _BASE.but(ages=(0, 2), update=0.08, model="sure", ranks=2, rows=8, seed=76)),
    fault("a fault that ended", "rank 2 off in 8 to 17", "rank_apart",
           "a fault that is over is still what was wrong", _BASE.but(steps=78, seed=77),
           where="rank 2",
           sample=sampled(trained_by(other_model(0.3)), 8, (2,), until=17)),
    fault("a fault that ended", "all late in 6 to 15", "streams_shifted",
           "a fault that is over is still what was wrong", _BASE.but(steps=76, ranks=2, seed=78),
           change=when(delayed(1), 6, until=15)),
    fault("a fault that ended", "engine at 0.7 in 10 to 19", "sampling_differs",
           "a fault that is over is still what was wrong", _BASE.but(steps=80, ranks=2, rows=8,
           seed=79),
           sample=sampled(by(temperature(0.7)), 10, until=19)),
)  # fmt: skip

ASYNCHRONOUS: Final = (
    fault("policy drift", "engine 1 of 2 is one recorded version behind", "staleness", _DRIFT,
           _BASE.but(engines=2, rows=8, ages=(0,), update=0.06, seed=122), sample=lags,
           change=told),
    fault("sync breaks weights", "much worse from the first sync, one step off",
           "mismatch_jump_at_first_sync", "drift of one version moves log-probs less",
           _BASE.but(syncs=True, ages=(1,), update=0.02, seed=123),
           sample=sampled(by(other_model(0.8)), 2)),
    fault("older policy, unsaid", "one version behind, said to be fresh", "engine_behind", _UNSAID,
           _BASE.but(ages=(0,), update=0.02, sharpens=3.0, seed=124), sample=behind(1)),
    fault("older policy, unsaid", "four versions behind, of no version", "engine_behind", _UNSAID,
           _BASE.but(update=0.02, sharpens=3.0, seed=125), sample=behind(4)),
    fault("older policy, unsaid", "two versions behind a policy that flattens", "engine_behind",
           _UNSAID, _BASE.but(ages=(0,), model="sure", steps=40, sharpens=0.4, seed=126),
           sample=behind(2)),
    fault("temperature", "engine at 0.93 while the policy sharpens", "sampling_differs", _T,
           _BASE.but(steps=48, sharpens=1.5, seed=127), sample=sampled(by(temperature(0.93)), 2)),
)  # fmt: skip
