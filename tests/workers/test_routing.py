"""Routes that a probe counts: alignment, what is missing, and what is sent."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.support.routes import routed

from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensors import (
    NO_ROLLOUT_ROUTE,
    NO_TRAINER_ROUTE,
    ROUTING_COUNT_COLUMNS,
    ROUTING_TENSORS,
)
from stagescope_workers import routing
from stagescope_workers.device import PinnedPool
from stagescope_workers.payload import owned_tensor
from stagescope_workers.probe.draft import Draft

STEP = routed(rows=4, tokens=12, flips=0.2, seed=3)
PROMPT = 2


def counted(**tensors: Any) -> dict[str, Any]:
    wire = {name: owned_tensor(name, value) for name, value in tensors.items()}
    return {name: tensor[2] for name, tensor in routing.count(wire).items()}


def flips_of(rollout: Any, trainer: Any, **more: Any) -> Any:
    named = {"rollout_routed_experts": rollout, "trainer_routed_experts": trainer}
    return counted(response_mask=STEP.mask, **named, **more)["routing_flips"]


EXPECTED = (
    np.sort(STEP.rollout[:, 1:], -1) != np.sort(STEP.trainer[:, 1:], -1)
).any(-1).sum(-1)  # fmt: skip
ON = STEP.mask != 0


def whole(routes: Any) -> Any:
    """Routes with a row for the last token, which no pass of an engine reads."""
    return np.concatenate([routes, routes[:, :1]], axis=1)


@pytest.mark.parametrize(
    ("rollout", "trainer", "more"),
    [
        pytest.param(STEP.rollout, STEP.trainer, {}, id="one shorter than the tokens"),
        pytest.param(
            np.pad(STEP.rollout, ((0, 0), (0, 1), (0, 0), (0, 0))),
            np.pad(STEP.trainer, ((0, 0), (0, 1), (0, 0), (0, 0))), {}, id="zeros at the end",
        ),
        pytest.param(
            np.pad(STEP.rollout, ((0, 0), (0, 1), (0, 0), (0, 0))), whole(STEP.trainer), {},
            id="zeros at the end of one side",
        ),
        pytest.param(STEP.rollout, whole(STEP.trainer), {}, id="one side has the last token"),
        pytest.param(
            whole(STEP.rollout), whole(STEP.trainer),
            {"prompts": np.zeros((4, PROMPT), np.int64)}, id="the prompts say it",
        ),
        pytest.param([*STEP.rollout], [*STEP.trainer], {}, id="lists of rows"),
        pytest.param(
            STEP.rollout.astype(np.uint8), STEP.trainer.astype(np.int64), {}, id="other dtypes"
        ),
    ],
)  # fmt: skip
def test_routes_are_those_of_the_pass_that_gave_the_log_prob(
    rollout: Any, trainer: Any, more: Any
) -> None:
    assert flips_of(rollout, trainer, **more)[ON].tolist() == EXPECTED[ON].tolist()


def test_routes_of_the_response_alone_lack_the_first_token() -> None:
    flips = flips_of(STEP.rollout[:, 2:], STEP.trainer[:, 2:])
    assert (flips[:, 0] == -3).all()
    assert flips[:, 1:][ON[:, 1:]].tolist() == EXPECTED[:, 1:][ON[:, 1:]].tolist()


def test_a_token_without_a_route_says_whose_is_missing() -> None:
    rollout, trainer = STEP.rollout.copy(), STEP.trainer.copy()
    rollout[0], trainer[1] = 0, -1
    flips = flips_of(rollout, trainer)
    assert set(flips[0][ON[0]].tolist()) == {NO_ROLLOUT_ROUTE}
    assert set(flips[1][ON[1]].tolist()) == {NO_TRAINER_ROUTE}
    assert flips[2:][ON[2:]].tolist() == EXPECTED[2:][ON[2:]].tolist()


@pytest.mark.parametrize("filler", [0, -1, 255])
def test_a_layer_of_one_number_is_no_choice(filler: int) -> None:
    rollout = STEP.rollout.astype(np.uint8)
    rollout[:, :, 1] = np.array(filler).astype(np.uint8)
    named = {"rollout_routed_experts": rollout, "trainer_routed_experts": STEP.trainer}
    counts = counted(response_mask=STEP.mask, **named)["routing_counts"]
    layer, unset = (counts[:, ROUTING_COUNT_COLUMNS.index(n)] for n in ("layer", "rollout_unset"))
    assert (unset[layer == 1].sum(), unset.sum()) == (ON.sum(), ON.sum())


def test_a_refused_dtype_reads_the_same_in_each_process() -> None:
    draft = Draft(PinnedPool())
    assert [*draft.add({**STEP.tensors(), "rollout_routed_experts": STEP.rollout / 2})] == []
    assert [str(problem).endswith("one of int64, int32, int16, int8, uint8")
            for problem in draft.problems()] == [True]  # fmt: skip


def test_counts_are_those_of_a_loop_and_do_not_depend_on_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = STEP.trainer.copy()
    trainer[:, :, 2] = trainer[:, :, 2, ::-1]  # another order
    named = {"rollout_routed_experts": STEP.rollout, "trainer_routed_experts": trainer}
    found = counted(response_mask=STEP.mask, **named)
    rollout, trainer = STEP.rollout[:, 1:], trainer[:, 1:]
    listed = [dict(zip(ROUTING_COUNT_COLUMNS, row, strict=True))
              for row in found["routing_counts"].tolist()]  # fmt: skip
    rows = {(row["row"], row["layer"], row["round"]): row for row in listed}
    for r, layer in itertools.product(range(4), range(4)):
        for number, columns in enumerate((range(6), range(7, 12))):
            pairs = [(rollout[r, t, layer], trainer[r, t, layer]) for t in columns]
            row = rows[r, layer, number]
            assert row["tokens"] == len(pairs)
            assert row["same"] == sum({*a} == {*b} for a, b in pairs)
            assert row["ordered"] == sum([*a] == [*b] for a, b in pairs)
            assert row["slots"] == sum(len({*a} & {*b}) for a, b in pairs)
            assert row["pairs"] == len(columns) - 1
            assert row["earlier"] == sum(
                {*rollout[r, t + 1, layer]} == {*trainer[r, t, layer]}
                for t in columns[:-1]
            )  # fmt: skip
    monkeypatch.setattr(routing, "_CHUNK", 40)
    pieces = counted(response_mask=STEP.mask, **named)
    for name in ("routing_counts", "routing_same", "routing_flips"):
        assert (pieces[name] == found[name]).all(), name
    # In a large payload several rows are counted together.
    monkeypatch.setattr(routing, "_MAX_COUNTED", 16)
    joined = counted(response_mask=STEP.mask, **named)["routing_counts"]
    assert {*joined[:, 0].tolist()} == {0, 2}
    assert joined[:, 3:].sum(axis=0).tolist() == found["routing_counts"][:, 3:].sum(axis=0).tolist()


def test_the_probe_sends_counts_and_no_routes() -> None:
    draft = Draft(PinnedPool())
    assert [*draft.add(STEP.tensors())] == []
    assert draft.problems() == []
    sent = draft.finish()["tensors"]
    assert {*ROUTING_TENSORS} <= sent.keys()
    assert not [name for name in sent if name.endswith("experts")]
    announced = draft.description()["tensors"]
    assert isinstance(announced, dict)
    assert "routing_flips" in announced
    assert not [name for name in announced if name.endswith("experts")]
    draft.send_whole(["rollout_routed_experts"])
    assert "rollout_routed_experts" in draft.finish()["tensors"]


def test_routes_that_do_not_fit_leave_the_other_numbers() -> None:
    draft = Draft(PinnedPool())
    recorded = {**STEP.tensors(), "trainer_routed_experts": STEP.trainer[:, :, :3]}
    assert [*draft.add(recorded)] == []
    (problem,) = draft.problems()
    assert "equally many layers" in str(problem)
    sent = draft.finish()
    assert "old_log_probs" in sent["tensors"]
    assert "routes are" in str(sent["meta"]["routes_refused"])
    with pytest.raises(InvalidTensor, match="4 rows"):
        counted(response_mask=STEP.mask[:2], rollout_routed_experts=STEP.rollout)


def test_routes_larger_than_the_buffer_are_left_out() -> None:
    draft = Draft(PinnedPool())
    assert [*draft.add(STEP.tensors())] == []
    draft.limit_routes(2000)
    assert draft.routes() == []
    assert "uint8" in str(draft.finish()["meta"]["routes_refused"])
