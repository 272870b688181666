"""Realistic healthy runs: what each rank samples, scores and logs in a step.

An engine samples tokens from a small model, and a trainer of another kernel scores them
(`tests.support.sampler`). Updates move the policy a little in each step. Responses have long-tailed
lengths and several rounds, and some end at the longest length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tests.service.rules.planted import Batch
from tests.support import sampler
from tests.support.sampler import Scores, as_is, log_softmax

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Restart:
    """A new attempt: its first step, and the last step that the attempt before it trained."""

    at: int
    died_in: int


@dataclasses.dataclass(frozen=True)
class Scene:
    """A healthy run.

    Attributes:
        steps: number of steps.
        ranks: number of ranks.
        rows: responses of each rank and step; a multiple of `group`.
        uneven: whether ranks have other numbers of rows.
        rounds: the most rounds of a response.
        longest: the largest number of tokens of a response, tools included.
        usual: the median number of tokens of a round.
        model: of `sampler.SHARPNESS`.
        engine: of `sampler.NOISE`.
        engines: number of engine instances, recorded with the rows; 0: not recorded.
        group: responses of a prompt.
        update: standard deviation of the logits' change in one step.
        sharpens: factor on the logits after all steps.
        ages: policy versions by which rows are older than the trainer's, in turn; (): synchronous.
        outliers: share of the tokens of which routing makes another mismatch of 0.5 nat.
        restarts: new attempts.
        syncs: whether weight syncs are reported.
        updates: whether the update hands over its first mini-batch's log-probs.
        turns: whether turn ids are recorded.
        has_ids: whether rows have sample and group ids.
        has_scalars: whether numbers are logged.
        dtype: of the trainer's log-probs.
        reward: 'binary' or 'smooth'.
        slow_steps: share of the steps that take three times as long, on all ranks or on one.
        seed: decides everything.
    """

    steps: int = 32
    ranks: int = 4
    rows: int = 4
    uneven: bool = False
    rounds: int = 3
    longest: int = 192
    usual: int = 32
    model: str = "usual"
    engine: str = "bf16"
    engines: int = 0
    group: int = 4
    update: float = 0.01
    sharpens: float = 1.0
    ages: tuple[int, ...] = ()
    outliers: float = 0.0
    restarts: tuple[Restart, ...] = ()
    syncs: bool = False
    updates: bool = False
    turns: bool = False
    has_ids: bool = True
    has_scalars: bool = True
    dtype: str = "float32"
    reward: str = "binary"
    slow_steps: float = 0.03
    seed: int = 0

    def but(self, **changed: Any) -> Scene:
        """Return the scene with other values."""
        return dataclasses.replace(self, **changed)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where tokens are sampled."""

    step: int
    rank: int
    engine: int
    attempt: int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How an engine samples and what each side scores.

    Attributes:
        version: policy version that the engine serves; None: as the scene has it.
        sampled: what the engine's log-probs become before a token is drawn.
        reported: what they become in the stream; None: as sampled.
        trained: what the trainer's become.
        foreign: share of the tokens of which the trainer scores another id.
        trained_version: policy version of the trainer; None: that of the step.
    """

    version: int | None = None
    sampled: Scores = as_is
    reported: Scores | None = None
    trained: Scores = as_is
    foreign: float = 0.0
    trained_version: int | None = None


Sampler = Callable[[Place], Sampling]
HEALTHY: Final = Sampling()


def healthily(place: Place) -> Sampling:
    """Sample without a fault."""
    return HEALTHY


# --- the policy ---------------------------------------------------------------------------------
@functools.lru_cache(maxsize=4)
def _directions(seed: int) -> tuple[Floats, Floats]:
    random = np.random.default_rng([seed, 77])
    shape = (sampler.CONTEXTS, sampler.VOCABULARY)
    return random.standard_normal(shape), random.standard_normal(shape)


@functools.lru_cache(maxsize=64)
def policy(scene: Scene, version: int) -> Scores:
    """Return what takes the model's first log-probs to those of a version of the policy."""
    # Half of an update goes on as the one before it; the rest turns slowly.
    one, other = _directions(scene.seed)
    turn = 0.02 * version
    change = scene.update * version * (math.cos(turn) * one + math.sin(turn) * other)
    sharp = scene.sharpens ** (version / scene.steps)
    return lambda scores: log_softmax(sharp * scores + change)


@functools.lru_cache(maxsize=64)
def then(first: Scores, second: Scores) -> Scores:
    """Return both, one after the other."""
    return first if second is as_is else lambda scores: second(first(scores))


def forget() -> None:
    """Drop what was computed for a run: each policy version has tables of its own."""
    policy.cache_clear()
    then.cache_clear()
    sampler._prepared.cache_clear()


