"""Below `/v1` the API is what it is without a prefix, with the same tokens and limits."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from tests.support.api import Rank, Service, service

import stagescope
from stagescope_service.http.auth import PREFIX


def described(live: Service, path: str) -> tuple[int, str | None, bytes]:
    answer = live.read.get(path)
    return answer.status_code, answer.headers.get("content-type"), answer.content


def test_every_path_answers_below_it_as_without_it(live: Service) -> None:
    Rank(live, world_size=1).stage("actor_update", 5, scalars={"loss": 1.0})
    for path in ("/healthz", "/runs", "/steps?run=r", "/steps/5/scalars", "/openapi.json", "/",
                 "/runs/none/attempts", "/steps/5/scalars?rnak=0", "/nowhere"):  # fmt: skip
        assert described(live, PREFIX + path) == described(live, path), path


def test_the_document_names_each_path_once(live: Service) -> None:
    document = live.get("/openapi.json")
    assert not [path for path in document["paths"] if path.startswith(PREFIX)]
    assert f"`{PREFIX}`" in document["info"]["description"]


def test_a_token_may_what_it_may_without_it(live: Service) -> None:
    anybody = live.client(None)
    assert anybody.get(f"{PREFIX}/healthz").status_code == 200
    for path in (f"{PREFIX}/runs", PREFIX, f"{PREFIX}{PREFIX}/healthz", f"{PREFIX}//healthz",
                 f"{PREFIX}x/healthz", "/v2/healthz"):  # fmt: skip
        assert anybody.get(path).status_code == 401, path
    assert live.read.get(f"{PREFIX}{PREFIX}/healthz").status_code == 404
    assert live.read.request("DELETE", f"{PREFIX}/captures/x").status_code == 403
    nothing = live.read.post(f"{PREFIX}/triggers/test", json={})  # reading suffices for it
    assert (nothing.status_code, nothing.json()["code"]) == (404, "not_found")
    assert live.operate.request("DELETE", f"{PREFIX}/captures/x").status_code == 404


def test_the_client_asks_below_it_where_its_url_says_so(live: Service) -> None:
    Rank(live, world_size=1).stage("actor_update", 5, scalars={"loss": 1.0})
    with stagescope.attach(live.server.url + PREFIX, token=live.tokens.read) as session:
        assert session.runs()["run"] == ("r",)
        assert session.step(5).scalars()["value"] == (1.0,)
        with pytest.raises(stagescope.NotFound):
            session.step(6).scalars()


def test_a_server_that_stops_does_not_wait_for_its_listeners(tmp_path: Path) -> None:
    with service(tmp_path / "home") as running:
        with running.read.stream("GET", f"{PREFIX}/stream") as answer:
            assert answer.status_code == 200
            began = time.monotonic()
            running.server.stop()
            assert time.monotonic() - began < 1.5  # GRACE_SECONDS is for answers that end
        with pytest.raises(httpx.TransportError):
            running.read.get(f"{PREFIX}/healthz")
