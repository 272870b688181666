"""What earlier dumps of a run cost, over HTTP."""

from __future__ import annotations

from tests.support.api import Rank, Service
from tests.support.stores import eventually

STAGE = "actor_update"


def test_the_cost_is_of_the_largest_rank_and_step_of_each_kind(live: Service) -> None:
    rank = Rank(live)
    assert live.get("/runs/r/capture-costs")["rows"] == []

    def dump(
        step: int, size: int, seconds: float | None, level: str = "L0", **more: object
    ) -> None:
        fields = {"stage": STAGE, "step": step, "capture_id": "c", "state": "complete", **more}
        rank.say(
            "dump", path="/d", bytes=size, seconds=seconds, task="statistics", level=level, **fields
        )

    rank.stage(STAGE, 1)
    rank.stage(STAGE, 2)
    dump(1, 500, 0.5)
    dump(1, 300, 0.25, microbatch=1)  # of the same rank and step
    dump(2, 700, 0.9)
    dump(2, 40, None, level="mix", capture_id="d")
    dump(2, 9999, 9.0, capture_id="e", state="failed")
    kind = {"role": "actor", "stage": STAGE, "task": "statistics", "attempt": 1, "step": 2}
    expected = [
        {**kind, "level": "L0", "bytes": 800, "seconds": 0.9},
        {**kind, "level": "mix", "bytes": 40, "seconds": None},
    ]
    eventually(lambda: len(live.get("/runs/r/capture-costs")["rows"]) == 2)
    rows = live.get("/runs/r/capture-costs")["rows"]
    assert sorted(rows, key=lambda row: str(row["level"])) == expected
