"""Batches as an engine samples them: tokens drawn from q, scored again by a trainer.

A model is a table of contexts, each with its own distribution over a small vocabulary; a sure model
knows the next token nearly always. Engine and trainer see logits with noise of their own, as other
kernels and number formats make it, and each takes its own log-softmax: what one draws the other
scores, so that E_q[p/q] = 1 holds as in a real batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Final

import numpy as np

from stagescope_wire.tensorfile import Array

Scores = Callable[[Array], Array]
"""Log-probs [contexts, vocabulary] to others of the same shape."""

CONTEXTS: Final = 1024
VOCABULARY: Final = 128
SHARPNESS: Final = {"certain": 30.0, "sure": 9.0, "usual": 4.0, "unsure": 1.6, "vague": 0.1}
"""Median factor on the logits of a context."""
NOISE: Final = {"float32": 1e-5, "bf16": 0.02, "int8": 0.08}
"""Standard deviation of an engine's logits around the exact ones."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """float32 [rows, tokens] each: p of the trainer, q of the engine, entropy of q's context."""

    p: Array
    q: Array
    entropy: Array


def log_softmax(logits: Array) -> Array:
    """Return log-probs over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


@functools.cache
def tables(model: str, engine: str) -> tuple[Array, Array]:
    """Return (trainer's, engine's) log-probs [contexts, vocabulary] of a model."""
    rng = np.random.default_rng(sorted(SHARPNESS).index(model) * 10 + sorted(NOISE).index(engine))
    ranked = -0.9 * np.log1p(np.arange(VOCABULARY)) + 0.4 * rng.standard_normal(
        (CONTEXTS, VOCABULARY)
    )
    sharp = SHARPNESS[model] * np.exp(0.5 * rng.standard_normal((CONTEXTS, 1)))
    logits = sharp * ranked
    trainer = min(NOISE[engine], NOISE["bf16"]) * rng.standard_normal(logits.shape)
    noise = NOISE[engine] * rng.standard_normal(logits.shape)
    return log_softmax(logits + trainer), log_softmax(logits + noise)


@functools.cache
def temperature(by: float) -> Scores:
    """Return what takes log-probs to those at another temperature."""
    return lambda scores: log_softmax(scores / by)


@functools.cache
def top_k(k: int) -> Scores:
    """Return what keeps the k likeliest tokens alone, renormalised."""

    def cut(scores: Array) -> Array:
        least = np.partition(scores, -k, axis=-1)[:, -k, None]
        return log_softmax(np.where(scores >= least, scores, -1e4))

    return cut


@functools.cache
def top_p(share: float) -> Scores:
    """Return what keeps the likeliest tokens that together reach a share, renormalised."""

    def cut(scores: Array) -> Array:
        order = np.argsort(-scores, axis=-1)
        ranked = np.take_along_axis(np.exp(scores), order, axis=-1)
        kept = np.cumsum(ranked, axis=-1) - ranked < share
        mask = np.empty_like(kept)
        np.put_along_axis(mask, order, kept, axis=-1)
        return log_softmax(np.where(mask, scores, -1e4))

    return cut


@functools.cache
def min_p(share: float) -> Scores:
    """Return what keeps tokens of at least a share of the likeliest one's chance, renormalised."""

    def cut(scores: Array) -> Array:
        least = scores.max(axis=-1, keepdims=True) + np.log(share)
        return log_softmax(np.where(scores >= least, scores, -1e4))

    return cut


@functools.cache
def other_model(size: float, rank: int | None = None, sharpness: float = 1.0) -> Scores:
    """Return what takes a model's log-probs to those of another model.

    Args:
        size: standard deviation of the change of the logits.
        rank: of the change, as an adapter makes it; None: each logit changes alone.
        sharpness: factor on the logits.
    """
    rng = np.random.default_rng([int(size * 1000), rank or 0])
    if rank is None:
        change = rng.standard_normal((CONTEXTS, VOCABULARY))
    else:
        widths = np.exp(rng.standard_normal((CONTEXTS, 1)) - 1.0)
        left = widths * rng.standard_normal((CONTEXTS, rank))
        change = left @ rng.standard_normal((rank, VOCABULARY)) / np.sqrt(rank)
    return lambda scores: log_softmax(sharpness * scores + size * change)


def as_is(scores: Array) -> Array:
    """Change nothing."""
    return scores


def draw(
    rng: np.random.Generator,
    rows: int,
    tokens: int,
    *,
    model: str = "usual",
    engine: str = "bf16",
    sampled: Scores = as_is,
    reported: Scores | None = None,
    trained: Scores = as_is,
    foreign: float = 0.0,
) -> Batch:
    """Draw a batch.

    Args:
        rng: decides everything.
        rows, tokens: its shape.
        model, engine: see `SHARPNESS` and `NOISE`.
        sampled: what the engine's log-probs become before a token is drawn.
        reported: what they become before they are handed over; default as `sampled`.
        trained: what the trainer's become.
        foreign: share of the tokens of which the trainer scores another id.
    """
    scored, given, rungs, entropies = _prepared(model, engine, sampled, reported, trained)
    context = rng.integers(0, CONTEXTS, rows * tokens)
    at = np.searchsorted(rungs, context + rng.random(rows * tokens), side="right")
    token = np.clip(at - context * VOCABULARY, 0, VOCABULARY - 1)
    scored_token = token
    if foreign:
        is_foreign = rng.random(rows * tokens) < foreign
        scored_token = np.where(is_foreign, rng.integers(0, VOCABULARY, rows * tokens), token)
    columns = (scored[context, scored_token], given[context, token], entropies[context])
    return Batch(*(column.astype(np.float32).reshape(rows, tokens) for column in columns))


@functools.cache
def _prepared(
    model: str, engine: str, sampled: Scores, reported: Scores | None, trained: Scores
) -> tuple[Array, Array, Array, Array]:
    p, q = tables(model, engine)
    drawn = sampled(q)
    given = drawn if reported is None else reported(q)
    chance = np.exp(drawn)
    ladder = np.cumsum(chance / chance.sum(axis=-1, keepdims=True), axis=-1)
    ladder[:, -1] = 1.0
    rungs = (ladder + np.arange(CONTEXTS)[:, None]).reshape(-1)
    entropies = -(np.exp(given) * np.where(given < -1e3, 0.0, given)).sum(axis=-1)
    return trained(p), given, rungs, entropies
