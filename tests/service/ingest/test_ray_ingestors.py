"""The coordinator's client of ingestors, where the cluster does not answer or answers late."""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from stagescope_service.core.instructions import PayloadKey
from stagescope_service.ingest import actor, cluster_state
from stagescope_service.ingest.actor import Ingestor, Ingestors, RayIngestors
from stagescope_service.ingest.reader import Outcome
from stagescope_service.ingest.work_queue import Superseded
from stagescope_service.settings import Settings
from stagescope_wire.errors import Unreachable

KEY = PayloadKey("i", 1)
JOB: Any = {}


class Handle:
    """The actor of one node's ingestor, as far as the client sees it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.serves: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: object, caller: str | None = None) -> object:
            if name == "serve":
                self.serves += map(str, arguments)
                return None
            return Outcome("ingested", f"{self.node} for {caller}", [], {})

        return types.SimpleNamespace(remote=call)


class Cluster:
    """What the cluster says of its nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: Callable[[], list[dict[str, object]]] = lambda: self.alive("home")
        self.handles: dict[str, Handle] = {}
        context = types.SimpleNamespace(get_node_id=lambda: "home", gcs_address="local")
        fake = types.SimpleNamespace(
            nodes=lambda: self.nodes(), get_runtime_context=lambda: context
        )
        monkeypatch.setattr(actor, "ray", fake)
        monkeypatch.setattr(actor, "_RETRY_SECONDS", 0.0)
        monkeypatch.setattr(cluster_state, "LIST_SECONDS", 0.0)
        monkeypatch.setattr(Ingestors, "handle_for", lambda _, node: self.handle(node))

    def handle(self, node: str) -> Handle:
        return self.handles.setdefault(node, Handle(node))

    @staticmethod
    def alive(*names: str) -> list[dict[str, object]]:
        return [{"NodeID": name, "Alive": True} for name in names]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def made(tmp_path: Path) -> RayIngestors:
    return RayIngestors(Settings(home=tmp_path), "c1")


def test_the_loop_goes_on_while_the_cluster_does_not_answer(
    tmp_path: Path, cluster: Cluster
) -> None:
    answers = threading.Event()

    def nodes() -> list[dict[str, object]]:
        assert answers.wait(30)
        return cluster.alive("home", "n2")

    async def work() -> None:
        cluster.nodes = nodes
        ingestors = made(tmp_path)
        reading = asyncio.ensure_future(ingestors.ingest("n2", KEY, JOB, b""))
        for _ in range(10):  # a blocked loop would not come here before the cluster answers
            ingestors.lost_nodes()
            assert ingestors.node_of("n2") == "home"
            await asyncio.sleep(0.01)
        answers.set()
        assert (await reading).reason == "n2 for c1"
        assert ingestors.node_of("n2") == "n2"
        assert cluster.handles["n2"].serves == ["c1"]

    asyncio.run(asyncio.wait_for(work(), 20))


def test_a_cluster_that_fails_loses_no_payload(tmp_path: Path, cluster: Cluster) -> None:
    tries: list[str] = []

    def nodes() -> list[dict[str, object]]:
        tries.append("")
        if len(tries) < 3:
            raise ConnectionError("the GCS is away")
        return cluster.alive("home", "n2")

    async def work() -> None:
        cluster.nodes = nodes
        ingestors = made(tmp_path)
        with pytest.raises(Unreachable, match="does not say which nodes"):
            await ingestors.learn_nodes(["n2"])
        outcome = await ingestors.ingest("n2", KEY, JOB, b"")
        assert (outcome.state, outcome.reason) == ("ingested", "n2 for c1")

    asyncio.run(asyncio.wait_for(work(), 20))


def test_the_payloads_of_a_node_that_is_gone_go_to_the_home_node(
    tmp_path: Path, cluster: Cluster
) -> None:
    async def work() -> None:
        ingestors = made(tmp_path)
        assert (await ingestors.ingest("gone", KEY, JOB, b"")).reason == "home for c1"
        cluster.nodes = lambda: cluster.alive("home", "new")  # a node that joined since
        assert (await ingestors.ingest("new", KEY, JOB, b"")).reason == "new for c1"

    asyncio.run(asyncio.wait_for(work(), 20))


def test_an_ingestor_is_looked_up_and_told_once_however_many_payloads_wait(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[Handle] = []
    monkeypatch.setattr(Ingestors, "known_handle", lambda _, node: cluster.handles.get(node))

    def look_up(_: object, node: str) -> Handle:
        looked_up.append(cluster.handles.setdefault(node, Handle(node)))
        return looked_up[-1]

    monkeypatch.setattr(Ingestors, "handle_for", look_up)

    async def work() -> None:
        ingestors = made(tmp_path)
        calls = [ingestors.ingest("home", KEY, JOB, b"") for _ in range(20)]
        assert {outcome.state for outcome in await asyncio.gather(*calls)} == {"ingested"}

    asyncio.run(asyncio.wait_for(work(), 20))
    assert len(looked_up) == 1
    assert looked_up[0].serves == ["c1"]


def test_rollouts_are_given_to_another_node_before_the_new_coordinator_called(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        ingestor = Ingestor("n2", str(tmp_path), 1 << 20, 1 << 20, [str(tmp_path)])
        await ingestor.serve("dead")
        assert await ingestor.rollouts([], ["s1"]) == []
        with pytest.raises(Superseded):
            await ingestor.call("unpin", 1, 1, caller="new")
        await ingestor.serve("new")
        assert await ingestor.call("unpin", 1, 1, caller="new")

    asyncio.run(asyncio.wait_for(work(), 120))
