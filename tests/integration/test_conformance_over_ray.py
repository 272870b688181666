"""The conformance training on a cluster of two nodes: rollouts lie on the other one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.actor import ActorHandle
from tests.support.parallel import Reported, Training

from stagescope.answers import Metrics
from stagescope_service.statistics import publish, summarise

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def nodes(clusters: contextlib.ExitStack) -> Iterator[tuple[str, str, str]]:
    """Be the driver of two nodes; yields the address and their ids, the driver's own first."""
    from ray.cluster_utils import Cluster

    clusters.close()  # a process is the driver of one cluster
    options: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        cluster.add_node(**options)
        ray.init(address=cluster.address, log_to_driver=False)
        own = ray.get_runtime_context().get_node_id()
        (other,) = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != own)
        yield str(cluster.address), own, other
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def test_rollouts_of_another_node_are_joined(tmp_path: Path, nodes: tuple[str, str, str]) -> None:
    from tests.support.cluster import Service, eventually

    address, own, other = nodes
    service = Service.start(tmp_path / "home", address)
    try:
        training = Training(
            trainer_has_rollout=False, rollout_key="rollout-job", nodes=(own, other)
        )
        hear(service.coordinator, training.greetings())
        hear(service.coordinator, training.generate(1))
        hear(service.coordinator, training.log_probs(1))
        hear(service.coordinator, (process.leave() for process in training.ranks))
        expected = publish(summarise(training.unsplit(1)))
        with service.session() as session:
            step = session.step(1, run="moe")

            def aggregated() -> Metrics | None:
                metrics = step.metrics()
                return metrics if metrics["counts/tokens"] == expected["counts/tokens"] else None

            metrics = eventually(aggregated)
        for name, value in expected.items():
            same = math.isclose(metrics[name], value, rel_tol=1e-9, abs_tol=1e-12)
            assert same or (math.isnan(value) and math.isnan(metrics[name])), name
        names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
        assert {f"ingestor-{own}", f"ingestor-{other}"} <= names
    finally:
        service.stop()


def hear(coordinator: ActorHandle[object], reported: Iterable[Reported]) -> None:
    """Hand over what was said, payloads as refs, one batch a sender; wait for the receipts."""
    senders: dict[str, list[Reported]] = {}
    for each in reported:
        senders.setdefault(each.sender.incarnation, []).append(each)
    waiting = [
        coordinator.record_events.remote(
            sender=own[0].sender.wire(),
            events=[each.event.wire() for each in own],
            payloads={e.event.seq: ray.put(e.payload) for e in own if e.payload is not None},
        )
        for own in senders.values()
    ]
    for answer in ray.get(waiting, timeout=60):
        assert not answer["refused"], answer
    ray.get(coordinator.drain.remote(run="moe", timeout=60.0), timeout=90)
