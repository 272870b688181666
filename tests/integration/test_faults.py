"""Faults on a real cluster: what was acknowledged is there, what was lost is listed.

Ranks are processes with the real probe; what they report is compared with what the API answers.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.measure import payload

ray = pytest.importorskip("ray")
from tests.support.cluster import Service, eventually, expect  # noqa: E402
from tests.support.ranks import Rank, hanging_job  # noqa: E402

pytestmark = pytest.mark.ray

RESUMES = 5.0
"""Seconds in which answers resume once Ray has made a killed actor anew."""


@pytest.fixture(scope="module")
def service(
    address: str, data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("home")
    service = Service.start(home, address, data_dir=data_dir, ring_bytes=20_000_000)
    warm = Rank("warm", world_size=1)
    warm.ask("report", 1, payload())  # makes the ingestor, which tests stop and kill
    eventually(warm.settled)
    yield service
    service.stop()


def test_killed_coordinator_loses_nothing_and_hurts_no_training(service: Service) -> None:
    run = "coordinator"
    ranks = [Rank(run, number, world_size=2) for number in (0, 1)]
    handed = [payload(seed=number, first_sample=4 * number) for number in (0, 1)]
    work = 0.05
    alive = [r.begins("train", [*range(1, 16)], handed[i], work) for i, r in enumerate(ranks)]
    calm = [seconds for took in ray.get(alive, timeout=60) for seconds in took]
    training = [r.begins("train", [*range(16, 76)], handed[i], work) for i, r in enumerate(ranks)]
    for _ in range(2):
        assert service.kill_and_await("coordinator") < RESUMES
    rough = [seconds for took in ray.get(training, timeout=60) for seconds in took]
    for rank in ranks:
        rank.ask("end_step", 75)
        eventually(rank.settled)
        status = rank.status()
        assert status["dropped"] == {}
        assert status["refused"] == {}
    slower = statistics.median(rough) / statistics.median(calm)
    print(f"a step with the coordinator killed: {slower:.3f} of one with it alive")  # noqa: T201
    assert slower < 1.25
    with service.session() as session:
        assert {row["step"] for row in session.steps(run)} == {*range(1, 76)}
        for step in (1, 16, 30, 45, 60, 75):
            expect(session.step(step, run=run), *handed)
    assert service.losses(run) == []
    for rank in ranks:
        rank.kill()


def test_a_rank_that_comes_much_later_counts_in_the_steps_that_closed_without_it(
    service: Service,
) -> None:
    run, steps = "late", [*range(1, 21)]
    ranks = [Rank(run, number, world_size=2) for number in (0, 1)]
    handed = [payload(seed=number, first_sample=4 * number) for number in (0, 1)]
    ranks[0].ask("train", steps, handed[0], 0.0)
    eventually(ranks[0].settled)
    with service.session() as session:
        eventually(lambda: session.step(1, run=run).metrics().about["complete"] == "partial")
        ranks[1].ask("train", steps, handed[1], 0.0)
        eventually(ranks[1].settled)
        for step in (1, 10, 19):
            expect(session.step(step, run=run), *handed)
            about = eventually(
                lambda: (
                    (said := session.step(step, run=run).metrics().about)["complete"] == "complete"  # noqa: B023
                    and said
                )
            )
            assert about["missing"] == []
        listed = {row["step"]: row["complete"] for row in session.steps(run)}
        assert {listed[step] for step in steps[:-1]} == {"complete"}
    for rank in ranks:
        rank.kill()


def test_killed_ingestor_reads_again(service: Service) -> None:
    rank = Rank("ingestor", world_size=1)
    with service.held("ingestor") as pid:
        rank.ask("report", 1, payload(seed=1))
        rank.ask("end_step", 1)
        eventually(rank.acknowledged)
        took = service.kill_and_await("ingestor", rank.settled, pid)
    assert took < RESUMES
    with service.session() as session:
        expect(session.step(1, run="ingestor"), payload(seed=1))
    assert service.losses("ingestor") == []
    rank.kill()


def test_unread_payload_of_a_killed_rank_is_lost_and_its_event_stands(service: Service) -> None:
    rank = Rank("silent", world_size=1)
    with service.held("ingestor"):
        rank.ask("report", 7, payload(seed=7))
        eventually(rank.acknowledged)
        # Both that had the refs: the rank, and the coordinator that had handed them on.
        os.kill(rank.pid, signal.SIGSTOP)
        old = service.kill("coordinator")
        rank.kill()
        service.reborn("coordinator", old)
    (lost,) = eventually(lambda: service.losses("silent"))
    assert (lost["kind"], lost["step"], lost["stage"]) == ("payload", 7, "actor_update")
    assert "stopped reporting before the payload was read" in lost["reason"]
    (row,) = service.stages("silent", 7)
    assert row["status"] == "ok"


def test_payload_whose_owner_died_is_lost_with_the_reason(service: Service) -> None:
    rank = Rank("raw-owner", world_size=1)
    with service.held("ingestor"):
        refs = rank.ask("end_raw", "raw-owner", 7, payload(seed=7))
        eventually(lambda: service.status()["pending_payloads"] == 1)
        rank.kill()
        eventually(lambda: all(owner_is_dead(ref) for ref in refs))
    (lost,) = eventually(lambda: service.losses("raw-owner", kind="payload"))
    assert lost["step"] == 7
    assert "could not be read" in lost["reason"]
    assert "owner" in lost["reason"].lower()
    (row,) = service.stages("raw-owner", 7)
    assert row["status"] == "ok"


def test_payloads_of_a_dead_rank_hold_up_no_other(service: Service) -> None:
    """Ray reads a ref that is an argument before the call, for ever if its owner is gone."""
    dead, other = (Rank("held-up", number, world_size=2) for number in (0, 1))
    before = free_store()
    with service.held("ingestor"):
        for step in range(1, 31):
            dead.ask("report_own", step, 64, 1024, step)
        refs = dead.ask("end_raw", "held-up-too", 1, payload(seed=7))
        other.ask("report", 1, payload(seed=100, first_sample=4))
        eventually(lambda: dead.acknowledged() and other.acknowledged())
        eventually(lambda: free_store() < before - 2e7)
        dead.kill()
        # What the store says of itself may be older than the kill.
        eventually(lambda: all(owner_is_dead(ref) for ref in refs))
        eventually(lambda: free_store() > before - 5e6)
    eventually(other.settled)
    (row,) = service.stages("held-up", 1, rank=1)
    assert row["status"] == "ok"
    reasons = eventually(lambda: [row["reason"] for row in service.losses("held-up")])
    assert all("could not be read" in reason for reason in reasons)
    other.kill()


def free_store() -> float:
    """Return the free bytes of the object store; asks no process that may be held."""
    return float(ray.available_resources()["object_store_memory"])


def owner_is_dead(ref: object) -> bool:
    """Return whether Ray knows that the owner of an object died: until then a `get` waits."""
    try:
        ray.get(ref, timeout=1.0)
    except ray.exceptions.GetTimeoutError:
        return False
    except ray.exceptions.OwnerDiedError:
        return True
    return False


def test_killed_api_answers_again_at_its_address(service: Service) -> None:
    rank = Rank("api", world_size=1)
    rank.ask("report", 1, payload(seed=1))
    eventually(rank.settled)
    with service.session() as session:
        expect(session.step(1, run="api"), payload(seed=1))
        assert service.kill_and_await("api") < RESUMES
        expect(session.step(1, run="api"), payload(seed=1))
    rank.kill()


def test_killed_driver_leaves_an_attempt_and_the_next_opens_another(
    service: Service, address: str
) -> None:
    for first in (1, 2):
        hanging_job(address, "driver", first).kill()
        attempt = first
        eventually(lambda: len(service.losses("driver", attempt=attempt)) == 2)  # noqa: B023
    rows = service.losses("driver")
    assert {(row["attempt"], row["step"], row["rank"], row["kind"]) for row in rows} == {
        (1, 2, 0, "stage"), (1, 2, 1, "stage"), (2, 3, 0, "stage"), (2, 3, 1, "stage"),
    }  # fmt: skip
    with service.session() as session:
        attempts = list(session.attempts("driver"))
        assert [row["attempt"] for row in attempts] == [2, 1]
        assert len({row["attempt_key"] for row in attempts}) == 2
        # What was acknowledged before the kill answers, in both attempts.
        for step, attempt in ((1, 1), (2, 2)):
            found = session.step(step, run="driver", attempt=attempt).metrics()
            assert found["counts/tokens"] == 32
            assert found["logprob_abs_diff/mean"] == pytest.approx(0.01 * step, rel=1e-5)


def test_catalogue_that_cannot_be_opened_is_waited_for(service: Service) -> None:
    rank = Rank("closed", world_size=1)
    rank.ask("report", 1, payload(seed=1))
    eventually(rank.settled)
    data = service.settings.data_path
    away = data.with_name("away")
    data.rename(away)
    data.write_text("in the way")
    try:
        old = service.kill("coordinator")
        service.reborn("coordinator", old)
        eventually(lambda: "cannot be opened" in service.status().get("not_ready", ""))
        code, text = service.ready()
        assert code == 503
        assert "catalogue" in text
        rank.ask("report", 2, payload(seed=2))
        assert not rank.acknowledged()
    finally:
        data.unlink()
        away.rename(data)
    began = time.monotonic()
    eventually(lambda: service.ready()[0] == 200)
    print(f"ready {time.monotonic() - began:.2f} s after it could be opened")  # noqa: T201
    assert time.monotonic() - began < RESUMES
    eventually(rank.settled)
    with service.session() as session:
        expect(session.step(1, run="closed"), payload(seed=1))
        expect(session.step(2, run="closed"), payload(seed=2))
    assert service.losses("closed") == []
    rank.kill()


def test_full_disk_while_the_coordinator_restarts_is_waited_for(service: Service) -> None:
    disk = service.settings.data_path.parent
    if not os.path.ismount(disk):
        pytest.skip("this user may not mount a filesystem")
    rank = Rank("full", world_size=1)
    rank.ask("report", 1, payload(seed=1))
    eventually(rank.settled)
    resize(disk, str(shutil.disk_usage(disk).used))
    try:
        old = service.kill("coordinator")
        service.reborn("coordinator", old)
        steps = itertools.count(2)
        eventually(
            lambda: (
                rank.ask("flood", next(steps))
                or "free space" in service.status().get("not_ready", "")
            )
        )
        code, text = service.ready()
        assert (code, "not ready" in text) == (503, True)
        rank.ask("report", 1000, payload(seed=1000))
        rank.ask("begin", 1001)
        # Longer than a lease: nobody can be heard, so nobody stopped reporting.
        lapsed = time.monotonic() + 1.5 * service.settings.lease_seconds
        eventually(lambda: not rank.acknowledged() and time.monotonic() > lapsed)
    finally:
        resize(disk, "4g")
    began = time.monotonic()
    eventually(lambda: service.ready()[0] == 200)
    print(f"ready {time.monotonic() - began:.2f} s after there was space")  # noqa: T201
    assert time.monotonic() - began < RESUMES
    rank.ask("end")
    eventually(rank.settled)
    assert rank.status()["dropped"] == {}
    with service.session() as session:
        expect(session.step(1, run="full"), payload(seed=1))
        expect(session.step(1000, run="full"), payload(seed=1000))
        for step in range(2, next(steps)):
            assert len(session.step(step, run="full").scalars()) == 1000
    assert service.losses("full") == []
    assert [row["status"] for row in service.stages("full", 1001)] == ["ok"]
    rank.kill()


def resize(disk: Path, size: str) -> None:
    """Give a mounted tmpfs another size."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def test_plan_outlives_a_killed_coordinator(service: Service) -> None:
    rank = Rank("plan", world_size=1)
    with service.session() as session:
        requested = session.capture(run="plan", steps="all", stages="all", keep=["old_log_probs"])
        revision = session.plan().about["revision"]
        assert service.kill_and_await("coordinator") < RESUMES
        plan = session.plan()
        assert [row["capture_id"] for row in plan] == [requested["capture_id"]]
        assert plan.about["revision"] == revision
        eventually(lambda: rank.status()["plan_revision"] == revision)
        session.remove_capture(requested["capture_id"])
        eventually(lambda: rank.status()["plan_revision"] == revision + 1)
        assert service.kill_and_await("coordinator") < RESUMES
        assert len(session.plan()) == 0
        assert session.plan().about["revision"] == revision + 1
    rank.kill()


def test_health_needs_no_coordinator(service: Service) -> None:
    with service.held("coordinator"):
        assert httpx.get(f"{service.info.url}/healthz").status_code == 200
        code, text = service.ready()
        assert code == 503
        assert "does not answer" in text
        with service.session() as session:
            assert len(session.runs()) > 0
    eventually(lambda: service.ready()[0] == 200)
