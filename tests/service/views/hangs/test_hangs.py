"""Who is stuck, and stacks, over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.support.api import Rank, Service
from tests.support.stores import eventually

from stagescope_wire.collectives.records import Call, GroupRecord, RankRecord
from stagescope_wire.errors import InvalidInput
from stagescope_wire.schema import FINISH, STACKS

THREADS = [
    {"name": "trainer", "ident": 7, "is_training": True, "stack": '  File "t.py", line 1, in f'},
    {"name": "other", "ident": 8, "is_training": False, "stack": '  File "o.py", line 2, in g'},
]


@pytest.fixture
def ranks(live: Service) -> tuple[Rank, Rank]:
    """Two ranks that did step 1 in 1 s; in step 2 rank 1 is not there."""
    made = (Rank(live, rank=0, host="a"), Rank(live, rank=1, host="b"))
    for rank in made:
        rank.stage("actor_update", 1)
        rank.stage("rollout_generate", 2)
    made[0].begin("actor_update", 2)
    return made


def test_stuck_ranks_are_listed(live: Service, ranks: tuple[Rank, Rank]) -> None:
    live.now = ranks[0].clock + 20.0
    assert live.get("/steps/2/stuck")["rows"] == []
    live.now = ranks[0].clock + 40.0
    answer = live.get("/steps/latest/stuck")
    assert (answer["run"], answer["attempt"], answer["step"], answer["closed"]) == (
        "r", 1, 2, False,
    )  # fmt: skip
    [row] = answer["rows"]
    assert (row["rank"], row["role"], row["status"]) == (1, "actor", "not begun")
    assert (row["stage"], row["step"], row["part"]) == ("actor_update", 2, "0.0.0.0")
    assert row["seconds"] == pytest.approx(40.0)
    assert row["limit_seconds"] == 30.0
    assert (row["ranks"], row["ranks_begun"], row["ranks_ended"]) == (2, 1, 0)
    assert live.get("/steps/2/stuck", rank=0)["rows"] == []
    for filters in ({"role": "actr"}, {"stage": "actor_updat"}):  # nobody stuck would be wrong
        live.problem(404, "/steps/2/stuck", **filters)
    assert live.get("/steps/2/stuck", role="actor", stage="actor_update", rank=1)["rows"] == [row]
    ranks[1].clock = live.now
    ranks[1].begin("actor_update", 2)
    assert live.get("/steps/2/stuck")["rows"] == []
    closed = live.get("/steps/1/stuck")
    assert closed["closed"]
    assert closed["rows"] == []


def test_why_nobody_can_be_stuck_is_said(live: Service, ranks: tuple[Rank, Rank]) -> None:
    live.now = ranks[0].clock
    assert live.get("/steps/2/stuck")["note"] is None
    assert live.get("/steps/1/stuck")["note"] == "step 1 is closed: no rank is waited for in it"
    for rank in ranks:
        live.engine.fall_silent(rank)
    answer = live.get("/steps/2/stuck")
    assert answer["rows"] == []
    assert answer["note"] == (
        "no process is left, so no rank is waited for. 2 of 2 ranks stopped reporting "
        "without a finish. The stages that they left open are unfinished, and listed as lost"
    )
    ranks[0].say(FINISH)
    assert "1 of 2 ranks stopped reporting" in live.get("/steps/2/stuck")["note"]
    ranks[1].say(FINISH)
    assert live.get("/steps/2/stuck")["note"] == "no process is left: all of them finished"
    ranks[1].begin("actor_update", 2)
    ranks[1].say(FINISH, error_type="KeyboardInterrupt")
    assert live.get("/steps/2/stuck")["note"] == "no process is left: it was interrupted"


def test_lost_stages_are_named_only_where_one_was_open(live: Service) -> None:
    rank = Rank(live, world_size=1)
    rank.stage("actor_update", 1)
    live.engine.fall_silent(rank)
    assert live.get("/steps/1/stuck")["note"] == (
        "no process is left, so no rank is waited for. 1 of 1 rank stopped reporting "
        "without a finish"
    )


def test_latest_is_the_newest_attempt_also_before_its_first_step(live: Service) -> None:
    first = Rank(live, world_size=1)
    first.stage("actor_update", 5)
    first.say(FINISH, error_type="KeyboardInterrupt")
    Rank(live, key="a2", world_size=2, start=2_000.0)
    second = Rank(live, key="a2", rank=1, world_size=2, start=2_010.0)
    live.now = second.clock + 40.0
    answer = live.get("/steps/latest/stuck")
    assert (answer["attempt"], answer["step"], answer["rows"]) == (2, None, [])
    assert answer["note"] == (
        "attempt 2 is live, and no rank has begun a step yet: 2 ranks connected, the last one "
        "40 s ago. If this is long, see where they are with `stagescope stacks`"
    )
    assert live.get("/steps/latest/stuck", attempt=1)["step"] == 5
    assert live.get("/steps/5/stuck")["attempt"] == 1
    second.begin("actor_update", 6)
    assert live.get("/steps/latest/stuck")["step"] == 6


def ask(live: Service, answer: Callable[[str], object], **body: object) -> Any:
    """Request stacks, and let `answer` send some for the request while the call waits."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(live.operate.post, "/stacks", json=body)
        row, *_ = eventually(live.catalogue.stacks)
        answer(row["request_id"])
        response = call.result(30)
    assert response.status_code == 200, response.text
    return response.json()


