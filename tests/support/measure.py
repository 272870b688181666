"""Payloads as ranks hand them over."""

from __future__ import annotations

from typing import TypedDict, cast

import numpy as np

from stagescope_service.core.instructions import IngestJob
from stagescope_wire.tensorfile import WireTensor


class Handed(TypedDict):
    """A `WirePayload` that a test may change before it is handed over."""

    schema: int
    tensors: dict[str, WireTensor]
    strings: dict[str, list[str]]
    meta: dict[str, object]


def ingest_job(**changes: object) -> IngestJob:
    """The job of a payload of rank 0 in step 5, with other fields as in `changes`."""
    job: IngestJob = {
        "run": "r", "attempt_id": 1, "attempt_key": "k", "role": "actor", "rank": 0,
        "data_rank": None, "step": 5, "policy_version": None, "stage": "actor_compute_log_prob",
        "occurrence": 0, "epoch": 0, "minibatch": 0, "microbatch": 0, "layout": {},
    }  # fmt: skip
    return cast("IngestJob", {**job, **changes})


def payload(
    rows: int = 4, tokens: int = 12, *, seed: int = 0, noise: float = 0.05, first_sample: int = 0
) -> Handed:
    """A payload of padded rows with two rounds each, as a rank hands it over."""
    random = np.random.default_rng(seed)
    q = -0.5 - random.exponential(1.0, (rows, tokens)).astype(np.float32)
    p = (q + random.normal(0.0, noise, q.shape)).astype(np.float32)
    mask = np.ones((rows, tokens), np.int64)
    mask[:, tokens // 2] = 0
    tensors: dict[str, WireTensor] = {
        "old_log_probs": ("float32", p.shape, p, None),
        "rollout_log_probs": ("float32", q.shape, q, None),
        "response_mask": ("int64", mask.shape, mask, None),
        "responses": ("int64", mask.shape, random.integers(0, 1000, mask.shape), None),
    }
    ids = [f"sample-{first_sample + row}" for row in range(rows)]
    return {"schema": 1, "tensors": tensors, "strings": {"sample_ids": ids}, "meta": {}}
