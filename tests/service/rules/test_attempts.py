"""Since which step a symptom is there, and in which attempt."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from tests.service.rules.planted import (
    STAGE,
    Batch,
    and_scalars,
    bfloat16,
    diagnosed,
    first_tokens,
    found_in,
    late_rounds,
    never_finite,
    rank_two,
    report,
    rows_of,
    shift,
    since,
    train,
)
from tests.support.api import Rank, Service
from tests.support.stores import write

from stagescope_service.store.contract import Put

SINCE_12: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "rank": ("rank_apart", {"change": since(12, lambda batch: rank_two(batch))}),
    "slow": ("straggler", {"seconds": lambda step, rank: 2.5 if rank == 3 and step > 11 else 1.0}),
    "bfloat16": ("rounded_stream", {"change": since(12, bfloat16)}),
    "shift": ("streams_shifted", {"change": since(12, shift)}),
    "rounds": ("mismatch_rises_with_rounds", {"change": since(12, late_rounds)}),
    "first": ("first_token", {"change": since(12, first_tokens)}),
}
"""Name -> the rule that finds what begins in step 12, and how it is planted."""


@pytest.mark.parametrize("name", SINCE_12)
def test_since_when_is_the_first_step_that_shows_it(name: str, live: Service) -> None:
    """However many steps have gone since: most rules look at the newest ones alone."""
    rule, arguments = SINCE_12[name]
    train(live, f"since-{name}", steps=range(1, 61), ranks=4, **arguments)
    for last in (24, 60):
        row = rows_of(live, f"since-{name}", step=last)[rule]
        assert (row["verdict"], row["since_step"]) == ("found", 12), last
    assert rows_of(live, f"since-{name}", step=11)[rule]["verdict"] != "found"


@pytest.mark.parametrize("begin", [1, 9])
def test_the_begin_of_a_growth_stays_as_the_run_goes_on(begin: int, live: Service) -> None:
    run = f"grows-{begin}"
    change = since(begin, lambda batch: batch.add(0.004 * (batch.step + 1 - begin)))
    train(live, run, change, steps=range(1, 61), ranks=2)
    rows = [rows_of(live, run, step=last)["mismatch_grows"] for last in range(begin + 15, 61, 9)]
    assert {row["verdict"] for row in rows} == {"found"}
    (step,) = {row["since_step"] for row in rows}
    assert begin <= step <= begin + 4
    assert f"since about step {step}" in rows[0]["sentence"]


@pytest.mark.parametrize(("at", "steps"), [(38, 40), (5, 12)])
def test_a_jump_inside_an_attempt_is_no_growth(at: int, steps: int, live: Service) -> None:
    run = f"jump-{at}-{steps}"
    rows = diagnosed(live, run, since(at, lambda batch: batch.add(0.05)), steps=range(1, steps + 1))
    assert rows["mismatch_jump"]["since_step"] == at
    assert rows["mismatch_grows"]["verdict"] == "not found"
    assert found_in(rows) == {"mismatch_jump"}
    do = rows["mismatch_jump"]["next"]
    assert f"stagescope ranks {at} --run {run}" in do
    # Nobody recorded weights: what to record, instead of a command that finds none.
    assert any("record_weights" in each for each in do)
    assert not any("stagescope weights" in each for each in do)


def test_a_jump_soon_after_a_restart_is_of_the_step_in_which_it_comes(live: Service) -> None:
    train(live, "third-step", steps=range(1, 18))
    worse = since(20, lambda batch: batch.add(0.05))
    rows = diagnosed(live, "third-step", worse, steps=range(18, 40), key="a2", start=9_000.0)
    assert found_in(rows) == {"mismatch_jump"}
    assert (rows["mismatch_jump"]["since_step"], rows["mismatch_jump"]["where"]) == (
        20, "attempt 2",
    )  # fmt: skip


@pytest.mark.parametrize("heals", [False, True])
def test_a_jump_inside_an_earlier_attempt_is_found_and_may_be_over(
    heals: bool, live: Service
) -> None:
    """In steps that the later attempt resumed from, which are in force."""
    run = f"jump-before-{heals}"
    worse = since(12, lambda batch: batch.add(0.05))
    train(live, run, worse, steps=range(1, 25))
    after = (lambda batch: None) if heals else worse
    row = diagnosed(live, run, after, steps=range(23, 45), key="a2", start=9_000.0)["mismatch_jump"]
    if heals:
        assert row["last_step"] == 22
    assert (row["verdict"], row["since_step"], row["where"]) == ("found", 12, "attempt 1")
    assert heals or "in the 11 steps before step 12" in row["for"][0]


def test_what_comes_after_the_step_is_not_looked_at(live: Service) -> None:
    train(
        live, "nan-from-5", steps=range(1, 13),
        scalars=and_scalars(loss=lambda step: float("nan") if step >= 5 else 1.0),
    )  # fmt: skip
    assert "non_finite_scalars" in found_in(rows_of(live, "nan-from-5", step=5))
    assert not found_in(rows_of(live, "nan-from-5", step=4))


def test_ranks_that_are_missing_lately_are_found_in_a_long_run(live: Service) -> None:
    train(live, "late-partial", steps=range(1, 41), ranks=2)
    rank = Rank(live, run="late-partial", rank=0, key="b1", world_size=2, start=50_000.0)
    for step in range(41, 45):
        rank.stage(STAGE, step)
    rank.begin(STAGE, 45)
    row = rows_of(live, "late-partial")["ranks_missing"]
    assert (row["verdict"], row["since_step"]) == ("found", 41), row


def test_a_jump_at_a_restart_names_the_attempt(live: Service) -> None:
    train(live, "restarted", steps=range(1, 13))

    def worse(batch: Batch) -> None:
        batch.add(0.05)

    rows = diagnosed(live, "restarted", worse, steps=range(11, 23), key="a2", start=9_000.0)
    row = rows["mismatch_jump_at_restart"]
    assert row["verdict"] == "found"
    assert (row["since_step"], row["where"]) == (11, "attempt 2")
    assert row["next"][0] == "stagescope diff restarted@1 restarted@2"
    # Of the first attempt alone there is nothing to say.
    of_first = rows_of(live, "restarted", attempt=1)["mismatch_jump_at_restart"]
    assert of_first["verdict"] == "not measured"
    before = rows_of(live, "restarted", step=10)
    assert "mismatch_jump_at_restart" not in found_in(before)


def test_a_jump_in_the_first_step_of_an_attempt_is_not_called_absent(live: Service) -> None:
    train(live, "first-step", steps=range(1, 13))
    train(live, "first-step", steps=range(13, 14), key="a2", start=9_000.0)
    row = rows_of(live, "first-step")["mismatch_jump_at_restart"]
    assert row["verdict"] == "not measured"
    assert "too few steps" in row["against"][0]


@pytest.mark.parametrize("first_step", [1, 3])
def test_a_checkpoint_is_named_only_where_there_is_one(live: Service, first_step: int) -> None:
    run = f"again-{first_step}"
    crashed = Rank(live, run=run, world_size=1, key="a")
    for step in (1, 2):
        crashed.stage(STAGE, step)
    crashed.say("finish", error_type="ValueError", error_message="no")
    later = Rank(live, run=run, world_size=1, key="b", start=20_000.0)
    later.stage(STAGE, first_step)
    failed = rows_of(live, run)["processes_failed"]
    named = "attempt 2 began from the checkpoint of step 2"
    assert (named in failed["for"]) == (first_step == 3)
    assert "checkpoint" not in f"{failed['meaning']} {failed['against']}"


def test_an_interruption_is_no_crash(live: Service) -> None:
    stopped = Rank(live, run="stopped", world_size=1)
    stopped.stage(STAGE, 1)
    stopped.begin(STAGE, 2)
    stopped.begin("another_stage", 2)
    said = {"error_type": "KeyboardInterrupt", "error_message": "", "interrupted": True}
    stopped.end(STAGE, 2, status="failed", **said)
    stopped.say("finish", **said)
    [attempt] = live.catalogue.attempts("stopped")
    assert attempt["end_reason"] == "it was interrupted"
    assert rows_of(live, "stopped")["processes_failed"]["verdict"] == "not found"


def test_only_what_still_holds_up_the_newest_attempt_is_a_hang(live: Service) -> None:
    train(live, "hung", steps=range(1, 6))
    text = "rank 1 of actor has not ended step 5"
    report(live, "hung", "stage_stuck", text, role="actor", rank=1)
    row = rows_of(live, "hung")["hangs"]
    assert (row["verdict"], row["since_step"], row["where"]) == ("found", 5, "actor 1")
    row = diagnosed(live, "hung", steps=range(6, 11), key="a2", start=9_000.0)["hangs"]
    assert row["verdict"] == "not found"
    assert row["against"] == [
        f"1 rank held up others earlier, the last: {text}",
        f"attempt 1 ended with it, since step 5: {text}",
    ]
    assert rows_of(live, "hung", step=5)["hangs"]["verdict"] == "found"


def test_what_a_later_attempt_superseded_is_not_found_but_named(live: Service) -> None:
    sick = since(4, never_finite)
    nan = and_scalars(loss=lambda step: float("nan") if step >= 4 else 1.0)
    train(live, "healed", sick, steps=range(1, 7), scalars=nan)
    now = rows_of(live, "healed")
    names = ("non_finite_log_probs", "non_finite_scalars")
    assert [now[name]["verdict"] for name in names] == ["found", "found"]
    train(live, "healed", steps=range(1, 4), key="a2", start=9_000.0)
    answer = live.get("/runs/healed/diagnosis")
    rows = {row["rule"]: row for row in answer["rows"]}
    for name in names:
        assert rows[name]["verdict"] == "not found", name
        assert rows[name]["against"][-1].startswith("attempt 1 ended with it, since step 4: "), name
    # The sentence names the cause, not what follows from it.
    cause = rows["non_finite_log_probs"]["title"]
    assert f"Attempt 1 ended with: {cause}, since step 4 (" in answer["text"]
    assert "stagescope doctor healed --attempt 1" in answer["text"]
    first = rows_of(live, "healed", attempt=1)
    assert [first[name]["verdict"] for name in names] == ["found", "found"]
    assert "Attempt 1" not in live.get("/runs/healed/diagnosis", attempt=2)["text"]


def test_a_mismatch_that_an_earlier_attempt_ended_with_is_named(live: Service) -> None:
    """The question after a restart: was it there before?"""
    worse = since(20, lambda batch: batch.add(0.05))
    train(live, "was-sick", worse, steps=range(1, 30), ranks=4)
    train(live, "was-sick", steps=range(16, 19), ranks=4, key="a2", start=9_000.0)
    train(live, "was-sick", steps=range(17, 19), ranks=4, key="a3", start=19_000.0)
    answer = live.get("/runs/was-sick/diagnosis")
    rows = {row["rule"]: row for row in answer["rows"]}
    assert found_in(rows) == set()
    assert rows["mismatch_jump"]["against"][-1].startswith(
        "attempt 1 ended with it, since step 20: logprob_abs_diff/mean is "
    )
    assert answer["text"].endswith(
        f". Attempt 1 ended with: {rows['mismatch_jump']['title']}, since step 20 "
        "(stagescope doctor was-sick --attempt 1)"
    )
    # What every attempt shows is no matter of before.
    train(live, "still-sick", worse, steps=range(1, 30), ranks=4)
    train(live, "still-sick", worse, steps=range(26, 30), ranks=4, key="a2", start=9_000.0)
    answer = live.get("/runs/still-sick/diagnosis")
    assert found_in({row["rule"]: row for row in answer["rows"]}) == {"mismatch_jump"}
    assert "ended with" not in json.dumps(answer)
    answer = live.get("/runs/was-sick/diagnosis", step=18)
    assert "ended with" not in json.dumps(answer)  # attempt 1 went on
    # What is found again, in steps that were done again, says that it was there before.
    train(live, "sick-again", worse, steps=range(1, 30), ranks=4)
    later = since(18, lambda batch: batch.add(0.05))
    train(live, "sick-again", later, steps=range(13, 30), ranks=4, key="a2", start=9_000.0)
    row = rows_of(live, "sick-again")["mismatch_jump"]
    assert (row["verdict"], row["since_step"]) == ("found", 18)
    assert row["for"][-1].startswith("attempt 1 ended with it, since step 20: ")


def test_an_attempt_of_one_step_does_not_hide_where_a_jump_was(live: Service) -> None:
    worse = since(6, lambda batch: batch.add(0.05))
    train(live, "one-step", steps=range(1, 6))
    train(live, "one-step", worse, steps=range(6, 7), key="a2", start=9_000.0)
    train(live, "one-step", worse, steps=range(7, 12), key="a3", start=19_000.0)
    train(live, "two-steps", steps=range(1, 6))
    train(live, "two-steps", worse, steps=range(6, 8), key="a2", start=9_000.0)
    train(live, "two-steps", worse, steps=range(8, 14), key="a3", start=19_000.0)
    row = rows_of(live, "two-steps")["mismatch_jump_at_restart"]
    assert (row["verdict"], row["since_step"], row["where"]) == ("found", 6, "attempt 2")
    row = rows_of(live, "one-step")["mismatch_jump_at_restart"]
    assert (row["verdict"], row["since_step"], row["where"]) == ("found", 6, "attempt 2")
    assert row["next"][0] == "stagescope diff one-step@1 one-step@2"


def test_another_rank_stands_apart_since_another_step(live: Service) -> None:
    def change(batch: Batch) -> None:
        sick = 1 if 8 <= batch.step < 12 else 0 if batch.step >= 12 else None
        if batch.rank == sick:
            batch.add(0.1)

    row = diagnosed(live, "two-sick", change)["rank_apart"]
    assert (row["verdict"], row["where"], row["since_step"]) == ("found", "actor rank 0", 12)


def test_a_low_first_step_alone_is_no_jump_inside_an_attempt(live: Service) -> None:
    worse = since(2, lambda batch: batch.add(0.05))
    rows = diagnosed(live, "low-first", worse, steps=range(1, 16), syncs=True)
    assert rows["mismatch_jump"]["verdict"] == "not found"
    assert rows["mismatch_jump_at_first_sync"]["verdict"] == "found"
    # Where no sync is reported, nothing says that one lies between: it is a jump.
    rows = diagnosed(live, "low-no-sync", worse, steps=range(1, 16))
    assert rows["mismatch_jump"]["since_step"] == 2
    of_sync = rows["mismatch_jump_at_first_sync"]
    assert (of_sync["verdict"], of_sync["against"]) == (
        "not measured", ["attempt 1 reported no weight sync"],
    )  # fmt: skip
    assert "weight_sync" in of_sync["record"]


def test_what_the_later_attempt_resumed_from_is_found_with_its_attempt(live: Service) -> None:
    train(live, "resumed", since(4, never_finite), steps=range(1, 7))
    train(live, "resumed", steps=range(6, 9), key="a2", start=9_000.0)
    row = rows_of(live, "resumed")["non_finite_log_probs"]
    assert (row["verdict"], row["since_step"]) == ("found", 4)
    assert row["for"][0].startswith("attempt 1: ")


def test_a_killed_rank_that_did_its_step_again_does_not_contradict_its_ids(live: Service) -> None:
    for rank in range(2):  # one of two: were all new, it would be a new attempt
        Rank(live, run="again", rank=rank, world_size=2).stage(STAGE, 1)
    Rank(live, run="again", world_size=2, incarnation="second", start=2_000.0).stage(STAGE, 1)
    rows = rows_of(live, "again")
    assert "superseded_work" in {row["kind"] for row in live.get("/findings?run=again")["rows"]}
    assert rows["ids_contradict"]["verdict"] == "not found"
    assert rows["work_superseded"]["verdict"] == "found"


def test_steps_that_nobody_reported_are_found(live: Service) -> None:
    train(live, "gap", steps=range(1, 6))
    row = diagnosed(live, "gap", steps=range(21, 26), key="a2", start=9_000.0)["steps_unreported"]
    assert (row["verdict"], row["since_step"]) == ("found", 6)
    assert row["for"] == ["no steps 6 to 20: attempt 2 begins with 21, after 5 of attempt 1"]
    train(live, "every-ten", steps=range(10, 200, 10))
    assert rows_of(live, "every-ten")["steps_unreported"]["verdict"] == "not found"


def test_what_to_do_next_is_of_the_attempt_that_is_asked_for(live: Service) -> None:
    train(live, "two-attempts", rank_two)
    train(live, "two-attempts", steps=range(20, 25), key="a2", start=9_000.0)
    row = rows_of(live, "two-attempts", attempt=1)["rank_apart"]
    assert row["verdict"] == "found"
    assert f"stagescope ranks {row['since_step']} --run two-attempts --attempt 1" in row["next"]
    assert row["figure"].endswith("&attempt=1")
    assert live.get(row["figure"])
    for each in rows_of(live, "two-attempts", attempt=1).values():
        assert not [line for line in each["next"] if "{" in line]


def test_an_answer_says_what_was_asked_and_what_was_not_examined(live: Service) -> None:
    train(live, "few", steps=range(6, 9))
    Rank(live, run="few", key="a2", world_size=1, start=5_000.0).begin(STAGE, 9)
    Rank(live, run="few", key="a3", world_size=1, start=9_000.0)

    def said(**asked: int) -> str:
        answer = live.get("/runs/few/diagnosis", **asked)
        assert answer["healthy"] is (True if answer["steps"] else None)
        text: str = answer["text"]
        return text.replace(f" ({text.partition(' (')[2].partition(')')[0]})", "")

    assert said() == "Nothing is wrong in 3 closed steps of run few"
    assert said(attempt=1) == "Nothing is wrong in 3 closed steps of run few, attempt 1"
    up_to_8 = "The newest step that was examined is 8, because "
    fine = "Nothing is wrong in 3 closed steps of run few"
    assert said(step=9) == f"{up_to_8}step 9 is not closed. {fine}"
    assert said(step=40) == f"{up_to_8}step 40 was not reported. {fine}"
    nothing = "No closed step of run few{} was examined, because {}"
    assert said(step=0) == nothing.format("", "step 0 was not reported, the first step is 6")
    assert said(attempt=2) == nothing.format(", attempt 2", "step 9 is not closed")
    assert said(attempt=3) == nothing.format(", attempt 3", "no step was reported")


def test_an_earlier_step_knows_nothing_of_what_came_later(live: Service) -> None:
    """Neither findings without a step, nor lost data. Ends of attempts: `test_silence.py`."""
    train(live, "then", steps=range(1, 13))
    attempt_id = live.catalogue.attempts("then")[0]["attempt_id"]
    closed = {row["step"]: row["closed_wall"] for row in live.catalogue.steps(attempt_id)}
    early, late = (float(closed[step] or 0.0) for step in (4, 11))
    report(live, "then", "payload_dropped", "early", step=None, severity="error", wall=early)
    report(live, "then", "time_jumped", "late", step=None, severity="error", wall=late)
    lost = {"loss_id": "late", "run": "then", "attempt_id": attempt_id, "kind": "payload"}
    write(live.store, Put("losses", {**lost, "reason": "no room", "count": 1, "wall": late}))
    known = {
        step: (set(answer["unexplained"]), found_in({row["rule"]: row for row in answer["rows"]}))
        for step in (3, 5, 12)
        for answer in [live.get("/runs/then/diagnosis", step=step)]
    }
    assert known == {
        3: (set(), set()),
        5: ({"payload_dropped"}, set()),
        12: ({"payload_dropped", "time_jumped"}, {"payloads_lost"}),
    }
