from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from tests.support.answering import OPERATE, READ, Answering
from tests.support.step_batches import step_batch

import stagescope
from stagescope import Session
from stagescope.transport import Transport
from stagescope_wire import errors
from stagescope_wire.discovery import ServiceLocation
from stagescope_wire.links import Link

NOT_READY = (503, {"code": "not_ready", "wrong": "the catalogue is being opened"})
TOO_MANY = (429, {"code": "too_many_requests", "wrong": "more than the 2 requests"})
UNAVAILABLE = (503, {"code": "catalogue_unavailable", "wrong": "the disk is full"})


def test_every_error_of_the_tree_comes_back_as_itself(service: Answering, client: Session) -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        # A status that is not retried; the code alone decides on the class.
        body = {"code": kind.code, "wrong": "w", "expected": "e", "advice": "a"}
        service.refusals.append((418, body))
        with pytest.raises(errors.StagescopeError) as caught:
            client.get("/runs")
        # One with a reason shares the code of its parent.
        assert type(caught.value) is (kind.__base__ if kind.reason else kind), name
        assert (caught.value.wrong, caught.value.expected) == ("w", "e")
        assert caught.value.advice.startswith("a")


def test_links_of_an_error_are_calls_of_the_session(service: Answering, client: Session) -> None:
    see = [Link("stages", 5, shows="who has arrived").to_json(), Link("losses").to_json()]
    advice = "wait; see /steps/5/stages for who has arrived, /losses"
    body = {"code": "not_found", "wrong": "w", "expected": "", "advice": advice, "see": see}
    of_other_version = {**body, "advice": "look at /steps/5/stages, /losses"}
    service.refusals += [(404, body), (404, of_other_version)]
    with pytest.raises(errors.NotFound) as caught:
        client.get("/runs")
    assert (caught.value.advice, len(caught.value.see)) == ("wait", 2)
    calls = "see session.step(5).stages() for who has arrived, session.lost()"
    assert str(caught.value) == f"w; wait; {calls}"
    with pytest.raises(errors.NotFound, match=r"w; look at /steps/5/stages, /losses$"):
        client.get("/runs")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, errors.Unauthorized), (403, errors.Forbidden), (404, errors.NotFound),
        (409, errors.Conflict), (422, errors.InvalidInput), (418, errors.StagescopeError),
    ],
)  # fmt: skip
def test_an_unknown_code_falls_back_to_the_status(
    service: Answering, client: Session, status: int, kind: type[errors.StagescopeError]
) -> None:
    service.refusals.append((status, {"code": "of_a_later_version", "detail": "said so"}))
    with pytest.raises(errors.StagescopeError, match="said so") as caught:
        client.get("/runs")
    assert type(caught.value) is kind


def test_a_service_that_is_not_ready_is_waited_for(service: Answering, client: Session) -> None:
    service.refusals += [NOT_READY, NOT_READY, UNAVAILABLE]
    assert len(client.runs()) == 2
    assert len(service.seen) == 4


def test_one_request_too_many_is_sent_again(service: Answering, client: Session) -> None:
    service.refusals += [TOO_MANY]
    assert len(client.runs()) == 2
    service.refusals += [TOO_MANY]
    client.capture(steps=[5])
    assert len(service.captures) == 1


@pytest.mark.parametrize(
    ("refusal", "kind"), [(TOO_MANY, errors.TooManyRequests), (NOT_READY, errors.NotReady)]
)
def test_the_wait_ends_at_the_deadline_with_the_reason(
    service: Answering, refusal: tuple[int, dict[str, str]], kind: type[errors.StagescopeError]
) -> None:
    transport = Transport(ServiceLocation(service.url, "the test", READ), timeout=2.0)
    service.refusals += [refusal] * 50
    began = time.monotonic()
    with pytest.raises(kind, match=refusal[1]["wrong"]):
        transport.get("/runs")
    assert time.monotonic() - began < 20
    assert 2 <= len(service.seen) < 20
    transport.close()


