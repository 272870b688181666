"""A service on several nodes: what stays on each, what is read from others, what a loss takes.

Two worker nodes beside the head, by `ray start`. One has a disk of its own where the service's
data directory is, the other one shares the head's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.measure import payload

ray = pytest.importorskip("ray")
from ray._private.internal_api import node_stats  # noqa: E402
from tests.support.cluster import Service, answer, eventually, expect  # noqa: E402
from tests.support.ranks import Rank  # noqa: E402
from tests.support.ray_nodes import RayNodes, short_directory  # noqa: E402

from stagescope_service import clusters as joining  # noqa: E402
from stagescope_wire.discovery import NAMESPACE, ingestor_name  # noqa: E402

pytestmark = pytest.mark.ray

RUN = "nodes"
OWN_DISK, SHARED_DISK = "127.0.0.2", "127.0.0.3"


class Running(NamedTuple):
    """A service and the nodes of its cluster."""

    service: Service
    nodes: RayNodes
    head: str
    own_disk: str
    shared_disk: str
    ranks: tuple[Rank, Rank]
    """On the node with a disk of its own, and on that which shares the head's."""


@pytest.fixture(scope="module")
def running(clusters: contextlib.ExitStack) -> Iterator[Running]:
    clusters.close()  # a process is the driver of one cluster
    with short_directory() as directory:
        data = directory / "data"
        data.mkdir()
        nodes = RayNodes(directory / "ray", None, {})
        mount = f'mount -t tmpfs -o size=1g tmpfs {data} && exec "$@"'
        private = ["unshare", "--mount", "sh", "-c", mount, "sh"]
        if subprocess.run([*private, "true"], capture_output=True).returncode:
            pytest.skip("this user may not mount a filesystem")
        try:
            nodes.start_head()
            nodes.start("own", OWN_DISK, prefix=private)
            nodes.start("shared", SHARED_DISK)
            with joining.joined(nodes.address) as address:
                ids = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
                # A lease that outlasts what Ray takes to find a lost node, as the default does.
                service = Service.start(
                    directory / "home", address, data_dir=data, lease_seconds=20.0
                )
                head = ray.get_runtime_context().get_node_id()
                keep = {"what": ["old_log_probs"], "every_n_steps": 2}
                own, shared = ids[OWN_DISK], ids[SHARED_DISK]
                ranks = (
                    Rank(RUN, 0, own, world_size=2, keep=keep),
                    Rank(RUN, 1, shared, world_size=2, keep=keep),
                )
                yield Running(service, nodes, head, own, shared, ranks)
                service.stop()
        finally:
            nodes.kill()


def test_payloads_are_read_on_their_nodes_and_cross_only_when_they_are_asked_for(
    running: Running,
) -> None:
    service, steps = running.service, (1, 2, 3)
    handed = [payload(64, 2048, seed=rank, first_sample=64 * rank) for rank in (0, 1)]
    size = sum(item[2].nbytes for item in handed[0]["tensors"].values())
    before = created_bytes()
    for step in steps:
        for number, rank in enumerate(running.ranks):
            rank.ask("report_own", step, 64, 2048, number)
    running.ranks[0].ask("end_step", steps[-1])
    for rank in running.ranks:
        eventually(rank.settled)
    with service.session() as session:
        for step in steps:
            expect(session.step(step, run=RUN), *handed)
        after = created_bytes()
        crossed = after[running.head] - before[running.head]
        print(f"{len(steps) * 2} payloads of {size} bytes: {crossed} bytes came to the head")  # noqa: T201
        assert crossed < size / 10
        for node in (running.own_disk, running.shared_disk):
            assert after[node] - before[node] >= len(steps) * size
        names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
        assert {ingestor_name(node) for node in (running.own_disk, running.shared_disk)} <= names
        # What lies on the disk of one node is not on the head's.
        rings = {path.name for path in (service.settings.data_path / "ring").iterdir()}
        assert running.shared_disk in rings
        assert running.own_disk not in rings

        batch = session.step(1, run=RUN).batch(names=["old_log_probs"])
        assert len(batch) == 128
        assert created_bytes()[running.head] - after[running.head] >= size / 4


