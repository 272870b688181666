"""The stream of changes: server-sent events of one watcher."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.support.api import Rank, Service
from tests.support.measure import payload
from tests.support.stores import eventually

from stagescope_service.http import stream
from stagescope_service.http.stream import Watcher

LOG_PROB = "actor_compute_log_prob"
Event = dict[str, Any]


class Listener:
    """A client of `/stream`, read by a thread of its own."""

    def __init__(self, live: Service, *, last_id: str | None = None, **params: str) -> None:
        headers = {} if last_id is None else {"last-event-id": last_id}
        self._client = live.client(live.tokens.read)
        self._events: queue.Queue[Event] = queue.Queue()
        self.comments = 0
        self.ended = threading.Event()
        self._answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._read, args=(headers, params), daemon=True)
        self._thread.start()

    def _read(self, headers: dict[str, str], params: dict[str, str]) -> None:
        fields: Event = {}
        with (
            contextlib.suppress(httpx.TransportError, httpx.StreamError),
            self._client.stream("GET", "/stream", headers=headers, params=params) as answer,
        ):
            self._answer = answer
            for line in answer.iter_lines():
                name, _, text = line.partition(": ")
                if line.startswith(":"):
                    self.comments += 1
                elif line:
                    fields[name] = text
                elif "data" in fields:
                    event = {"event": fields["event"], "id": fields["id"]}
                    self._events.put({**event, **json.loads(fields["data"])})
                    fields = {}
        self.ended.set()

    def next(self, event: str | None = None, **fields: object) -> Event:
        """The next event of a kind (None: any) with these fields."""
        deadline = time.monotonic() + 30
        while True:
            found = self._events.get(timeout=max(0.001, deadline - time.monotonic()))
            if event in (None, found["event"]) and fields.items() <= found.items():
                return found

    def rest(self) -> list[Event]:
        """What has arrived and was not looked at."""
        with contextlib.suppress(queue.Empty):
            return [self._events.get_nowait() for _ in range(self._events.qsize())]
        return []

    def close(self) -> None:
        if self._answer is not None:
            self._answer.stream.close()  # type: ignore[union-attr]
        self._client.close()


Listen = Callable[..., Listener]


@pytest.fixture
def listen(live: Service) -> Iterator[Listen]:
    """Makes listeners that have been greeted."""
    made: list[Listener] = []

    def make(**arguments: Any) -> Listener:
        made.append(Listener(live, **arguments))
        return made[-1]

    yield make
    for each in made:
        # The connection is cut: the reading thread then ends.
        if not each.ended.is_set():
            each._client.close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.05)
    # A connection whose other end has gone is noticed when something is sent.
    monkeypatch.setattr(stream, "HEARTBEAT_SECONDS", 0.2)


def watcher_of(live: Service) -> Watcher:
    watcher: Watcher = live.app.state.watcher
    return watcher


def test_a_step_is_told_from_its_begin_to_its_numbers(live: Service, listen: Listen) -> None:
    rank = Rank(live, world_size=1)
    listener = listen()
    hello = listener.next()
    assert (hello["event"], hello["resumed"]) == ("hello", False)
    rank.begin(LOG_PROB, 5)
    begun = listener.next("step")
    assert begun == {
        "event": "step", "id": begun["id"], "run": "r", "attempt": 1, "step": 5, "closed": False,
        "complete": "open", "aggregated": False, "measured": False, "verdict": None,
    }  # fmt: skip
    rank.end(LOG_PROB, 5, payload())
    rank.begin(LOG_PROB, 6)
    closed = listener.next("step", step=5, closed=True, measured=True)
    assert (closed["complete"], closed["verdict"]) == ("complete", "unknown")
    # What it says is what a question is answered.
    metrics = live.get("/steps/5/metrics")
    assert (closed["complete"], closed["verdict"]) == (metrics["complete"], metrics["comparable"])


def test_a_step_without_numbers_is_told_to_be_over(live: Service, listen: Listen) -> None:
    rank = Rank(live, world_size=1)
    listener = listen()
    listener.next("hello")
    rank.stage("actor_update", 5, scalars={"loss": 0.5})
    rank.begin("actor_update", 6)
    over = listener.next("step", step=5, aggregated=True)
    assert (over["closed"], over["measured"], over["verdict"]) == (True, False, None)


def test_a_stage_of_one_rank_alone_makes_no_step_partial(live: Service, listen: Listen) -> None:
    listener = listen()
    listener.next("hello")
    ranks = [Rank(live, rank=rank, world_size=2) for rank in range(2)]
    for step in range(1, 4):
        for rank in ranks:
            rank.stage(LOG_PROB, step)
        ranks[0].stage("compute_rm_score", step)
    for rank in ranks:
        rank.begin(LOG_PROB, 4)
    closed = listener.next("step", step=3, closed=True)
    stored = eventually(lambda: live.catalogue.step(1, 3))
    assert (stored["completeness"], closed["complete"]) == ("partial", "complete")
    assert live.get("/steps")["rows"][1]["complete"] == "complete"


def test_attempts_and_findings(live: Service, listen: Listen) -> None:
    first = Rank(live, world_size=1)
    first.stage("actor_update", 4)
    listener = listen()
    listener.next("hello")
    first.say("refused", what="record", message="no such tensor", step=4)
    finding = listener.next("finding")
    (row,) = live.get("/findings")["rows"]
    for name in ("finding_id", "run", "attempt", "step", "kind", "severity", "message"):
        assert finding[name] == row[name], name
    assert finding["over"] is False
    first.say("finish")
    assert listener.next("attempt", attempt=1)["end_reason"] == "finished"
    Rank(live, key="two", world_size=1, resumed_from_step=3, start=2_000.0)
    assert listener.next("attempt", attempt=2) | {"id": ""} == {
        "event": "attempt", "id": "", "run": "r", "attempt": 2, "resumed_from_step": 3,
        "ended": None, "end_reason": None,
    }  # fmt: skip


def test_a_capture_from_the_request_to_its_dumps(live: Service, listen: Listen) -> None:
    ranks = [Rank(live, rank=rank, world_size=2) for rank in (0, 1)]
    for rank in ranks:
        rank.stage("actor_update", 1)
    listener = listen()
    listener.next("hello")
    body = {"run": "r", "stages": ["actor_update"], "steps": "next", "task": "statistics"}
    capture_id = live.operate.post("/captures?wait=0", json=body).json()["capture_id"]
    asked = listener.next("capture")
    assert (asked["capture_id"], asked["run"], asked["state"]) == (capture_id, "r", "asked")
    ranks[0].acknowledge()
    ranks[0].begin("rollout_generate", 2)
    assert listener.next("capture", acknowledged=1)["capture_id"] == capture_id
    ranks[1].acknowledge()
    for rank in ranks:
        rank.say(
            "dump", stage="actor_update", capture_id=capture_id, state="estimated", estimate={}
        )
    assert listener.next("capture", state="agreed")["capture_id"] == capture_id
    step = live.get(f"/captures/{capture_id}")["agreement"]["start"]
    dump = {"stage": "actor_update", "step": step, "capture_id": capture_id, "path": "/d"}
    ranks[0].stage("actor_update", step)
    ranks[0].say("dump", state="complete", **dump)
    listener.next("capture", dumps={"complete": 1})
    ranks[1].stage("actor_update", step)
    ranks[1].say("dump", state="failed", **dump)
    listener.next("capture", dumps={"complete": 1, "failed": 1})


def test_what_somebody_changed_is_told(live: Service, listen: Listen) -> None:
    Rank(live, world_size=1).say("finish")
    listener = listen()
    listener.next("hello")
    assert live.operate.patch("/runs/r", json={"display_name": "mine"}).status_code == 200
    named = listener.next("action")
    assert (named["action"], named["run"], named["attempt"]) == ("change_run", "r", None)
    assert "detail" not in named  # what was done, and to which run, is for all; the rest for admins
    assert live.operate.delete("/runs/r?wait=10").json()["deleted"]
    assert listener.next("action", action="run_deleted")["run"] == "r"


def test_of_one_run_alone(live: Service, listen: Listen) -> None:
    mine = Rank(live, run="mine", display_name="my/run", world_size=1)
    other = Rank(live, run="other", world_size=1)
    one, every = listen(run="my/run"), listen()
    for listener in (one, every):
        listener.next("hello")
    other.begin("actor_update", 1)
    mine.begin("actor_update", 1)
    assert one.next("step")["run"] == "mine"
    assert {every.next("step")["run"] for _ in range(2)} == {"mine", "other"}
    assert live.read.get("/stream", params={"run": "none"}).status_code == 404


def test_nothing_is_told_twice_or_without_a_change(live: Service, listen: Listen) -> None:
    rank = Rank(live, world_size=1)
    rank.begin("actor_update", 1)
    listener = listen()
    listener.next("hello")
    before = watcher_of(live)._recent
    eventually(lambda: watcher_of(live)._recent is not before)
    assert listener.rest() == []
    rank.begin("actor_update", 2)
    # A new step, and the one before, which closes with it.
    found = {(each["step"], each["closed"]) for each in (listener.next(), listener.next())}
    assert found == {(1, True), (2, False)}


def test_an_interrupted_listener_gets_what_it_missed(live: Service, listen: Listen) -> None:
    rank = Rank(live, world_size=1)
    stays, first = listen(), listen()
    for listener in (stays, first):
        listener.next("hello")
    rank.begin("actor_update", 1)
    last = first.next("step", step=1)["id"]
    first._client.close()
    rank.begin("actor_update", 2)
    missed = stays.next("step", step=2)
    again = listen(last_id=last)
    assert again.next("hello")["resumed"] is True
    assert again.next("step", step=2) == missed


def test_it_gets_what_changed_while_nobody_listened(live: Service, listen: Listen) -> None:
    rank = Rank(live, world_size=1)
    first = listen()
    last = first.next("hello")["id"]
    first._client.close()
    eventually(lambda: watcher_of(live).listeners == 0)
    rank.begin("actor_update", 7)
    again = listen(last_id=last)
    assert again.next("hello")["resumed"] is True
    assert again.next("step")["step"] == 7


@pytest.mark.parametrize("last_id", ["", "other-3", "x", "-1", "0-99999999999999999999"])
def test_one_of_another_process_is_told_that_it_may_have_missed_something(
    live: Service, listen: Listen, last_id: str
) -> None:
    assert listen(last_id=last_id).next("hello")["resumed"] is False


def test_too_long_ago_is_told_too(
    live: Service, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(live, world_size=1)
    stays = listen()
    first = stays.next("hello")["id"]
    watcher_of(live)._remembered = type(watcher_of(live)._remembered)(maxlen=2)
    for step in range(1, 6):
        rank.begin("actor_update", step)
        stays.next("step", step=step)
    assert listen(last_id=first).next("hello")["resumed"] is False


def test_the_catalogue_is_read_once_for_all_and_only_while_somebody_listens(
    live: Service, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.5)
    read: list[float] = []
    recent = live.catalogue.recent

    def counted(since: float) -> object:
        read.append(time.monotonic())
        return recent(since)

    monkeypatch.setattr(live.catalogue, "recent", counted)
    listeners = [listen() for _ in range(5)]
    for listener in listeners:
        listener.next("hello")
    eventually(lambda: len(read) >= 4)
    assert min(b - a for a, b in itertools.pairwise(read)) >= 0.5
    for listener in listeners:
        listener._client.close()
    eventually(lambda: watcher_of(live).listeners == 0)
    assert watcher_of(live)._task is None
    after = len(read)
    assert live.get("/runs")["rows"] == []
    listen().next("hello")  # begins to read anew
    assert len(read) <= after + 2


def test_a_slow_listener_is_closed_and_the_others_go_on(
    live: Service, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading brings as much as fills the buffers of a connection that nobody reads."""
    monkeypatch.setattr(stream, "_MAX_BEHIND", 3)
    recent, numbers = live.catalogue.recent, itertools.count()

    def much(since: float) -> object:
        finding = {"finding_id": str(next(numbers)), "run": "r", "message": 2_000_000 * "x"}
        columns = ("attempt_id", "step", "kind", "severity", "over_wall")
        return recent(since)._replace(findings=[dict.fromkeys(columns) | finding])

    monkeypatch.setattr(live.catalogue, "recent", much)
    reads = listen()
    reads.next("hello")
    host, port = live.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        head = f"GET /stream HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {live.tokens.read}"
        slow.sendall(head.encode() + b"\r\n\r\n")
        eventually(lambda: watcher_of(live).listeners == 2)
        eventually(lambda: watcher_of(live).listeners == 1)
    last = int(reads.rest()[-1]["finding_id"])
    assert int(reads.next("finding")["finding_id"]) > last


