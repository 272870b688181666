"""What stopped: the log-probs of all ranks, the ranks of a role, or the whole training."""

from __future__ import annotations

import pytest
from tests.service.rules.planted import (
    STAGE,
    Batch,
    diagnosed,
    found_in,
    make_batch,
    report,
    rows_of,
    shown_by,
    wire,
)
from tests.support.api import Rank, Service

STOPS: int = 12
"""The first step without what stopped."""


def unrecorded(batch: Batch) -> None:
    if batch.step >= STOPS:
        batch.has_streams = False


def test_all_ranks_that_record_nothing_any_more_are_named(live: Service) -> None:
    row = diagnosed(live, "none-records", unrecorded)["streams_stopped"]
    assert (row["verdict"], row["since_step"]) == ("found", STOPS)
    assert row["sentence"] == (
        "No rank records log-probs any more, since step 12, in 13 of 13 steps"
    )
    assert row["for"][0].endswith("; 4 of these 4 ranks still run stages")
    command = row["next"][0].partition(" #")[0].split()[1:]
    proof = shown_by(live, *command)
    assert "no value at steps 12-24: no rank handed over both streams" in proof
    # Two steps without them may be a pause, and so may as many as there were before.
    assert rows_of(live, "none-records", step=13)["streams_stopped"]["verdict"] == "not found"


def test_log_probs_of_every_tenth_step_have_not_stopped(live: Service) -> None:
    def every_tenth(batch: Batch) -> None:
        batch.has_streams = batch.step % 10 == 1

    for last in (25, 30):
        run = f"every-tenth-{last}"
        rows = diagnosed(live, run, every_tenth, steps=range(1, last + 1))
        assert rows["streams_stopped"]["verdict"] != "found"


def roles_until(live: Service, run: str, lapse_at: int | None = None) -> list[Rank]:
    """Four actors record up to step 11; two rollout ranks go on. Actors may lapse, or live."""
    actors = [Rank(live, run=run, rank=rank, world_size=4) for rank in range(4)]
    rollout = [Rank(live, run=run, rank=rank, role="rollout", world_size=2) for rank in range(2)]
    for step in range(1, 25):
        reports = [each.draft_stage("rollout_generate", step) for each in rollout]
        if step < STOPS:
            reports += [
                each.draft_stage(STAGE, step, wire(make_batch(step, at, 0), run))
                for at, each in enumerate(actors)
            ]
        live.engine.take_together(reports)
        for each in actors if step == lapse_at else ():
            live.engine.fall_silent(each)
    return [*actors, *rollout]


def test_a_role_that_is_gone_while_others_go_on_is_named(live: Service) -> None:
    roles_until(live, "role-gone", lapse_at=14)
    row = rows_of(live, "role-gone")["streams_stopped"]
    assert (row["verdict"], row["since_step"], row["where"]) == ("found", STOPS, "actor ranks 0-3")
    assert row["sentence"].startswith("Actor ranks 0-3 stopped reporting, and other ranks go on")


def report_quiet(live: Service, run: str, behind: list[list[object]]) -> None:
    report(live, run, "training_quiet", "no step closed for 62 min", step=10,
           evidence={"behind": behind})  # fmt: skip


def test_a_role_that_holds_up_all_steps_is_named(live: Service) -> None:
    roles_until(live, "role-waits")
    assert found_in(rows_of(live, "role-waits")) == set()
    report_quiet(live, "role-waits", [["actor", rank] for rank in range(4)])
    row = rows_of(live, "role-waits")["training_quiet"]
    assert (row["verdict"], row["since_step"], row["where"]) == ("found", 10, "actor ranks 0-3")
    assert row["for"] == ["no step closed for 62 min"]


