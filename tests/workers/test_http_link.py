"""Over HTTP, with the API's own reader of the body at the other end of a real socket."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.support.coordinators import FakeCoordinator, wait_for
from tests.support.proxy import running_proxy, set_proxy

from stagescope_service.http import framing as api_framing
from stagescope_service.statistics.payload import read_value
from stagescope_wire import discovery, framing
from stagescope_wire.errors import InvalidEvent, StagescopeError, Unauthorized, Unreachable
from stagescope_wire.framing import WirePayload
from stagescope_wire.names import storable_id
from stagescope_wire.schema import Event
from stagescope_wire.tensors import DTYPE_BYTES
from stagescope_workers.device import PinnedPool
from stagescope_workers.payload import owned_tensor
from stagescope_workers.probe import lifecycle
from stagescope_workers.probe.draft import Draft
from stagescope_workers.probe.stage import error_fields
from stagescope_workers.transport import calls, sender
from stagescope_workers.transport import link as links
from stagescope_workers.transport.http_link import HttpLink
from stagescope_workers.transport.link import find_link


def write_service_file(monkeypatch: pytest.MonkeyPatch, home: Path, url: str, token: str) -> None:
    monkeypatch.setenv("STAGESCOPE_HOME", str(home))
    (home / "operate.token").write_text(token)
    written = {"url": url, "operate_token_file": str(home / "operate.token")}
    (home / "service.json").write_text(json.dumps(written))


SENDER = (1, "incarnation", "run", "key", "actor", 0, None, None, None)


def pack_and_parse(payload: WirePayload, fields: dict[str, object]) -> api_framing.EventBatch:
    event = (1, "end", 7, 1.0, 2.0, fields)
    body = framing.pack_batch(SENDER, [event], {7: payload})
    return api_framing.parse(body, framed=True, max_json=1 << 20, max_events=10)


@pytest.mark.parametrize("tag", DTYPE_BYTES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_every_tensor_arrives_bit_by_bit(tag: str, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 3).to(getattr(torch, tag))
    draft = Draft(PinnedPool())
    assert not list(draft.add({"x": tensor, "odd": np.zeros(3, np.int8), "uid": ["a", "é"]}))
    batch = pack_and_parse(draft.finish(), {"step": 1})
    assert batch.sender == SENDER
    found, shape_found, buffer, offsets = batch.payloads[7]["tensors"]["x"]
    expected = owned_tensor("x", tensor)
    assert (found, shape_found, offsets) == (tag, shape, None)
    assert buffer.tobytes() == expected[2].tobytes()
    assert batch.payloads[7]["strings"] == {"uid": ["a", "é"]}


def test_rows_and_nonfinite_numbers_arrive() -> None:
    draft = Draft(PinnedPool())
    assert not list(draft.add({"x": [torch.ones(2), torch.zeros(1)], "temperature": 0.5}))
    inf = float("inf")
    batch = pack_and_parse(draft.finish(), {"scalars": {"a": inf, "b": float("nan"), "c": 1.5}})
    tag, shape, buffer, offsets = batch.payloads[7]["tensors"]["x"]
    assert offsets is not None
    found = (tag, shape, buffer.tolist(), offsets.tolist())
    assert found == ("float32", (3,), [1, 1, 0], [0, 2, 3])
    fields: Any = batch.events[0][5]
    assert np.isnan(fields["scalars"].pop("b"))
    assert fields["scalars"] == {"a": inf, "c": 1.5}
    assert batch.payloads[7]["meta"] == {"temperature": 0.5}


def test_a_text_that_is_no_unicode_arrives_as_its_escape() -> None:
    """As what comes over Ray is read."""
    draft = Draft(PinnedPool())
    values = {
        "a\ud800": np.ones(2, np.float32),
        "texts": ["\udc00", ""],
        "sample_ids": ["\ud800x", "é"],
    }
    assert not list(draft.add({**values, "source": "s\udcff", "meta": {"\ud83d": [10**400]}}))
    error = error_fields(OSError(2, "no such file", "dump\udcff"))
    batch = pack_and_parse(draft.finish(), {**error, "scalars": {"loss\udcff": 1.5}})
    fields: Any = batch.events[0][5]
    assert fields["error_message"].endswith("'dump\\udcff'")
    assert fields["scalars"] == {"loss\\udcff": 1.5}
    payload = batch.payloads[7]
    over_ray, over_http = read_value(draft.finish()), read_value(payload)
    assert over_ray.strings == over_http.strings
    assert [*over_ray.tensors] == [*over_http.tensors] == ["a\\ud800"]
    assert payload["strings"]["sample_ids"] == [storable_id("\ud800x"), "é"]
    assert payload["meta"] == {"source": "s\\udcff", "meta": {"\\ud83d": [str(10**400)]}}


def test_an_event_without_json_is_sent_as_one_that_is_refused() -> None:
    itself: list[object] = []
    itself.append(itself)
    good = (1, "log", 1, 0.0, 0.0, {"scalars": {"loss": np.float32(1.5)}})
    bad = (1, "log", 2, 0.0, 0.0, {"x": itself})
    body = framing.pack_batch(SENDER, [good, bad], {})
    first, second = api_framing.parse(body, framed=True, max_json=1 << 20, max_events=2).events
    assert Event.parse(first).fields == {"scalars": {"loss": 1.5}}
    with pytest.raises(InvalidEvent, match="nested more than 100 deep"):
        Event.parse(second)


class Service(ThreadingHTTPServer):
    """`/events` and `/poll` of the API in front of a fake coordinator."""

    daemon_threads = True

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.coordinator = FakeCoordinator()
        self.status = 200
        self.detail = "as the test said"
        self.authorizations: list[str | None] = []
        self.drained: list[str | None] = []
        self.drain_answer: dict[str, object] = {}
        self.holds: threading.Event | None = None
        self.is_dead = False
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        service = self.server
        assert isinstance(service, Service)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if service.is_dead:
            self.close_connection = True
            return
        service.authorizations.append(self.headers["Authorization"])
        assert service.holds is None or service.holds.wait(30)
        status = 401 if self.headers["Authorization"] != "Bearer right" else service.status
        answer: dict[str, object] = {"code": "of_the_test", "wrong": service.detail}
        if status == 200 and self.path == "/events":
            assert self.headers["Content-Type"] == api_framing.MEDIA_TYPE
            batch = api_framing.parse(body, framed=True, max_json=1 << 24, max_events=1000)
            answer = service.coordinator.record(*batch).result(10)
        elif status == 200 and self.path == "/poll":
            reported = json.loads(body)
            until = min(reported["wait"], 0.2)
            future = service.coordinator.poll(reported["revision"], reported["unreceipted"], until)
            while not future.done():
                threading.Event().wait(0.01)
                service.coordinator.tick()
            answer = future.result()
        elif status == 200 and self.path == "/drain":
            service.drained.append(json.loads(body)["run"])
            answer = {"drained": True, "known": True, **service.drain_answer}
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on the test's output."""


