"""A stand-in for the coordinator behind a link, driven by the test: answers when it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from stagescope_wire.errors import NotFound
from stagescope_wire.framing import WirePayload
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import Event, Sender
from stagescope_workers.transport.calls import Reply


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until `condition()` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"still not so after {seconds} s: {condition}")
        time.sleep(0.002)


class FakeCoordinator:
    """Keeps what it was sent. `mode` says how it behaves: serve, refuse, hang, not_ready, dead."""

    def __init__(self, name: str = "first") -> None:
        self.name = name
        self.mode = "serve"
        self.wall: Callable[[], float] = time.time
        self.pause: float | None = None
        self.plan: dict[str, Any] = {"revision": 0, "captures": []}
        self.requests: list[Mapping[str, object]] = []
        self.batches: list[list[Event]] = []
        self.events: dict[tuple[str, int], Event] = {}
        self.payloads: dict[tuple[str, int], Any] = {}
        self.senders: list[Sender] = []
        self.receipts: dict[int, str] = {}
        self.refuses: dict[int, str] = {}
        self.revisions: list[int] = []
        self.settle_at_once = False
        self.attempt_key: str | None = None
        self.page: str | None = None
        self.holds_polls = False
        self.hanging: list[Future[Reply]] = []
        self.calls = 0
        self._polls: list[tuple[int, list[int], float, Future[Reply]]] = []
        self._lock = threading.RLock()

    def record(
        self,
        sender: tuple[object, ...],
        events: list[tuple[object, ...]],
        payloads: Mapping[int, object],
    ) -> Future[Reply]:
        future: Future[Reply] = Future()
        with self._lock:
            self.calls += 1
            if not self._answers(future):
                return future
            who = Sender.parse(sender)
            self.senders.append(who)
            batch = [Event.parse(event) for event in events]
            self.batches.append(batch)
            for event in batch:
                if event.seq not in self.refuses:
                    self.events[who.incarnation, event.seq] = event
            for seq, payload in payloads.items():
                self.payloads[who.incarnation, seq] = payload
                if self.settle_at_once:
                    self.receipts[seq] = "ingested"
            refused = {e.seq: self.refuses[e.seq] for e in batch if e.seq in self.refuses}
        asked: dict[str, object] = {} if self.pause is None else {"pause": self.pause}
        if who.plan_revision != self.plan["revision"]:
            asked["plan"] = self.plan
        said = {"received": len(batch), "refused": refused}
        future.set_result(self._answer() | said | asked)
        return future

    def poll(self, revision: int, unreceipted: list[int], wait: float) -> Future[Reply]:
        future: Future[Reply] = Future()
        with self._lock:
            if not self._answers(future):
                return future
            self.revisions.append(revision)
            self._polls.append((revision, unreceipted, time.monotonic() + wait, future))
        self.tick()
        return future

    def settle(self, receipts: Mapping[int, str]) -> None:
        with self._lock:
            self.receipts.update(receipts)
        self.tick()

    def order(self, *captures: Mapping[str, object]) -> None:
        with self._lock:
            self.plan = {"revision": self.plan["revision"] + 1, "captures": list(captures)}
        self.tick()

    def ask(self, *requests: Mapping[str, object]) -> None:
        """Have the next poll's answer carry requests, and every later one until it is answered."""
        with self._lock:
            self.requests = list(requests)
        self.tick()

    def tick(self) -> None:
        """Answer the polls that have something to say, or have waited long enough."""
        with self._lock:
            if self.holds_polls:
                return
            waiting, self._polls = self._polls, []
            for poll in waiting:
                revision, unreceipted, until, future = poll
                settled = {seq: self.receipts[seq] for seq in unreceipted if seq in self.receipts}
                if (
                    settled
                    or self.requests
                    or revision != self.plan["revision"]
                    or time.monotonic() >= until
                ):
                    plan = self.plan if revision != self.plan["revision"] else None
                    said = {"plan": plan, "receipts": settled, "requests": self.requests}
                    future.set_result(self._answer() | said)
                else:
                    self._polls.append(poll)

    def die(self) -> None:
        """Fail every call under way, and every later one."""
        with self._lock:
            self.mode = "dead"
            for future in self.hanging + [poll[3] for poll in self._polls]:
                future.set_exception(ConnectionError("the actor died"))
            self.hanging, self._polls = [], []

    def of_kind(self, kind: str) -> list[Event]:
        with self._lock:
            return [event for _, event in sorted(self.events.items()) if event.kind == kind]

    def fields(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Return the fields of the events of a kind, once `count` of them have come."""
        wait_for(lambda: len(self.of_kind(kind)) >= count)
        return [dict(event.fields) for event in self.of_kind(kind)]

    def _answer(self) -> dict[str, object]:
        revision = self.plan["revision"]
        receipts = dict(self.receipts) if self.settle_at_once else {}
        now = self.wall()
        key: dict[str, object] = (
            {} if self.attempt_key is None else {"attempt_key": self.attempt_key}
        )
        key |= {} if self.page is None else {"page": self.page}
        return key | {
            "coordinator": self.name, "wall": now, "revision": revision, "receipts": receipts,
            "poll_seconds": 20.0,
        }  # fmt: skip

    def _answers(self, future: Future[Reply]) -> bool:
        if self.mode == "hang":
            self.hanging.append(future)
        elif self.mode == "not_ready":
            future.set_result({"coordinator": self.name, "not_ready": "the catalogue is away"})
        elif self.mode == "dead":
            future.set_exception(ConnectionError("the actor is dead"))
        return self.mode == "serve"


class FakeApi:
    """Answers questions about a step's metrics as the test says: an answer, an error, or never."""

    def __init__(self) -> None:
        self.answers: dict[int, dict[str, object] | Exception] = {}
        self.asked: list[tuple[str, str | None, int]] = []
        self.hangs = False
        self.hanging: list[Future[Reply]] = []

    def metrics(self, run: str, attempt_key: str | None, step: int) -> Future[Reply]:
        future: Future[Reply] = Future()
        said = self.answers.get(step, NotFound(f"step {step} has no numbers (yet)"))
        if self.hangs:
            self.hanging.append(future)
        elif isinstance(said, Exception):
            future.set_exception(said)
        else:
            future.set_result(said)
        self.asked.append((run, attempt_key, step))
        return future


class FakeLink:
    """A link to whatever coordinator the test has put in place."""

    _address = address = "the test"
    page = None

    def __init__(self, location: FakeService) -> None:
        self._place = location
        self._coordinator = location.coordinator

    def pack(self, payload: WirePayload) -> object:
        self._place.packed += 1
        if self._place.pack_error is not None:
            raise self._place.pack_error
        return payload

    def record(
        self,
        sender: tuple[object, ...],
        events: list[tuple[object, ...]],
        payloads: dict[int, object],
    ) -> Future[Reply]:
        assert self._coordinator is not None
        return self._coordinator.record(sender, events, payloads)

    def poll(
        self, sender: tuple[object, ...], revision: int, unreceipted: list[int], wait: float
    ) -> Future[Reply]:
        assert self._coordinator is not None
        return self._coordinator.poll(revision, unreceipted, wait)

    def metrics(self, run: str, attempt_key: str | None, step: int) -> Future[Reply]:
        return self._place.api.metrics(run, attempt_key, step)

    @property
    def is_open(self) -> bool:
        return True

    def is_silent(self) -> bool:
        return self._place.silent

    def moved(self) -> bool:
        return self._place.coordinator is not self._coordinator

    def drain(
        self,
        run: str | None,
        timeout: float,
        attempt_key: str | None = None,
        *,
        ended_by: JsonObject | None = None,
    ) -> JsonObject:
        return {"run": run, "drained": True, "pending": 0}

    def close(self) -> None:
        self._place.closed += 1


class FakeService:
    """The place where a probe looks for its coordinator; None: nobody is there."""

    def __init__(self, coordinator: FakeCoordinator | None = None) -> None:
        self.coordinator = coordinator
        self.api = FakeApi()
        self.pack_error: Exception | None = None
        self.packed = 0
        self.closed = 0
        self.looked = 0
        self.silent = False

    def find(self, *_: object, **__: object) -> FakeLink | None:
        self.looked += 1
        return None if self.coordinator is None else FakeLink(self)
