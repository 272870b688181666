"""Real hangs on a real cluster: a collective that one rank never enters, a held interpreter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from tests.support.cluster import Service, answer, eventually
from tests.support.hanging import Trainer

import stagescope
from stagescope.step_answers import Stacks
from stagescope_service.store.catalogue import Catalogue
from stagescope_wire.errors import NotReady, StagescopeError

pytestmark = pytest.mark.ray

FLOOR = 2.0


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service.start(tmp_path_factory.mktemp("home"), address, stuck_seconds=FLOOR)
    eventually(lambda: made.ready()[0] == 200)
    yield made
    made.stop()


@pytest.fixture
def ranks(
    service: Service, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Trainer, Trainer]]:
    run = f"hang-{request.node.name[:60]}"
    made = [Trainer(run, rank, str(tmp_path / "store"), watchdog=3.0) for rank in (0, 1)]
    yield made[0], made[1]
    for rank in made:
        rank.kill()


def run_of(request: pytest.FixtureRequest) -> str:
    return f"hang-{request.node.name[:60]}"


def join(ranks: tuple[Trainer, Trainer]) -> None:
    for ref in [rank.begins("join") for rank in ranks]:
        answer(ref)


def stuck_rows(service: Service, run: str) -> list[Any]:
    with service.session() as session:
        return list(session.step("latest", run=run).stuck())


def findings(service: Service, run: str, kind: str) -> list[Any]:
    with service.session() as session:
        return [row for row in session.findings(run) if row["kind"] == kind]


def test_the_rank_that_never_came_is_named_and_the_blocked_one_shows_the_collective(
    service: Service, ranks: tuple[Trainer, Trainer], request: pytest.FixtureRequest
) -> None:
    run = run_of(request)
    join(ranks)
    for rank in ranks:
        rank.ask("train", 1, 6, 5)
    [row] = eventually(lambda: stuck_rows(service, run))
    assert (row["rank"], row["status"], row["stage"], row["step"]) == (
        1, "not begun", "actor_update", 5,
    )  # fmt: skip
    assert row["seconds"] > FLOOR
    assert row["history_steps"] == 4
    assert (row["ranks_begun"], row["ranks_ended"], row["ranks"]) == (1, 0, 2)
    assert row["pid"] == ranks[1].pid

    # The finding asked both for their stacks by itself.
    [found] = eventually(lambda: findings(service, run, "stage_stuck"))
    assert (found["rank"], found["stage"], found["over_wall"]) == (1, "actor_update", None)
    with service.session() as session:
        step = session.step(5, run=run)

        def taken_by_itself() -> Stacks | None:
            taken = step.stacks(source="probe")
            return taken if all(row["state"] == "answered" for row in taken.rows) else None

        kept: Stacks = eventually(taken_by_itself)
        by_rank = {row["rank"]: row for row in kept.rows}
        assert {row["request_id"] for row in kept.rows} == {found["evidence"]["request_id"]}
        text = "\n".join(kept.lines(width=200))
        assert "all_reduce" in text
        assert "lose_the_way" in text
        assert by_rank[0]["stage"] == "actor_update"
        [training] = [t for t in by_rank[0]["threads"] if t["is_training"]]
        assert training["name"] == "trainer"
        assert "reduce_gradients" in training["stack"]

        # And on request.
        taken = session.stacks(run, ranks=[0, 1, 7])
        assert [row["rank"] for row in taken.rows] == [0, 1]
        assert "all_reduce" in taken.rows[0]["threads"][0]["stack"]
        assert [row["rank"] for row in taken.not_answered] == [7]

    ranks[1].ask("go_on")
    eventually(lambda: all(rank.ask("is_done") for rank in ranks))
    eventually(lambda: findings(service, run, "stage_stuck")[0]["over_wall"])
    assert stuck_rows(service, run) == []
    assert findings(service, run, "stage_stuck")[0]["severity"] == "info"


def test_a_request_survives_the_coordinator(
    service: Service, ranks: tuple[Trainer, Trainer], request: pytest.FixtureRequest
) -> None:
    run = run_of(request)
    for rank in ranks:
        rank.ask("report", 1)
        eventually(rank.acknowledged)
    # Rank 1 cannot answer now; the coordinator dies while it waits for it.
    os.kill(ranks[1].pid, signal.SIGSTOP)
    try:
        with service.session() as session:
            taken = session.stacks(run, wait=0.5)
        assert [row["rank"] for row in taken.rows] == [0]
        [silent] = taken.not_answered
        assert (silent["rank"], "no answer in time" in silent["reason"]) == (1, True)
        coordinator = service.coordinator  # by a name: in older Rays a method does not keep it
        ref = coordinator.ask_stacks.remote(
            attempt_id=attempt_id(service, run), role=None, ranks=[1], seconds=60.0, by="test"
        )
        asked = answer(ref)
        service.kill_and_await("coordinator")
    finally:
        os.kill(ranks[1].pid, signal.SIGCONT)

    def answered() -> Any:
        with service.session() as session:
            rows = session.step(1, run=run).stacks(rank=1).rows
            mine = [row for row in rows if row["request_id"] == asked["request_id"]]
            return [row for row in mine if row["state"] == "answered"]

    [row] = eventually(answered)
    assert row["threads"]


def attempt_id(service: Service, run: str) -> int:
    found = Catalogue(service.settings.catalogue_url).find_attempt(run)
    assert found is not None
    return int(found["attempt_id"])


def test_a_held_interpreter_is_seen_by_its_watchdog(
    service: Service, ranks: tuple[Trainer, Trainer], request: pytest.FixtureRequest
) -> None:
    run = run_of(request)
    for rank in ranks:
        rank.ask("report", 1)
        eventually(rank.acknowledged)
    ranks[1].begins("hold_interpreter", 2, 600.0)

    def seen() -> Any:
        found = findings(service, run, "interpreter_held")
        return found[0] if found else None

    found = eventually(seen)
    assert (found["role"], found["rank"]) == ("actor", 1)
    assert "in hold" in found["message"]
    with service.session() as session:
        rows = session.step(found["step"], run=run).stacks(source="watchdog").rows
    assert rows[0]["rank"] == 1
    assert rows[0]["request_id"] == found["evidence"]["request_id"]
    stacks = {thread["name"]: thread["stack"] for thread in rows[0]["threads"]}
    assert stacks["trainer"].splitlines()[-1].strip().endswith("in hold")


def test_who_may_only_read_may_not_ask(service: Service, request: pytest.FixtureRequest) -> None:
    token = service.info.token_file.read_text().strip()
    with stagescope.attach(service.info.url, token=token) as session:
        with pytest.raises(StagescopeError) as refused:
            session.stacks("nobody")
        assert not isinstance(refused.value, NotReady)
        assert refused.value.status in (401, 403)