@contextlib.contextmanager
def running(host: str = "127.0.0.1", port: int = 0) -> Iterator[Service]:
    with Service(port, host) as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[Service]:
    with running() as service:
        yield service


@contextlib.contextmanager
def finishing_in_vain(run: str) -> Iterator[list[bool]]:
    """Call `finish` in a thread while nobody answers; it has returned True at the end."""
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(lifecycle.finish(30.0, run=run)))
    thread.start()
    thread.join(1.5)  # so long the service is away
    assert not done
    yield done
    thread.join(30.0)
    assert done == [True]


def test_a_batch_puts_no_line_into_the_log_of_the_training(
    server: Service, caplog: pytest.LogCaptureFixture
) -> None:
    link = HttpLink(server.url, "right")
    with caplog.at_level(logging.DEBUG):
        link.record(SENDER, [(1, "log", 1, 0.0, 0.0, {})], {}).result(10)
        link.close()
        assert not [record for record in caplog.records if record.name.startswith("http")]
        # The training's own requests are logged as before, also to the same service.
        assert httpx.post(f"{server.url}/drain", json={"run": None}).status_code == 401
    assert [record.getMessage() for record in caplog.records if record.name == "httpx"]
    assert "httpcore.connection" in {record.name for record in caplog.records}


def test_probe_reports_over_http(server: Service) -> None:
    probe = lifecycle.init("over-http", url=server.url, token="right", attempt_key="a")
    with probe.stage("s", step=2) as stage:
        stage.record(rewards=torch.ones(3, dtype=torch.bfloat16))
        stage.log(loss=float("nan"))
    wait_for(lambda: server.coordinator.payloads)
    [payload] = server.coordinator.payloads.values()
    assert payload["tensors"]["rewards"][:2] == ("bfloat16", (3,))
    server.coordinator.settle({3: "ingested"})
    assert probe.close(10.0)
    [end] = server.coordinator.of_kind("end")
    assert np.isnan(end.fields["scalars"]["loss"])
    assert server.coordinator.of_kind("finish")


