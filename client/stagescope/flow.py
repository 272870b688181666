"""The order in which a step's data flow: the first difference in it is nearest to the cause."""

from __future__ import annotations

from typing import Final

FLOW: Final = (
    "prompts", "responses", "tokens", "prompt_text", "response_text", "input_ids", "position_ids",
    "positions",
    "attention_mask", "loss_mask", "response_mask", "round_ids", "turn_ids", "versions",
    "rollout_log_probs",
    "rewards",
    "old_log_probs", "recomputed_log_probs", "ref_log_probs", "entropy",
    "values",
    "advantages", "returns",
    "log_probs",
    "prob_ratio", "elementwise_loss", "effective_valid",
    "pg_loss", "kl", "kl_loss", "entropy_loss", "value_loss", "loss",
    "gradient", "grad_norm", "parameter",
)  # fmt: skip
"""Names of tensors and numbers in that order; `gradient` and `parameter` stand for their families
(`gradient/lm_head.weight`)."""

_ORDER: Final = {name: order for order, name in enumerate(FLOW)}
_PASS: Final = _ORDER["log_probs"]
_UPDATES: Final = ("actor_update", "critic_update")


def order_of(name: str, stage: str | None = None) -> int:
    """Return the index of a tensor or number in `FLOW`; unknown names come last.

    In an update stage, `entropy` and `values` belong to the update's own forward pass.
    """
    family = name.partition("/")[0].partition(".")[0]
    if family in ("gradient", "parameter", "gradients", "parameters"):
        name = family.removesuffix("s")
    order = _ORDER.get(name, len(FLOW))
    return _PASS if stage in _UPDATES and name in ("entropy", "values") else order
