"""How far a capture has come, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.api import Rank, Service
from tests.support.command_line import invoke
from tests.support.measure import payload
from tests.support.stores import eventually

import stagescope
from stagescope import terminal
from stagescope.progress import CaptureProgress
from stagescope_service.core.captures.agreement import AGREED
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Put

STAGE = "actor_update"


def request_capture(live: Service, **capture_fields: object) -> str:
    """Request a capture by step numbers, in force before anybody trains; return its id."""
    response = live.operate.post("/captures", json={"run": "r", **capture_fields})
    assert response.status_code == 201, response.text
    answer = response.json()
    assert answer["agreement"]["phase"] == AGREED
    return str(answer["capture_id"])


def dump(
    rank: Rank, capture_id: str, stage: str, step: int, state: str = "complete", **part: int
) -> None:
    rank.stage(stage, step, **part)
    dump = {"stage": stage, "step": step, "capture_id": capture_id, "state": state, **part}
    rank.say("dump", path="/d", **dump)


def come_to(live: Service, capture_id: str) -> tuple[str, list[tuple[str, int, int, int]]]:
    """Return (state, [(state, collected, waiting, gaps) of each step])."""
    progress = live.get(f"/captures/{capture_id}")
    steps = [
        (each["state"], each["collected"], len(each["waiting"]), len(each["gaps"]))
        for each in progress["steps"]
    ]
    return progress["state"], steps


def await_agreement(live: Service, capture_id: str) -> None:
    eventually(lambda: come_to(live, capture_id)[0] == "agreed")


def test_a_step_that_an_earlier_attempt_captured_is_not_waited_for(live: Service) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[3, 7])
    rank = Rank(live, world_size=1)
    dump(rank, capture_id, STAGE, 3)
    rank.begin(STAGE, 4)
    resumed = Rank(live, key="again", world_size=1, resumed_from_step=5)
    resumed.begin(STAGE, 6)
    progress = live.get(f"/captures/{capture_id}")
    assert [(each["attempt"], each["step"], each["state"]) for each in progress["steps"]] == [
        (1, 3, "complete"),
        (2, 7, "waiting"),
    ]


def test_a_capture_that_was_carried_out_stays_complete_in_the_next_attempt(live: Service) -> None:
    rank = Rank(live, world_size=1)
    rank.stage(STAGE, 1)
    spec = {"run": "r", "stages": [STAGE], "steps": "next", "task": "statistics"}
    order = live.operate.post("/captures?wait=0", json=spec).json()
    rank.acknowledge()
    rank.say("dump", stage=STAGE, capture_id=order["capture_id"], state="estimated", estimate={})
    step = eventually(lambda: live.get(f"/captures/{order['capture_id']}")["agreement"]["start"])
    for number in range(2, step):
        rank.stage(STAGE, number)
    dump(rank, order["capture_id"], STAGE, step)
    rank.stage(STAGE, step + 1)
    rank.begin(STAGE, step + 2)
    done = "complete", [("complete", 1, 0, 0)]
    assert come_to(live, order["capture_id"]) == done
    rank.say("finish")
    resumed = Rank(live, key="again", world_size=1, start=9_000.0)
    for number in range(1, step + 3):
        resumed.stage(STAGE, number)
        assert come_to(live, order["capture_id"]) == done, number
    (listed,) = live.get("/captures", run="r")["rows"]
    assert (listed["attempt"], listed["spec"]["agreement"]["start"]) == (1, step)


def test_a_stage_that_nobody_did_and_a_withdrawn_request_are_not_waited_for(live: Service) -> None:
    empty = request_capture(live, stages=["critic_update"], steps=[2])
    withdrawn = request_capture(live, stages=[STAGE], steps=[2])
    assert come_to(live, withdrawn)[0] == "agreed"
    rank = Rank(live, world_size=1)
    rank.stage(STAGE, 1)
    assert live.operate.delete(f"/captures/{withdrawn}").status_code == 200
    for number in (2, 3):
        rank.stage(STAGE, number)
    rank.begin(STAGE, 4)
    assert come_to(live, empty) == ("empty", [("empty", 0, 0, 0)])
    assert come_to(live, withdrawn) == ("withdrawn", [])
    text = "\n".join(CaptureProgress(live.get(f"/captures/{empty}")).lines())
    assert "step 2: nothing to collect, no rank did these stages" in text
    text = "\n".join(CaptureProgress(live.get(f"/captures/{withdrawn}")).lines())
    assert "has released it" in text
    assert "waiting" not in text


def test_a_step_that_the_trainer_never_numbers_so_is_empty_not_waited_for(live: Service) -> None:
    rank = Rank(live, world_size=1)
    rank.stage(STAGE, 1)
    spec = {"run": "r", "stages": [STAGE], "steps": "next", "keep": ["trajectories"]}
    capture_id = live.operate.post("/captures?wait=0", json=spec).json()["capture_id"]
    await_agreement(live, capture_id)
    rank.stage(STAGE, 10)
    rank.begin(STAGE, 11)
    eventually(lambda: come_to(live, capture_id) == ("empty", [("empty", 0, 0, 0)]))


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_a_step_is_not_complete_between_its_stages(live: Service, steps_before: int) -> None:
    stages = ["actor_compute_log_prob", STAGE]
    first = 1 + steps_before
    capture_id = request_capture(live, stages=stages, steps=[first])
    ranks = [Rank(live, rank=number) for number in (0, 1)]
    for step in range(1, first):
        for rank in ranks:
            for stage in stages:
                rank.stage(stage, step)
    for stage in stages:
        for rank in ranks:
            assert come_to(live, capture_id)[0] == "agreed"
            dump(rank, capture_id, stage, first)
    if steps_before:
        # All that the ranks did in the step before is reported: nothing more is waited for.
        assert come_to(live, capture_id) == ("complete", [("complete", 2, 0, 0)])
    else:
        assert come_to(live, capture_id) == ("agreed", [("waiting", 0, 2, 0)])
        ranks[0].begin(stages[0], first + 1)
        assert come_to(live, capture_id) == ("agreed", [("waiting", 1, 1, 0)])
        ranks[1].begin(stages[0], first + 1)
        assert come_to(live, capture_id) == ("complete", [("complete", 2, 0, 0)])


def test_minibatches_that_are_still_to_come_are_waited_for(live: Service) -> None:
    capture_id = request_capture(live, stages="all", steps=[4])
    rank = Rank(live, world_size=1)
    for step, minibatches in ((1, 2), (2, 2), (3, 3)):
        for minibatch in range(minibatches):
            rank.stage(STAGE, step, minibatch=minibatch)
    for minibatch in range(3):
        # Their number changed between the steps before: only the step's end says how many.
        dump(rank, capture_id, STAGE, 4, minibatch=minibatch)
        assert come_to(live, capture_id) == ("agreed", [("waiting", 0, 1, 0)])
    rank.begin(STAGE, 5)
    assert come_to(live, capture_id) == ("complete", [("complete", 1, 0, 0)])


def test_a_stage_without_a_report_is_a_gap_once_its_step_is_over(live: Service) -> None:
    capture_id = request_capture(live, stages=["actor_compute_log_prob", STAGE], steps=[1])
    ranks = [Rank(live, rank=number) for number in (0, 1)]
    for rank in ranks:
        dump(rank, capture_id, "actor_compute_log_prob", 1)
    dump(ranks[0], capture_id, STAGE, 1, state="failed")
    assert come_to(live, capture_id) == ("agreed", [("waiting", 0, 2, 1)])
    ranks[1].stage(STAGE, 1)
    for rank in ranks:
        rank.begin(STAGE, 2)
    progress = live.get(f"/captures/{capture_id}")
    assert progress["state"] == "partial"
    assert [(gap["rank"], gap["state"]) for gap in progress["steps"][0]["gaps"]] == [
        (0, "failed"), (1, "no report"),
    ]  # fmt: skip


def test_a_capture_takes_the_run_that_every_question_takes(live: Service) -> None:
    for run in ("older", "newer"):
        rank = Rank(live, run=run, world_size=1, start=1_000.0 if run == "older" else 2_000.0)
        rank.stage(STAGE, 1)
    spec = {"stages": [STAGE], "steps": "next"}
    answer = live.operate.post("/captures?wait=0", json=spec)
    assert answer.status_code == 201, answer.text
    progress = answer.json()
    assert progress["run"] == live.get("/steps/1/stages")["run"] == "newer"
    assert "also live: older" in progress["notes"][0]


def test_the_plan_and_the_list_say_what_came_of_a_capture(live: Service) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[1])

    def states() -> list[str]:
        (planned,), (listed,) = live.get("/plan")["captures"], live.get("/captures")["rows"]
        return [planned["state"], listed["state"], live.get(f"/captures/{capture_id}")["state"]]

    assert states() == ["agreed"] * 3
    rank = Rank(live, world_size=1)
    dump(rank, capture_id, STAGE, 1)
    rank.begin(STAGE, 2)
    assert states() == ["complete"] * 3


def test_what_the_service_keeps_alone_is_complete_where_it_is_kept(live: Service) -> None:
    kept = request_capture(live, stages=[STAGE], steps=[1], keep=["old_log_probs"])
    nothing = request_capture(live, stages=[STAGE], steps=[1], keep=["advantages"])
    every = request_capture(live, stages="all", steps=[1], keep=["old_log_probs", "responses"])
    ranks = [Rank(live, rank=number) for number in (0, 1)]
    ranks[0].stage(STAGE, 1, payload())
    for stage in ("compute_advantage", "rollout_generate"):
        ranks[0].stage(stage, 1)
        ranks[1].stage(stage, 1, payload())
    ranks[1].stage(STAGE, 1)
    assert come_to(live, kept) == ("agreed", [("waiting", 1, 0, 0)])
    for rank in ranks:
        rank.begin(STAGE, 2)
    # A rank that recorded none of it is no gap.
    assert come_to(live, kept) == ("complete", [("complete", 1, 0, 0)])
    text = CaptureProgress(live.get(f"/captures/{kept}")).lines()
    assert text[0] == "the service keeps old_log_probs and asks no rank"
    assert text[-1] == (
        "step 1: complete, tensors of 1 rank kept (stagescope kept 1 --run r --attempt 1)"
    )
    assert come_to(live, every) == ("complete", [("complete", 2, 0, 0)])
    assert come_to(live, nothing) == ("empty", [("empty", 0, 0, 0)])
    text = CaptureProgress(live.get(f"/captures/{nothing}")).lines()
    assert text[-1] == (
        "step 1: nothing to keep, no requested rank recorded advantages in these stages"
    )


def test_a_file_that_holds_something_else_is_not_what_is_requested(live: Service) -> None:
    """The run's own configuration keeps tensors of every stage."""
    live.engine.keep("old_log_probs")
    of_stage = request_capture(live, stages=[STAGE], steps=[1], keep=["old_log_probs"])
    part = request_capture(
        live, stages=["compute_advantage"], steps=[1], keep=["response_mask", "loss", "values"]
    )
    numbers = request_capture(live, stages=["compute_advantage"], steps=[1], keep=["metrics"])
    rank = Rank(live, world_size=1)
    rank.stage("compute_advantage", 1, payload())
    rank.stage(STAGE, 1)
    rank.begin(STAGE, 2)
    assert come_to(live, of_stage) == ("empty", [("empty", 0, 0, 0)])
    assert come_to(live, part) == ("complete", [("complete", 1, 0, 0)])
    text = CaptureProgress(live.get(f"/captures/{part}")).lines()
    assert "step 1: complete, tensors of 1 rank kept; no rank recorded loss, values (" in text[-1]
    assert come_to(live, numbers) == ("empty", [("empty", 0, 0, 0)])


