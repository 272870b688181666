"""The losses, as sums over model tokens: ranks divide by the count over all ranks."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Sums over the tokens of a mask; `loss` carries the gradient."""

    loss: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor
    pg: torch.Tensor
    clipped_side: torch.Tensor
    """Int8 [rows, tokens]: -1 where the lower bound takes the gradient of a token away, 1 where the
    upper one does, else 0."""
    prob_ratio: torch.Tensor
    """Probability ratio of each token, float32 [rows, tokens], like `elementwise` and its mask."""
    elementwise: torch.Tensor


def policy_loss(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    *,
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: float,
    kl_coefficient: float,
    entropy_coefficient: float,
) -> PolicyLoss:
    """PPO's clipped objective (arXiv:1707.06347, eq. 7) with a k3 penalty against the reference.

    Args:
        log_probs: log-probs of the trained policy, float32 [rows, tokens]; like all others.
        entropy: entropy of its distribution at each token.
        old_log_probs: log-probs of the policy before this step's updates.
        ref_log_probs: log-probs of the reference policy.
        advantages: advantage of each token.
        mask: 1.0 = model token.
        clip: half width of the trusted interval of the ratio.
        kl_coefficient: weight of KL(policy || reference) as exp(r) - r - 1, r = ref - policy.
        entropy_coefficient: weight of the entropy that is added.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    distance = ref_log_probs - log_probs
    kl = torch.expm1(distance) - distance
    loss = -gain + kl_coefficient * kl - entropy_coefficient * entropy
    outside = (clipped_ratio * advantages < ratio * advantages).float()
    return PolicyLoss(
        (loss * mask).sum(),
        (entropy * mask).sum().detach(),
        (kl * mask).sum().detach(),
        (outside * mask).sum(),
        pg=-(gain * mask).sum().detach(),
        clipped_side=(outside * torch.sign(ratio - 1.0)).detach().to(torch.int8),
        prob_ratio=ratio.detach(),
        elementwise=loss.detach(),
    )


def value_loss(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Half the squared error, summed over the mask; all float32 [rows, tokens]."""
    return 0.5 * ((values - returns).square() * mask).sum()
