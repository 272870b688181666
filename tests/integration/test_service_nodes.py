"""A service on any node that has its resource, with the catalogue in PostgreSQL."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.measure import payload
from tests.support.stores import postgresql

from stagescope_wire.errors import InvalidInput

ray = pytest.importorskip("ray")
from tests.support.cluster import Service, answer, eventually, expect  # noqa: E402
from tests.support.ranks import Rank  # noqa: E402
from tests.support.ray_nodes import RayNodes, short_directory  # noqa: E402

from stagescope_service import clusters as joining  # noqa: E402
from stagescope_wire.discovery import API_NAME, COORDINATOR_NAME, NAMESPACE  # noqa: E402

pytestmark = pytest.mark.ray

RESOURCE = "stagescope"
FIRST, SECOND = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def nodes(clusters: contextlib.ExitStack) -> Iterator[tuple[RayNodes, Path]]:
    clusters.close()  # a process is the driver of one cluster
    with short_directory() as directory:
        made = RayNodes(directory / "ray", None, {})
        try:
            made.start_head()
            made.start("first", FIRST, resource=RESOURCE)
            yield made, directory
        finally:
            made.kill()


def place_of(name: str) -> str:
    """Return the address of the node of one of the service's actors, once it answers."""
    states = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    actor = ray.get_actor(name, namespace=NAMESPACE)
    method = actor.status if name == COORDINATOR_NAME else actor.where
    answer(method.remote())
    [node] = [
        each["Address"]["NodeID"]
        for each in ray._private.state.actors().values()
        if each["ActorID"] == actor._actor_id.hex()
    ]
    return str(states[node])


def test_the_service_survives_the_loss_of_its_node(nodes: tuple[RayNodes, Path]) -> None:
    made, directory = nodes
    with postgresql() as url, joining.joined(made.address) as address:
        with pytest.raises(InvalidInput, match="no node of the Ray cluster has the resource other"):
            Service.start(directory / "none", address, service_resource="other")
        service = Service.start(
            directory / "home", address, database_url=url, service_resource=RESOURCE,
            lease_seconds=20.0,
        )  # fmt: skip
        assert {place_of(name) for name in (COORDINATOR_NAME, API_NAME)} == {FIRST}
        rank = Rank("moved", 0, ray.get_runtime_context().get_node_id(), world_size=1)
        rank.ask("report", 1, payload(seed=1), "actor_compute_log_prob")
        eventually(rank.settled)
        made.start("second", SECOND, resource=RESOURCE)
        lost = made.kill("first")
        for step in (2, 3):
            rank.ask("report", step, payload(seed=step), "actor_compute_log_prob")
        eventually(rank.settled, seconds=180.0)
        print(f"acknowledged again {time.time() - lost:.1f} s after the loss")  # noqa: T201
        assert {place_of(name) for name in (COORDINATOR_NAME, API_NAME)} == {SECOND}
        api = ray.get_actor(API_NAME, namespace=NAMESPACE)
        service.info = type(service.info)(
            **{**vars(service.info), "url": eventually(lambda: answer(api.where.remote())["url"])}
        )
        with service.session() as session:
            for step in (1, 2, 3):
                expect(session.step(step, run="moved"), payload(seed=step))
            [attempt] = session.attempts("moved")
            assert not session.losses("moved")
            assert attempt["attempt"] == 1
        service.stop()
