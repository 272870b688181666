from __future__ import annotations

import numpy as np

from stagescope_service.statistics.loss_fate import NAMES, Fate, LossTokens


def test_a_log_prob_that_is_not_finite_comes_before_every_other_fate() -> None:
    loss = LossTokens(
        mask=np.array([[True, True, True, False]]),
        in_loss=np.array([[True, False, True, True]]),
        advantage=np.array([[0.0, 0.0, 0.0, 1.0]]),
        finite=np.array([[False, False, True, False]]),
    )
    names = [NAMES[Fate(code)] for code in loss.fates()[0]]
    assert names == ["not finite", "not finite", "zero advantage", "environment"]
