"""Faults of the training itself: its rewards, its numbers, its update, its turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from tests.service.rules.benchmark.faults.engines import by, one_round, sampled, trained_by
from tests.service.rules.benchmark.faults.streams import (
    Change,
    copied,
    delayed,
    delayed_rows,
    fault,
    first_tokens_lower,
    when,
)
from tests.service.rules.benchmark.play import Scalars
from tests.service.rules.benchmark.scene import (
    HEALTHY,
    Floats,
    Place,
    Sampler,
    Sampling,
    Scene,
    progress,
)
from tests.service.rules.planted import Batch
from tests.support.sampler import other_model, temperature


def with_scalar(
    name: str, value: Callable[[int, float], float]
) -> Callable[[int, Scalars], Scalars]:
    """Return what logs another value; it is given the step and the healthy value."""
    return lambda step, scalars: {**scalars, name: value(step, scalars.get(name, 0.0))}


def both(*changes: Callable[[int, Scalars], Scalars]) -> Callable[[int, Scalars], Scalars]:
    """Return several changes of what is logged."""

    def changed(step: int, scalars: Scalars) -> Scalars:
        for change in changes:
            scalars = change(step, scalars)
        return scalars

    return changed


def in_turn(*changes: Change) -> Change:
    """Return several changes of a batch, one after the other."""

    def changed(batch: Batch) -> None:
        for change in changes:
            change(batch)

    return changed


def both_sampled(*samplers: Sampler) -> Sampler:
    """Return the fault of the first sampler that has one in a place."""

    def sample(place: Place) -> Sampling:
        found = (each(place) for each in samplers)
        return next((each for each in found if each is not HEALTHY), HEALTHY)

    return sample


def _flat(step: int, value: float) -> float:
    """The reward without its progress."""
    return value - 0.3 * progress(Scene(), step)


def equal_rewards(batch: Batch) -> None:
    """All responses of a prompt have one reward."""
    groups = len(batch.q) // batch.groups
    batch.rewards = np.repeat(batch.random.integers(0, 2, groups), batch.groups).astype(float)


def all_wrong(batch: Batch) -> None:
    """The reward function rejects nearly everything."""
    batch.rewards = (batch.random.random(len(batch.q)) < 0.02).astype(float)


def all_right(batch: Batch) -> None:
    """The reward function takes nearly everything."""
    batch.rewards = (batch.random.random(len(batch.q)) < 0.98).astype(float)


def of_one(batch: Batch) -> None:
    """Every response has a group of its own."""
    batch.groups = 1


def advantages(bad: float, ranks: tuple[int, ...], since: int) -> Callable[[Batch], None]:
    """Return a change that hands over advantages, from a step on with one bad value."""

    def change(batch: Batch) -> None:
        values = np.broadcast_to(batch.random.normal(size=(len(batch.q), 1)), batch.q.shape).copy()
        if batch.step >= since and batch.rank in ranks:
            values[0] = bad
        batch.extra["advantages"] = ("float32", values.shape, values.astype(np.float32), None)

    return change


def second_turn_masked(batch: Batch) -> None:
    """The mask leaves out the second turn."""
    batch.rounds = np.where(batch.rounds == 1, -1, batch.rounds)


def cut_at_longest(batch: Batch) -> None:
    """Two thirds of the responses end at the longest length of 96 tokens."""
    rows, width = batch.q.shape
    q = -batch.random.exponential(0.7, (rows, 96))
    p = np.minimum(q + batch.random.normal(0.0, 0.01, q.shape), 0.0)
    rounds = np.zeros(q.shape, np.int64)
    whole = np.arange(rows) < (2 * rows) // 3
    for one, other in ((q, batch.q), (p, batch.p), (rounds, batch.rounds)):
        one[~whole, :width] = other[~whole]
    rounds[~whole, width:] = -1
    batch.q, batch.p, batch.rounds = q, p, rounds


def with_responses(change: Callable[[Batch], None]) -> Callable[[Batch], None]:
    """Return a change after which the batch has its token ids, too."""

    def changed(batch: Batch) -> None:
        change(batch)
        ids = batch.random.integers(5, 1000, batch.q.shape)
        batch.extra["responses"] = ("int64", ids.shape, ids, None)

    return changed


def _dropout(batch: Batch) -> Floats:
    noise: Floats = batch.p + batch.random.normal(0.0, 0.04, batch.p.shape)
    return noise


def _of_rank(rank: int, since: int) -> Callable[[Batch], Floats]:
    def current(batch: Batch) -> Floats:
        size = 0.05 if batch.rank == rank and batch.step >= since else 1e-6
        noise: Floats = batch.p + batch.random.normal(0.0, size, batch.p.shape)
        return noise

    return current


def _moved(batch: Batch) -> Floats:
    """The policy of the first mini-batch is not that of the old log-probs."""
    moved: Floats = batch.p + 0.1 * np.abs(batch.p) * batch.random.normal(size=batch.p.shape)
    return moved


_GROUPS: Final = "groups of equal rewards have no advantage, so nothing is learned"
_PASS: Final = "no update lies between the two passes, and they differ"
_ADVANTAGE: Final = "the update multiplies by a value that is not finite"
TWO: Final = "both faults are there, and neither explains the other"

_BASE: Final = Scene()

TRAININGS: Final = (
    fault("entropy collapse", "entropy falls from the begin", "entropy_collapse",
           "the entropy falls below a fifth of what it was", _BASE.but(steps=40, seed=81),
           scalars=with_scalar("entropy", lambda step, value: value * 0.88**step)),
    fault("entropy collapse", "entropy falls at once in 22", "entropy_collapse",
           "the entropy falls below a fifth of what it was", _BASE.but(steps=40, ranks=2, seed=82),
           scalars=with_scalar("entropy", lambda step, value: value * (0.05 if step > 21 else 1))),
    fault("reward flat", "reward flat over 60 steps", "reward_flat", "the reward does not rise",
           _BASE.but(steps=60, ranks=2, seed=83), scalars=with_scalar("reward", _flat)),
    fault("reward flat", "reward falls", "reward_flat", "the reward does not rise",
           _BASE.but(steps=50, ranks=2, seed=84),
           scalars=with_scalar("reward", lambda step, value: 0.8 - 0.5 * value)),
    fault("gradient spikes", "one spike in 25", "gradient_spikes", "one update was far too large",
           _BASE.but(steps=36, seed=85),
           scalars=with_scalar("grad_norm", lambda step, v: 40.0 if step == 25 else v)),
    fault("gradient spikes", "spikes again and again", "gradient_spikes",
           "some updates were far too large", _BASE.but(steps=40, ranks=2, seed=86),
           scalars=with_scalar("grad_norm", lambda step,
           v: v * (60 if step > 9 and not step % 6 else 1))),
    fault("loss not finite", "loss NaN from 20", "non_finite_scalars", "the loss is not a number",
           _BASE.but(seed=87),
           scalars=both(
               with_scalar("pg_loss", lambda step, v: np.nan if step >= 20 else v),
               with_scalar("grad_norm", lambda step, v: np.nan if step >= 20 else v),
           )),
    fault("loss not finite", "gradient infinite once", "non_finite_scalars gradient_spikes",
           "the gradient is not finite", _BASE.but(steps=26, seed=88),
           scalars=with_scalar("grad_norm", lambda step, v: np.inf if step == 24 else v)),
    fault("groups equal", "equal rewards in each group", "groups_equal", _GROUPS,
           _BASE.but(rows=8, seed=89), change=equal_rewards),
    fault("groups equal", "all wrong from 14", "groups_all_wrong groups_equal", _GROUPS,
           _BASE.but(rows=8, seed=90), change=when(all_wrong, 14)),
    fault("groups equal", "all right from 10", "groups_all_right groups_equal", _GROUPS,
           _BASE.but(ranks=2, rows=8, seed=91), change=when(all_right, 10)),
    fault("groups of one", "groups of one", "groups_of_one",
           "no response has another to compare with",
           _BASE.but(seed=92), change=of_one),
    fault("groups of one", "groups of one on one rank from 12", "groups_of_one",
           "no response has another to compare with", _BASE.but(seed=93), change=when(of_one, 12,
           [1])),
    fault("truncated responses", "logged share of 0.4", "responses_truncated",
           "responses end at the longest length", _BASE.but(seed=94),
           scalars=with_scalar("response_length/clip_ratio", lambda step, v: v + 0.35)),
    fault("truncated responses", "most are as long as the longest", "responses_truncated",
           "responses end at the longest length",
           _BASE.but(has_scalars=False, rounds=1, longest=96, seed=95),
           change=with_responses(when(cut_at_longest, 8))),
    fault("not finite advantages", "NaN advantages on rank 1", "non_finite_values", _ADVANTAGE,
           _BASE.but(seed=96), where="1", change=advantages(np.nan, (1,), 12)),
    fault("not finite advantages", "infinite advantages on two ranks", "non_finite_values",
           _ADVANTAGE,
           _BASE.but(ranks=8, seed=97), change=advantages(np.inf, (3, 4), 25)),
    fault("current differs", "dropout is on", "current_differs", _PASS,
           _BASE.but(updates=True, rows=8, seed=98), current=_dropout),
    fault("current differs", "the pass of rank 3 from 15", "current_differs", _PASS,
           _BASE.but(updates=True, rows=8, seed=99), where="3", current=_of_rank(3, 15)),
    fault("clipping without an update", "many tokens clipped in the first mini-batch",
           "current_differs", _PASS, _BASE.but(updates=True, rows=8, seed=100), current=_moved,
           scalars=with_scalar("clip_fraction", lambda step, v: v + 0.4)),
    fault("clipping without an update", "clipped from 12 on two ranks", "current_differs", _PASS,
           _BASE.but(updates=True, ranks=2, rows=8, seed=101),
           current=lambda batch: _moved(batch) if batch.step >= 12 else batch.p,
           scalars=with_scalar("clip_fraction", lambda step, v: v + (0.4 if step >= 12 else 0))),
    fault("far from the reference", "KL of 1.5", "kl_to_reference",
           "the policy is far from its reference",
           _BASE.but(steps=36, ranks=2, seed=102),
           scalars=with_scalar("kl_loss", lambda step, v: 0.08 * step)),
    fault("far from the reference", "KL jumps in 20", "kl_to_reference",
           "the policy is far from its reference", _BASE.but(steps=36, ranks=2, seed=103),
           scalars=with_scalar("kl_loss", lambda step, v: v + (3.0 if step >= 20 else 0.0))),
    fault("a turn stops training", "the second turn from 14", "turn_stops",
           "no token of a turn is trained", _BASE.but(turns=True, rows=8, seed=104), where="turn 1",
           change=when(second_turn_masked, 14), keep=("trajectories",)),
    fault("a turn stops training", "the second turn from 20, without tensors", "turn_stops",
           "no token of a turn is trained", _BASE.but(turns=True, rows=8, ranks=2, steps=40,
           seed=105),
           where="turn 1", change=when(second_turn_masked, 20)),
    fault("two faults", "late on rank 1, and entropy collapses", "streams_shifted", TWO,
           _BASE.but(steps=40, seed=106), second=frozenset({"entropy_collapse"}),
           change=when(delayed(1), 10, [1]),
           scalars=with_scalar("entropy", lambda step, value: value * 0.88**step)),
    fault("two faults", "engine at 0.7, and rank 2 slow", "sampling_differs", TWO,
           _BASE.but(seed=107), second=frozenset({"straggler"}),
           sample=sampled(by(temperature(0.7)), 8),
           seconds=lambda step, rank, usual: usual * (3.0 if rank == 2 else 1.0)),
    fault("two faults", "rank 3 has other weights, and NaN advantages on rank 0", "rank_apart",
           TWO, _BASE.but(seed=108), where="rank 3", second=frozenset({"non_finite_values"}),
           sample=sampled(trained_by(other_model(0.3)), 9, (3,)),
           change=advantages(np.nan, (0,), 14)),
)  # fmt: skip

TOGETHER: Final = (
    fault("two faults", "late on rank 1, and rank 5 has other weights", "streams_shifted", TWO,
           _BASE.but(ranks=8, seed=109), where="1", second=frozenset({"rank_apart"}),
           change=when(delayed(1), 8, [1]), sample=sampled(trained_by(other_model(0.2)), 12, (5,))),
    fault("two faults", "late on rank 1, and engine 2 of 4 is off", "streams_shifted", TWO,
           _BASE.but(rows=12, engines=4, seed=110), where="1", second=frozenset({"engine_apart"}),
           change=when(delayed(1), 6, [1]),
           sample=sampled(by(other_model(0.2)), 10, engines=(2,))),
    fault("two faults", "engine 2 of 4 late, and rank 3 is off", "streams_shifted", TWO,
           _BASE.but(rows=8, engines=4, seed=111), second=frozenset({"rank_apart"}),
           change=when(delayed_rows, 6), sample=sampled(trained_by(other_model(0.3)), 10, (3,))),
    fault("two faults", "late on rank 1, and first tokens less likely", "streams_shifted", TWO,
           _BASE.but(seed=112), where="1", second=frozenset({"first_token"}),
           change=in_turn(when(first_tokens_lower, 10), when(delayed(1), 6, [1]))),
    fault("two faults", "copied on rank 0, and the engine at 0.7", "streams_copied", TWO,
           _BASE.but(seed=113), where="0", second=frozenset({"sampling_differs"}),
           change=when(copied, 6, [0]), sample=sampled(by(temperature(0.7)), 8)),
    fault("two faults", "late on rank 2, and the engine at 0.7", "streams_shifted", TWO,
           _BASE.but(seed=114), where="2", second=frozenset({"sampling_differs"}),
           change=when(delayed(1), 6, [2]), sample=sampled(by(temperature(0.7)), 8)),
    fault("two faults", "rank 1 far off, and engine 0 of 3 is off", "rank_apart", TWO,
           _BASE.but(rows=12, ranks=6, engines=3, seed=115), where="rank 1",
           second=frozenset({"engine_apart"}),
           sample=both_sampled(sampled(trained_by(other_model(2.0)), 8, (1,)),
                               sampled(by(other_model(0.2)), 14, engines=(0,)))),
    fault("two faults", "late on rank 1, and the second round is off", "streams_shifted", TWO,
           _BASE.but(rows=8, seed=116), where="1", second=frozenset({"round_apart"}),
           change=in_turn(when(one_round(1), 12), when(delayed(1), 6, [1]))),
    fault("two faults", "late on rank 1, and all are worse from 17", "streams_shifted", TWO,
           _BASE.but(seed=117), where="1", second=frozenset({"mismatch_jump"}),
           change=when(delayed(1), 6, [1]), sample=sampled(by(other_model(0.2)), 17)),
)  # fmt: skip
"""Faults of one kind of evidence at once."""
