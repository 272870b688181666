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
from tests.support.ranks import Process

from stagescope.step_answers import Stacks
from stagescope_service.store.catalogue import Catalogue

pytestmark = pytest.mark.ray

FLOOR = 2.0


def _trainer_class() -> Any:
    """Return the class by value: the actor's process cannot import the tests."""

    class Trainer:
        """A rank that trains in a thread, so that its actor still answers."""

        def __init__(self, run: str, rank: int, store: str, options: dict[str, Any]) -> None:
            from stagescope_workers import init

            self.rank, self.store = rank, store
            self.probe = init(run=run, rank=rank, world_size=2, **options)
            self.group: object = None
            self.thread: Any = None

        def join(self) -> None:
            """Make the process group of both ranks."""
            import torch.distributed as dist

            dist.init_process_group(
                "gloo", init_method=f"file://{self.store}", rank=self.rank, world_size=2
            )

        def train(self, first: int, last: int, skip: int) -> None:
            """Reduce once in each step; in step `skip` rank 1 never comes to it."""
            import threading

            self.release = threading.Event()
            self.thread = threading.Thread(
                target=self._train, args=(first, last, skip), name="trainer", daemon=True
            )
            self.thread.start()

        def _train(self, first: int, last: int, skip: int) -> None:
            for step in range(first, last + 1):
                self.sample(step)
                if step == skip and self.rank == 1:
                    self.lose_the_way()
                with self.probe.stage("actor_update", step=step):
                    self.reduce_gradients()

        def sample(self, step: int) -> None:
            with self.probe.stage("rollout_generate", step=step):
                pass

        def lose_the_way(self) -> None:
            self.release.wait()

        def reduce_gradients(self) -> None:
            import torch
            import torch.distributed as dist

            dist.all_reduce(torch.ones(4))

        def go_on(self) -> None:
            """Let rank 1 come to the collective after all."""
            self.release.set()

        def is_done(self) -> bool:
            return not self.thread.is_alive()

        def hold_interpreter(self, step: int, seconds: float) -> None:
            """Stand still inside a stage: PyDLL's functions do not let the interpreter go."""
            import ctypes
            import pathlib
            import threading
            import time

            def hold() -> None:
                with self.probe.stage("actor_update", step=step):
                    # Its file says the stage once the watchdog was set inside it.
                    file = pathlib.Path(str(self.probe.stage_tracker.start_watchdog()))
                    while "actor_update" not in file.read_text():
                        time.sleep(0.01)
                    ctypes.PyDLL(None).usleep(int(seconds * 1e6))

            threading.Thread(target=hold, name="trainer", daemon=True).start()

        def report(self, step: int) -> None:
            with self.probe.stage("actor_update", step=step):
                pass

    return Trainer


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service.start(tmp_path_factory.mktemp("home"), address, stuck_seconds=FLOOR)
    eventually(lambda: made.ready()[0] == 200)
    yield made
    made.stop()


@pytest.fixture
def ranks(
    service: Service, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Process, Process]]:
    run = f"hang-{request.node.name[:60]}"
    store, options = str(tmp_path / "store"), {"watchdog": 3.0}
    made = [Process(_trainer_class(), run, rank, store, options) for rank in (0, 1)]
    pids = [rank.pid for rank in made]  # asked now: a rank whose interpreter is held says nothing
    assert len({*pids}) == 2
    yield made[0], made[1]
    for rank in made:
        rank.kill()


def run_of(request: pytest.FixtureRequest) -> str:
    return f"hang-{request.node.name[:60]}"


def join(ranks: tuple[Process, Process]) -> None:
    for ref in [rank.begins("join") for rank in ranks]:
        answer(ref)


def stuck_rows(service: Service, run: str) -> list[Any]:
    with service.session() as session:
        return list(session.step("latest", run=run).stuck())


def findings(service: Service, run: str, kind: str) -> list[Any]:
    with service.session() as session:
        return [row for row in session.findings(run) if row["kind"] == kind]


def test_the_rank_that_never_came_is_named_and_the_blocked_one_shows_the_collective(
    service: Service, ranks: tuple[Process, Process], request: pytest.FixtureRequest
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
    service: Service, ranks: tuple[Process, Process], request: pytest.FixtureRequest
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
    service: Service, ranks: tuple[Process, Process], request: pytest.FixtureRequest
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
