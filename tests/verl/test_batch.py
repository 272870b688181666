"""A batch as the DataProto of an installed verl."""

from __future__ import annotations

import pytest
from tests.support.step_batches import step_batch

pytestmark = pytest.mark.verl
verl = pytest.importorskip("verl")


def test_a_batch_is_a_dataproto() -> None:
    import torch

    batch = step_batch()
    found = batch.as_dataproto()
    assert isinstance(found, verl.DataProto)
    assert len(found) == 4
    assert found.batch["old_log_probs"].dtype == torch.bfloat16
    assert found.batch["old_log_probs"].float().tolist() == batch["rollout_log_probs"].tolist()
    assert found.non_tensor_batch["uid"].tolist() == ["g0", "g0", "g1", "g1"]
    assert found.meta_info["global_steps"] == 5
    assert len(found.select_idxs([1, 2])) == 2
