"""Over HTTP, with the API's own reader of the body at the other end of a real socket."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.coordinators import FakeCoordinator, wait_for

from stagescope import framing
from stagescope.errors import Unauthorized, Unreachable
from stagescope.schema import DTYPE_BYTES
from stagescope_service.api import framing as api_framing
from stagescope_workers import lifecycle
from stagescope_workers.device import PinnedPool
from stagescope_workers.draft import Draft
from stagescope_workers.http_link import HttpLink
from stagescope_workers.link import find_link
from stagescope_workers.payload import owned_tensor

SENDER = (1, "incarnation", "run", "key", "actor", 0, None, None, None)


def pack_and_parse(payload: dict[str, Any], fields: dict[str, Any]) -> api_framing.Batch:
    event = (1, "end", 7, 1.0, 2.0, fields)
    body = framing.pack_batch(SENDER, [event], {7: payload})
    return api_framing.parse(body, framed=True, max_json=1 << 20, max_events=10)


@pytest.mark.parametrize("tag", DTYPE_BYTES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
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
    assert (tag, shape, buffer.tolist(), offsets.tolist()) == (
        "float32",
        (3,),
        [1, 1, 0],
        [0, 2, 3],
    )
    scalars = batch.events[0][5]["scalars"]
    assert scalars["a"] == inf
    assert np.isnan(scalars["b"])
    assert scalars["c"] == 1.5
    assert batch.payloads[7]["meta"] == {"temperature": 0.5}


def test_batch_without_payload_has_no_tensors() -> None:
    body = framing.pack_batch(SENDER, [(1, "log", 1, 0.0, 0.0, {})], {})
    assert api_framing.parse(body, framed=True, max_json=1000, max_events=1).payloads == {}


class Service(ThreadingHTTPServer):
    """`/events` and `/poll` of the API in front of a fake coordinator."""

    daemon_threads = True

    def __init__(self) -> None:
        self.coordinator = FakeCoordinator()
        self.status = 200
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        service = self.server
        assert isinstance(service, Service)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = 401 if self.headers["Authorization"] != "Bearer right" else service.status
        answer: dict[str, Any] = {"detail": "as the test said"}
        if status == 200 and self.path == "/events":
            assert self.headers["Content-Type"] == api_framing.MEDIA_TYPE
            batch = api_framing.parse(body, framed=True, max_json=1 << 24, max_events=1000)
            answer = service.coordinator.record(*batch).result(10)
        elif status == 200 and self.path == "/poll":
            said = json.loads(body)
            until = min(said["wait"], 0.2)
            future = service.coordinator.poll(said["revision"], said["unreceipted"], until)
            while not future.done():
                threading.Event().wait(0.01)
                service.coordinator.tick()
            answer = future.result()
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing on the test's output."""


@pytest.fixture
def server() -> Iterator[Service]:
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.02,))
        thread.start()
        yield service
        service.shutdown()
        thread.join()


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
    ("status", "token", "error"),
    [(200, "wrong", Unauthorized), (500, "right", Unreachable), (404, "right", Unreachable)],
)
def test_errors_are_this_project_s(
    server: Service, status: int, token: str, error: type[Exception]
) -> None:
    server.status = status
    link = HttpLink(server.url, token)
    with pytest.raises(error):
        link.record(SENDER, [], {}).result(10)
    link.close()


def test_service_unavailable_is_not_ready(server: Service) -> None:
    server.status = 503
    link = HttpLink(server.url, "right")
    assert "as the test said" in link.record(SENDER, [], {}).result(10)["not_ready"]
    link.close()


def test_nobody_there_is_unreachable() -> None:
    link = HttpLink("http://127.0.0.1:9", None, timeout=2.0)
    with pytest.raises(Unreachable, match="STAGESCOPE_URL"):
        link.poll(SENDER, 0, [], 0.0).result(10)
    link.close()


def test_an_address_is_used_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., object] = find_link
    assert find(None, None, "stagescope", url_only=False, waited=60.0) is None
    assert isinstance(
        find("http://127.0.0.1:9", None, "stagescope", url_only=False, waited=60.0), HttpLink
    )
    monkeypatch.setitem(sys.modules, "ray", object())
    assert find("http://127.0.0.1:9", None, "stagescope", url_only=False, waited=0.0) is None
