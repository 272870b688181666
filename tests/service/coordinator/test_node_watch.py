"""What a lost node took along, by attempt: one finding each, whatever comes first."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.trainings import Bench, Rank

from stagescope_service.coordinator.node_watch import RECENT_SECONDS, NodeWatch

LOST = {"node-b": "health check failed"}


class Watched:
    """A run of which some ranks are on a node that is lost."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.watch = NodeWatch(self.bench.state)
        nodes = ("node-a", "node-b", "node-b")
        self.ranks = [Rank(rank=number, node=node) for number, node in enumerate(nodes)]

    def check(self, lost: dict[str, str] | None = None, wall: float = 100.0) -> list[Any]:
        self.bench.carry_out(self.watch.check(LOST if lost is None else lost, wall))
        return self.findings()

    def findings(self) -> list[Any]:
        return self.bench.rows.of("findings", kind="node_lost")


@pytest.fixture
def watched() -> Watched:
    made = Watched()
    for rank in made.ranks:
        made.bench.give(rank.begin(1))
    return made


def test_the_ranks_open_stages_and_payloads_of_a_lost_node_are_one_finding(
    watched: Watched,
) -> None:
    made = watched
    made.bench.give(*made.ranks[1].work(1, "actor_compute_log_prob", payload=True))
    made.bench.give(made.ranks[1].begin(2))
    assert made.check({}) == []
    (row,) = made.check()
    assert row["message"] == (
        "node node-b was lost with actor ranks 1, 2, 3 open stages and 1 unread payload: health "
        "check failed"
    )
    assert row["evidence"]["ranks"] == {"actor": [1, 2]}
    assert (row["step"], row["severity"], row["first_wall"]) == (2, "error", 100.0)
    assert made.check(wall=200.0) == [row]
    # A coordinator that begins anew finds the node in Ray's list again.
    made.bench.restart()
    made.watch = NodeWatch(made.bench.state)
    (again,) = made.check(wall=300.0)
    assert again["finding_id"] == row["finding_id"]


def test_losses_name_the_node_where_it_is_known_to_be_lost(watched: Watched) -> None:
    bench = watched.bench
    bench.now += 10_000.0
    bench.carry_out(bench.state.expire(bench.now, 5000.0, LOST))
    reasons = {row["rank"]: row["reason"] for row in bench.rows.of("losses")}
    assert reasons == {
        0: "its process stopped reporting inside the stage",
        1: "its process stopped reporting, lost with node node-b, inside the stage",
        2: "its process stopped reporting, lost with node node-b, inside the stage",
    }
    # Its lease may lapse before Ray knows of the node.
    (row,) = watched.check(wall=5000.0 + RECENT_SECONDS - 1.0)
    assert "ranks 1, 2" in row["message"]


def test_a_node_whose_ranks_had_left_is_no_finding(watched: Watched) -> None:
    bench = watched.bench
    bench.give(watched.ranks[1].finish())
    bench.silence(wall=5000.0)
    assert watched.check(wall=5000.0 + RECENT_SECONDS) == []