@pytest.mark.parametrize("lapses", [False, True])
def test_a_training_of_which_no_rank_reports_is_named(lapses: bool, live: Service) -> None:
    run = f"quiet-{lapses}"
    ranks = [Rank(live, run=run, rank=rank, world_size=4) for rank in range(4)]
    for step in range(1, STOPS):
        live.engine.take_together([
            each.draft_stage(STAGE, step, wire(make_batch(step, at, 0), run))
            for at, each in enumerate(ranks)
        ])  # fmt: skip
    report_quiet(live, run, [])
    for each in ranks if lapses else ():
        live.engine.fall_silent(each)
    rows = rows_of(live, run)
    assert found_in(rows) == {"processes_failed" if lapses else "training_quiet"}
    if lapses:
        row = rows["processes_failed"]
        assert row["sentence"].startswith("Processes stopped reporting between stages")
        text = "attempt 1: its processes stopped reporting after the stages of step 11"
        assert row["for"][0].startswith(text)
        assert found_in(rows_of(live, run, step=STOPS - 1)) == {"processes_failed"}
    assert found_in(rows_of(live, run, step=8)) == set()


def test_an_old_failure_does_not_hide_how_the_newest_attempt_ended(live: Service) -> None:
    run = "died-again"
    for key, first in (("a1", 1), ("a2", STOPS)):
        start = 1_000.0 if key == "a1" else 9_000.0
        ranks = [
            Rank(live, run=run, rank=rank, world_size=2, key=key, start=start) for rank in range(2)
        ]
        for step in range(first, first + 8):
            live.engine.take_together([each.draft_stage(STAGE, step) for each in ranks])
        if key == "a1":
            report(live, run, "process_crashed", "rank 1 crashed", step=8, role="actor", rank=1)
        for each in ranks:
            live.engine.fall_silent(each)
    answer = live.get(f"/runs/{run}/diagnosis")
    row = next(each for each in answer["rows"] if each["rule"] == "processes_failed")
    assert row["last_step"] is None
    assert row["sentence"].startswith("Processes stopped reporting between stages")
    assert [text.partition(":")[0] for text in row["for"]] == ["attempt 2", "attempt 1"]


def test_the_step_in_which_a_training_died_is_named(live: Service) -> None:
    """The end of the attempt closes the step: it is the last closed one then."""
    ranks = [Rank(live, run="killed", rank=rank, world_size=2) for rank in range(2)]
    for step in range(1, 58):
        for each in ranks:
            each.stage("actor_compute_log_prob", step)
        for each in ranks if step < 57 else ():
            each.stage("actor_update", step)
    for each in ranks:
        live.engine.fall_silent(each)
    row = rows_of(live, "killed")["processes_failed"]
    assert row["sentence"] == (
        "Processes stopped reporting within a step, and said nothing of an end, since step 57"
    )
    assert row["for"] == [
        "attempt 1: its processes stopped reporting in step 57, before the end of actor_update of "
        "actor ranks 0-1, and said nothing of an end"
    ]


@pytest.mark.parametrize(("first", "last_step"), [(1, "not found"), (STOPS, STOPS - 1)])
def test_the_silent_end_of_an_attempt_is_past_after_a_restart(
    first: int, last_step: int | str, live: Service
) -> None:
    """It is no symptom at all if the restart began with the first step."""
    run = f"restarted-{first}"
    dead = [Rank(live, run=run, rank=rank, world_size=2) for rank in range(2)]
    for step in range(1, STOPS):
        live.engine.take_together([each.draft_stage(STAGE, step) for each in dead])
    for each in dead:
        live.engine.fall_silent(each)
    begin = max(each.clock for each in dead) + 60.0
    ranks = [
        Rank(live, run=run, rank=rank, world_size=2, key="a2", start=begin) for rank in range(2)
    ]
    for step in range(first, first + 8):
        live.engine.take_together([each.draft_stage(STAGE, step) for each in ranks])
    row = rows_of(live, run)["processes_failed"]
    assert last_step in (row["verdict"], row["last_step"])


def test_a_training_that_finished_is_not_quiet(live: Service) -> None:
    ranks = [Rank(live, run="done", rank=rank, world_size=2) for rank in range(2)]
    for step in range(1, STOPS):
        live.engine.take_together([each.draft_stage(STAGE, step) for each in ranks])
    for each in ranks:
        each.say("finish")
    assert found_in(rows_of(live, "done")) == set()
