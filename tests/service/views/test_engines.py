"""The registry of long-lived engines: who may write, what is asked of them, and when."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from tests.support.answering import serving
from tests.support.api import Rank, Service
from tests.support.engines.servers import EngineServer
from tests.support.proxy import running_proxy, set_proxy

from stagescope_service.views.reading import engine_health
from stagescope_wire.engines import Sampling
from stagescope_wire.errors import EngineError, Forbidden, NotFound


@contextlib.contextmanager
def engine() -> Iterator[tuple[str, EngineServer]]:
    server = EngineServer("vllm")
    with serving(server.app) as url:
        yield url, server


def add(live: Service, **fields: str) -> None:
    answer = live.operate.post("/engines", json=fields)
    assert answer.status_code == 200, answer.text


def test_registered_listed_used_and_removed(live: Service) -> None:
    with engine() as (url, _):
        add(live, url=url, name="llm", model="m", run="countdown", note="two GPUs")
        [row] = live.get("/engines")["rows"]
        assert (row["name"], row["url"], row["model"]) == ("llm", url, "m")
        assert row["used_by"] == ["countdown"]
        assert row["state"] == "not asked"
        assert "operate token" in row["by"]
        assert row["wall"] <= time.time()
        assert live.get("/engines/llm")["url"] == url
        add(live, url=url, name="llm", note="again")
        [row] = live.get("/engines")["rows"]
        assert (row["note"], row["model"]) == ("again", None)
    assert live.operate.delete("/engines/llm").status_code == 200
    assert live.get("/engines")["rows"] == []
    assert live.problem(404, "/engines/llm")["code"] == "not_found"
    assert live.operate.delete("/engines/llm").status_code == 404
    with pytest.raises(NotFound, match="no engine is called 'llm'"):  # a raw call of the actor
        asyncio.run(live.engine.remove_engine(name="llm", by="me"))
    assert [action for _, action in live.engine.audit] == ["add_engine"] * 2 + ["remove_engine"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://u:p@h:1", "gopher://h:70", "h h"])
def test_another_kind_of_url_is_refused(live: Service, url: str) -> None:
    answer = live.operate.post("/engines", json={"url": url})
    assert answer.status_code == 422, answer.text
    assert live.get("/engines")["rows"] == []


def test_health_is_checked_only_on_request_by_one_path(live: Service) -> None:
    live.now = time.time()  # an answer is fresh for a second of this clock
    with engine() as (url, server):
        add(live, url=url)
        live.get("/engines")
        assert server.asked == []
        [row] = live.get("/engines", check=True)["rows"]
        assert (row["state"], row["status"]) == ("up", 200)
        assert row["age_seconds"] == 0
        assert server.asked == [("/health", None)]
        assert server.authorization == [None]  # no token of the service goes there
        live.now += 0.5
        [row] = live.get("/engines", check=True)["rows"]
        assert len(server.asked) == 1  # many readers are one question
        assert row["age_seconds"] == pytest.approx(0.5)
        server.health = 503
        live.now += 1
        [row] = live.get("/engines", check=True)["rows"]
        assert len(server.asked) == 2
        assert (row["state"], row["reason"]) == ("refuses", "/health answers 503")
        live.now += 30
        [row] = live.get("/engines")["rows"]
        assert row["age_seconds"] == pytest.approx(30)


def test_health_is_not_asked_of_a_proxy_of_the_environment(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(EngineServer("vllm").app, host="127.0.0.2") as url, running_proxy() as proxy:
        live.now = time.time()
        set_proxy(monkeypatch, proxy)
        add(live, url=url)
        [row] = live.get("/engines", check=True)["rows"]
        assert (row["state"], proxy.tokens) == ("up", [])
        live.now += 2
        monkeypatch.setenv("STAGESCOPE_PROXY", proxy.url)
        [row] = live.get("/engines", check=True)["rows"]
        assert f"/health answers 503 through the proxy {proxy.url}" in row["reason"]


def test_a_redirect_is_not_followed(live: Service) -> None:
    with engine() as (url, server):
        server.health = 302
        add(live, url=url)
        [row] = live.get("/engines", check=True)["rows"]
        assert (row["state"], row["status"]) == ("refuses", 302)
        assert [path for path, _ in server.asked] == ["/health"]


def test_engines_that_hang_cost_one_deadline(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_health, "DEADLINE_SECONDS", 0.5)
    with contextlib.ExitStack() as stack:
        for number in range(40):  # more than are asked at one time
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = silent.getsockname()[1]
            add(live, url=f"http://127.0.0.1:{port}", name=f"e{number}")
        add(live, url="http://127.0.0.1:9", name="nobody")
        begun = time.monotonic()
        rows = live.get("/engines", check=True, limit=100)["rows"]
        assert time.monotonic() - begun < 5
    states = {row["name"]: row["state"] for row in rows}
    assert set(states.values()) == {"unreachable"}
    assert next(row for row in rows if row["name"] == "e0")["reason"] == "no answer within 0.5 s"


def test_runs_whose_settings_name_an_engine_use_it(live: Service) -> None:
    add(live, url="http://127.0.0.1:9", name="llm")
    Rank(live, run="by-name", settings={"engine": "llm"})
    Rank(live, run="by-url", settings={"engine": "http://127.0.0.1:9"})
    Rank(live, run="another", settings={"engine": "else"})
    [row] = live.get("/engines")["rows"]
    assert sorted(row["used_by"]) == ["by-name", "by-url"]


def test_a_session_gets_an_engine_back_by_name(live: Service) -> None:
    with engine() as (url, _), live.session("operate") as session:
        session.add_engine(url.removeprefix("http://"), name="llm")
        rollout = session.engine("llm")
        assert rollout.generate([[1, 2]], Sampling(max_tokens=3))[0].token_ids is not None
        rollout.close()
        assert session.engines(check=True)["state"] == ("up",)
        session.remove_engine("llm")
        with pytest.raises(NotFound):
            session.engine("llm")
        session.add_engine("http://127.0.0.1:9", name="gone")
        with pytest.raises(EngineError, match="cannot be reached"):
            session.engine("gone")
    with live.session() as session, pytest.raises(Forbidden):
        session.add_engine("http://127.0.0.1:9")
