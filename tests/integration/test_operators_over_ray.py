"""Operators end to end: msprobe in real ranks, real ingestors, the API and the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("msprobe")
from tests.support.cluster import SECONDS, Service, answer, eventually  # noqa: E402
from tests.support.ranks import Process  # noqa: E402

from stagescope_wire.discovery import NAMESPACE, ingestor_name  # noqa: E402
from stagescope_wire.errors import NotFound  # noqa: E402

pytestmark = pytest.mark.ray

RUN = "layers"
STAGE = "actor_update"
CUT_AFTER = 1200
"""Calls before a rank dies: msprobe writes every 1000."""


def _replica_class() -> type:
    """Return the class by value: the actor's process cannot import the tests."""

    class Replica:
        """One of two replicas of a model, whose parameters a test may change."""

        def __init__(self, run: str, rank: int, plan: str) -> None:
            import torch

            from stagescope_workers import init

            torch.set_num_threads(1)
            torch.manual_seed(0)
            self.torch = torch
            layers = [torch.nn.Linear(8, 8) for _ in range(4)]
            self.model = torch.nn.Sequential(*layers)
            self.probe = init(run=run, rank=rank, world_size=2, plan=plan)

        def step(self, step: int, name: str | None = None, factor: float = 1.0) -> None:
            """Do a step in which a parameter is `factor` times what it is."""
            torch = self.torch
            if name is not None:
                with torch.no_grad():
                    self.model.get_parameter(name).mul_(factor)
            with self.probe.stage("actor_update", step=step, model=self.model):
                self.model.zero_grad()
                self.model(torch.ones(2, 8)).square().mean().backward()

        def hang(self, step: int, calls: int) -> None:
            """Stay inside a step after so many calls of operators."""
            import time

            torch = self.torch
            stage = self.probe.begin("actor_update", step=step, model=self.model)
            value = torch.ones(2)
            for _ in range(calls):
                value = torch.add(value, 1.0)
            while self.probe.status()["waiting_events"]:
                time.sleep(0.01)
            self.hanging = stage

    return Replica