def test_stacks_are_answered_and_kept(live: Service, ranks: tuple[Rank, Rank]) -> None:
    def say(request_id: str) -> None:
        for rank in ranks:
            rank.say(STACKS, request_id=request_id, threads=THREADS, step=2, stage="actor_update")

    answer = ask(live, say, wait=20)
    assert [row["rank"] for row in answer["rows"]] == [0, 1]
    assert answer["rows"][0]["threads"] == THREADS
    assert answer["not_answered"] == []
    kept = live.get("/steps/2/stacks")
    assert {row["rank"]: row["threads"] for row in kept["rows"]} == {0: THREADS, 1: THREADS}
    assert live.get("/steps/2/stacks", rank=1)["rows"][0]["rank"] == 1
    assert live.get("/steps/2/stacks", source="watchdog")["rows"] == []
    assert live.get("/steps/1/stacks")["rows"] == []
    assert len(live.get("/stacks", request_id=answer["request_id"])["rows"]) == 2
    page = live.get("/stacks", limit=1)
    assert len(page["rows"]) == 1
    assert live.get("/stacks", limit=1, cursor=page["next"])["next"] is None


def block(live: Service, ranks: tuple[Rank, Rank]) -> None:
    """Let rank 0 wait in a collective that rank 1 has not entered, and have it found."""

    def say(request_id: str) -> None:
        for number, rank in enumerate(ranks):
            call = Call(8 - number, "all_reduce", False, number == 1, seconds=60.0)
            group = GroupRecord("0", "default_pg", (0, 1), 8 - number, (call,))
            rank.say(
                STACKS, request_id=request_id, threads=THREADS, step=2, stage="actor_update",
                collectives=RankRecord("recorded", number, (group,)).wire(),
            )  # fmt: skip

    ask(live, say, wait=20)
    live.engine.look_for_hangs(ranks[0].clock)


def test_a_collective_that_cannot_finish_is_named(live: Service, ranks: tuple[Rank, Rank]) -> None:
    block(live, ranks)
    answer = live.get("/steps/2/stuck")
    [row] = answer["collectives"]
    assert row["message"] == (
        "rank 0 waits in all_reduce #8 of all ranks; rank 1 has not entered it: it is in f (t.py:1)"
    )
    assert (row["verdict"], row["sequence"], row["seconds"]) == ("not entered", 8, 60.0)
    assert [each["kind"] for each in answer["findings"]] == ["collective_blocked"]
    assert live.get("/steps/2/stuck", role="actor")["collectives"] == [row]
    assert live.get("/steps/1/stuck")["collectives"] == []
    with live.session() as session:
        stuck = session.step(2).stuck()
    assert " ".join(stuck.lines()).startswith(row["message"])
    assert row["message"] in stuck._repr_html_()


def test_ranks_that_do_not_answer_are_listed(live: Service, ranks: tuple[Rank, Rank]) -> None:
    def say(request_id: str) -> None:
        ranks[0].say(STACKS, request_id=request_id, threads=THREADS)

    answer = ask(live, say, wait=0.5, ranks=[0, 1, 5])
    assert [row["rank"] for row in answer["rows"]] == [0]
    reasons = {row["rank"]: row["reason"] for row in answer["not_answered"]}
    assert "no answer in time" in reasons[1]
    assert reasons[5] == "it has never reported"


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({"rank": 1}, "no field 'rank'"),
        ({"ranks": 1}, "ranks are 1"),
        ({"ranks": [True]}, "ranks are"),
        ({"wait": "long"}, "wait is 'long'"),
        ({"wait": 61}, "wait is 61"),
        ({"attempt": 0}, "attempt is 0"),
        ({"role": 3}, "role is 3"),
    ],
)
def test_invalid_requests_for_stacks_are_refused(
    live: Service, ranks: tuple[Rank, Rank], body: object, wrong: str
) -> None:
    response = live.operate.post("/stacks", json=body)
    assert response.status_code == InvalidInput.status, response.text
    assert wrong in response.json()["wrong"]
