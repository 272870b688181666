"""A turn that stops training: its tokens fall at once beside those of the other turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from tests.service.rules.planted import STAGE, rows_of
from tests.support.api import Rank, Service

import stagescope
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.steps import CurrentStep, LossOfStep
from stagescope_service.rules.symptoms.turns import turn_stops
from stagescope_service.statistics.step_metrics import Dimension, SliceKey
from stagescope_wire.batch import Batch
from stagescope_wire.batch.data import Tensor
from stagescope_wire.errors import InvalidInput

ROWS: Final = 16
Int64 = npt.NDArray[np.int64]
Turns = Callable[[int], Sequence[int]]
"""Step -> the length of each of three turns."""


def fixed(step: int) -> Sequence[int]:
    return (30, 60, 20)


def train(
    live: Service, run: str, mask: Callable[[int, Int64], None], *, steps: int = 3,
    lengths: Turns = fixed,
) -> dict[str, Any]:  # fmt: skip
    """Train on rows of three turns; `mask` sets tokens of a step's mask [rows, tokens] to 0."""
    rank = Rank(live, run=run, world_size=1)
    for step in range(1, steps + 1):
        random = np.random.default_rng(step)
        of_row = [[0] * lengths(step)[0], [1] * lengths(step)[1], [2] * lengths(step)[2]]
        row = np.array([*of_row[0], *[-1] * 5, *of_row[1], *[-1] * 5, *of_row[2]])
        turns = np.repeat(row[None], ROWS, 0)
        on = (turns >= 0).astype(np.int64)
        mask(step, on)
        q = -1.0 - random.exponential(1.0, turns.shape)
        p = np.minimum(q + random.normal(0.0, 0.01, q.shape), -1e-6)
        tensors = {
            "rollout_log_probs": ("float32", q.shape, q.astype(np.float32), None),
            "old_log_probs": ("float32", q.shape, p.astype(np.float32), None),
            "response_mask": ("int64", q.shape, on, None),
            "turn_ids": ("int64", q.shape, turns, None),
        }
        names = [f"s{step}-{row}" for row in range(ROWS)]
        wire = {"schema": 1, "tensors": tensors, "strings": {"sample_ids": names}, "meta": {}}
        rank.stage(STAGE, step, wire)
    rank.begin(STAGE, steps + 1)
    return rows_of(live, run)["turn_stops"]


def second_turn_of_half(step: int, on: Int64) -> None:
    if step > 1:
        on[::2, 35:95] = 0


def test_a_turn_that_is_masked_in_half_of_the_samples_is_found(live: Service) -> None:
    row = train(live, "turn-masked", second_turn_of_half)
    assert (row["verdict"], row["where"], row["since_step"]) == ("found", "turn 1", 2)
    assert row["sure"] == 0.5
    assert row["for"] == [
        "turn 1 has 960 model tokens a step before step 2, and 480 from it on, while others keep "
        "theirs",
        "step 3: 8 of 16 samples with turn 1 have no token of it under the mask",
    ]
    # Without the tensors so few steps show no usual size.
    history = RunHistory(live.catalogue, "turn-masked")
    assert turn_stops(history, factor=0.6).verdict == "not found"


def test_shorter_responses_are_no_masked_turn(live: Service) -> None:
    """Half as long from step 4 on, as after an update: every sample still trains on it."""
    row = train(
        live, "turn-shorter", lambda step, on: None, steps=8,
        lengths=lambda step: (30, 60 if step < 4 else 25, 20),
    )  # fmt: skip
    assert row["verdict"] == "not found"


def test_a_turn_that_a_filter_drops_is_found_by_its_size_alone(live: Service) -> None:
    def change(step: int, on: Int64) -> None:
        if step >= 7:
            on[:, 100:] = 0

    row = train(live, "turn-dropped", change, steps=10)
    assert (row["verdict"], row["where"], row["since_step"], row["sure"]) == (
        "found", "turn 2", 7, 1.0,
    )  # fmt: skip
    history = RunHistory(live.catalogue, "turn-dropped")
    assert turn_stops(history, factor=0.6).since_step == 7


