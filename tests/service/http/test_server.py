from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.support.api import Service, service

from stagescope_service.api_actor import ApiActor
from stagescope_service.http import server as server_module
from stagescope_service.http.server import ApiServer, bind
from stagescope_service.store.queries.overview import ListedRun
from stagescope_wire import schema
from stagescope_wire.errors import Conflict, InvalidInput


def app() -> FastAPI:
    made = FastAPI()

    @made.get("/")
    async def root() -> dict[str, str]:
        return {"thread": threading.current_thread().name}

    return made


def test_serves_from_a_thread_and_lets_go() -> None:
    server = ApiServer(app(), port=0)
    assert not server.running
    server.start()
    server.start()
    url, port = server.url, server.port
    assert server.running
    assert httpx.get(url).json() == {"thread": "api-server"}
    server.stop()
    server.stop()
    assert not server.running
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    bind("127.0.0.1", port).close()
    server.start()
    assert httpx.get(server.url).status_code == 200
    server.stop()


def test_a_taken_port_is_a_clear_error() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        server = ApiServer(app(), port=port)
        with pytest.raises(Conflict, match=f"port {port} of 127.0.0.1 is taken") as caught:
            server.start()
        assert "STAGESCOPE_PORT" in caught.value.advice
        assert f"taken by pid {os.getpid()} (" in caught.value.wrong
        assert not server.running
    server.start()
    assert server.port == port
    server.stop()


def test_a_port_of_another_homes_service_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    process = f"pid 7 (ray::{ApiActor.__name__})"
    monkeypatch.setattr(server_module, "holder_of", lambda port: process)
    with bind("127.0.0.1", 0) as taken, pytest.raises(Conflict) as caught:
        bind("127.0.0.1", taken.getsockname()[1])
    assert caught.value.wrong.endswith(f"is taken by {process}, another home's stagescope")
    assert "stagescope stop" in caught.value.advice


def test_waits_for_the_port_of_its_predecessor() -> None:
    taken = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    timer = threading.Timer(0.3, taken.close)
    timer.start()
    server = ApiServer(app(), port=port)
    server.start(wait_for_port=20)
    assert server.port == port
    server.stop()
    timer.join()


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_of_elsewhere_is_a_clear_error(host: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be bound"):
        ApiServer(app(), host=host, port=0).start()


def test_urls() -> None:
    assert ApiServer(app(), host="0.0.0.0", port=1).url == "http://127.0.0.1:1"
    assert ApiServer(app(), host="::1", port=1).url == "http://[::1]:1"
    assert ApiServer(app(), host="::", port=1).url == "http://[::1]:1"


def test_stops_although_a_poll_is_pending(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        poll = {
            "sender": schema.Sender("i", "r", "a", "actor", 0).wire(),
            "revision": 0,
            "wait": 20,
        }
        got: list[object] = []

        def ask() -> None:
            try:
                got.append(running.operate.post("/poll", json=poll).status_code)
            except httpx.TransportError as error:
                got.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while running.operate.get("/plan").status_code != 200:
            pass
        running.server.stop(timeout=15)
        thread.join(15)
        assert not thread.is_alive()
        assert not running.server.running
        assert len(got) == 1


def test_heavy_questions_do_not_block_what_training_sends(live: Service) -> None:
    released = threading.Event()
    runs = live.catalogue.runs

    def slow_runs(**page: Any) -> list[ListedRun]:
        released.wait(20)
        return runs(**page)

    live.catalogue.runs = slow_runs  # type: ignore[method-assign]
    answers: list[int] = []
    clients = [live.client(live.tokens.read) for _ in range(60)]
    threads = [
        threading.Thread(
            target=lambda client=client: answers.append(client.get("/runs").status_code)
        )
        for client in clients
    ]
    for thread in threads:
        thread.start()
    batch = {
        "sender": schema.Sender("i", "r", "a", "actor", 0).wire(),
        "events": [[1, "finish", 1, 1.0, 1.0, {}]],
    }
    for _ in range(5):
        taken = live.operate.post("/events", json=batch)
        assert taken.status_code == 200, taken.text
        assert live.operate.get("/healthz").status_code == 200
        assert live.operate.get("/readyz").status_code == 200
        assert live.operate.get("/plan").status_code == 200
    assert not answers
    released.set()
    for thread in threads:
        thread.join(60)
    assert answers == [200] * 60
