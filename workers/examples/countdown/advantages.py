"""Compute advantages from rewards, in numpy: group-relative (GRPO) or with a critic (GAE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_advantages(rewards: np.ndarray, group_ids: Sequence[str], mask: np.ndarray) -> np.ndarray:
    """GRPO: a reward against its group, (r - mean) / (std + 1e-6), for every model token.

    Args:
        rewards: float [rows].
        group_ids: group of each row; the std has n - 1 in the denominator, a single row gets 0.
        mask: [rows, tokens], 1 = model token.

    Returns:
        float32 [rows, tokens], 0 where the mask is 0 (arXiv:2402.03300, section 4.1.2).
    """
    out = np.zeros(len(rewards))
    groups = np.asarray(group_ids)
    for group in np.unique(groups):
        rows = groups == group
        values = rewards[rows].astype(np.float64)
        if len(values) > 1:
            out[rows] = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    advantages: np.ndarray = (out[:, None] * mask).astype(np.float32)
    return advantages


def critic_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation over the model's tokens only (arXiv:1506.02438).

    The environment's tokens are not actions. After the last token of a round comes the first token
    of the next round. The last model token gets the reward.

    Args:
        rewards: float [rows].
        values: float [rows, tokens], the value before each token was written.
        mask: [rows, tokens], 1 = model token.
        discount: discount from one model token to the next.
        gae_lambda: weight of longer returns.

    Returns:
        Advantages whitened over the batch's model tokens, and returns, float32 [rows, tokens],
        both 0 where the mask is 0.
    """
    rows, tokens = mask.shape
    advantages = np.zeros((rows, tokens))
    following_value, running = np.zeros(rows), np.zeros(rows)
    pending = rewards.astype(np.float64)
    for token in reversed(range(tokens)):
        model = mask[:, token] == 1
        delta = pending + discount * following_value - values[:, token]
        running = np.where(model, delta + discount * gae_lambda * running, running)
        following_value = np.where(model, values[:, token], following_value)
        pending = np.where(model, 0.0, pending)
        advantages[:, token] = np.where(model, running, 0.0)
    returns = (advantages + values) * mask
    selected = advantages[mask == 1]
    whitened = (advantages - selected.mean()) / (selected.std() + 1e-6) * mask
    return whitened.astype(np.float32), returns.astype(np.float32)
