from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stagescope_service.coordinator.aggregation.step_work import StepOrdering

STEPS = st.permutations(range(1, 11))


def test_a_step_waits_for_an_earlier_one_of_its_attempt() -> None:
    turns = StepOrdering(10)
    assert turns.aggregated(1, 9, owed=[6, 12]) == []
    assert turns.aggregated(2, 9, owed=[]) == [9]
    assert turns.aggregated(1, 9, owed=[6]) == []
    assert turns.aggregated(1, 7, owed=[6]) == []
    assert turns.aggregated(1, 6, owed=[8]) == [6, 7]
    assert turns.aggregated(1, 8, owed=[]) == [8, 9]
    assert turns.aggregated(1, 8, owed=[8]) == [
        8
    ]  # aggregated again meanwhile: once more is to come


@given(STEPS)
def test_steps_that_all_become_formed_have_their_turns_in_order(order: list[int]) -> None:
    turns, owed, had = StepOrdering(10), set(order), list[int]()
    for step in order:
        owed.discard(step)
        had += turns.aggregated(1, step, owed)
    assert had == sorted(order)


@given(STEPS, st.integers(0, 4))
def test_a_step_that_never_comes_holds_up_no_more_than_so_many(order: list[int], most: int) -> None:
    turns, owed, had = StepOrdering(most), {0, *order}, list[int]()
    for step in order:
        owed.discard(step)
        had += turns.aggregated(1, step, owed)
    assert len(had) == len(order) - most
    assert len(set(had)) == len(had)
