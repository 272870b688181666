"""Kept steps of a rollout engine and a trainer, as batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stagescope_wire.batch import Batch, Padding, Tensor


def kept_step(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rollout: Sequence[Sequence[float]],
    trainer: Sequence[Sequence[float]],
    *,
    sampling: Mapping[str, float] | None = None,
    mask: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """Return a step, prompts padded on the left, the rest on the right.

    Args:
        prompts, responses: token ids by row.
        rollout, trainer: log-probs of the responses by row.
        sampling: as it is recorded; None: it is not.
        mask: the response mask by row; None: all ones.
    """
    lengths = np.array([len(row) for row in responses])
    sizes = np.array([len(row) for row in prompts])
    width, left = int(lengths.max()), int(sizes.max())

    def right(rows: Sequence[Sequence[float]], dtype: type) -> Tensor:
        values: npt.NDArray[Any] = np.zeros((len(rows), width), dtype)
        for index, row in enumerate(rows):
            values[index, : len(row)] = row
        return Tensor(str(values.dtype), values)

    padded = np.zeros((len(prompts), left), np.int64)
    for index, row in enumerate(prompts):
        padded[index, left - len(row) :] = row
    return Batch(
        rows=len(prompts),
        tensors={
            "prompts": Tensor("int64", padded),
            "responses": right(responses, np.int64),
            "response_mask": right(mask or [[1] * len(row) for row in responses], np.int8),
            "rollout_log_probs": right(rollout, np.float32),
            "old_log_probs": right(trainer, np.float32),
        },
        strings={"sample_ids": tuple(f"s{index}" for index in range(len(prompts)))},
        lengths={"prompts": sizes, "responses": lengths, "response_mask": lengths},
        padding={"prompts": Padding("left", 0), "responses": Padding("right", 0)},
        meta={} if sampling is None else {"sampling": dict(sampling)},
        source={"run": "r", "attempt": 1, "step": 5},
    )