def test_what_an_earlier_attempt_kept_is_listed_with_it(live: Service) -> None:
    spec = {"stages": [STAGE], "keep": ["old_log_probs"]}
    numbered = request_capture(live, steps=[2, 3, 7], **spec)
    every = request_capture(live, steps="all", **spec)
    first = Rank(live, world_size=1)
    first.stage(STAGE, 2, payload())
    first.stage(STAGE, 3)
    first.begin(STAGE, 4)
    again = Rank(live, key="again", world_size=1, resumed_from_step=5, start=9_000.0)
    again.stage(STAGE, 6, payload())
    again.stage(STAGE, 7, payload())
    again.begin(STAGE, 8)

    def steps_of(capture_id: str) -> list[tuple[int, int, str]]:
        steps = live.get(f"/captures/{capture_id}")["steps"]
        return [(each["attempt"], each["step"], each["state"]) for each in steps]

    assert steps_of(numbered) == [(1, 2, "complete"), (1, 3, "empty"), (2, 7, "complete")]
    assert steps_of(every) == [(1, 2, "complete"), (2, 6, "complete"), (2, 7, "complete")]


def test_of_a_step_that_is_done_again_the_later_result_counts(live: Service) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[7], keep=["old_log_probs"])
    first = [Rank(live, rank=number) for number in (0, 1)]
    for rank in first:
        rank.stage(STAGE, 6)
    first[0].stage(STAGE, 7, payload())
    for rank in first:
        live.engine.fall_silent(rank)
    assert come_to(live, capture_id)[0] == "partial"
    for number in (0, 1):
        rank = Rank(live, rank=number, key="again", resumed_from_step=6, start=9_000.0)
        rank.stage(STAGE, 7, payload())
        rank.begin(STAGE, 8)
    steps = live.get(f"/captures/{capture_id}")["steps"]
    assert [(each["attempt"], each["state"]) for each in steps] == [
        (1, "partial"), (2, "complete"),
    ]  # fmt: skip
    assert come_to(live, capture_id)[0] == "complete"