@pytest.mark.parametrize(
    ("status", "token", "detail", "error", "told"),
    [
        (200, "wrong", "not one of this service", Unauthorized, "a token was sent"),
        (403, "right", "the read token may not POST", Unauthorized, "the read token may not POST"),
        (403, None, "no bearer token", Unauthorized, "no token was sent"),
        (500, "right", "", Unreachable, "500"),
        (404, "right", "", Unreachable, "404"),
    ],
)
def test_errors_are_this_project_s(
    server: Service,
    status: int,
    token: str | None,
    detail: str,
    error: type[Exception],
    told: str,
) -> None:
    server.status, server.detail = status, detail
    link = HttpLink(server.url, token)
    with pytest.raises(error, match=told):
        link.record(SENDER, [], {}).result(10)
    link.close()


@pytest.mark.parametrize("status", [429, 503])
def test_service_unavailable_is_not_ready(server: Service, status: int) -> None:
    server.status = status
    link = HttpLink(server.url, "right")
    assert "as the test said" in link.record(SENDER, [], {}).result(10)["not_ready"]
    link.close()


@pytest.mark.parametrize("no_proxy", ["", "127.0.0.0/8"])
def test_the_token_goes_to_no_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str
) -> None:
    with running("127.0.0.2") as beyond, running_proxy() as proxy:
        set_proxy(monkeypatch, proxy, no_proxy)
        link = HttpLink(beyond.url, "right")
        assert link.record(SENDER, [(1, "log", 1, 0.0, 0.0, {})], {}).result(10)["coordinator"]
        link.close()
        assert proxy.tokens == []


