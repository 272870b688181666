from __future__ import annotations

import numpy as np
import pytest

from examples.countdown.advantages import critic_advantages, group_advantages

MASK = np.array([[1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


def test_group_advantages_compare_within_the_group() -> None:
    rewards = np.array([1.0, 0.0, 5.0])
    advantages = group_advantages(rewards, ["a", "a", "b"], MASK)
    expected = np.array([0.5, -0.5, 0.0]) / (np.sqrt(0.5) + 1e-6)
    assert advantages == pytest.approx(expected[:, None] * MASK)
    assert advantages.dtype == np.float32


def test_equal_rewards_give_no_advantage() -> None:
    assert not group_advantages(np.ones(3), ["a", "a", "a"], MASK).any()


def plain_gae(
    reward: float, values: list[float], discount: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Over the model's tokens of one row, by the definition: a sum of discounted errors."""
    following = [*values[1:], 0.0]
    rewards = [0.0] * (len(values) - 1) + [reward]
    errors = [r + discount * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    advantages = [
        sum((discount * gae_lambda) ** k * e for k, e in enumerate(errors[t:]))
        for t in range(len(values))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0)])
def test_critic_advantages_step_over_the_environments_tokens(
    discount: float, gae_lambda: float
) -> None:
    generator = np.random.default_rng(3)
    rewards, values = generator.random(3), generator.random(MASK.shape)
    advantages, returns = critic_advantages(
        rewards, values, MASK, discount=discount, gae_lambda=gae_lambda
    )
    plain_advantages, plain_returns = np.zeros(MASK.shape), np.zeros(MASK.shape)
    for row in range(3):
        index = np.flatnonzero(MASK[row])
        a, r = plain_gae(float(rewards[row]), list(values[row, index]), discount, gae_lambda)
        plain_advantages[row, index], plain_returns[row, index] = a, r
    chosen = plain_advantages[MASK == 1]
    whitened = (plain_advantages - chosen.mean()) / (chosen.std() + 1e-6) * MASK
    assert advantages == pytest.approx(whitened, abs=1e-6)
    assert returns == pytest.approx(plain_returns, abs=1e-6)
