"""A prompt begins with the turn before it, or its tokens are other ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from tests.service.rules.planted import (
    RETOKENISED_AT,
    Batch,
    found_in,
    play_turns,
    proved_by,
    retokenise,
    rows_of,
    train,
)
from tests.support.api import Service

from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.steps import CurrentStep
from stagescope_service.rules.symptoms.prompts import retokenised
from stagescope_wire.batch import Batch as StepBatch
from stagescope_wire.batch import Tensor


def test_retokenisation_is_looked_for_where_each_turn_is_a_row(live: Service) -> None:
    train(live, "turns-well", play_turns, keep=["trajectories"])
    well = rows_of(live, "turns-well")
    assert not found_in(well)
    # 4 ranks of 2 trajectories with one follow-up prompt each, in the newest 3 steps.
    assert well["retokenised"]["against"] == [
        "0 of 24 prompts of later turns, in 3 steps, do not begin with the turn before"
    ]
    train(live, "turns-sick", retokenise, keep=["trajectories"], steps=range(1, 4))
    sick = rows_of(live, "turns-sick")["retokenised"]
    assert sick["sure"] == 0.5  # one of two trajectories
    assert sick["where"] == f"turn 1, position {RETOKENISED_AT}"
    assert sick["since_step"] == 1
    assert f"at position {RETOKENISED_AT} (step 1, group 1-0-0, run 0): token 4" in sick["for"][1]
    assert sick["for"][2].startswith("ids around it: [")
    proof = json.loads(proved_by(live, sick))
    assert proof["sample_uid"] == "turns-sick-1-0-1"
    assert proof["prompt_ids"][RETOKENISED_AT] == 4
    # The ring keeps prompts without a request.
    train(live, "turns-recent", play_turns, steps=range(1, 4))
    assert rows_of(live, "turns-recent")["retokenised"]["verdict"] == "not found"
    # Without prompts, or in rows that hold whole trajectories, it is not measured.
    train(live, "turns-lost", steps=range(1, 4))
    lost = rows_of(live, "turns-lost")["retokenised"]
    assert (lost["verdict"], lost["against"]) == (
        "not measured", ["no prompts and responses are kept of the newest steps"],
    )  # fmt: skip
    assert lost["record"].startswith("where each turn is a row: record prompts")

    def whole(batch: Batch) -> None:
        play_turns(batch)
        batch.turns = [turn._replace(number=0) for turn in batch.turns]

    train(live, "turns-whole", whole, steps=range(1, 4), keep=["trajectories"])
    assert rows_of(live, "turns-whole")["retokenised"]["verdict"] == "not measured"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_prompts_is_no_retokenisation(side: str) -> None:
    first, answer, tool = [7, 7, 3, 9, 9], [4, 5, 6], [8, 2]
    rows = [first, [*first, *answer, *tool]]
    width = max(map(len, rows)) + 2
    prompts = np.zeros((2, width), np.int64)
    for at, row in enumerate(rows):
        prompts[at, width - len(row) if side == "left" else 0 :][: len(row)] = row
    responses = np.array([[*answer, 0], [1, 1, 1, 1]], np.int64)
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], np.int64)
    turn_ids = np.where(mask == 1, [[0], [1]], -1)

    def verdict(prompts: npt.NDArray[np.generic]) -> str:
        return of_turns(prompts=prompts, responses=responses, response_mask=mask, turn_ids=turn_ids)

    assert verdict(prompts) == "not found"
    other = prompts.copy()
    other[1, 2 if side == "right" else 4] = 1
    assert verdict(other) == "found"


def test_retokenisation_is_found_in_rows_of_all_tokens() -> None:
    """Rows hold prompt and response in one tensor, as slime's and AReaL's do."""
    first, answer, tool = [7, 3, 9], [4, 5, 6], [8, 2]
    rows = [[*first, *answer, 0, 0, 0, 0], [*first, *answer, *tool, 1, 1]]
    mask = np.zeros((2, 10), np.int64)
    mask[0, 3:6] = mask[1, 8:] = 1
    turn_ids = np.where(mask == 1, [[0], [1]], -1)

    def verdict(tokens: npt.NDArray[np.generic]) -> str:
        return of_turns(tokens=tokens, loss_mask=mask, turn_ids=turn_ids)

    tokens = np.array(rows)
    assert verdict(tokens) == "not found"
    for at in (0, 5):  # in the prompt, and in what the turn before wrote
        other = tokens.copy()
        other[1, at] = 11
        assert verdict(other) == "found"
    other = tokens.copy()
    other[1, 6] = 11  # what the environment adds is of no earlier turn
    assert verdict(other) == "not found"


def of_turns(**tensors: npt.NDArray[np.generic]) -> str:
    """Return the verdict on two turns of one trajectory, a row each."""
    batch = StepBatch(
        2,
        {name: Tensor("int64", values) for name, values in tensors.items()},
        {"group_ids": ("g", "g"), "run_ids": ("0", "0")},
    )
    return retokenised(cast(RunHistory, OneStep(batch)), share=0.01).verdict


class OneStep:
    """A history of one step, whose batch is given: prompts that no `Rank` sends."""

    def __init__(self, batch: StepBatch) -> None:
        self.steps = [CurrentStep(1, 1, 1, "comparable", ())]
        self.kept = self
        self._batch = batch

    def batch(self, step: CurrentStep, names: Sequence[str]) -> StepBatch | None:
        return self._batch if {*names} <= {*self._batch.tensors} else None