def test_a_last_try_that_gets_no_answer_does_not_hide_the_reason(
    service: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(
        Transport(ServiceLocation(service.url, "the test", READ, OPERATE), timeout=0.5)
    ) as transport:
        send = transport._client.send

        def answer_once(request: httpx.Request) -> httpx.Response:
            if service.seen:
                raise httpx.ReadTimeout("timed out", request=request)
            return send(request)

        monkeypatch.setattr(transport._client, "send", answer_once)
        service.refusals.append(NOT_READY)
        with pytest.raises(errors.NotReady, match=NOT_READY[1]["wrong"]):
            transport.get("/runs")
        with pytest.raises(errors.Unreachable):  # the change may have been made
            transport.change("POST", "/captures", {})


def test_a_change_is_retried_only_if_it_was_not_accepted(
    service: Answering, client: Session
) -> None:
    service.refusals.append(NOT_READY)
    client.capture(steps=[5])
    assert len(service.captures) == 1
    service.refusals.append(UNAVAILABLE)
    with pytest.raises(errors.CatalogueUnavailable):
        client.capture(steps=[6])
    assert len(service.captures) == 1


@contextmanager
def answering_bytes(*answers: bytes) -> Iterator[str]:
    """Something that is no stagescope service: a connection an answer, the last one for ever."""
    left = list(answers)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(left.pop(0) if len(left) > 1 else left[0])

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def http(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def test_a_reading_call_outlives_broken_connections_and_gateways() -> None:
    gaps = [b"", b"HTTP/1.1 200 OK\r\ncontent-le", http(b"", "502 Bad Gateway")]
    with answering_bytes(*gaps, http(b'{"rows": []}')) as url:
        transport = Transport(ServiceLocation(url, "the test", READ), timeout=30.0)
        assert transport.get("/runs") == {"rows": []}
        transport.close()


@pytest.mark.parametrize("gap", [b"", http(b"", "502 Bad Gateway"), http(b"{}", "500 Oh")])
def test_a_change_that_may_have_arrived_is_not_repeated(gap: bytes) -> None:
    with answering_bytes(gap, http(b"{}")) as url:
        transport = Transport(ServiceLocation(url, "the test", READ, READ), timeout=30.0)
        with pytest.raises(errors.StagescopeError):
            transport.change("POST", "/captures", {})
        transport.close()


@pytest.mark.parametrize(
    "answer",
    [
        http(b"<p/>"), http(b"[]"),
        b"HTTP/1.1 302 Found\r\nlocation: http://x/login\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n", b"",
    ],
)  # fmt: skip
def test_something_else_at_the_url(answer: bytes) -> None:
    with answering_bytes(answer) as url, pytest.raises(errors.StagescopeError) as caught:
        stagescope.attach(url, token=READ, timeout=5.0)
    assert url in str(caught.value)
    assert READ not in str(caught.value)


BUSY = http(b'{"code": "not_ready", "wrong": "two are being computed"}', "503 Busy")


def test_a_download_waits_for_a_busy_service_and_is_complete(tmp_path: Path) -> None:
    batch = step_batch()
    whole = batch.save(tmp_path / "here.safetensors").read_bytes()
    stages = http(b'{"step": 5, "run": "r", "attempt": 1}')
    with (
        answering_bytes(stages, BUSY, http(whole)) as url,
        Session(ServiceLocation(url, "the test", READ)) as client,
    ):
        found = client.step(5).save_batch(tmp_path / "there.safetensors")
    assert (tmp_path / "there.safetensors").read_bytes() == whole
    assert found.sample_ids == batch.sample_ids


def test_a_download_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    stages = http(b'{"step": 5, "run": "r", "attempt": 1}')
    broken = http(b"x" * 100)[:-60]
    with (
        answering_bytes(stages, broken, BUSY) as url,
        Session(ServiceLocation(url, "the test", READ)) as client,
    ):
        step = client.step(5)
        with pytest.raises(errors.Unreachable):
            step.save_batch(tmp_path / "there.safetensors")
        assert not list(tmp_path.iterdir())
        with pytest.raises(errors.NotReady, match="two are being computed"):
            step.batch(timeout=0.1)


def test_a_service_that_never_answers_ends_at_the_deadline() -> None:
    """A slow answer is no absent service."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(errors.Unreachable, match=r"not answer within 0\.5 s; it is") as caught:
            stagescope.attach(url, token=READ, timeout=0.5)
        assert time.monotonic() - began < 10
    assert "cannot be reached" not in str(caught.value)
    assert "is it running" not in str(caught.value)
    assert "--timeout" in caught.value.advice


def test_each_request_carries_its_own_token_and_the_user(service: Answering) -> None:
    transport = Transport(ServiceLocation(service.url, "the test", READ, OPERATE), timeout=5.0)
    transport.get("/runs", {"limit": 1, "cursor": None})
    transport.change("POST", "/captures", {"steps": [1]})
    transport.close()
    assert [h["authorization"] for h in service.headers] == [f"Bearer {READ}", f"Bearer {OPERATE}"]
    assert all(headers["x-stagescope-user"] for headers in service.headers)
    assert service.seen[0] == ("GET", "/runs", {"limit": "1"})


def test_a_service_that_is_starting_can_be_attached_to(service: Answering) -> None:
    service.refusals += [NOT_READY] * 20
    began = time.monotonic()
    with stagescope.attach(service.url, token=READ, timeout=30.0) as client:
        assert time.monotonic() - began < 10
        service.refusals.clear()
        assert len(client.runs()) == 2
