"""An engine whose next token depends on the last one alone, with a prefix cache and faults."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from stagescope_workers.canary.engine_arms import Cache, Decoded, Rows

VOCABULARY = 64

Table = npt.NDArray[np.float64]
"""[last token, next token] logits."""


def table(seed: int = 0) -> Table:
    """Return random logits."""
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)) * 1.5


def log_softmax(logits: Table) -> Table:
    """Return log-probs over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    found: Table = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def scores(logits: Table, row: tuple[int, ...]) -> tuple[float, ...]:
    """Return the log-probs of a row's tokens, NaN for the first."""
    own = log_softmax(logits)
    pairs = itertools.pairwise(row)
    return (math.nan, *(float(own[last, token]) for last, token in pairs))


def cut(logits: Table, keeps: int | float) -> Table:
    """Exclude all tokens but the `keeps` likeliest (int) or those of this probability (float)."""
    order = np.argsort(-logits, axis=-1)
    shares = np.exp(log_softmax(np.take_along_axis(logits, order, -1))).cumsum(-1)
    kept = np.ones_like(logits, np.bool_)
    if isinstance(keeps, int):
        kept[:, keeps:] = False
    else:
        kept[:, 1:] = shares[:, :-1] < keeps
    found = np.empty_like(logits)
    np.put_along_axis(found, order, np.where(kept, 0.0, -np.inf), -1)
    return logits + found


@dataclasses.dataclass
class TableEngine:
    """Scores and decodes with `models`; a name is an adapter or the base.

    Attributes:
        models: name -> logits; None is the engine's own.
        decodes_at: the temperature that it uses, whatever is requested; None: the requested one.
        keeps: the top_k (int) or top_p (float) that it uses, whatever is requested.
        tokens: what it makes of each text; None: it does not tell.
        lists: whether it returns the log-probs of the likeliest tokens.
        before_call: runs before each call.
    """

    models: dict[str | None, Table]
    name: str = "table"
    cache: Cache = "salted"
    max_length: int | None = None
    processed: bool | None = True
    decodes_at: float | None = None
    keeps: int | float = 1.0
    tokens: tuple[int, ...] | None = None
    lists: bool = True
    before_call: Callable[[], None] = lambda: None
    settings: dict[str, Any] = dataclasses.field(default_factory=lambda: {"kind": "table"})
    cached: dict[tuple[str | None, str | None, int], Table] = dataclasses.field(
        default_factory=dict
    )

    def decode(self, rows: Rows, n: int, *, seed: int, temperature: float) -> list[Decoded]:
        """Continue each row; a cached prefix keeps the logits of the time when it was cached."""
        self.before_call()
        found = []
        for at_row, row in enumerate(rows.rows):
            random = np.random.default_rng(seed + at_row)
            key = (rows.model, rows.salt, row[0])
            logits = self.cached.setdefault(key, self.models[rows.model])
            at = self.decodes_at if self.decodes_at is not None else temperature
            sampled = log_softmax(cut(logits / at, self.keeps))
            own = sampled if self.processed else log_softmax(logits)
            ids: list[int] = []
            for _ in range(n):
                last = ids[-1] if ids else row[-1]
                noise = random.gumbel(size=VOCABULARY)
                ids.append(int((sampled[last] + noise).argmax()))
            values = zip([row[-1], *ids], ids, strict=False)
            places = [own[last] for last in (row[-1], *ids[:-1])]
            likeliest = tuple(tuple(np.sort(each)[::-1][:20].tolist()) for each in places)
            log_probs = tuple(float(own[a, b]) for a, b in values)
            found.append(Decoded(tuple(ids), log_probs, likeliest if self.lists else ()))
        return found

    def score(self, rows: Rows) -> list[tuple[float, ...]]:
        """Score each row with the current logits."""
        self.before_call()
        return [scores(self.models[rows.model], row) for row in rows.rows]

    def tokenise(self, text: str) -> tuple[int, ...] | None:
        """Return `tokens`."""
        return self.tokens