def test_a_rank_that_left_something_out_or_never_came_to_it_is_a_gap(live: Service) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[2, 3], keep=["old_log_probs"])
    ranks = [Rank(live, rank=number) for number in (0, 1)]
    for rank in ranks:
        rank.stage(STAGE, 1)
    ranks[0].stage(STAGE, 2, payload())
    ranks[0].say("dump", stage=STAGE, step=2, capture_id=capture_id, state="missed")
    ranks[1].stage(STAGE, 2, payload())
    ranks[0].stage(STAGE, 3, payload())
    live.engine.fall_silent(ranks[1])
    ranks[0].begin(STAGE, 4)
    progress = live.get(f"/captures/{capture_id}")
    assert [(each["state"], each["collected"], each["gaps"]) for each in progress["steps"]] == [
        ("partial", 1, [{"role": "actor", "rank": 0, "state": "missed"}]),
        ("partial", 1, [{"role": "actor", "rank": 1, "state": "not begun"}]),
    ]


def test_a_payload_that_another_process_did_again_is_no_gap(live: Service) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[1], keep=["old_log_probs"])
    rank = Rank(live, world_size=1)
    rank.begin(STAGE, 1)
    rank.say("end", stage=STAGE, step=1, payload={"tensors": {}, "bytes": 1, "meta": {}})
    again = Rank(live, world_size=1, incarnation="again", start=2_000.0)
    again.stage(STAGE, 1, payload())
    again.begin(STAGE, 2)
    live.engine.fall_silent(rank)
    eventually(lambda: come_to(live, capture_id) == ("complete", [("complete", 1, 0, 0)]))


