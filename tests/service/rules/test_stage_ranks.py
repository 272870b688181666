"""Stages that some ranks alone run: the others are not missing from them."""

from __future__ import annotations

from typing import Final

from tests.service.rules.planted import STAGE, rows_of
from tests.support.api import Rank, Service

LOSS: Final = {"loss": 0.1}


def train(live: Service, run: str, stages: dict[str, set[int]], stops: int = 99) -> None:
    """Run 20 steps; `stages` names the ranks that run each, rank 1 only below step `stops`."""
    ranks = [Rank(live, run=run, rank=rank, world_size=3) for rank in range(3)]
    for step in range(1, 21):
        for stage, of in stages.items():
            for rank in sorted(of):
                if rank != 1 or step < stops or stage == "weight_sync":
                    live.engine.take_together([ranks[rank].draft_stage(stage, step, scalars=LOSS)])
    for each in ranks:
        each.begin(STAGE, 21)


def test_a_stage_of_rank_0_alone_lacks_nobody(live: Service) -> None:
    train(live, "alone", {STAGE: {0, 1, 2}, "rollout_generate": {0}, "reward": {2}})
    rows = rows_of(live, "alone")
    assert rows["ranks_missing"]["verdict"] == "not found"
    assert live.get("/runs/alone/diagnosis")["text"].startswith("Nothing is wrong in 20 ")
    # Every answer about a step agrees with the doctor.
    steps = live.get("/steps", run="alone")["rows"]
    assert {row["complete"] for row in steps[1:]} == {"complete"}
    assert {len(row["missing"]) for row in steps[1:]} == {0}
    series = live.get("/series", run="alone", metric="loss")
    assert series["complete"] == ["complete"] * 20 + ["open"]
    closed = live.get("/steps/20/stages", run="alone")
    assert (closed["complete"], closed["missing"]) == ("complete", [])
    assert closed["expected"]["actor"]["rollout_generate"] == [0]
    Rank(live, run="alone", world_size=3).begin("rollout_generate", 21)
    open_ = live.get("/steps/21/stages", run="alone")
    assert [(each["rank"], each["stage"]) for each in open_["missing"]] == [
        (0, STAGE), (1, STAGE), (2, STAGE), (0, "rollout_generate"),
    ]  # fmt: skip


def test_in_a_stage_that_most_ranks_run_the_others_are_missing(live: Service) -> None:
    train(live, "most", {STAGE: {0, 2}, "weight_sync": {0, 1, 2}})
    row = rows_of(live, "most")["ranks_missing"]
    assert (row["verdict"], row["where"]) == ("found", "actor 1")
    assert live.get("/steps", run="most")["rows"][1]["complete"] == "partial"


def test_in_a_stage_that_one_step_has_nobody_knows_who_runs_it(live: Service) -> None:
    ranks = [Rank(live, run="killed", rank=rank, world_size=3) for rank in range(3)]
    for rank in ranks:
        rank.stage("rollout_generate", 1)
    ranks[0].stage(STAGE, 1)
    for rank in ranks:
        live.engine.fall_silent(rank)
    [step] = live.get("/steps", run="killed")["rows"]
    assert step["complete"] == "partial"
    assert [each["rank"] for each in step["missing"]] == [1, 2]


def test_a_rank_that_stops_a_stage_is_missing_from_it_alone(live: Service) -> None:
    stages = {STAGE: {0, 1, 2}, "rollout_generate": {0}, "weight_sync": {0, 1, 2}}
    train(live, "stops", stages, stops=11)
    row = rows_of(live, "stops")["ranks_missing"]
    assert (row["verdict"], row["where"], row["since_step"]) == ("found", "actor 1", 11)
    assert row["for"][2] == f"actor rank 1 is missing in 10 steps from 11 to 20: {STAGE}"


def test_a_rank_that_never_reports_is_missing(live: Service) -> None:
    train(live, "never", {STAGE: {0, 1}, "rollout_generate": {0}})
    row = rows_of(live, "never")["ranks_missing"]
    assert (row["verdict"], row["where"]) == ("found", "actor 2")
