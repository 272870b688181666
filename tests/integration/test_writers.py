"""Everybody who may write, on a real cluster: raw calls, other jobs, processes without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from tests.support.measure import Handed, payload

ray = pytest.importorskip("ray")
from tests.support.cluster import Service, eventually  # noqa: E402
from tests.support.ranks import Rank  # noqa: E402

from stagescope_service.serve import start_service  # noqa: E402
from stagescope_wire.errors import InvalidInput  # noqa: E402

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service.start(tmp_path_factory.mktemp("home"), address)
    yield service
    service.stop()


def refs_of(handed: Handed) -> dict[str, object]:
    return {name: ray.put(item[2]) for name, item in handed["tensors"].items()}


def counted(service: Service, run: str, step: int) -> float:
    with service.session() as session:
        return session.step(step, run=run).metrics()["counts/tokens"]


def run_python(program: str, *arguments: str, **environment: str) -> None:
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        check=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_raw_call_that_ray_retries_over_a_killed_coordinator_counts_once(service: Service) -> None:
    call = {"run": "raw", "step": 3, "stage": "actor_update", "rank": 0, "world_size": 1}
    coordinator = service.coordinator
    assert ray.get(coordinator.begin_stage.remote(**call))["occurrence"] == 0
    first = coordinator.end_stage.remote(**call, payload=refs_of(payload(seed=1)))
    assert ray.get(first, timeout=60)["payload"] == "ingested"  # now there is an ingestor
    assert ray.get(coordinator.begin_stage.remote(**call))["occurrence"] == 1
    with service.held("ingestor"):
        answer = coordinator.end_stage.remote(
            **call, payload=refs_of(payload(seed=2, first_sample=4))
        )
        eventually(lambda: service.status()["pending_payloads"] == 1)
        service.reborn("coordinator", service.kill("coordinator"))
    settled = ray.get(answer, timeout=60)
    assert (settled["payload"], settled["occurrence"], settled["attempt"]) == ("ingested", 1, 1)
    with service.session() as session:
        rows = list(session.step(3, run="raw").stages())
        assert sorted((row["part"], row["status"]) for row in rows) == [
            ("0.0.0.0", "ok"), ("1.0.0.0", "ok"),
        ]  # fmt: skip
        assert len(session.losses("raw")) == 0
    assert counted(service, "raw", 3) == 88


def test_unkeyed_raw_calls_are_marked_and_keyed_ones_find_their_attempt(service: Service) -> None:
    coordinator = service.coordinator

    def end(step: int, **more: object) -> int:
        call = coordinator.end_stage.remote(
            run="keys", step=step, stage="actor_update", rank=0, **more
        )
        return int(ray.get(call, timeout=60)["attempt"])

    assert end(1) == 1
    assert end(1, attempt_key="a") == 2
    assert end(1, attempt_key="b") == 3
    service.kill_and_await("coordinator")
    assert end(2, attempt_key="a") == 2
    assert end(2) == 3
    rank = Rank("keys", 0, attempt_key="a")
    rank.ask("report", 3, None)
    eventually(rank.settled)
    rank.kill()
    with service.session() as session:
        attempts = {row["attempt"]: row for row in session.attempts("keys")}
        assert {number: row["attempt_key"] for number, row in attempts.items() if number > 1} == {
            2: "a", 3: "b",
        }  # fmt: skip
        assert [attempts[number]["unkeyed"] for number in (1, 2, 3)] == [True, False, False]
        steps = {row["step"] for row in session.steps("keys", attempt=2)}
        assert steps == {1, 2, 3}


def test_unrelated_job_writes_with_three_lines(service: Service, address: str) -> None:
    run_python(
        """
        import sys
        import ray
        ray.init(address=sys.argv[1], log_to_driver=False)

        coordinator = ray.get_actor("DebugCoordinator", namespace="stagescope")
        coordinator.begin_stage.remote(run="other-job", step=1, stage="actor_update", rank=0)
        ray.get(coordinator.end_stage.remote(run="other-job", step=1, stage="actor_update", rank=0))
        """,
        address,
        RAY_AUTH_MODE="token",
    )
    with service.session() as session:
        assert [row["status"] for row in session.step(1, run="other-job").stages()] == ["ok"]


def test_registered_engines_outlive_the_coordinator(service: Service) -> None:
    with service.session() as session:
        session.add_engine("http://127.0.0.1:9", name="llm", model="m")
        service.kill_and_await("coordinator")
        assert session.engines()["name"] == ("llm",)
        session.remove_engine("llm")
        assert len(session.engines()) == 0


def test_serve_again_changes_nothing(service: Service, address: str) -> None:
    pids = {which: service.pid(which) for which in ("coordinator", "api")}
    before = (service.settings.home / "service.json").read_text()
    again = start_service(service.settings, address=address)
    assert again.already_running
    assert (again.url, again.address) == (service.info.url, service.info.address)
    assert {which: service.pid(which) for which in pids} == pids
    assert (service.settings.home / "service.json").read_text() == before


def test_stop_ends_the_service_alone_and_what_it_stored_answers_later(
    service: Service, address: str
) -> None:
    rank = Rank("stopped", world_size=1)
    rank.ask("report", 1, payload(seed=1))
    eventually(rank.settled)
    assert service.stop()
    assert not service.stop()
    assert ray.get_runtime_context().get_node_id()  # the cluster stays
    assert not (service.settings.home / "service.json").exists()
    with pytest.raises(ValueError, match="DebugCoordinator"):
        _ = service.coordinator
    # Training goes on meanwhile, and what it reports waits for the next service.
    rank.ask("report", 2, payload(seed=2))
    service.info = Service.start(service.settings.home, address).info
    eventually(rank.settled)
    for step in (1, 2):
        assert counted(service, "stopped", step) == 44
    with service.session() as session:
        assert len(session.losses("stopped")) == 0
    rank.kill()


def test_odd_arguments_of_calls_are_refused_by_name(service: Service) -> None:
    coordinator = service.coordinator
    for call, wrong in (
        (coordinator.pin.remote(attempt_id=1, step=1 << 63, by="x"), "step is 9223372036854775808"),
        (coordinator.remove_capture.remote(capture_id={}, by="x"), "capture_id is {}"),
        (coordinator.poll.remote(sender=None, revision=0), "sender is None"),
        (coordinator.record_events.remote(sender=(), events=None), "events is a NoneType"),
    ):
        with pytest.raises(InvalidInput, match=wrong):
            ray.get(call, timeout=30)
