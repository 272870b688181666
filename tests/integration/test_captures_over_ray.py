"""Captures on a running training: real ranks under gloo, real msprobe, real faults."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from stagescope.session import Session

ray = pytest.importorskip("ray")
pytest.importorskip("msprobe")
from tests.support.cluster import Service, answer, eventually  # noqa: E402
from tests.support.ranks import Process  # noqa: E402

pytestmark = pytest.mark.ray

RUN = "trained"


def _trainer_class() -> Any:
    """Return the class by value: the actor's process cannot import the tests."""

    class Trainer:
        """One rank: a module, a group, and steps until it is told to stop."""

        def __init__(self, run: str, rank: int, store: str) -> None:
            import torch

            from stagescope_workers import init

            torch.set_num_threads(1)
            torch.manual_seed(0)
            self.torch = torch
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=2
            )
            self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
            self.probe = init(run=run, rank=rank, world_size=2)
            self.step = 0
            self.seconds = 0.0
            self.stopping = False

        def train(self, seconds: float) -> int:
            """Do steps of some length until `stop`; return how many."""
            import time

            torch = self.torch
            self.seconds = seconds
            while True:
                going = torch.tensor([0.0 if self.stopping else 1.0])
                torch.distributed.all_reduce(going, op=torch.distributed.ReduceOp.MIN)
                if not going.item():
                    return int(self.step)
                self.step += 1
                with self.probe.stage("actor_update", step=self.step, model=self.model):
                    self.model.zero_grad()
                    self.model(torch.ones(2, 8)).sum().backward()
                    for parameter in self.model.parameters():
                        torch.distributed.all_reduce(parameter.grad)
                time.sleep(self.seconds)

        def slow_down(self, seconds: float) -> None:
            """Let steps take so long from the next one on."""
            self.seconds = seconds

        def stop(self) -> None:
            """Let every rank end with this step."""
            self.stopping = True

        def where(self) -> int:
            """Return the step it is in."""
            return int(self.step)

    return Trainer


