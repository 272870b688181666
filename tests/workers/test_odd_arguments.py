"""No public call raises in a training process, whatever it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagescope_workers.probe.probe import Probe

MakeProbe = Callable[..., Probe]


class Unreadable:
    """Raises where anything is asked of it."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("nothing can be asked of it")

    __repr__ = __str__ = __eq__ = __hash__ = __bool__ = __len__ = __iter__ = _raise
    __getitem__ = __float__ = __int__ = __index__ = _raise


ODD: tuple[object, ...] = (
    None, True, 0, -1, 5, 2**80, 1.5, float("nan"), "", "x", "a" * 1000, "\ud800", "\0", b"x", [],
    [1], {}, {"a": 1}, {1: 2}, set(), object(), Unreadable(), Unreadable, lambda: 1, range(3),
    np.zeros(3), np.float32(1), np.array(["a"]), np.datetime64("now"), torch.zeros(2),
    torch.zeros(2, 2, requires_grad=True), torch.zeros(0), torch.tensor(1 + 2j),
    torch.zeros(2).to_sparse(), torch.nn.Linear(2, 2), Exception("x"), (1, 2),
)  # fmt: skip
ARGUMENTS = st.integers(0, len(ODD) - 1).map(ODD.__getitem__)  # not all can be hashed
TENSORS = st.sampled_from(
    ("rollout_log_probs", "old_log_probs", "response_mask", "responses", "sample_ids", "loss",
     "turn_ids", "producers", "cu_seqlens", "x")
)  # fmt: skip
NAMED = st.dictionaries(TENSORS, ARGUMENTS, max_size=3)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_odd_arguments_raise_nothing(make_probe: MakeProbe, data: st.DataObject) -> None:
    probe = make_probe(attempt_key=f"k{data.draw(st.integers(0, 10**9))}")

    def odd() -> Any:
        return data.draw(ARGUMENTS)

    def usual(value: object) -> Any:
        return value if data.draw(st.booleans()) else odd()

    probe.wants(odd(), stage=odd(), step=odd())
    probe.log(step=odd(), policy_version=odd(), **data.draw(NAMED))
    probe.end_step(odd())
    probe.record_weights(odd(), version=usual(1), side=usual("trainer"), step=odd(), kind=odd())
    probe.end(odd(), odd())
    stage = probe.begin(
        usual("actor_update"), step=usual(1), model=odd(), policy_version=odd(), microbatch=odd()
    )
    for call in (stage.record, stage.hand_over):
        call(odd())
        call(**data.draw(NAMED))
    stage.record_datums(odd())
    stage.wants(odd())
    stage.log(**data.draw(NAMED))
    probe.end(stage, odd())
    assert probe.status()["attempt_key"]


def test_a_call_that_was_given_no_stage_or_name_is_counted(make_probe: MakeProbe) -> None:
    probe = make_probe()
    probe.end(None)  # type: ignore[arg-type]
    probe.wants(5, stage="actor_update")  # type: ignore[arg-type]
    assert probe.refused == {"end": 1, "wants": 1}