def test_tensors_that_came_before_they_were_to_be_kept_are_a_gap(live: Service) -> None:
    ranks = [Rank(live, rank=number) for number in (0, 1)]
    about = {"tensors": {"responses": ["int64", [4, 12], None]}, "bytes": 384, "meta": {}}
    ranks[0].begin(STAGE, 1)
    ranks[0].say("end", payload(), stage=STAGE, step=1, payload=about)
    spec = {"run": "r", "stages": [STAGE], "steps": [1, 2], "keep": ["trajectories", "loss"]}
    capture_id = live.operate.post("/captures", json=spec).json()["capture_id"]
    await_agreement(live, capture_id)
    ranks[1].stage(STAGE, 1, None, scalars={"loss": 1.0})
    ranks[0].stage(STAGE, 2, payload())
    ranks[1].stage(STAGE, 2)
    for rank in ranks:
        rank.begin(STAGE, 3)
    progress = live.get(f"/captures/{capture_id}")
    assert [(each["state"], each["collected"], each["gaps"]) for each in progress["steps"]] == [
        ("partial", 0, [{"role": "actor", "rank": 0, "state": "not kept"}]),
        ("complete", 1, []),
    ]


@pytest.mark.parametrize("steps", [[3], "next"])
def test_waiting_for_a_capture_waits_for_a_run_that_has_not_reported(
    live: Service, steps: list[int] | str
) -> None:
    Rank(live, run="countdown", world_size=1).stage(STAGE, 1)
    with live.session("operate") as session:
        requested = session.capture(run="cuntdown", steps=steps, stages=[STAGE])
        assert "no run 'cuntdown' is known (yet) (did you mean countdown?)" in requested["notes"][0]
        told: list[CaptureProgress] = []

        def tell(progress: CaptureProgress) -> None:
            told.append(progress)
            if len(told) == 1:
                Rank(live, run="cuntdown", world_size=1)
            elif len(told) == 2:
                session.remove_capture(requested["capture_id"])

        final = session.wait_for(requested["capture_id"], timeout=60, told=tell)
        assert "no run cuntdown has reported yet" in told[0].lines()[0]
        assert [(rank["role"], rank["rank"]) for rank in told[1]["ranks"]] == [("actor", 0)]
        assert final["state"] == "withdrawn"


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (["--wait"], "no requested rank has reported for"),
        (["--wait-seconds", "0.2"], "the capture has not ended after 0.2 s"),
    ],
)
@pytest.mark.parametrize("unknown", [{"run": "nosuch"}, {"run": "r", "roles": "critc"}])
def test_waiting_for_ranks_that_never_reported_ends(
    live: Service,
    monkeypatch: pytest.MonkeyPatch,
    unknown: dict[str, str],
    wait: list[str],
    text: str,
) -> None:
    Rank(live, world_size=1).stage(STAGE, 1)
    monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.operate)
    monkeypatch.setattr(stagescope.capture_requests, "UNKNOWN_SECONDS", 0.2)
    options = [word for name, value in unknown.items() for word in (f"--{name}", value)]
    result = invoke("capture", *options, "--stages", STAGE, "--steps", "3", *wait)
    assert result.exit_code == 1
    [capture] = live.get("/captures", run=unknown["run"])["rows"]
    assert capture["state"] != "withdrawn"
    for line in (
        text,
        f"stagescope progress {capture['capture_id']} --wait-seconds N",
        f"stagescope remove-capture {capture['capture_id']}",
    ):
        assert line in result.stderr