class Replicas:
    """Two replicas in processes of their own."""

    def __init__(self, run: str, plan: Path) -> None:
        self.ranks = [Process(_replica_class(), run, rank, str(plan)) for rank in (0, 1)]

    def step(self, step: int, name: str | None = None, factor: float = 1.0) -> None:
        """Do a step on both, in which rank 1's parameter is changed."""
        changed = (name, factor) if name is not None else ()
        refs = [rank.begins("step", step, *changed * at) for at, rank in enumerate(self.ranks)]
        answer(refs, 2 * SECONDS)


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service.start(tmp_path_factory.mktemp("operators"), address)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def both(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Replicas:
    """Two replicas that stay alive, with the tables of their first step."""
    made = replicas(service, tmp_path_factory.mktemp("plan"), RUN)
    made.step(1)
    digested(service, RUN, 1)
    return made


def replicas(service: Service, directory: Path, run: str, **capture: object) -> Replicas:
    """Start two replicas with a capture of every step."""
    order = {
        "stages": [STAGE], "steps": "all", "config": {"task": "statistics", "level": "mix"},
        "data_dir": str(service.settings.data_path), **capture,
    }  # fmt: skip
    plan = directory / "captures.json"
    plan.write_text(json.dumps({"captures": [order]}))
    return Replicas(run, plan)


def digested(service: Service, run: str, step: int, count: int = 2) -> Any:
    """Return the tables of a step once so many are read."""

    def tables() -> object:
        with service.session() as session:
            found = session.step(step, run=run).operators(limit=1).about["tables"]
        done = [table for table in found if table["state"] != "announced"]
        return found if len(done) == count else None

    return eventually(tables)


def test_a_broken_and_a_changed_layer_are_named(service: Service, both: Replicas) -> None:
    both.step(2, "1.weight", 1.5)
    both.step(3, "2.weight", float("nan"))
    for step in (1, 2, 3):
        for table in digested(service, RUN, step):
            assert (table["state"], table["truncated"], table["done"]) == ("digested", False, True)
            assert Path(table["path"]).is_file()
    with service.session() as session:
        same = session.divergence({"run": RUN, "step": 1, "rank": 0}, {"rank": 1}, exact=True)
        assert same.same, same
        changed = session.divergence({"run": RUN, "step": 2, "rank": 0}, {"rank": 1})
        assert changed["first"]["a"]["parent"] == "Module.1.Linear.forward.0"
        assert changed["first_parameter"]["a"]["operator"] == "1"
        broken = session.step(3, run=RUN).non_finite()
        earliest = broken.about["earliest"]
        assert (earliest["rank"], earliest["parent"]) == (1, "Module.2.Linear.forward.0")
        (found,) = [row for row in session.findings(RUN) if row["kind"] == "non_finite_operator"]
        assert (found["step"], found["stage"], found["rank"]) == (3, STAGE, 1)
        assert found["evidence"]["parent"] == "Module.2.Linear.forward.0"
        rows = session.step(3, run=RUN).operators(rank=1, non_finite=True)
        assert {row["rank"] for row in rows} == {1}
        before = session.divergence({"run": RUN, "step": 1, "rank": 0}, {"step": 2})
        assert before.same


def test_a_rank_that_dies_inside_a_capture_leaves_a_truncated_table(
    service: Service, tmp_path: Path
) -> None:
    two = replicas(service, tmp_path, "dies", config={"task": "statistics", "level": "L1"})
    two.step(1)
    two.ranks[1].ask("hang", 2, CUT_AFTER)
    two.ranks[1].kill()
    (table,) = digested(service, "dies", 2, count=1)
    assert (table["rank"], table["truncated"], table["done"]) == (1, True, None)
    assert 0 < table["calls"] < CUT_AFTER
    with service.session() as session:
        assert session.step(2, run="dies").operators(rank=1, limit=1)[0]["operator"] == "add"
        (dump,) = session.step(2, run="dies").dumps(rank=1)
        assert dump["state"] == "truncated"
        reasons = [row["reason"] for row in session.losses("dies") if row["kind"] == "dump"]
        assert any("stopped reporting inside the capture" in reason for reason in reasons)


def test_what_was_announced_before_the_coordinator_died_is_read_after(
    service: Service, both: Replicas
) -> None:
    with service.held("ingestor"):
        both.step(4)

        def announced() -> bool:
            try:
                with service.session() as session:
                    found = session.step(4, run=RUN).operators(limit=1)
            except NotFound:
                return False
            return [table["state"] for table in found.about["tables"]] == ["announced"] * 2

        eventually(announced)
        service.kill_and_await("coordinator")
        assert announced()
    tables = digested(service, RUN, 4)
    assert [table["state"] for table in tables] == ["digested"] * 2


def test_what_a_capture_wrote_is_read_outside_the_allowed_roots_too(
    service: Service, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    two = replicas(service, tmp_path, "outside", data_dir=str(outside))
    two.step(1)
    assert {table["state"] for table in digested(service, "outside", 1)} == {"digested"}
    assert len([*outside.rglob("*.parquet")]) == 2


@pytest.mark.usefixtures("both")
def test_a_node_gives_out_its_artifacts_and_nothing_else(service: Service) -> None:
    table = Path(digested(service, RUN, 1)[0]["path"])
    node = ray.get_runtime_context().get_node_id()
    ingestor = ray.get_actor(ingestor_name(node), namespace=NAMESPACE)
    whole = table.read_bytes()
    pieces = [
        answer(ingestor.read_artifact.remote(str(table), at, 1000))
        for at in range(0, len(whole), 1000)
    ]
    assert b"".join(pieces) == whole
    assert answer(ingestor.read_artifact.remote(str(table), len(whole), 1000)) == b""
    secret = service.info.operate_token_file
    with pytest.raises(ray.exceptions.RayTaskError, match="outside the directories"):
        answer(ingestor.read_artifact.remote(str(secret), 0, 10))