def test_kept_files_of_a_node_with_its_own_disk_are_read_from_it(running: Running) -> None:
    with running.service.session() as session:
        rows = {row["rank"]: row for row in session.step(2, run=RUN).kept()}
        assert {rank: row["state"] for rank, row in rows.items()} == {0: "kept", 1: "kept"}
        assert rows[0]["node_id"] == running.own_disk
        assert not Path(rows[0]["path"]).exists()
        assert rows[1]["node_id"] == running.shared_disk
        assert Path(rows[1]["path"]).exists()


def test_a_lost_node_is_listed_with_what_it_took_along(running: Running) -> None:
    service, step = running.service, 4
    lost, stays = running.ranks
    handed = payload(seed=4)
    ingestor = ray.get_actor(ingestor_name(running.own_disk), namespace=NAMESPACE)
    os.kill(answer(ingestor.pid.remote()), signal.SIGSTOP)
    lost.ask("report", step, handed, "actor_compute_log_prob")
    lost.ask("begin", step)
    eventually(lost.acknowledged)
    stays.ask("report", step, payload(seed=5, first_sample=4), "actor_compute_log_prob")
    stays.ask("report", step, None)
    stays.ask("begin", step + 1)
    eventually(stays.settled)
    died = running.nodes.kill("own")
    with service.session() as session:

        def found() -> Any:
            return [row for row in session.findings(RUN) if row["kind"] == "node_lost"]

        (row,) = eventually(found)
        print(f"the node was found to be lost {row['first_wall'] - died:.1f} s after its kill")  # noqa: T201
        assert row["message"].startswith(f"node {running.own_disk} ")
        assert "was lost with actor rank 0, 1 open stage and 1 unread payload" in row["message"]
        assert row["evidence"]["node_id"] == running.own_disk
        assert row["evidence"]["ranks"] == {"actor": [0]}
        assert row["evidence"]["open_stages"] == ["actor_update"]
        assert row["step"] == step

        eventually(lambda: len(service.losses(RUN)) == 2)
        losses = service.losses(RUN)
        by_kind = {row["kind"]: row for row in losses}
        assert {(row["step"], row["rank"]) for row in losses} == {(step, 0)}
        stage, unread = by_kind["stage"], by_kind["payload"]
        assert stage["stage"] == "actor_update"
        assert f"lost with node {running.own_disk}" in stage["reason"]
        assert unread["stage"] == "actor_compute_log_prob"
        assert "owner" in unread["reason"].lower()

        about = eventually(lambda: closed(session.step(step, run=RUN)))
        assert about["complete"] == "partial"
        (missing,) = about["missing"]
        assert (missing["rank"], missing["status"]) == (0, "unfinished")
        assert "1 payload lost" in about["gap"]

        # The files of its own disk are gone with it; those of the shared one stay.
        states = {row["rank"]: row["state"] for row in session.step(2, run=RUN).kept()}
        assert states == {0: "unreachable", 1: "kept"}
        batch = session.step(2, run=RUN).batch(names=["old_log_probs"])
        assert len(batch) == 64
        assert any(f"node {running.own_disk} is gone" in str(gap) for gap in batch.gaps), batch.gaps
        running.nodes.kill("shared")
        states = {row["rank"]: row["state"] for row in session.step(2, run=RUN).kept()}
        assert states == {0: "unreachable", 1: "kept"}


def created_bytes() -> dict[str, int]:
    """Return node id -> bytes of all objects that were ever made or copied in its store."""
    stats: Any = node_stats
    found = {}
    for node in ray.nodes():
        address = (node["NodeManagerAddress"], node["NodeManagerPort"])
        found[node["NodeID"]] = int(stats(*address, False).store_stats.cumulative_created_bytes)
    return found


def closed(step: Any) -> Any:
    about = step.metrics().about
    return about if about["complete"] != "open" else None
