"""Real hangs of four gloo ranks on a real cluster, named by the collective that cannot finish."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from tests.support.cluster import Service, answer, eventually
from tests.support.ranks import Process

pytestmark = pytest.mark.ray

FLOOR = 2.0
RANKS = 4


def _trainer_class() -> Any:
    """Return the class by value: the actor's process cannot import the tests."""

    class Trainer:
        """A rank of a training with expert parallelism of 2: ranks 0 and 1, ranks 2 and 3."""

        def __init__(self, run: str, rank: int, store: str) -> None:
            from stagescope_workers import init

            self.rank, self.store = rank, store
            self.probe = init(
                run=run, rank=rank, world_size=4,
                layout={"dp_rank": rank // 2, "dp_size": 2, "ep_rank": rank % 2, "ep_size": 2},
            )  # fmt: skip

        def join(self) -> None:
            import threading

            import torch.distributed as dist

            dist.init_process_group(
                "gloo", init_method=f"file://{self.store}", rank=self.rank, world_size=4
            )
            groups = [dist.new_group(each, group_desc="ep") for each in ([0, 1], [2, 3])]
            self.experts = groups[self.rank // 2]
            self.release = threading.Event()

        def train(self, steps: list[int], fault: str, step: int) -> None:
            """Train in a thread, so that the actor still answers; rank 3 has the fault."""
            import threading

            self.thread = threading.Thread(
                target=self._train, args=(steps, fault, step), name="trainer", daemon=True
            )
            self.thread.start()

        def _train(self, steps: list[int], fault: str, at: int) -> None:
            import time

            for step in steps:
                with self.probe.stage("actor_update", step=step):
                    if step == at and self.rank == 3 and fault == "checkpoint":
                        self.save_checkpoint()
                    if step == at and self.rank == 3 and fault == "slow":
                        time.sleep(1.0)
                    if step == at and self.rank == 3 and fault == "other call":
                        self.other_call()
                    self.exchange_tokens()
                    self.reduce_gradients()

        def save_checkpoint(self) -> None:
            self.release.wait()

        def exchange_tokens(self) -> None:
            import torch
            import torch.distributed as dist

            dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), group=self.experts)

        def reduce_gradients(self) -> None:
            import torch
            import torch.distributed as dist

            dist.all_reduce(torch.ones(4))

        def other_call(self) -> None:
            import torch
            import torch.distributed as dist

            dist.all_reduce(torch.ones(8), group=self.experts)

        def go_on(self) -> None:
            self.release.set()

        def is_done(self) -> bool:
            return not self.thread.is_alive()

    return Trainer


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service.start(tmp_path_factory.mktemp("home"), address, stuck_seconds=FLOOR)
    eventually(lambda: made.ready()[0] == 200)
    yield made
    made.stop()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return f"c-{request.node.name[:60]}"


@pytest.fixture
def ranks(service: Service, tmp_path: Path, run: str) -> Iterator[list[Process]]:
    store = str(tmp_path / "store")
    made = [Process(_trainer_class(), run, rank, store) for rank in range(RANKS)]
    for joined in [rank.begins("join") for rank in made]:
        answer(joined)
    yield made
    for rank in made:
        rank.kill()


def findings(service: Service, run: str, kind: str) -> list[Any]:
    with service.session() as session:
        return [row for row in session.findings(run) if row["kind"] == kind]


def test_the_collective_is_named_with_who_waits_and_where_the_missing_rank_is(
    service: Service, ranks: list[Process], run: str
) -> None:
    for rank in ranks:
        rank.ask("train", [*range(1, 7)], "checkpoint", 5)
    [found] = eventually(lambda: findings(service, run, "collective_blocked"))
    assert found["message"].startswith(
        "rank 2 waits in all_gather #5 of ep (group 2), ep of dp 1; rank 3 has not entered it: "
        "it is in save_checkpoint (test_collectives.py:"
    )
    assert (found["step"], found["stage"], found["role"]) == (5, "actor_update", "actor")
    with service.session() as session:
        stuck = session.step("latest", run=run).stuck()
        first, second = stuck.about["collectives"]
        doctor = "\n".join(session.doctor(run).lines(width=1000))
    # The line in which each rank waits, and the collective that waits behind the first.
    [waiting], [missing] = first["waiting"], first["missing"]
    assert waiting["place"].startswith("exchange_tokens (test_collectives.py:")
    assert (missing["ranks"], missing["stage"]) == ([3], "actor_update")
    assert (first["verdict"], first["sequence"], first["ranks"]) == ("not entered", 5, 2)
    assert (second["verdict"], second["operation"]) == ("behind", "all_reduce")
    assert second["waiting"][0]["ranks"] == [0, 1]
    assert second["waiting"][0]["place"].startswith("reduce_gradients (")
    assert found["message"] in doctor
    assert first["message"] in "\n".join(stuck.lines(width=1000))

    ranks[3].ask("go_on")
    eventually(lambda: all(rank.ask("is_done") for rank in ranks))
    eventually(lambda: findings(service, run, "collective_blocked")[0]["over_wall"])
    with service.session() as session:
        assert session.step("latest", run=run).stuck().about["collectives"] == []


def test_a_slow_collective_is_no_finding(service: Service, ranks: list[Process], run: str) -> None:
    for rank in ranks:
        rank.ask("train", [*range(1, 7)], "slow", 5)
    eventually(lambda: all(rank.ask("is_done") for rank in ranks))
    with service.session() as session:
        taken = session.stacks(run)
        assert len(taken.rows) == RANKS
    assert findings(service, run, "collective_blocked") == []


def test_ranks_that_call_different_collectives_are_named_on_request(
    service: Service, ranks: list[Process], run: str
) -> None:
    """In the first step nothing tells how long a stage takes, so nobody is called stuck."""
    for rank in ranks:
        rank.ask("train", [1], "other call", 1)

    def named() -> list[Any]:
        with service.session() as session:
            session.stacks(run)
        return findings(service, run, "collective_blocked")

    [found] = eventually(named)
    assert found["message"].startswith(
        "ranks of ep (group 2), ep of dp 1 called different collectives as #1: "
        "rank 2 called all_gather [4] Float; rank 3 called all_reduce [8] Float"
    )


def test_a_hang_in_the_first_step_is_named_though_no_history_tells_who_is_stuck(
    service: Service, ranks: list[Process], run: str
) -> None:
    for rank in ranks:
        rank.ask("train", [1], "checkpoint", 1)
    [found] = eventually(lambda: findings(service, run, "collective_blocked"))
    assert "rank 3 has not entered it: it is in save_checkpoint (" in found["message"]
    assert findings(service, run, "stage_stuck") == []
