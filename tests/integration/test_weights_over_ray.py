"""Weights on a real cluster: a skipped sync, a card that is one bit off, a killed coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
from tests.support.cluster import SECONDS, Service, answer, eventually

from examples.countdown.actors import Report
from examples.countdown.config import Settings, SkippedSync, Troubles
from examples.countdown.train import Job
from stagescope.table import Table

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    started = Service.start(tmp_path_factory.mktemp("home"), address)
    yield started
    started.stop()


def test_a_sync_that_the_example_skips_is_found_at_its_step_by_name(service: Service) -> None:
    # With hardly a warm-up nothing is earned: the entropy is what moves the weights.
    settings = Settings(groups=4, warmup_steps=3, warmup_rows=8, entropy_coefficient=0.01)
    job = Job(settings, Report("skipped", "one"), Troubles(skip=SkippedSync(2, NAME)))
    job.prepare(None)
    for step in (1, 2, 3):
        job.step(step)
    job.close(30.0)
    with service.session() as session:

        def all_compared() -> Table | None:
            found = session.weights(run="skipped")
            return found if found["complete"] == (True,) * 3 else None

        versions = eventually(all_compared)
        assert versions["version"] == (2, 1, 0)
        assert versions["differ"] == (0, 1, 0)
        found = session.step(2, run="skipped").weights()
        assert found.about["recorded"] == {
            "trainer": {"actor": [0, 1]}, "rollout": {"rollout": [0]},
        }  # fmt: skip
        assert found.where(verdict="differs")["name"] == (NAME,)
        assert set(found["verdict"][1:]) == {"agrees"}
        [finding] = session.findings("skipped").where(kind="weights_differ")
        assert (finding["step"], finding["role"], finding["rank"]) == (2, "rollout", 0)
        assert NAME in finding["message"]
        assert len(session.devices("skipped")) == 0


def _replica_class() -> Any:
    """Return the class by value: the actor's process cannot import the tests."""

    class Replica:
        """A rank of plain data parallelism over gloo, in one run after the other."""

        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.store: Any = None
            self.model: Any = None

        def init(self, run: str, size: int) -> None:
            """Begin a run of so many ranks."""
            from stagescope_workers import init

            serial = f"SN-{self.rank}"
            layout = {"dp_rank": self.rank, "device_kind": "npu", "device_serial": serial}
            self.probe = init(run, rank=self.rank, world_size=size, attempt_key="a", layout=layout)
            self.size = size

        def listen(self) -> int:
            """On rank 0: open the meeting place."""
            import torch

            dist: Any = torch.distributed
            self.store = dist.TCPStore(
                "127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False
            )
            return int(self.store.port)

        def join(self, port: int) -> None:
            """Meet the other ranks, and begin with rank 0's weights."""
            import os

            import torch

            dist: Any = torch.distributed
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = self.store or dist.TCPStore("127.0.0.1", port, self.size, is_master=False)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
            torch.manual_seed(self.rank)
            self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
            for parameter in self.model.parameters():
                dist.broadcast(parameter.data, 0)

        def record(self, version: int, bad: bool = False) -> None:
            """Update all ranks alike; a bad card flips the lowest bit of one number."""
            import torch

            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter += 1.0
                if bad:
                    self.model[1].weight.view(-1)[3:4].view(torch.int32).bitwise_xor_(1)
            weights = self.model.named_parameters()
            self.probe.record_weights(weights, version=version, side="trainer", step=version)

        def close(self) -> bool:
            """Report the end of this process."""
            import torch.distributed as dist

            dist.destroy_process_group()
            self.store = None
            return self.probe.close(30.0)

    return Replica


@pytest.fixture(scope="module")
def cards(address: str) -> list[object]:
    made = ray.remote(_replica_class()).options(num_cpus=0)
    return [made.remote(rank) for rank in range(3)]


def replicas(cards: list[Any], run: str) -> list[Any]:
    """Let a run begin on these cards."""
    everybody(cards, "init", run, len(cards))
    port = answer(cards[0].listen.remote())
    everybody(cards, "join", port)
    return cards


def everybody(handles: Sequence[object], method: str, *arguments: object) -> None:
    ray.get([getattr(each, method).remote(*arguments) for each in handles], timeout=SECONDS)


def test_a_card_that_is_one_bit_off_is_named_in_every_run(
    service: Service, cards: list[Any]
) -> None:
    for run in ("first", "second"):
        ranks = replicas(cards, run)
        everybody(ranks, "record", 1)
        ray.get([rank.record.remote(2, at == 1) for at, rank in enumerate(ranks)], timeout=SECONDS)
        everybody(ranks, "close")
    with service.session() as session:

        def card() -> Any:
            found = [row for row in session.devices() if row["device"] == "SN-1"]
            return found[0] if found and found[0]["odd"] == 2 else None

        found = eventually(card)
        assert (found["runs"], found["suspected"]) == (["first", "second"], 0)
        assert (found["last_rank"], found["last_version"]) == (1, 2)
        assert found["names"] == ["1.weight"]
        assert [row["device"] for row in session.devices() if row["odd"]] == ["SN-1"]
        [finding] = session.findings("first").where(kind="replica_weights_differ")
        assert (finding["step"], finding["rank"]) == (2, 1)
        assert "SN-1" in finding["message"]
        assert session.weights(run="first")["replicas_differ"] == (1, 0)


def test_of_two_replicas_both_are_named_and_a_killed_coordinator_forgets_nothing(
    service: Service, cards: list[Any]
) -> None:
    ranks = replicas(cards[:2], "two")
    everybody(ranks[:1], "record", 1)
    with service.session() as session:
        eventually(lambda: len(session.weights(run="two")))
        service.kill_and_await("coordinator")
        ray.get(ranks[1].record.remote(1, True), timeout=SECONDS)
        everybody(ranks, "close")
        found = eventually(lambda: session.devices("two"))
        assert found["device"] == ("SN-0", "SN-1")
        assert (found["odd"], found["suspected"]) == ((0, 0), (1, 1))
        [finding] = session.findings("two").where(kind="replica_weights_differ")
        assert "without a majority" in finding["message"]