@pytest.mark.parametrize("status", [200, 401, 403, 407, 429, 503])
def test_an_answer_of_a_proxy_is_named_as_such(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with running_proxy() as proxy:
        proxy.status = status
        monkeypatch.setenv("STAGESCOPE_PROXY", proxy.url)
        link = HttpLink("http://head.test:8700", "right")
        assert f"http://head.test:8700 through the proxy {proxy.url}" in link.address
        with pytest.raises(Unreachable, match=f"through the proxy {proxy.url}"):
            link.record(SENDER, [], {}).result(10)
        link.close()
        # The same without a word of ours: a gateway that nobody mentioned.
        monkeypatch.delenv("STAGESCOPE_PROXY")
        link = HttpLink(proxy.url, "right")
        with pytest.raises(Unreachable, match="via: 1"):
            link.record(SENDER, [], {}).result(10)
        link.close()


def test_a_gateway_that_refuses_a_body_s_size_gets_smaller_ones() -> None:
    with running_proxy() as proxy:
        proxy.status = 413
        link = HttpLink(proxy.url, "right")
        with pytest.raises(StagescopeError) as caught:
            link.record(SENDER, [], {}).result(10)
        link.close()
    assert calls.is_refusal(caught.value)
    assert "from a proxy" in str(caught.value)


def test_nobody_there_is_unreachable() -> None:
    link = HttpLink("http://127.0.0.1:9", None, timeout=2.0)
    with pytest.raises(Unreachable, match="STAGESCOPE_URL"):
        link.poll(SENDER, 0, [], 0.0).result(10)
    link.close()


def test_a_probe_without_ray_finds_the_service_as_attach_does(
    server: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_service_file(monkeypatch, tmp_path, server.url, "right")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    probe = lifecycle.init("by-file", attempt_key="a")
    with probe.stage("s", step=2):
        pass
    wait_for(lambda: server.coordinator.of_kind("end"))
    wait_for(lambda: f": connected to {server.url} (from {tmp_path}" in repr(probe))
    assert "right" not in repr(probe)
    assert lifecycle.finish(30.0)
    assert "by-file" in server.drained


def test_finish_waits_for_an_api_that_is_being_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with running() as first:
        probe = lifecycle.init("again", attempt_key="a", url=first.url, token="right")
        wait_for(lambda: first.coordinator.events)
        wait_for(lambda: ": connected to" in repr(probe))
        port = first.server_address[1]
        first.is_dead = True
    with probe.stage("s", step=1):
        pass
    wait_for(lambda: ": not connected" in repr(probe))
    with finishing_in_vain("again"), running(port=port) as second:
        second.coordinator.fields("finish")
        wait_for(lambda: "again" in second.drained)
    assert {"begin", "end"} <= {e.kind for e in second.coordinator.events.values()}


@pytest.mark.parametrize("with_probe", [True, False], ids=["rank", "driver"])
def test_finish_of_a_short_process_waits_for_an_api_that_it_never_reached(
    monkeypatch: pytest.MonkeyPatch, *, with_probe: bool
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with Service() as first:
        port, url = first.server_address[1], first.url  # a free port
    monkeypatch.setenv("STAGESCOPE_URL", url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", "right")
    if with_probe:
        with lifecycle.init("born-late", attempt_key="a").stage("s", step=1):
            pass
    with finishing_in_vain("born-late"), running(port=port) as second:
        wait_for(lambda: "born-late" in second.drained)
    kinds = {event.kind for event in second.coordinator.events.values()}
    assert ({"begin", "end", "finish"} <= kinds) is with_probe


def test_finish_is_false_where_something_of_any_rank_will_never_arrive(
    server: Service,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_service_file(monkeypatch, tmp_path, server.url, "right")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    server.drain_answer["lost"] = ["actor rank 3: payloads 2"]
    lifecycle.init("lossy", attempt_key="a")
    assert not lifecycle.finish(30.0)
    assert "never have everything of run lossy (actor rank 3: payloads 2)" in caplog.text


def test_finish_gives_up_in_time_where_a_known_service_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr("stagescope_workers.probe.probe.RESTART_SECONDS", 1.0)
    probe = lifecycle.init("never", attempt_key="a", url="http://127.0.0.1:9")
    with probe.stage("s", step=1):
        pass
    wait_for(lambda: ": not connected, " in repr(probe))
    started = time.monotonic()
    assert not lifecycle.finish(30.0)
    assert time.monotonic() - started < 15.0


_FINALLY = "try:\n    raise ValueError('no')\nfinally:\n    finish(20)\n"
_WITH = "with probe:\n    raise ValueError('no')\n"
_FALLBACK = "    finish(20)\n"  # goes on inside of the handler in which init was called
_EXHAUSTED = "try:\n    next(iter([]))\nexcept StopIteration:\n    finish(20)\n"


@pytest.mark.parametrize(
    ("ending", "crashed"),
    [
        ("raise ValueError('no')", True), (_FINALLY, True), (_WITH, True),
        ("", False), (_EXHAUSTED, False), ("finish(20)", False), (_FALLBACK, False),
    ],
)  # fmt: skip
def test_a_process_that_an_exception_ends_says_so(
    server: Service, tmp_path: Path, ending: str, crashed: bool
) -> None:
    body = (
        f"probe = init('crash', attempt_key='a', url={server.url!r}, token='right')\n"
        "with probe.stage('rollout', step=1):\n"
        f"    pass\n{ending.strip()}\n"
    )
    if ending is _FALLBACK:
        body = "try:\n    import nothing_of_this_name\nexcept ImportError:\n" + textwrap.indent(
            body, "    "
        )
    ended = subprocess.run(
        [sys.executable, "-c", f"from stagescope_workers import finish, init\n{body}"],
        check=False, timeout=60, capture_output=True, text=True,
        env={**os.environ, "STAGESCOPE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert (ended.returncode != 0) is crashed, ended.stderr
    assert "not acknowledged" not in ended.stderr  # it ended before its first search
    assert {"begin", "end"} <= {event.kind for event in server.coordinator.events.values()}
    [finish] = server.coordinator.fields("finish")
    expected = {"error_type": "ValueError", "error_message": "no"} if crashed else {}
    assert finish == expected


def test_where_and_when_a_service_is_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    nowhere = "http://127.0.0.1:9"
    assert find_link(None, None, "stagescope") is None
    assert isinstance(find_link(nowhere, None, "stagescope", waited=0.0), HttpLink)
    write_service_file(monkeypatch, tmp_path, nowhere, "token-of-the-file")
    link = find_link(None, None, "stagescope", waited=0.0)
    assert isinstance(link, HttpLink)
    assert link.address == f"{nowhere} (from {tmp_path / 'service.json'})"
    # A process that imported Ray may still join a cluster that has a service.
    monkeypatch.setitem(sys.modules, "ray", object())
    assert find_link(None, None, "stagescope", waited=0.0) is None
    assert find_link(None, None, "stagescope", waited=60.0) is not None


def test_no_error_of_a_link_holds_its_token(server: Service) -> None:
    link = HttpLink(server.url, "hidden\n")
    with pytest.raises(Unreachable, match="LocalProtocolError") as caught:
        link.poll(SENDER, 0, [], 0.0).result(10)
    assert "hidden" not in str(caught.value)
    link.close()


def test_a_token_of_the_file_goes_to_its_own_url_alone(
    server: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_service_file(monkeypatch, tmp_path, "http://127.0.0.1:9", "right")
    link = find_link(server.url, None, "stagescope")
    assert link is not None
    with pytest.raises(Unauthorized, match="STAGESCOPE_TOKEN_FILE"):
        link.record(SENDER, [], {}).result(10)
    assert server.authorizations == [None]
    link.close()


def test_nothing_connected_is_logged_once_and_finish_is_false(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(links, "_warned_in", set())
    monkeypatch.setattr(sender, "UNCONNECTED_SECONDS", 0.05)
    for rank in (0, 1):
        probe = lifecycle.init("alone", rank=rank)
    assert "looking for a service" in repr(probe) or caplog.records
    wait_for(lambda: caplog.records)
    wait_for(lambda: "not connected, no service was found" in repr(probe))
    assert lifecycle.finish(0.1) is False
    [line] = [r.getMessage() for r in caplog.records if "nothing is reported" in r.getMessage()]
    words = ("run alone", "DebugCoordinator", "has not joined Ray", "STAGESCOPE_URL is not set")
    for word in (*words, f"{tmp_path / 'service.json'} does not exist", "STAGESCOPE_TOKEN_FILE"):
        assert word in line
    assert lifecycle.finish(0.1) is False  # nor where this process has no probe at all


def test_finish_raises_nothing_where_httpx_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ImportError("cannot import name 'HTTPStatus' from 'http'")

    monkeypatch.setattr(links, "_warned_in", set())
    monkeypatch.setattr(discovery, "find", broken)
    lifecycle.init("broken")
    assert lifecycle.finish(0.1) is False
    assert "ImportError: cannot import name 'HTTPStatus'" in caplog.text


def test_a_refused_token_is_logged_once_and_not_sent_again_and_again(
    server: Service, caplog: pytest.LogCaptureFixture
) -> None:
    probe = lifecycle.init("refused-token", url=server.url, token="wrong", attempt_key="a")
    wait_for(lambda: server.authorizations)
    wait_for(lambda: "401" in repr(probe))
    assert len(server.authorizations) <= 2  # the first batch and the first poll
    assert probe.close(0.3) is False
    reported = [r.getMessage() for r in caplog.records if "401" in r.getMessage()]
    (once,) = [line for line in reported if "failed, and is tried again" in line]
    assert once.endswith("set it where `ray start` runs on each node")  # advice is not cut
    assert "wrong" not in " ".join(reported)


@pytest.mark.parametrize("has_probe", [True, False])
def test_finish_does_not_wait_where_the_token_is_refused(
    server: Service,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    has_probe: bool,
) -> None:
    """Of a process that had just begun, and of a driver that has no probe of its own."""
    if has_probe:
        probe = lifecycle.init("refused-token", url=server.url, token="wrong", attempt_key="a")
        with probe.stage("actor_update", step=1):
            pass
    monkeypatch.setenv("STAGESCOPE_URL", server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", "wrong")
    began = time.monotonic()
    assert lifecycle.finish(300) is False
    assert time.monotonic() - began < 60
    [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("finish: ")]
    for words in ("refuses the access token", "STAGESCOPE_TOKEN_FILE", "401"):
        assert words in line


def test_a_call_under_way_outlives_the_close_of_its_link(server: Service) -> None:
    server.holds = threading.Event()
    link = HttpLink(server.url, "right")
    poll = link.poll(SENDER, 0, [], 0.0)
    wait_for(lambda: server.authorizations)
    link.close()
    late = link.record(SENDER, [], {})
    with pytest.raises(Unreachable, match="link to the service is closed"):
        late.result(10)
    server.holds.set()
    assert "receipts" in poll.result(10)
    wait_for(lambda: link._client.is_closed)
