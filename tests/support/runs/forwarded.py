"""A run to forward, where it is forwarded to, and how that is read back."""

from __future__ import annotations

import contextlib
import http.server
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.support.api import Rank, Service
from tests.support.measure import Handed, payload

from stagescope import Session
from stagescope.forwarding import PREFIX, forwarder

RUN: Final = "forwarded"
LOG_PROB: Final = "actor_compute_log_prob"
K3: Final = "rollout_corr/k3_kl"
PAGE: Final = "http://head:8700"


class Training:
    """Two ranks of a run."""

    def __init__(self, live: Service, key: str = "one", **hello: Any) -> None:
        self.live = live
        self.ranks = [
            Rank(live, run=RUN, rank=rank, key=key, start=1_800_000_000.0, **hello)
            for rank in range(2)
        ]

    def do(self, first: int, last: int, **of_rank_1: object) -> None:
        """Do steps, and begin the one after."""
        for step in range(first, last + 1):
            for rank, each in enumerate(self.ranks):
                each.clock = 1_800_000_000.0 + 60.0 * step
                each.stage(LOG_PROB, step, handed(step, rank), seconds=3.0)
                fields = of_rank_1 if rank else {}
                each.stage("actor_update", step, seconds=2.0, **fields)
        self.begin(last + 1)

    def do_broken(self, step: int) -> None:
        """Do a step whose trainer's log-probs are NaN throughout, and begin the one after."""
        for rank, each in enumerate(self.ranks):
            broken = handed(step, rank)
            broken["tensors"]["old_log_probs"][2][:] = math.nan
            each.stage(LOG_PROB, step, broken)
        self.begin(step + 1)

    def begin(self, step: int) -> None:
        for each in self.ranks:
            each.stage("rollout_generate", step)

    def restart(self, after: int) -> Training:
        """The same run resumed, in its next attempt."""
        for each in self.ranks:
            self.live.engine.fall_silent(each)
        return Training(self.live, "two", resumed_from_step=after)


def handed(step: int, rank: int, **fields: Any) -> Handed:
    return payload(seed=2 * step + rank, first_sample=10 * rank, **fields)


def published(live: Service, step: int, name: str = K3, **params: object) -> float:
    value: float = live.get(f"/steps/{step}/metrics", run=RUN, **params)["metrics"][name]
    return value


class Board:
    """A directory of event files, as TensorBoard reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target = f"tensorboard:{path}"

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.glob("*tfevents*"))

    def _read(self) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(self.path), size_guidance={"tensors": 0, "scalars": 0})
        found.Reload()
        return found

    def scalars(self, name: str) -> list[tuple[int, float]]:
        found = self._read()
        tag = f"{PREFIX}{name}"
        return [(each.step, each.value) for each in found.Scalars(tag)]

    def texts(self, name: str = "step/page") -> dict[int, str]:
        return {
            each.step: each.tensor_proto.string_val[0].decode()
            for each in self._read().Tensors(f"{PREFIX}{name}")
        }

    def tags(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = self._read().Tags()
        return found


class Collector:
    """A receiver of OTLP over HTTP, which refuses while `status` is not 200."""

    def __init__(self) -> None:
        self.status = 200
        self.requests: list[bytes] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                if collector.status == 200:
                    collector.requests.append(body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.target = f"otlp:http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        found: list[Any] = []
        for body in self.requests:
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                assert attributes(resource.resource)["service.name"] == "stagescope"
                for scope in resource.scope_spans:
                    found += scope.spans
        return found


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@contextlib.contextmanager
def following(session: Session, target: str, said: list[str]) -> Iterator[list[Any]]:
    """Follow in a thread; the outcome is in the list once it has ended."""
    stopped = threading.Event()
    found: list[Any] = []

    def follow() -> None:
        found.append(
            forwarder.forward(
                session, RUN, [target], every=0.05, stopped=stopped, report=said.append
            )
        )

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield found
    finally:
        stopped.set()
        thread.join(60)
    assert found