def test_the_answer_of_a_wait_is_printed_once(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[9])
    monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.operate)
    invoke("remove-capture", capture_id)
    result = invoke("progress", capture_id, "--wait")
    assert (result.output.count("withdrawn"), result.stderr) == (1, "")


def test_a_terminal_shows_each_line_of_a_wait_once(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[9])
    monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.operate)
    words = ("progress", capture_id, "--wait-seconds", "0")
    apart = invoke(*words)
    monkeypatch.setattr(terminal, "shows_both", lambda: True)
    together = invoke(*words)
    line = apart.stdout.splitlines()[1]
    assert line in apart.stderr
    assert line in together.stderr
    assert line not in together.stdout
    assert f"capture {capture_id}" in together.stdout


def test_a_stage_that_no_rank_has_run_is_a_warning(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rank(live, world_size=1).stage(STAGE, 1)
    monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.operate)
    result = invoke("capture", "--stages", "nosuch", "--steps", "9")
    assert result.exit_code == 0  # a stage may begin later
    warning = "no rank has done nosuch lately: nothing is captured until one does"
    assert result.stderr == f"warning: {warning}; stages of the run: {STAGE}\n"
    assert warning not in result.stdout
    known = invoke("capture", "--stages", STAGE, "--steps", "8")
    assert (known.exit_code, known.stderr) == (0, "")


def test_an_interrupted_wait_says_that_the_request_stays(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rank(live, world_size=1).stage(STAGE, 1)
    monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.operate)

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stagescope.Session, "wait_for", interrupted)
    result = invoke("capture", "--run", "r", "--stages", STAGE, "--steps", "9", "--wait")
    assert result.exit_code == 1
    [capture] = live.get("/captures", run="r")["rows"]
    withdraw = f"`stagescope remove-capture {capture['capture_id']}` withdraws it"
    assert f"the request stays: {withdraw}" in result.stderr


def test_a_list_of_an_unknown_run_names_those_there_are(live: Service) -> None:
    Rank(live, run="qwen3-8b", world_size=1).stage(STAGE, 1)
    for path in ("/captures", "/devices", "/triggers", "/triggers/firings"):
        assert live.problem(404, path, run="qwen3-8B")["expected"] == "one of qwen3-8b", path
        assert live.get(path, run="qwen3-8b")


def test_a_rank_that_does_not_exist_is_named(live: Service) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[1], ranks=[0, 9])
    assert live.get(f"/captures/{capture_id}")["unmatched_ranks"] == []  # nobody has come yet
    rank = Rank(live, world_size=1)
    dump(rank, capture_id, STAGE, 1)
    progress = live.get(f"/captures/{capture_id}")
    assert progress["unmatched_ranks"] == [9]
    assert (
        "rank 9 is not connected: nothing is collected of it" in CaptureProgress(progress).lines()
    )


