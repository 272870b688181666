"""What the payloads of a step say of their streams otherwise than the step before: one finding."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.api import Rank, Service
from tests.support.measure import payload

STAGE = "actor_compute_log_prob"


def hand(rank: Rank, step: int, dtype: str = "float32", **of_rollout: object) -> None:
    handed: Any = {**payload(seed=step), "meta": {"streams": {"rollout": of_rollout}}}
    declared = {name: [tag, list(shape), None]
                for name, (tag, shape, _, _) in handed["tensors"].items()}  # fmt: skip
    declared["old_log_probs"][0] = dtype
    rank.begin(STAGE, step)
    announced = {"tensors": declared, "bytes": 1, "meta": handed["meta"]}
    rank.say("end", handed, stage=STAGE, step=step, payload=announced)


def changes(live: Service) -> dict[str, dict[str, Any]]:
    rows = live.get("/findings", kind="stream_changed")["rows"]
    return {row["evidence"]["attribute"]: row for row in rows}


def test_each_attribute_that_changes_is_a_finding_of_its_step(live: Service) -> None:
    rank = Rank(live, world_size=1)
    for step in range(5, 9):
        late = step >= 7
        hand(rank, step, "bfloat16" if late else "float32", temperature=0.7 if late else 1.0,
             engine="vllm", engine_version="0.12" if late else "0.11")  # fmt: skip
    rank.begin(STAGE, 9)
    found = changes(live)
    assert {name: row["message"] for name, row in found.items()} == {
        "temperature": "temperature changes in step 7: rollout 1.0 in step 6, 0.7 since",
        "engine_version": "engine_version changes in step 7: rollout 0.11 in step 6, 0.12 since",
        "dtype": "dtype changes in step 7: old float32 in step 6, bfloat16 since",
    }
    assert {row["step"] for row in found.values()} == {7}
    notes = {row["rule"]: row["text"] for row in live.get("/runs/r/diagnosis")["notes"]}
    for row in found.values():
        assert row["message"] in notes["stream_changed"]


def test_a_schedule_is_one_finding_with_its_first_and_last_step(live: Service) -> None:
    rank = Rank(live, world_size=1)
    for step in range(1, 41):
        hand(rank, step, temperature=1.0 - step / 100, top_p=0.9)
    rank.begin(STAGE, 41)
    ((name, row),) = changes(live).items()
    assert (name, row["step"]) == ("temperature", 2)
    assert row["message"] == (
        "temperature changes in 39 steps, from 2 to 40: rollout 0.99 in step 1, 0.98 in step 2; "
        "rollout 0.6 since step 40"
    )
    assert (row["evidence"]["steps"], len(row["evidence"]["newest"])) == (39, 20)


def test_what_is_not_said_for_some_steps_is_no_change(live: Service) -> None:
    rank = Rank(live, world_size=1)
    said: tuple[dict[str, Any], ...] = (
        {"top_p": 0.9}, {}, {}, {"top_p": 0.9}, {}, {"top_p": 1.0},
    )  # fmt: skip
    for step, own in enumerate(said, 1):
        hand(rank, step, **own)
    rank.begin(STAGE, 7)
    ((_, row),) = changes(live).items()
    assert row["message"] == "top_p changes in step 6: rollout 0.9 in step 4, 1.0 since"


@pytest.mark.parametrize("late", [0.7, 1.0])
def test_a_late_step_moves_the_change_to_where_it_belongs(live: Service, late: float) -> None:
    first, second = (Rank(live, rank=rank, world_size=2) for rank in (0, 1))
    for step, temperature in ((5, 1.0), (7, 0.7)):
        hand(first, step, temperature=temperature)
        hand(second, step, temperature=temperature)
    first.begin(STAGE, 8)
    second.begin(STAGE, 8)
    ((_, row),) = changes(live).items()
    assert row["step"] == 7
    for rank in (first, second):
        hand(rank, 6, temperature=late)
    ((_, row),) = changes(live).items()
    assert row["step"] == (6 if late == 0.7 else 7)