class Training:
    """Two ranks that train together, from its making until `stop`."""

    def __init__(self, run: str, store: Path, seconds: float = 0.05) -> None:
        self.seconds = seconds
        self.ranks = [
            Process(_trainer_class(), run, rank, str(store), max_concurrency=4) for rank in (0, 1)
        ]
        assert all(rank.pid for rank in self.ranks), "they have met"
        self._running = [rank.begins("train", seconds) for rank in self.ranks]

    def where(self) -> int:
        """Return the step that rank 0 is in."""
        return int(self.ranks[0].ask("where"))

    @contextlib.contextmanager
    def slowed(self, seconds: float) -> Iterator[None]:
        """Let every step take so long inside the block."""
        for rank in self.ranks:
            rank.ask("slow_down", seconds)
        try:
            yield
        finally:
            for rank in self.ranks:
                rank.ask("slow_down", self.seconds)

    def stop(self) -> None:
        """End after the present step, then the processes."""
        self.ranks[0].ask("stop")
        answer(self._running[0])
        for rank in self.ranks:
            rank.kill()


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home: Path = tmp_path_factory.mktemp("captures")
    running = Service.start(home, address, lease_seconds=20.0)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def ranks(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """Two ranks that are in their first steps, and known to the service; they train to the end."""
    made = Training(RUN, tmp_path_factory.mktemp("gloo") / "store")
    try:
        with service.session() as session:
            eventually(lambda: session.step(run=RUN).step >= 2)
            eventually(
                lambda: [row["status"] for row in session.step(2, run=RUN).stages()] == ["ok"] * 2
            )
        yield made
    finally:
        made.stop()


def states(progress: Any) -> dict[tuple[int, int], str]:
    return {(row["step"], row["rank"]): row["state"] for row in progress.dumps()}


def captured(session: Session, **spec: Any) -> Any:
    """Request it until every rank learned of it in time: on a busy machine one may not."""
    found: object = None
    for _ in range(5):
        requested = session.capture(**spec)
        found = session.wait_for(requested["capture_id"], timeout=120)
        if found["state"] == "complete":
            return found
        assert "missed" in states(found).values(), found
        eventually(lambda: len(session.plan()) == 0)
    raise AssertionError(found)


def test_both_ranks_capture_the_same_step_of_a_running_training(
    service: Service, ranks: Training
) -> None:
    with service.session() as session:
        found = captured(session, stages=["actor_update"], steps={"next": 2}, level="L1")
        assert found["run"] == RUN
        agreed = found["agreement"]
        assert agreed["members"] == [{"role": "actor", "rank": n} for n in (0, 1)]
        start = agreed["start"]
        assert states(found) == {
            (step, rank): "complete" for step in (start, start + 1) for rank in (0, 1)
        }
        assert all((Path(row["path"]) / "dump.json").is_file() for row in found.dumps())
        # No rank has an attempt key: their dumps lie in one tree all the same.
        assert len({row["path"].split("/step_")[0] for row in found.dumps()}) == 1
        # What it would take was told before, by every rank, from the model that runs there.
        assert [each["basis"] for each in agreed["estimates"]] == ["model", "model"]
        assert all(each["bytes"] > 0 for each in agreed["estimates"])
        assert {each["collective_timeout"] for each in agreed["estimates"]} == {1800.0}
        assert [row["acknowledged"] for row in found.ranks()] == [True, True]
        # The training goes on. A dump is complete while its step is still running.
        eventually(lambda: ranks.where() > start + 1)
        eventually(lambda: len(session.plan()) == 0)


def test_a_stopped_rank_is_named_and_waited_for(service: Service, ranks: Training) -> None:
    with service.session() as session:
        spec: dict[str, Any] = {"run": RUN, "stages": ["actor_update"], "task": "statistics"}
        os.kill(ranks.ranks[1].pid, signal.SIGSTOP)
        try:
            given_up = session.capture(**spec, late="give_up", timeout=0.5)
            found = session.wait_for(given_up["capture_id"], timeout=30)
            assert found["state"] == "given up"
            assert found["agreement"]["without"] == [{"role": "actor", "rank": 1}]
            assert "not actor 1" in found.lines()[0]
            waiting = session.capture(**spec)
            assert waiting["agreement"]["phase"] == "asked"
            assert waiting["notes"] == ["waiting for actor rank 1"]
            without = session.capture(**spec, late="go_on", timeout=0.5)
            eventually(lambda: session.progress(without["capture_id"])["state"] == "agreed")
            (finding,) = [row for row in session.findings(RUN) if row["kind"] == "capture_partial"]
            assert "without actor rank 1" in finding["message"]
        finally:
            os.kill(ranks.ranks[1].pid, signal.SIGCONT)
        found = session.wait_for(waiting["capture_id"], timeout=60)
        assert found["state"] == "complete", found


def test_an_agreement_outlives_the_coordinator(service: Service, ranks: Training) -> None:
    with service.session() as session:
        with ranks.slowed(1.0):
            step = ranks.where() + 60  # far enough that a slow restart is over before it
            requested = session.capture(
                run=RUN, stages=["actor_update"], steps=[step], task="statistics"
            )
            eventually(lambda: session.progress(requested["capture_id"])["state"] == "agreed")
            service.kill_and_await("coordinator")
            assert ranks.where() < step
        found = session.wait_for(requested["capture_id"], timeout=240)
        assert states(found) == {(step, 0): "complete", (step, 1): "complete"}


def test_what_does_not_fit_is_refused_before_it_starts_unless_forced(
    service: Service, ranks: Training
) -> None:
    with service.session() as session:
        spec: dict[str, Any] = {
            "run": RUN, "stages": ["actor_update"], "task": "statistics",
            "limits": {"reserve_bytes": 1e15},
        }  # fmt: skip
        requested = session.capture(**spec)
        found = session.wait_for(requested["capture_id"], timeout=30)
        assert found["state"] == "refused"
        assert "0.0 GB are free there" in found["reason"]
        assert len(found.dumps()) == 0
        assert session.capture(**spec, force=True)["agreement"]["phase"] == "agreed"


def test_gradients_and_parameters_of_every_rank_are_kept(service: Service, ranks: Training) -> None:
    with service.session() as session:
        spec = {"gradients": ["*.weight"], "parameters": ["1.bias"]}
        found = captured(session, run=RUN, stages=["actor_update"], **spec)
        assert all(each["bytes"] > 0 for each in found["agreement"]["estimates"])
        start = found["agreement"]["start"]
        kept = eventually(lambda: files(service, start, 2))
        for file in kept:
            with safetensors.safe_open(file, "np") as tensors:
                assert {*tensors.keys()} == {
                    "gradient/0.weight", "gradient/1.weight", "parameter/1.bias",
                }  # fmt: skip
                assert tensors.get_tensor("gradient/0.weight").shape == (16, 8)
                assert np.any(tensors.get_tensor("gradient/1.weight"))


def files(service: Service, step: int, count: int) -> list[Path]:
    found = [*service.settings.data_path.glob(f"{RUN}/*/step_{step}/actor_update/**/*.safetensors")]
    return found if len(found) == count else []
