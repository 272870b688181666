"""One night of a service: started, asked, its processes killed, stopped; the Ray of `make test`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import psutil
import pytest
from tests.support.command_line import Home
from tests.support.measure import payload
from tests.support.ray_nodes import short_directory

ray = pytest.importorskip("ray")
from tests.support.cluster import Service, eventually, expect  # noqa: E402
from tests.support.ranks import Rank  # noqa: E402

from stagescope_service import clusters  # noqa: E402

pytestmark = pytest.mark.ray

RUN = "story"
HANDED = [payload(seed=rank, first_sample=4 * rank) for rank in (0, 1)]


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with short_directory() as path:
        settings = {"STAGESCOPE_LEASE_SECONDS": "4", "STAGESCOPE_POLL_SECONDS": "1"}
        made = Home(path / "home", path, **settings)
        yield made
        for process in processes(made):
            process.kill()


def processes(home: Home) -> list[psutil.Process]:
    """Return the processes that were started for a home."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("STAGESCOPE_HOME") == str(home.path):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def service(home: Home, clusters_closed: None) -> Iterator[Service]:
    """What `stagescope serve` started with a cluster of its own; this process is a driver of it."""
    told = home.json("serve", "--address", "local", "--port", "0")
    assert (told["cluster"], told["already_running"]) == ("embedded", False)
    with clusters.joined(told["address"]):
        yield Service.start(home.path, told["address"])


@pytest.fixture(scope="module")
def clusters_closed(clusters: contextlib.ExitStack) -> None:
    """Leave the cluster that the files before shared."""
    clusters.close()


@pytest.fixture(scope="module")
def ranks(service: Service) -> list[Rank]:
    """Two ranks that have reported two steps."""
    made = [Rank(RUN, number, world_size=2) for number in (0, 1)]
    train(made, [1, 2])
    return made


def train(ranks: list[Rank], steps: list[int]) -> None:
    """Let both ranks report these steps, at once, and wait for their receipts."""
    done = [rank.begins("train", steps, HANDED[at], 0.0) for at, rank in enumerate(ranks)]
    ray.get(done, timeout=60)
    for rank in ranks:
        eventually(rank.settled)


def test_http_the_client_and_the_command_line_give_the_same_exact_numbers(
    home: Home, service: Service, ranks: list[Rank]
) -> None:
    with service.session() as session:
        expect(session.step(1, run=RUN), *HANDED)
        by_client = session.step(1, run=RUN).metrics()
    by_http = httpx.get(
        f"{service.info.url}/v1/steps/1/metrics",
        params={"run": RUN},
        headers={"Authorization": f"Bearer {service.info.token_file.read_text().strip()}"},
    ).raise_for_status()
    by_command = home.json("metrics", "1", "--run", RUN)
    assert by_http.json()["metrics"] == by_command["metrics"]
    assert {*by_client} == {*by_command["metrics"]}
    mean = "training/rollout_probs_diff_mean"
    assert by_client[mean] == by_command["metrics"][mean]


def test_killed_processes_of_the_service_come_back_and_lose_nothing(
    service: Service, ranks: list[Rank]
) -> None:
    with service.held("ingestor") as pid:
        for rank, handed in zip(ranks, HANDED, strict=True):
            rank.ask("report", 3, handed)
            eventually(rank.acknowledged)
            assert rank.status()["waiting_payloads"] == 1
        service.kill_and_await("coordinator")
        service.kill_and_await("ingestor", lambda: all(rank.settled() for rank in ranks), pid)
    train(ranks, [4])
    with service.session() as session:
        for step in (1, 2, 3):
            expect(session.step(step, run=RUN), *HANDED)
        assert len(session.attempts(RUN)) == 1
    assert service.losses(RUN) == []


def test_a_killed_rank_is_named_with_what_it_took_along(
    home: Home, service: Service, ranks: list[Rank]
) -> None:
    for rank in ranks:
        rank.ask("begin", 5)
        eventually(rank.acknowledged)
    ranks[1].kill()
    (lost,) = eventually(lambda: service.losses(RUN))
    assert (lost["kind"], lost["step"], lost["stage"]) == ("stage", 5, "actor_update")
    assert (lost["role"], lost["rank"]) == ("actor", 1)
    assert "stopped reporting" in lost["reason"]
    assert service.stages(RUN, 5, rank=0)[0]["status"] == "open"
    ranks[0].ask("end")
    eventually(ranks[0].settled)
    assert [row["rank"] for row in home.json("losses", "--run", RUN)["rows"]] == [1]
    statuses = {row["rank"]: row["status"] for row in service.stages(RUN, 5)}
    assert statuses == {0: "ok", 1: "unfinished"}


def test_the_job_starts_again_as_the_next_attempt(service: Service, ranks: list[Rank]) -> None:
    ranks[0].kill()
    again = [
        Rank(RUN, number, world_size=2, attempt_key="again", resumed_from_step=4)
        for number in (0, 1)
    ]
    train(again, [5, 6])
    with service.session() as session:
        expect(session.step(5, run=RUN), *HANDED)
        first, second = sorted(session.attempts(RUN), key=lambda row: row["attempt"])
        assert (first["attempt"], second["attempt"]) == (1, 2)
        assert second["resumed_from_step"] == 4
        expect(session.step(4, run=RUN, attempt=1), *HANDED)
    for rank in again:
        rank.kill()


def test_stop_leaves_no_process_and_serve_answers_from_what_is_stored(
    home: Home, service: Service
) -> None:
    before = service.info.url
    ray.shutdown()  # a driver of this cluster; another one begins with what follows
    assert home.json("stop") == {"stopped": True}
    assert eventually(lambda: processes(home) == [])
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{before}/healthz")
    home.json("serve", "--address", "local", "--port", "0")
    try:
        rows = home.json("steps", "--run", RUN)["rows"]
        assert {row["step"] for row in rows} == {1, 2, 3, 4, 5, 6}
    finally:
        assert home.json("stop") == {"stopped": True}
    assert eventually(lambda: processes(home) == [])
