"""Numbers of a step that is still open, asked for in the training by way of the API's actor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.measure import payload

import stagescope
from stagescope_wire.errors import NotFound, Unreachable
from stagescope_workers import init
from stagescope_workers.metrics_feed import MetricsFeed
from stagescope_workers.probe.probe import Probe
from stagescope_workers.transport.link import RayLink

ray = pytest.importorskip("ray")
from tests.support.cluster import SECONDS, Service, eventually  # noqa: E402
from tests.support.ranks import Rank  # noqa: E402

pytestmark = pytest.mark.ray

STAGE = "actor_compute_log_prob"


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service.start(tmp_path_factory.mktemp("home"), address)
    warm = Rank("warm", world_size=1)
    warm.ask("report", 1, payload())  # makes the ingestor, which a test stops
    eventually(warm.settled)
    yield service
    service.stop()


@pytest.fixture
def probe(service: Service, request: pytest.FixtureRequest) -> Iterator[Probe]:
    """The driver's own probe."""
    probe = init(request.node.name, role="driver", rank=0, world_size=1)
    eventually(lambda: probe.service)
    yield probe
    probe.close(0.0)


@pytest.fixture
def feed(probe: Probe) -> Iterator[MetricsFeed]:
    feed = MetricsFeed(probe)
    yield feed
    feed.close()


def record(probe: Probe, step: int, seed: int = 0) -> None:
    taken = payload(seed=seed)
    with probe.stage(STAGE, step=step) as stage:
        stage.record(
            **{name: item[2] for name, item in taken["tensors"].items()}, **taken["strings"]
        )


def ask(probe: Probe, step: int) -> dict[str, Any]:
    link = probe.service
    assert link is not None
    return link.metrics(probe.run, probe.attempt_key, step).result(SECONDS)


def over_http(service: Service, path: str, **params: str) -> object:
    headers = {"authorization": f"Bearer {service.token}"}
    found = httpx.get(f"{service.info.url}{path}", params=params, headers=headers, timeout=30)
    assert found.status_code == 200, found.text
    return found.json()


def test_attach_finds_the_service_of_the_cluster_that_the_process_has_joined(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path))  # where no service.json is
    monkeypatch.setenv("STAGESCOPE_URL", "http://127.0.0.1:9")  # as `init`, which asks Ray first
    with stagescope.attach() as session:
        assert session.url == service.info.url
        assert "the Ray cluster that this process has joined" in repr(session)
        assert session.status()["ready"]
        assert service.token not in repr(session)
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9"):
        stagescope.attach("http://127.0.0.1:9", timeout=5.0)


def test_numbers_of_an_open_step_are_those_of_the_route(
    service: Service, probe: Probe, feed: MetricsFeed
) -> None:
    assert feed.get(1) == {}
    record(probe, 1)
    feed.request(1)
    taken = eventually(lambda: feed.get(1))
    answer = ask(probe, 1)
    # The attempt's key is the one that Ray gives.
    assert answer == over_http(
        service, "/steps/1/metrics", run=probe.run, attempt_key=str(probe.attempt_key)
    )
    assert answer["complete"] == "open"
    assert taken["rollout_corr/kl"] == answer["metrics"]["rollout_corr/kl"] != 0.0
    assert taken["per_round/round_0_abs_diff_mean"] > 0.0
    assert taken.keys() == answer["metrics"].keys()
    with pytest.raises(NotFound, match="step 2"):
        ask(probe, 2)
    link = probe.service
    assert link is not None
    with pytest.raises(NotFound, match="other"):
        link.metrics(probe.run, "other", 1).result(SECONDS)


def test_late_payload_is_waited_for(service: Service, probe: Probe, feed: MetricsFeed) -> None:
    record(probe, 1)
    feed.request(1)
    eventually(lambda: feed.get(1))
    other = Rank(probe.run, 1, role="driver")
    with service.held("ingestor"):
        other.begins("report", 1, payload(seed=1, first_sample=4), STAGE)
        eventually(lambda: ask(probe, 1)["coverage"]["payloads_pending"] == 1)
        feed.request(1)
        partial = ask(probe, 1)
        assert partial["coverage"]["tokens"] == 44
        assert feed.get(1) == {}
    taken = eventually(lambda: feed.get(1))
    assert taken["counts/tokens"] == 88


def test_killed_api_fails_the_question_and_is_asked_again(
    service: Service, probe: Probe, feed: MetricsFeed
) -> None:
    record(probe, 1)
    eventually(lambda: probe.outbox.is_empty)
    link = probe.service
    assert link is not None
    with service.held("api") as pid:
        asked = link.metrics(probe.run, probe.attempt_key, 1)
        feed.request(1)
        assert feed.get(1) == {}
        service.kill("api", pid)
        assert asked.exception(SECONDS) is not None
    record(probe, 2)  # events go on without the API
    eventually(lambda: probe.outbox.is_empty)
    taken = eventually(lambda: feed.get(1))
    assert taken["counts/tokens"] == 44


def test_cluster_without_an_api_is_unreachable(service: Service, probe: Probe) -> None:
    link = RayLink.find()
    assert link is not None
    service.stop()
    with pytest.raises(Unreachable, match="no API"):
        link.metrics(probe.run, None, 1).result(SECONDS)
