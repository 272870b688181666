"""A batch of one step with everything that other projects' forms need."""

from __future__ import annotations

import numpy as np

from stagescope_wire.batch import Batch, BatchPart, Gap, Padding, Tensor
from stagescope_wire.schema import Part


def step_batch(step: int = 5) -> Batch:
    """Two groups of two samples, prompts padded on the left, responses on the right."""
    log_probs = np.array(
        [[-0.5, -0.25, 0, 0], [-1, 0, -2, 0], [-0.125, 0, 0, 0], [-1, -2, -3, -4]], np.float32
    )
    mask = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    responses = np.array([[11, 12, 0, 0], [13, 90, 14, 0], [15, 0, 0, 0], [16, 17, 18, 19]])
    prompts = np.array([[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]])
    attention = np.concatenate([prompts != 0, responses != 0], axis=1).astype(np.int64)
    later = Tensor("float32", np.full((2, 3), 0.5, np.float32))
    loss = Tensor("float32", np.array(0.25, np.float32))
    halves = [np.array([0, 1]), np.array([2, 3])]
    parts = [
        BatchPart("actor_update", "actor", rank, Part(epoch=epoch), rows=halves[rank],
                  names=("response_mask", "log_probs", "loss"),
                  widths={"response_mask": 3 + rank, "log_probs": 3 + rank},
                  own={"loss": loss, **({"log_probs": later} if epoch and not rank else {})},
                  numbers={"loss": 0.25 + epoch})
        for epoch in (0, 1) for rank in (0, 1)
    ]  # fmt: skip
    return Batch(
        rows=4,
        tensors={
            "prompts": Tensor("int64", prompts),
            "responses": Tensor("int64", responses),
            "attention_mask": Tensor("int64", attention),
            "response_mask": Tensor("int64", mask),
            "rollout_log_probs": Tensor("float32", log_probs),
            "old_log_probs": Tensor("bfloat16", (log_probs.view(np.uint32) >> 16).astype("u2")),
            "rewards": Tensor("float32", np.array([1, 0, 0.5, 0], np.float32)),
            "versions": Tensor("int64", np.array([4, 4, 3, 4])),
            "log_probs": Tensor("float32", log_probs - 1),
        },
        strings={
            "sample_ids": ("g0_0", "g0_1", "g1_0", "g1_1"),
            "group_ids": ("g0", "g0", "g1", "g1"),
            "task_id": ("a", "a", "b", "b"),
        },
        padding={"responses": Padding("right", 0)},
        meta={"policy_version": 4, "sampling": {"temperature": 0.7}, "settings": {}},
        source={"run": "r", "attempt": 1, "step": step, "files": []},
        gaps=(Gap("rank", "actor_update has nothing of actor 7"),),
        parts=tuple(parts),
    )
