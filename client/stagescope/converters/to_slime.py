"""A batch as slime's samples: responses alone, ragged lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stagescope.trajectories import Trajectory, trajectories

if TYPE_CHECKING:
    from stagescope.batch import Batch


def samples(batch: Batch) -> list[dict[str, Any]]:
    """Return a dict a row with the fields of slime's `Sample.to_dict()`.

    `tokens` are prompt and response, `loss_mask` and `rollout_log_probs` as long as the response.
    `group_index` counts groups in the order of the rows; the ids themselves are in `metadata`.
    Texts that were not recorded (`prompt`, `response`) are empty.

    Raises:
        NotFound: no `prompts`, `responses` or `response_mask` were kept.
    """
    groups: dict[str, int] = {}
    return [
        _sample(batch.step, each, groups.setdefault(each.group_id, len(groups)))
        for each in trajectories(batch)
    ]


def _sample(step: int | None, one: Trajectory, group: int) -> dict[str, Any]:
    response, mask = one.tensor("responses"), one.tensor("response_mask")
    log_probs = one.tensors.get("rollout_log_probs")
    versions = one.tensors.get("versions", one.values.get("versions"))
    return {
        "group_index": group,
        "index": one.row,
        "rollout_id": step,
        "prompt": one.strings.get("prompt", ""),
        "tokens": one.all_tokens(),
        "response": one.strings.get("response", ""),
        "response_length": len(response),
        "label": one.strings.get("label"),
        "reward": one.reward,
        "loss_mask": mask.astype(np.int64).tolist(),
        "weight_versions": [] if versions is None else np.unique(versions).astype(str).tolist(),
        "rollout_log_probs": None if log_probs is None else log_probs.tolist(),
        "remove_sample": False,
        "status": one.strings.get("status", "completed"),
        "metadata": {"sample_id": one.sample_id, "group_id": one.group_id, "run_id": one.run_id},
        "train_metadata": None,
    }
