"""Summaries and wholes as an ingestor and a coordinator store them, made by the real statistics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from stagescope_service.core.instructions import PayloadKey
from stagescope_service.statistics.batch import TokenBatch, available_pairs
from stagescope_service.statistics.codec import summary_to_bytes
from stagescope_service.statistics.comparability import examine
from stagescope_service.statistics.step_metrics import step_metrics
from stagescope_service.statistics.step_summary import MISMATCH_PAIRS, assemble
from stagescope_service.statistics.summarise import summarise
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Put
from stagescope_service.store.parts import pair_name, part_records


def payload(
    rows: int = 4, tokens: int = 12, *, seed: int = 0, noise: float = 0.05, first_sample: int = 0
) -> dict[str, Any]:
    """A payload of padded rows with two rounds each, as a rank hands it over."""
    random = np.random.default_rng(seed)
    q = -0.5 - random.exponential(1.0, (rows, tokens)).astype(np.float32)
    p = (q + random.normal(0.0, noise, q.shape)).astype(np.float32)
    mask = np.ones((rows, tokens), np.int64)
    mask[:, tokens // 2] = 0
    tensors = {
        "old_log_probs": ("float32", p.shape, p, None),
        "rollout_log_probs": ("float32", q.shape, q, None),
        "response_mask": ("int64", mask.shape, mask, None),
        "responses": ("int64", mask.shape, random.integers(0, 1000, mask.shape), None),
    }
    ids = [f"sample-{first_sample + row}" for row in range(rows)]
    return {"schema": 1, "tensors": tensors, "strings": {"sample_ids": ids}, "meta": {}}


def summary_rows(key: PayloadKey, job: Mapping[str, Any], taken: Mapping[str, Any]) -> list[Put]:
    """The rows of `summaries` for one payload."""
    found = []
    for pair in available_pairs(taken["tensors"]):
        batch = TokenBatch.from_tensors(
            taken["tensors"], taken["strings"], taken["meta"], pair=pair
        )
        names = ("attempt_id", "step", "policy_version", "stage", "role", "rank", "occurrence")
        row = {name: job[name] for name in (*names, "epoch", "minibatch", "microbatch")}
        row |= {"incarnation": key.incarnation, "seq": key.seq, "pair": pair_name(pair)}
        data_rank = job["data_rank"] if job["data_rank"] is not None else job["rank"]
        row |= {"data_rank": data_rank, "summary": summary_to_bytes(summarise(batch))}
        found.append(Put("summaries", row))
    return found


def whole_rows(catalogue: Catalogue, attempt_id: int, step: int) -> list[Put]:
    """The whole of a closed step and its published numbers; none where nothing was measured."""
    key, wall = {"attempt_id": attempt_id, "step": step}, time.time()
    formed = {**key, "whole_wall": wall, "whole_mark": catalogue.parts_mark(attempt_id, step)}
    replaced = catalogue.replaced(attempt_id, step)
    processes = catalogue.processes(attempt_id)
    parts = part_records(catalogue.summaries(attempt_id, step), processes, replaced)
    if not any(part.summary.pair in MISMATCH_PAIRS for part in parts):
        return [Put("steps", formed)]
    whole = assemble(parts)
    found = examine(whole.summary)
    suspects = [check.name for check in found.suspects]
    columns = step_metrics(whole, verdict=found.verdict, suspects=suspects, whole_wall=wall)
    return [
        Put("steps", {**formed, "whole": whole.to_bytes()}),
        Put("step_metrics", {**key, **columns}),
    ]
