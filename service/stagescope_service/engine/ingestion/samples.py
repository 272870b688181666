"""Rows about single samples: whose trajectory it is, what it was rewarded, which tokens it has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stagescope_service.engine.ingestion.values import Payload
from stagescope_service.statistics import WireTensor
from stagescope_service.store.base import Put
from stagescope_service.store.rollouts import TRAINER_STAGES

MOST_SAMPLES: Final = 20_000
"""Samples of one payload that get rows of their own; the statistics are of all."""


def sample_rows(job: Mapping[str, Any], payload: Payload) -> Iterator[Put]:
    """Say what a payload tells of each of its samples; columns that it does not tell stay."""
    ids = payload.strings.get("sample_ids")
    if not ids:
        return
    step, version = job.get("step"), job.get("policy_version")
    clock = f"s{step}" if step is not None else f"v{version}"
    groups = payload.strings.get("group_ids") or []
    rewards = _per_row(payload.tensors.get("rewards"), len(ids))
    hashes = _token_hashes(payload, len(ids))
    meta = payload.meta
    for row, uid in enumerate(ids[:MOST_SAMPLES]):
        columns: dict[str, Any] = {
            "attempt_id": job["attempt_id"],
            "clock": clock,
            "sample_uid": uid,
            "step": step,
            "policy_version": version,
        }
        if step is not None and job["stage"] in TRAINER_STAGES:
            columns["consumed_step"] = step
        if row < len(groups):
            columns["group_id"] = groups[row]
        if rewards is not None:
            columns["reward"] = float(rewards[row])
        if hashes is not None:
            columns["tokens_hash"], columns["tokens"] = hashes[row]
        for name in ("split", "data_source"):
            value = meta.get(name)
            if isinstance(value, str):
                columns[name] = value
            elif isinstance(value, list) and row < len(value):
                columns[name] = str(value[row])
        yield Put("samples", columns)


def _per_row(tensor: WireTensor | None, rows: int) -> npt.NDArray[Any] | None:
    if tensor is None or tensor[0] == "bfloat16" or tensor[2].size != rows:
        return None
    return tensor[2].reshape(-1)


def _token_hashes(payload: Payload, rows: int) -> list[tuple[str, int]] | None:
    """Return (hash, count) of each row's model tokens, which pairs samples across runs."""
    responses = payload.tensors.get("responses")
    mask = payload.tensors.get("response_mask")
    if responses is None or mask is None or responses[2].size != mask[2].size:
        return None
    offsets = responses[3]
    if offsets is None and len(responses[1]) == 2:
        offsets = np.arange(rows + 1, dtype=np.int64) * responses[1][1]
    if offsets is None or len(offsets) != rows + 1:
        return None
    tokens = responses[2].reshape(-1).astype(np.int64, copy=False)
    on = mask[2].reshape(-1) != 0
    found = []
    for row in range(rows):
        begin, end = int(offsets[row]), int(offsets[row + 1])
        own = tokens[begin:end][on[begin:end]]
        found.append((hashlib.blake2b(own.tobytes(), digest_size=12).hexdigest(), len(own)))
    return found
