from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.api import Service, service

from stagescope_service.http.requests import BodyReaders
from stagescope_wire import schema

EVENTS = {
    "sender": schema.Sender("i", "r", "a", "actor", 0).wire(),
    "events": [[1, "finish", 1, 1.0, 1.0, {}]],
}


def head(running: Service, path: str, size: int, grade: str = "operate") -> bytes:
    token = getattr(running.tokens, grade)
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n"
        f"Content-Type: application/json\r\nAuthorization: Bearer {token}\r\n\r\n"
    ).encode()


@contextlib.contextmanager
def connections(running: Service, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Connections that sent something and then stand still."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            address = ("127.0.0.1", running.server.port)
            one = stack.enter_context(socket.create_connection(address, timeout=60))
            one.sendall(sent)
            made.append(one)
        yield made


def held(running: Service, enough: Callable[[int], bool]) -> None:
    """Wait until so many bytes of bodies are in memory."""
    readers: BodyReaders = running.app.state.bodies
    reader = readers._readers["operate"]
    while not enough(reader.held):
        running.read.get("/healthz")


def test_an_event_passes_200_stalled_bodies(tmp_path: Path) -> None:
    with (
        service(tmp_path, body_seconds=300) as running,
        connections(running, 200, head(running, "/events", 100) + b"{") as still,
    ):
        held(running, lambda size: size == 200)
        taken = running.operate.post("/events", json=EVENTS)
        assert taken.status_code == 200, taken.text
        assert select.select(still, [], [], 0)[0] == []


def test_a_stalled_body_is_dropped(tmp_path: Path) -> None:
    with (
        service(tmp_path, body_seconds=0.2) as running,
        connections(running, 1, head(running, "/events", 100) + b"{") as (slow,),
    ):
        answer = slow.recv(4096)
        assert b"503" in answer.split(b"\r\n")[0]
        assert b"Retry-After" in answer or b"retry-after" in answer
        held(running, lambda size: size == 0)


def test_a_body_that_trickles_is_dropped(tmp_path: Path) -> None:
    with (
        service(tmp_path, body_seconds=0.2, body_rate=1e6) as running,
        connections(running, 1, head(running, "/events", 10_000) + b"{") as (slow,),
    ):
        while not select.select([slow], [], [], 0.02)[0]:
            slow.sendall(b" ")
        assert b"503" in slow.recv(4096).split(b"\r\n")[0]


def test_a_slow_body_that_keeps_its_rate_is_read(tmp_path: Path) -> None:
    text = json.dumps(EVENTS).encode()
    with (
        service(tmp_path, body_seconds=0.5, body_rate=1.0) as running,
        connections(running, 1, head(running, "/events", len(text))) as (slow,),
    ):
        for start in range(0, len(text), 16):
            slow.sendall(text[start : start + 16])
            assert not select.select([slow], [], [], 0.12)[0] or start + 16 >= len(text)
        assert b"200" in slow.recv(4096).split(b"\r\n")[0]


def test_slow_bodies_give_their_memory_to_others(tmp_path: Path) -> None:
    bounds = {"max_bodies": 1, "max_body_bytes": 1 << 20, "max_json_bytes": 1 << 20}
    sent = b" " * (1 << 19)
    with (
        service(tmp_path, body_seconds=300, **bounds) as running,
        connections(running, 2, head(running, "/events", 1 << 20) + sent) as still,
    ):
        held(running, lambda size: size == 1 << 20)
        # Nothing is free any more: refused for now, and taken once it is known who is slow.
        while (taken := running.operate.post("/events", json=EVENTS)).status_code == 503:
            assert taken.headers["retry-after"]
            assert "send the same again" in taken.json()["advice"]
        assert taken.status_code == 200, taken.text
        dropped = select.select(still, [], [], 10)[0]
        assert len(dropped) == 1
        assert b"503" in dropped[0].recv(4096).split(b"\r\n")[0]


def test_the_read_token_holds_no_memory_of_ranks(tmp_path: Path) -> None:
    bounds = {"max_bodies": 1, "max_body_bytes": 1024, "max_json_bytes": 1024}
    with (
        service(tmp_path, body_seconds=300, **bounds) as running,
        connections(running, 1, head(running, "/comparisons", 1024, "read") + b" " * 1023),
    ):
        readers: BodyReaders = running.app.state.bodies
        while not readers._readers["read"].held:
            running.read.get("/healthz")
        assert running.operate.post("/events", json=EVENTS).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: loc"])
def test_a_connection_without_a_complete_head_is_closed(tmp_path: Path, sent: bytes) -> None:
    with (
        service(tmp_path, header_seconds=0.2) as running,
        connections(running, 1, sent) as (half,),
        contextlib.suppress(ConnectionResetError),
    ):
        assert half.recv(4096) == b""


def test_a_second_head_has_its_deadline_too(tmp_path: Path) -> None:
    whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        service(tmp_path, header_seconds=0.3) as running,
        connections(running, 1, whole) as (half,),
    ):
        assert b"200" in half.recv(4096).split(b"\r\n")[0]
        half.sendall(b"GET /hea")
        with contextlib.suppress(ConnectionResetError):
            while half.recv(4096):
                pass


def test_a_client_that_trickles_after_a_refusal_is_disconnected(tmp_path: Path) -> None:
    refused = b"POST /events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    with (
        service(tmp_path, header_seconds=0.3) as running,
        connections(running, 1, refused) as (slow,),
    ):
        assert b"401" in slow.recv(4096).split(b"\r\n")[0]
        with contextlib.suppress(ConnectionError):
            while not select.select([slow], [], [], 0.05)[0] or slow.recv(4096):
                slow.sendall(b"x")


def test_a_client_that_leaves_during_a_body_causes_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with service(tmp_path) as running:
        with connections(running, 20, head(running, "/events", 100) + b"{"):
            held(running, lambda size: size == 20)
        held(running, lambda size: size == 0)
        with connections(running, 20, head(running, "/poll", 100) + b"{"):
            held(running, lambda size: size == 20)
        held(running, lambda size: size == 0)
        assert running.operate.post("/events", json=EVENTS).status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