def test_the_progress_says_why_ranks_failed(live: Service) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[3])
    ranks = [Rank(live, rank=number, world_size=3) for number in range(3)]
    for rank in ranks:
        rank.begin(STAGE, 3)
    dump(ranks[0], capture_id, STAGE, 3)
    for rank in ranks[1:]:
        rank.say(
            "dump", stage=STAGE, step=3, capture_id=capture_id, state="failed", error="level 'L0'"
        )
    for rank in ranks:
        rank.end(STAGE, 3)
        rank.begin(STAGE, 4)
    progress = CaptureProgress(live.get(f"/captures/{capture_id}"))
    assert f"{STAGE} of actor 1, 2: level 'L0'" in progress.lines()


@pytest.mark.parametrize("steps", ["next", [7]])
def test_a_capture_without_a_run_is_of_the_run_that_ended_last(
    live: Service, steps: object
) -> None:
    rank = Rank(live, world_size=1)
    rank.stage(STAGE, 1)
    rank.say("finish")
    spec = {"stages": [STAGE], "steps": steps, "task": "statistics"}
    answer = live.operate.post("/captures?wait=0", json=spec).json()
    assert (answer["run"], answer["notes"]) == (
        "r",
        ["attempt 1 of the run is over: the capture waits for the next"],
    )


def test_work_without_a_step_is_a_gap_of_a_capture_that_names_it(live: Service) -> None:
    actor = Rank(live, world_size=1)
    rollout = Rank(live, role="rollout", world_size=1)
    capture_id = request_capture(live, stages=[STAGE, "rollout_generate"], steps=[3])
    for step in (3, 4):
        begun = {"stage": "rollout_generate", "policy_version": step}
        rollout.say("begin", **begun)
        rollout.say("end", **begun, status="ok")
        dump(actor, capture_id, STAGE, step)
    progress = live.get(f"/captures/{capture_id}")
    (step,) = (each for each in progress["steps"] if each["step"] == 3)
    assert step["gaps"] == [{"role": "rollout", "rank": 0, "state": "without a step"}]
    assert step["state"] == "partial"


@pytest.mark.parametrize(
    ("stages", "role", "stage"),
    [("all", "rollout", "rollout_generate"), ([STAGE], "critic", "critic_update")],
)
@pytest.mark.parametrize("is_early", [True, False])
def test_a_rank_of_which_no_part_is_asked_is_no_gap_before_its_step_closes(
    live: Service, stages: object, role: str, stage: str, is_early: bool
) -> None:
    others = [Rank(live, role=role, rank=rank) for rank in (0, 1)]
    actors = [Rank(live, rank=rank) for rank in (0, 1)]
    order = {"run": "r", "stages": stages, "steps": [5]}
    capture_id = ""
    for step in range(1, 8):
        if step == (1 if is_early else 2):
            capture_id = live.operate.post("/captures?wait=0", json=order).json()["capture_id"]
        if step == 2 and not is_early:
            estimate = {"capture_id": capture_id, "state": "estimated", "estimate": {}}
            for rank in (*others, *actors):
                rank.acknowledge()
                rank.say("dump", stage=STAGE, **estimate)
            await_agreement(live, capture_id)
        for other in others:  # one has begun the next step while the other is still in this one
            other.stage(stage, step)
            assert step < 5 or come_to(live, capture_id)[0] != "partial"
        for actor in actors:
            if step == 5:
                dump(actor, capture_id, STAGE, step)
            else:
                actor.stage(STAGE, step)
            assert step < 5 or come_to(live, capture_id)[0] != "partial"
    assert come_to(live, capture_id) == ("complete", [("complete", 2, 0, 0)])