def test_there_are_only_so_many(
    live: Service, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_LISTENERS", 2)
    first, second = listen(), listen()
    for listener in (first, second):
        listener.next("hello")
    refused = live.read.get("/stream")
    assert refused.status_code == 503
    assert "2 clients listen" in refused.json()["wrong"]
    first._client.close()
    eventually(lambda: watcher_of(live).listeners == 1)
    listen().next("hello")


def test_one_that_reads_nothing_does_not_hold_every_place(
    live: Service, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_LISTENERS", 20)
    host, port = live.server.url.removeprefix("http://").split(":")
    head = f"GET /stream HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {live.tokens.read}"
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            deaf = stack.enter_context(socket.create_connection((host, int(port))))
            deaf.sendall(head.encode() + b"\r\n\r\n")
        eventually(lambda: watcher_of(live).listeners == 20)
        assert live.read.get("/stream").status_code == 503  # for as long as all of them are new
        monkeypatch.setattr(stream, "_PLACE_SECONDS", 0.0)
        first, second = listen(), listen()
        first.next("hello")
        second.next("hello")
        Rank(live, world_size=1).begin(LOG_PROB, 5)
        for listener in (first, second):
            assert listener.next("step")["step"] == 5
        assert watcher_of(live).listeners == 20


def test_a_silent_stream_says_that_it_lives(
    live: Service, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_SECONDS", 0.05)
    listener = listen()
    listener.next("hello")
    eventually(lambda: listener.comments >= 3)


def test_events_of_ranks_do_not_wait_for_listeners(live: Service, listen: Listen) -> None:
    for _ in range(8):
        listen().next("hello")
    slots = live.app.state.event_slots
    assert slots._value == live.settings.max_bodies
    rank = Rank(live, world_size=1)
    rank.begin("actor_update", 1)
    assert live.get("/steps")["rows"][0]["step"] == 1


def test_a_catalogue_that_cannot_be_read_is_read_again(
    live: Service, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(live, world_size=1)
    listener = listen()
    listener.next("hello")
    recent, failed = live.catalogue.recent, threading.Event()

    def fails(since: float) -> object:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("the disk is away")
        return recent(since)

    monkeypatch.setattr(live.catalogue, "recent", fails)
    assert failed.wait(10)
    rank.begin("actor_update", 3)
    assert listener.next("step")["step"] == 3
