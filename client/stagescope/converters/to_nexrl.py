"""A batch as the trajectories of NexRL's dumps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stagescope.trajectories import Trajectory, trajectories

if TYPE_CHECKING:
    from stagescope.batch import Batch

_EXTRA: Final = ("uid", "task_id")


def trajectories_of(batch: Batch) -> list[dict[str, Any]]:
    """Return a dict a row as NexRL's DataDumper writes them, in the order of the rows.

    `tokens` and `loss_mask` are of the whole trajectory, prompt first. A run_id that is a number
    is an int, as NexRL has it.

    Raises:
        NotFound: no `prompts`, `responses` or `response_mask` were kept.
    """
    temperature = (batch.meta.get("sampling") or {}).get("temperature")
    return [_trajectory(each, temperature) for each in trajectories(batch)]


def _trajectory(one: Trajectory, temperature: Any) -> dict[str, Any]:
    tokens = one.all_tokens()
    before = [0] * (len(tokens) - len(one.tensor("responses")))
    extra: dict[str, Any] = {
        "group_id": one.group_id,
        "run_id": int(one.run_id) if one.run_id.isdecimal() else one.run_id,
        **{name: one.strings[name] for name in _EXTRA if name in one.strings},
        **({} if one.reward is None else {"score": one.reward}),
        **({} if temperature is None else {"temperature": temperature}),
    }
    found: dict[str, Any] = {
        "tokens": tokens,
        "loss_mask": [*before, *one.tensor("response_mask").astype(np.int64).tolist()],
        "reward": one.reward,
        "is_val": one.strings.get("split") == "val",
        "extra_fields": extra,
    }
    if "advantages" in one.tensors:
        found["advantages"] = [*map(float, before), *one.tensors["advantages"].tolist()]
    return found