def test_an_option_that_names_nothing_is_refused(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset variable of the shell must not become a capture of everything."""
    monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.operate)
    result = invoke("capture", "--run", "r", "--stages", STAGE, "--keep", "")
    assert result.exit_code == 2
    assert "--keep: it names nothing" in result.stderr
    assert live.get("/captures")["rows"] == []


def test_a_report_on_its_way_is_waited_for_where_a_driver_closes_the_step(live: Service) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[1])
    ranks = [Rank(live, rank=number) for number in (0, 1)]
    dump(ranks[0], capture_id, STAGE, 1)
    driver = Rank(live, role="driver", world_size=1)
    driver.say("end_step", step=1)
    assert come_to(live, capture_id) == ("agreed", [("waiting", 1, 1, 0)])
    dump(ranks[1], capture_id, STAGE, 1)
    assert come_to(live, capture_id) == ("complete", [("complete", 2, 0, 0)])


def test_a_rank_that_leaves_a_closed_step_without_a_report_is_a_gap(live: Service) -> None:
    captures = [request_capture(live, stages=[STAGE], steps=[step]) for step in (1, 2)]
    ranks = [Rank(live, rank=number) for number in (0, 1)]
    driver = Rank(live, role="driver", world_size=1)
    for step, capture_id in enumerate(captures, start=1):
        dump(ranks[0], capture_id, STAGE, step)
        ranks[1].stage(STAGE, step)
        driver.say("end_step", step=step)
        assert come_to(live, capture_id) == ("agreed", [("waiting", 1, 1, 0)])
        ranks[1].begin(STAGE, step + 1) if step == 1 else ranks[1].say("finish")
        assert come_to(live, capture_id) == ("partial", [("partial", 1, 0, 1)])


def test_kept_tensors_on_their_way_are_waited_for_where_a_driver_closes_the_step(
    live: Service,
) -> None:
    live.engine.keep("rollout_log_probs")
    spec = {"stages": [STAGE], "steps": [1], "keep": ["rollout_log_probs"]}
    capture_id = request_capture(live, **spec)
    ranks = [Rank(live, rank=number) for number in (0, 1)]
    ranks[0].stage(STAGE, 1, payload())
    ranks[1].begin(STAGE, 1)
    Rank(live, role="driver", world_size=1).say("end_step", step=1)
    state, steps = come_to(live, capture_id)
    assert (state, steps[0][0]) == ("agreed", "waiting")
    ranks[1].stage(STAGE, 1, payload())
    assert come_to(live, capture_id)[0] == "complete"


def test_a_progress_is_of_one_moment(live: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[1])
    ranks = [Rank(live, rank=number) for number in (0, 1)]
    dump(ranks[0], capture_id, STAGE, 1)
    ranks[0].begin(STAGE, 2)
    captured = Catalogue.captured

    def meanwhile(catalogue: Catalogue, *args: Any, **options: Any) -> Any:
        found = captured(catalogue, *args, **options)
        monkeypatch.setattr(Catalogue, "captured", captured)
        dump(ranks[1], capture_id, STAGE, 1)
        ranks[1].begin(STAGE, 2)
        return found

    monkeypatch.setattr(Catalogue, "captured", meanwhile)
    assert come_to(live, capture_id) == ("agreed", [("waiting", 1, 1, 0)])
    assert come_to(live, capture_id) == ("complete", [("complete", 2, 0, 0)])


def test_a_capture_that_is_agreed_on_again_has_not_ended_before(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[1], again=1)
    rank = Rank(live, world_size=1)
    commits = live.engine.coordinator.parts.commits
    commit, seen = commits.commit, set[str]()

    async def look(*rows: Any) -> Any:
        answer = await commit(*rows)
        seen.add(come_to(live, capture_id)[0])
        return answer

    monkeypatch.setattr(commits, "commit", look)
    rank.stage(STAGE, 1)
    batch = [
        rank.draft("dump", stage=STAGE, step=1, capture_id=capture_id, state="missed"),
        rank.draft("begin", stage=STAGE, step=2),
    ]
    events = [event for report in batch for event in report.events]
    live.engine.take(rank.sender, events)
    assert seen == {"agreed", "asked"}


def _set_operators(live: Service, **columns: int | None) -> None:
    [table] = live.catalogue.operators()
    key = {name: table[name] for name in ("incarnation", "work_key", "capture_id")}
    live.store.submit([Put("operators", {**key, **columns})]).result(30)


def test_waiting_for_a_capture_waits_until_its_operators_are_read(live: Service) -> None:
    capture_id = request_capture(live, stages=[STAGE], steps=[1])
    rank = Rank(live, world_size=1)
    dump(rank, capture_id, STAGE, 1)
    rank.begin(STAGE, 2)
    rank.begin(STAGE, 3)
    [table] = live.catalogue.operators()
    _set_operators(live, digested_mark=None)
    told: list[CaptureProgress] = []
    with live.session("operate") as session:

        def tell(progress: CaptureProgress) -> None:
            told.append(progress)
            _set_operators(live, digested_mark=table["mark"])

        final = session.wait_for(capture_id, timeout=60, told=tell)
    assert (told[0]["state"], told[0]["unread_dumps"]) == ("complete", 1)
    assert told[0].lines()[-1] == "the service still reads the operators of 1 dump"
    assert (final["state"], final["unread_dumps"]) == ("complete", 0)
