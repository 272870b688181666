"""Tokens with both sides' log-probs, and the numbers of their difference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

WORST: Final = 10


@dataclasses.dataclass(frozen=True)
class Scored:
    """One answer of the engine.

    Attributes:
        name: the prompt's.
        prompt: its token ids.
        ids: the tokens of the answer.
        q: the engine's log-prob of each.
        p: the other side's, of the same tokens after the same prompt.
        mask: which of them the model sampled (the environment wrote the others); None: all.
        group: the prompt's group, where it is known.
        reward: of the answer, where it is known.
    """

    name: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    q: Float64
    p: Float64
    mask: npt.NDArray[np.bool_] | None = None
    group: str | None = None
    reward: float | None = None

    @property
    def counted(self) -> npt.NDArray[np.bool_]:
        """The mask, also where every token counts."""
        return np.ones(len(self.ids), np.bool_) if self.mask is None else self.mask


@dataclasses.dataclass(frozen=True, slots=True)
class WorstToken:
    """One of the tokens with the largest |d|; `position` counts from the first answered token."""

    sample: str
    position: int
    token_id: int
    token: str
    q: float
    p: float
    abs_diff: float


def numbers(rows: Sequence[Scored]) -> dict[str, float]:
    """Return the service's statistics of the same tokens, under the same names, in float64.

    They are over tokens with two finite values; the others are counted.
    """
    q = np.concatenate([row.q[row.counted] for row in rows]) if rows else np.empty(0)
    p = np.concatenate([row.p[row.counted] for row in rows]) if rows else np.empty(0)
    finite = np.isfinite(q) & np.isfinite(p)
    nonfinite = {
        f"nonfinite/{stream}": float(np.count_nonzero(~np.isfinite(values)))
        for stream, values in (("rollout", q), ("old", p))
    }
    q, p = q[finite], p[finite]
    d = p - q
    count = len(d)
    return {
        "logprob_abs_diff/mean": float(np.abs(d).mean()) if count else math.nan,
        "logprob_abs_diff/max": float(np.abs(d).max()) if count else math.nan,
        "rollout_corr/k3_kl": float((np.expm1(d) - d).mean()) if count else math.nan,
        "rollout_corr/kl": float(-d.mean()) if count else math.nan,
        "training/rollout_probs_diff_mean": (
            float(np.abs(np.exp(p) - np.exp(q)).mean()) if count else math.nan
        ),
        "training/rollout_actor_probs_pearson_corr": _pearson(np.exp(p), np.exp(q)),
        "counts/tokens": float(count),
        "counts/sequences": float(len(rows)),
        **nonfinite,
    }


def worst_tokens(
    rows: Sequence[Scored], decode: Callable[[int], str], count: int = WORST
) -> list[WorstToken]:
    """Return the tokens that differ most, the worst first; non-finite ones come before others.

    Args:
        rows: the answers.
        decode: returns a token's text by its id.
        count: the maximal number of tokens.
    """
    if not rows:
        return []
    counted = np.concatenate([row.counted for row in rows])
    with np.errstate(invalid="ignore"):
        gaps = np.concatenate([np.abs(row.p - row.q) for row in rows])
    keys = np.where(counted, np.where(np.isfinite(gaps), gaps, np.inf), -1.0)
    count = min(count, int(np.count_nonzero(counted)))
    starts = np.cumsum([0, *(len(row.ids) for row in rows)])
    found = []
    for index in np.argsort(-keys, kind="stable")[:count]:
        row = int(np.searchsorted(starts, index, side="right")) - 1
        position = int(index - starts[row])
        token = rows[row].ids[position]
        found.append(
            WorstToken(
                sample=rows[row].name,
                position=position,
                token_id=token,
                token=decode(token),
                q=float(rows[row].q[position]),
                p=float(rows[row].p[position]),
                abs_diff=float(gaps[index]),
            )
        )
    return found


def _pearson(x: Float64, y: Float64) -> float:
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])
