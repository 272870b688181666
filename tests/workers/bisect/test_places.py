"""A fault of a part of the step: its own tokens show it, those of the whole step do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.kept_steps import kept_step

from stagescope_wire.batch import Batch, Tensor
from stagescope_wire.batch.data import BatchPart
from stagescope_wire.schema import Part
from stagescope_workers.bisect.hypotheses import on_kept_numbers
from stagescope_workers.bisect.kept import Kept, kept_rows, spread
from stagescope_workers.bisect.places import found_place

ROWS = 24
RANKS = 4
ROUNDING = 0.02
Logs = list[list[float]]
Fault = Callable[[Logs, int], list[float]]


def step(fault: Fault, is_sick: Callable[[int], bool], noise: float = ROUNDING) -> Batch:
    """A step of 4 ranks with 6 rows each and 2 engines, every other row; the rollout is wrong in
    some rows."""
    drawn = np.random.default_rng(4)
    sizes = np.clip(drawn.lognormal(3.4, 0.5, ROWS), 12, 80).astype(int)
    trainer = [[-abs(value) for value in drawn.gamma(1, 1.3, size)] for size in sizes]
    own = [[value + float(drawn.normal(0, noise)) for value in row] for row in trainer]
    rollout = [fault(own, row) if is_sick(row) else own[row] for row in range(ROWS)]
    batch = kept_step([[1, 2]] * ROWS, [[5] * size for size in sizes], rollout, trainer)
    parts = tuple(
        BatchPart("actor_compute_log_prob", "actor", rank, Part(),
                  np.arange(6 * rank, 6 * rank + 6), ("old_log_probs",))
        for rank in range(RANKS)
    )  # fmt: skip
    engines = tuple(f"e{row % 2}" for row in range(ROWS))
    return dataclasses.replace(batch, parts=parts, strings={**batch.strings, "engine_ids": engines})


def late(own: Logs, row: int) -> list[float]:
    return [own[row][0], *own[row][:-1]]


def lower(own: Logs, row: int) -> list[float]:
    return [value - 0.1 for value in own[row]]


def next_row(own: Logs, row: int) -> list[float]:
    """The values of the next row of the same rank, repeated to this row's length."""
    other = own[row - row % 6 + (row + 1) % 6]
    return list(map(float, np.resize(other, len(own[row]))))


def of_the_last_rank(own: Logs, row: int) -> list[float]:
    return list(map(float, np.resize(own[18 + row % 6], len(own[row]))))


def noisy(own: Logs, row: int) -> list[float]:
    drawn = np.random.default_rng(row)
    return [value + float(drawn.normal(0, 0.4)) for value in own[row]]


def on_rank_1(row: int) -> bool:
    return row // 6 == 1


def part(batch: Batch) -> Kept:
    return spread(found_place(kept_rows(batch)), 16)


def named(kept: Kept) -> list[str]:
    return [each.kind for each in on_kept_numbers(kept) if each.holds(ROUNDING)]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(late, "shifted"), (lower, "constant"), (next_row, "reordered"),
     (of_the_last_rank, "reordered")],
)  # fmt: skip
def test_a_fault_of_one_rank_is_named_from_its_own_tokens(fault: Fault, kind: str) -> None:
    batch = step(fault, on_rank_1)
    pooled = spread(kept_rows(batch), 16)
    assert {*named(pooled)} <= {"reordered"}  # which each row shows alone
    kept = part(batch)
    assert kept.place is not None
    assert (kept.place.text, kept.place.ranks) == ("On actor rank 1", (("actor", 1),))
    assert kept.place.mean > 4 * kept.place.rest
    assert {row.rank for row in kept.rows} == {("actor", 1)}
    assert len(kept.rows) == 6
    assert named(kept) == [kind]


def test_the_rank_whose_rows_were_received_is_named() -> None:
    tried = list(on_kept_numbers(part(step(of_the_last_rank, on_rank_1))))
    assert any(each.text.endswith("of another row of actor rank 3") for each in tried)


def test_rows_in_another_order_are_named_where_tools_wrote_some_of_their_tokens() -> None:
    def has_tool(row: int, place: int) -> bool:
        return row % 2 == 1 and 3 <= place < 8

    def next_row_without_tools(own: Logs, row: int) -> list[float]:
        other = row - row % 6 + (row + 1) % 6
        values = [
            0.0 if has_tool(other, place) else value for place, value in enumerate(own[other])
        ]
        return list(map(float, np.resize([*values, *([0.0] * 80)], len(own[row]))))

    batch = step(next_row_without_tools, on_rank_1)
    mask = batch["response_mask"].copy()
    mask[1::2, 3:8] = 0
    batch = dataclasses.replace(
        batch, tensors={**batch.tensors, "response_mask": Tensor("int8", mask)}
    )
    [found] = [each for each in on_kept_numbers(part(batch)) if each.kind == "reordered"]
    assert found.now == pytest.approx(ROUNDING * 0.8, rel=0.2)  # the mean of the noise


@pytest.mark.parametrize(
    ("is_sick", "text"),
    [
        (lambda row: row // 6 in (0, 2), "On actor rank 0 and actor rank 2"),
        (lambda row: row % 2 == 1, "In engine e1"),
        (lambda row: row % 3 == 0, "In 8 of 24 trajectories"),
    ],
)
def test_the_part_may_be_ranks_an_engine_or_rows(is_sick: Any, text: str) -> None:
    kept = part(step(late, is_sick))
    assert kept.place is not None
    assert kept.place.text == text
    assert named(kept) == ["shifted"]


def test_a_fault_of_one_round_is_named_from_its_tokens() -> None:
    def fault(own: Logs, row: int) -> list[float]:
        half = len(own[row]) // 2
        return [*own[row][:half], *(value - 0.1 for value in own[row][half:])]

    batch = step(fault, lambda row: True)
    lengths = batch.lengths["responses"]
    places = np.arange(batch["responses"].shape[1])
    rounds = (places >= (lengths // 2)[:, None]).astype(np.int64)
    batch = dataclasses.replace(
        batch, tensors={**batch.tensors, "round_ids": Tensor("int64", rounds)}
    )
    kept = part(batch)
    assert kept.place is not None
    assert kept.place.text == "In round 1"
    assert named(kept) == ["constant"]


@pytest.mark.parametrize("fault", [late, lower, noisy])
def test_a_fault_of_all_rows_and_a_healthy_step_are_of_no_part(fault: Fault) -> None:
    assert part(step(fault, lambda row: True)).place is None
    assert part(step(fault, lambda row: False)).place is None


def test_a_rank_that_is_only_noisier_has_no_such_cause() -> None:
    kept = part(step(noisy, on_rank_1))
    assert kept.place is not None
    assert kept.place.text == "On actor rank 1"
    assert named(kept) == []


def test_a_step_without_any_mismatch_has_no_part() -> None:
    assert part(step(late, lambda row: False, noise=0.0)).place is None
