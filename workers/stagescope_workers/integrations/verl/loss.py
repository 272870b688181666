"""Bypass mode: the trainer's log-probs first meet the rollout's in the workers' loss.

verl then takes the rollout's log-probs for its own old ones and computes none before the update,
so its mismatch metrics vanish. The loss has both: the rollout's, and the current ones of each
micro-batch. They are taken in the first epoch alone, where each token comes once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stagescope_workers.integrations.verl import context as contexts
from stagescope_workers.integrations.verl import minibatches
from stagescope_workers.integrations.verl.guard import guarded


def run_ppo_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return verl's `ppo_loss` that hands over what met in it."""

    def run(config: Any, model_output: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(config, model_output, data, *args, **kwargs)
        with guarded("the log-probs of the loss"):
            _collect(model_output, data)
        return result

    return run


def _collect(model_output: Any, data: Any) -> None:
    update = minibatches.current()
    if update is None or update.meeting is None or not update.is_first_epoch:
        return
    from verl.workers.utils.padding import no_padding_2_padding  # pyright: ignore[reportMissingImports]

    held = [name for name in ("rollout_log_probs", "responses") if name in data.keys()]  # noqa: SIM118
    with torch.no_grad():
        padded = data.select("response_mask", "old_log_probs", *held).to_padded_tensor()
        mask = padded["response_mask"]
        rollout = padded["rollout_log_probs" if "rollout_log_probs" in held else "old_log_probs"]
        tensors = {
            "log_probs": no_padding_2_padding(model_output["log_probs"].detach(), data),
            "rollout_log_probs": rollout,
            "response_mask": mask,
        }
        if "responses" in held and padded["responses"].shape == mask.shape:
            tensors["responses"] = padded["responses"]
    update.meeting.add(tensors, contexts.rows_of(data, contexts.SAMPLES))