# --- a batch --------------------------------------------------------------------------------------
def make_batch(scene: Scene, sample: Sampler, step: int, rank: int, attempt: int) -> Batch:
    """Return the rows of one rank and step."""
    random = np.random.default_rng([scene.seed, step, rank, attempt])
    rows = rows_of(scene, step, rank)
    rounds = _rounds(scene, random, rows)
    width = rounds.shape[1]
    p, q = np.zeros((rows, width)), np.zeros((rows, width))
    engines = np.zeros(rows, np.int64)
    if scene.engines:
        engines[:] = (rank + np.arange(rows) // scene.group) % scene.engines
    ages = np.zeros(rows, np.int64)
    if scene.ages:
        ages = np.resize(np.array(scene.ages), rows + rank)[rank:]
        ages = np.minimum(ages, step - 1)  # the first step is on-policy
    for engine, age in sorted({*zip(engines.tolist(), ages.tolist(), strict=True)}):
        own = (engines == engine) & (ages == age)
        how = sample(Place(step, rank, engine, attempt))
        drawn = _draw(scene, how, step, age, random, int(own.sum()), width)
        p[own], q[own] = drawn.p, drawn.q
    far = random.random(p.shape) < scene.outliers
    p = np.where(far, np.minimum(p + random.normal(-0.1, 0.5, p.shape), -1e-6), p)
    q[rounds < 0] = 0.0
    batch = Batch(step, rank, q, np.minimum(p, 0.0), rounds, random, dtype=scene.dtype)
    batch.groups = scene.group
    batch.rewards = _rewards(scene, random, step, rows)
    batch.has_ids = scene.has_ids
    if scene.turns:
        batch.extra["turn_ids"] = ("int64", rounds.shape, rounds.copy(), None)
    if scene.engines:
        batch.engine = [f"engine-{engine}" for engine in engines]
    if scene.ages:
        versions = (step - ages)[:, None]
        batch.versions = np.broadcast_to(versions, q.shape).copy()
    return batch


def rows_of(scene: Scene, step: int, rank: int) -> int:
    """Return the number of rows of a rank in a step."""
    if not scene.uneven:
        return scene.rows
    share = np.random.default_rng([scene.seed, step, rank, 5]).uniform(0.5, 2.0)
    return max(round(share * scene.rows / scene.group), 1) * scene.group


def _draw(
    scene: Scene, how: Sampling, step: int, age: int, random: np.random.Generator, rows: int,
    width: int,
) -> sampler.Batch:  # fmt: skip
    version = step - age if how.version is None else min(how.version, step)
    trained = step if how.trained_version is None else how.trained_version
    engine, trainer = policy(scene, version), policy(scene, trained)
    return sampler.draw(
        random, rows, width, model=scene.model, engine=scene.engine,
        sampled=then(engine, how.sampled),
        reported=None if how.reported is None else then(engine, how.reported),
        trained=then(trainer, how.trained), foreign=how.foreign,
    )  # fmt: skip


def _rounds(scene: Scene, random: np.random.Generator, rows: int) -> npt.NDArray[np.int64]:
    """Return the round of each token, -1 for tools and padding: [rows, the longest of these]."""
    found = np.full((rows, scene.longest), -1)
    for row in range(rows):
        at = 0
        for number in range(int(random.integers(1, scene.rounds + 1))):
            length = max(int(scene.usual * math.exp(0.6 * random.standard_normal())), 4)
            found[row, at : at + length] = number
            at += length + int(random.integers(2, 12))
            if at >= scene.longest:
                break
    ends = int(np.flatnonzero((found >= 0).any(axis=0))[-1]) + 1
    return found[:, :ends]


def progress(scene: Scene, step: int) -> float:
    """Return how far a training is, 0 to 1, faster at its begin."""
    return 1.0 - math.exp(-3.0 * step / max(scene.steps, 40))


def _rewards(scene: Scene, random: np.random.Generator, step: int, rows: int) -> Floats:
    groups = max(rows // scene.group, 1)
    level = 0.35 + 0.3 * progress(scene, step)
    chance = np.repeat(random.beta(4.0 * level, 4.0 * (1.0 - level), groups), scene.group)
    if scene.reward == "smooth":
        return np.clip(chance + random.normal(0.0, 0.15, rows), 0.0, 1.0)
    return (random.random(rows) < chance).astype(float)


def scalars_of(scene: Scene, step: int) -> dict[str, float]:
    """Return the logged numbers of a step: they drift, and have noise."""
    if not scene.has_scalars:
        return {}
    random = np.random.default_rng([scene.seed, step, 9])
    done = progress(scene, step)
    return {
        "reward": 0.35 + 0.3 * done + random.normal(0.0, 0.03),
        "entropy": (0.9 - 0.35 * done) * math.exp(random.normal(0.0, 0.05)),
        "grad_norm": (1.5 - 0.8 * done) * math.exp(random.normal(0.0, 0.35)),
        "kl_loss": 0.02 * done * math.exp(random.normal(0.0, 0.2)),
        "clip_fraction": 0.02 * math.exp(random.normal(0.0, 0.4)),
        "response_length/clip_ratio": abs(random.normal(0.03, 0.015)),
        "pg_loss": random.normal(0.0, 0.02),
    }


def seconds_of(scene: Scene, step: int, rank: int) -> float:
    """Return how long a rank takes: by its rows, with noise, and sometimes three times as long."""
    of_step = np.random.default_rng([scene.seed, step, 3])
    own = np.random.default_rng([scene.seed, step, rank, 4])
    usual = 2.0 * math.exp(own.normal(0.0, 0.06))
    if of_step.random() < scene.slow_steps:
        slow = int(of_step.integers(-1, scene.ranks))
        usual *= 3.0 if slow in (-1, rank) else 1.0
    return usual


def logged(base: Mapping[str, float], **changed: float) -> dict[str, float]:
    """Return logged numbers with others."""
    return {**base, **changed}
