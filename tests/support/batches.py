"""Small batches for the statistics' tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stagescope_service.statistics import TokenBatch, WireTensor

Array = npt.NDArray[Any]


def bfloat16(values: Array) -> Array:
    """Round float32 to bfloat16 (ties to even), as the uint16 that travels."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """Read bfloat16 bits as float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def wire(array: Array, offsets: Sequence[int] | None = None) -> WireTensor:
    """Return an array as it travels; uint16 means bfloat16."""
    tag = "bfloat16" if array.dtype == np.uint16 else str(array.dtype)
    rows = None if offsets is None else np.array(offsets, np.int64)
    return tag, array.shape, array, rows


def batch_of(
    p: Array,
    q: Array,
    mask: Array,
    *,
    samples: Sequence[str] | None = None,
    engines: Sequence[str] | None = None,
    policy_version: int | None = None,
    pair: tuple[str, str] = ("old", "rollout"),
    **others: Array,
) -> TokenBatch:
    """Build a batch the way an ingestor does."""
    names = {"old": "old_log_probs", "recomputed": "recomputed_log_probs"}
    q_name = names.get(pair[1], "rollout_log_probs")
    tensors = {"old_log_probs": wire(p), q_name: wire(q), "response_mask": wire(mask)}
    tensors |= {name: wire(array) for name, array in others.items()}
    strings = {} if samples is None else {"sample_ids": list(samples)}
    strings |= {} if engines is None else {"engine_ids": list(engines)}
    meta = {} if policy_version is None else {"policy_version": policy_version}
    return TokenBatch.from_tensors(tensors, strings, meta, pair=pair)


def random_streams(
    rng: np.random.Generator, rows: int, tokens: int, noise: float = 0.05, share: float = 0.6
) -> tuple[Array, Array, Array]:
    """Return p and q (float32) and an int64 mask of several rounds a row."""
    q = -rng.exponential(1.0, (rows, tokens))
    p = np.minimum(q + rng.normal(0.0, noise, (rows, tokens)), 0.0)
    flips = rng.random((rows, tokens)) < 4.0 / max(tokens, 4)
    start = rng.random((rows, 1)) < share
    mask = (np.cumsum(flips, axis=1) + start) % 2
    return p.astype(np.float32), q.astype(np.float32), mask.astype(np.int64)