def test_a_smaller_batch_is_no_turn_that_stops(live: Service) -> None:
    def fewer(step: int, on: Int64) -> None:
        if step >= 4:
            on[::2] = 0

    assert train(live, "turn-fewer", fewer, steps=8)["verdict"] == "not found"


def test_turns_are_listed_where_they_are_named(live: Service) -> None:
    train(live, "turn-listed", second_turn_of_half)
    assert live.tokens is not None
    with stagescope.attach(live.server.url, token=live.tokens.read) as session:
        step = session.step(3, run="turn-listed")
        turns, rounds = step.rounds(by="turn"), step.rounds()
        assert (turns["turn"], rounds["round"]) == ((0, 1, 2), (0, 1, 2))
        assert turns["tokens"] == (480, 480, 320)
        with pytest.raises(InvalidInput, match="of a slice \\(by turn\\)"):
            turns.plot()
        assert rounds.plot()
        # Of a row whose turn 1 is masked, round 1 is turn 2.
        assert rounds["tokens"] == (480, 480 + 160, 160)
        assert "this step has 3 true turns" in "\n".join(rounds.lines())
        assert "true turns" not in "\n".join(turns.lines())
    assert live.get("/steps/3/rounds", run="turn-listed")["by"] == "round"


def test_one_step_is_not_measured(live: Service) -> None:
    row = train(live, "turn-one", second_turn_of_half, steps=1)
    assert row["verdict"] == "not measured"
    assert row["record"] is None


class SimulatedKept:
    """Keeps the mask and turns of the newest step."""

    def __init__(self, turns: Int64, on: Int64) -> None:
        self._turns, self._on = turns, on

    def loss(self, step: CurrentStep, wanted: Collection[str]) -> LossOfStep:
        raise NotImplementedError

    def batch(self, step: CurrentStep, names: Sequence[str]) -> Batch | None:
        if [*names] != ["turn_ids", "response_mask"]:
            return None
        tensors = {"turn_ids": Tensor("int64", self._turns), names[1]: Tensor("int64", self._on)}
        return Batch(len(self._on), tensors)


class SimulatedRun(RunHistory):
    """30 steps of 64 healthy samples, whose turns vary in number and length."""

    def __init__(self, seed: int, *, filtered: float, keeps: bool) -> None:
        random = np.random.default_rng(seed)
        self.measured = [CurrentStep(step, 1, 1, "ok", ()) for step in range(1, 31)]
        self._sizes: list[dict[SliceKey, float]] = []
        rows = turns = lengths = np.empty(0, np.int64)
        trains = np.empty(0, np.bool_)
        for _ in self.measured:
            numbers = random.geometric(0.4, 64)
            rows = np.repeat(np.arange(64), numbers)
            turns = np.concatenate([np.arange(number) for number in numbers])
            lengths = random.gamma(4, 40, len(rows)).astype(np.int64) + 1
            trains = random.random(64) >= filtered
            sizes = np.bincount(turns, lengths * trains[rows])
            self._sizes.append({(None, turn): size for turn, size in enumerate(sizes.tolist())})
        of_row = [np.repeat(turns[rows == row], lengths[rows == row]) for row in range(64)]
        ids = np.full((64, max(map(len, of_row))), -1)
        for row, values in enumerate(of_row):
            ids[row, : len(values)] = values
        on = ((ids >= 0) & trains[:, None]).astype(np.int64)
        self.kept = SimulatedKept(ids, on) if keeps else None

    def slices(
        self, by: Dimension, name: str, steps: Sequence[CurrentStep] | None = None
    ) -> list[tuple[CurrentStep, Mapping[SliceKey, float]]]:
        return list(zip(self.measured, self._sizes, strict=True))


@pytest.mark.parametrize(("filtered", "keeps"), [(0.0, False), (0.05, True)])
def test_turns_that_vary_are_none_that_stop(filtered: float, keeps: bool) -> None:
    runs = (SimulatedRun(seed, filtered=filtered, keeps=keeps) for seed in range(300))
    verdicts = [turn_stops(run, factor=0.6) for run in runs]
    assert [each.supports for each in verdicts if each.verdict != "not found"] == []
