"""A service in one process, without Ray: real store, state machine, statistics and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import httpx
from tests.support import documented
from tests.support.ingestors import LocalIngestors
from tests.support.stores import rows_of

import stagescope
from stagescope_service.coordinator.composition import Parts
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.coordinator.runner import Clock
from stagescope_service.core.captures.active_plan import Plan
from stagescope_service.core.state import State
from stagescope_service.http.access_tokens import AccessTokens, Grade
from stagescope_service.http.app import make_app
from stagescope_service.http.server import ApiServer
from stagescope_service.ingest.ingestors import IngestWorker
from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.settings import Settings
from stagescope_service.store.artifacts import read_piece
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.ring import Ring
from stagescope_service.store.sql import SqlStore
from stagescope_service.views.reading.dependencies import Commands
from stagescope_wire import schema
from stagescope_wire.errors import Unreachable

T = TypeVar("T")


class LocalEngine:
    """The coordinator in a thread of its own, called as the API calls its actor.

    Args:
        store: the catalogue, open.
        settings: of the service.
        resumes: whether it goes on where an earlier coordinator of the catalogue ended.
    """

    def __init__(self, store: SqlStore, settings: Settings, *, resumes: bool = False) -> None:
        self.not_ready: str | None = None
        self.nodes: dict[str, Path] = {}
        self.now: float | None = None
        """Time of the event that comes next; that of the machine where no rank says it."""
        data, roots = settings.data_path, settings.roots
        self.ingestors = LocalIngestors(
            lambda node: IngestWorker(node, data, roots, ring_bytes=0), home="here"
        )
        self._kept: Sequence[str] = ()
        self._store = store
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        if resumes:
            opening = Coordinator.open(settings, store, self.ingestors, name="c1")
            self.coordinator = self._wait(opening)
        else:
            state = State(lease_seconds=settings.lease_seconds)
            clock = Clock(self._clock, self._clock)
            parts = Parts(settings, store, self.ingestors, state, Plan(), name="c1", clock=clock)
            self.coordinator = Coordinator(parts)
        payloads = self.coordinator.parts.payloads
        keep = payloads._keep
        payloads._keep = lambda ingest: [*keep(ingest), *self._kept]  # type: ignore[method-assign, assignment]
        self._wait(self.coordinator.parts.runner.settled())

    def _clock(self) -> float:
        return time.time() if self.now is None else self.now

    # --- what the API calls -------------------------------------------------------------------
    def __getattr__(self, name: str) -> Callable[..., Coroutine[object, None, Any]]:
        """Return a call of the coordinator, made on its loop."""

        async def call(**arguments: object) -> Any:
            if self.not_ready and name in ("record_events", "status"):
                return {"coordinator": "c1", "wall": time.time(), "not_ready": self.not_ready}
            work = self._call(name, arguments)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

        return call

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        answer = await getattr(self.coordinator, name)(**arguments)
        if name != "poll":  # what follows of a call is done before the test looks at it
            await self.coordinator.parts.runner.settled()
        if name == "record_events":
            sender = schema.Sender.parse(arguments["sender"])
            seqs = [event[2] for event in arguments["events"] if isinstance(event, tuple | list)]
            answer["receipts"] |= self.coordinator.parts.commits.receipts(sender.incarnation, seqs)
        return answer

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        if node_id not in self.nodes:
            raise Unreachable(f"node {node_id} is gone")
        return read_piece(self.nodes[node_id] / path.lstrip("/"), offset, size)

    # --- what tests do ------------------------------------------------------------------------
    def take(
        self,
        sender: schema.Sender,
        events: Sequence[object],
        payloads: Mapping[int, object] | None = None,
    ) -> Mapping[int, str]:
        """Take in events; return those that are refused."""
        arguments = {"sender": sender.wire(), "events": events, "payloads": payloads}
        refused: Mapping[int, str] = self._wait(self._call("record_events", arguments))["refused"]
        return refused

    def take_together(self, reports: Sequence[Report]) -> None:
        """Take in batches as they come of several processes at a time; none may be refused."""

        async def take() -> list[Mapping[str, object]]:
            calls = (
                self.coordinator.record_events(
                    sender=each.sender.wire(), events=each.events, payloads=each.payloads
                )
                for each in reports
            )
            answers = await asyncio.gather(*calls)
            await self.coordinator.parts.runner.settled()
            return answers

        self.now = max(each.clock for each in reports)
        answers = self._wait(take())
        self.now = None
        assert not any(answer["refused"] for answer in answers), answers

    def fall_silent(self, rank: Rank) -> None:
        """Let a rank's lease run out, as where its process was killed."""
        state = self.coordinator.parts.state
        state.registry.processes[rank.sender.incarnation].lease_until = -1.0

        async def expire() -> None:
            await self.coordinator.parts.runner.carry_out(state.expire(0.0, rank.clock))
            await self.coordinator.parts.runner.settled()

        self._wait(expire())

    def look_for_hangs(self, wall: float) -> None:
        """Let the coordinator look for hangs, as it does every second."""

        async def look() -> None:
            parts = self.coordinator.parts
            await parts.runner.carry_out(parts.hangs.check(0.0, wall))
            await parts.runner.settled()

        self._wait(look())

    @property
    def audit(self) -> list[tuple[str, str]]:
        """Who did what."""
        return [(row["by"], row["action"]) for row in rows_of(self._store, "audit")]

    def keep(self, *words: str) -> None:
        """Keep these sections and tensors of every payload that comes."""
        self._kept = words

    def read_with(self, reader: PayloadReader) -> None:
        """Read payloads that come with this reader."""
        self.ingestors.worker(None)._reader = reader

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.ingestors.close()
        self.coordinator.parts.catalogue.close()

    def _wait(self, work: Coroutine[object, None, T]) -> T:
        # The first payload of a new machine waits for the kernel to be compiled.
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(250)


class Service:
    """Everything that a test of the API talks to; its answers are as the document says.

    Args:
        home: of the service.
        recorded: whether answers are held to the document at the end; a benchmark's are not.
        resumes: whether its coordinator goes on where an earlier one of the home ended.
        settings: of the service.
    """

    def __init__(
        self, home: Path, *, recorded: bool = True, resumes: bool = False, **settings: Any
    ) -> None:
        self.settings = Settings(home=home, port=0, **settings)
        self.store = SqlStore(self.settings.catalogue_url)
        self.store.open()
        self.catalogue = Catalogue(self.settings.catalogue_url)
        self.engine = LocalEngine(self.store, self.settings, resumes=resumes)
        self._tokens = AccessTokens.load(self.settings) if self.settings.auth else None
        self.now: float | None = None
        self.app = make_app(
            catalogue=self.catalogue,
            commands=cast(Commands, self.engine),
            settings=self.settings,
            tokens=self._tokens,
            clock=lambda: time.time() if self.now is None else self.now,
        )
        self.answers: list[documented.Answered] = []
        # Round the app, whose own middleware stays as it is.
        served: Any = documented.Recorder(self.app, self.answers) if recorded else self.app
        self.server = ApiServer(served, port=0, header_seconds=self.settings.header_seconds)
        self.server.start()
        self._clients: list[httpx.Client] = []
        self.read, self.operate = (
            self.client(None if self._tokens is None else getattr(self._tokens, grade))
            for grade in ("read", "operate")
        )

    @property
    def tokens(self) -> AccessTokens:
        """Those of its home; only of a service that asks for some."""
        assert self._tokens is not None
        return self._tokens

    def session(self, grade: Grade = "read") -> stagescope.Session:
        """A session of the client."""
        return stagescope.attach(self.server.url, token=getattr(self.tokens, grade))

    def environment(self, grade: Grade = "read") -> dict[str, str]:
        """The variables by which the command line finds it."""
        token = getattr(self.tokens, grade)
        return {"STAGESCOPE_URL": self.server.url, "STAGESCOPE_TOKEN": token}

    def use_ring(self, size: int = 1 << 24) -> None:
        """Have recent payloads in a ring, as an ingestor has them."""
        data = self.settings.data_path
        ring = Ring(data / "ring" / "here", size, reserve_bytes=0)
        self.engine.read_with(PayloadReader(data, "here", ring))

    def client(self, token: str | None, **headers: str) -> httpx.Client:
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        client = httpx.Client(
            base_url=self.server.url,
            headers=headers,
            timeout=30,
            trust_env=False,
        )
        self._clients.append(client)
        return client

    def get(self, path: str, **params: Any) -> Any:
        """The answer of a route that must answer."""
        return self._answered(lambda: self.read.get(path, params=params or None))

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        """The answer of a route that must answer, to a body."""
        return self._answered(lambda: self.read.post(path, json=body))

    @staticmethod
    def _answered(send: Callable[[], httpx.Response]) -> Any:
        """Ask again while the service computes what it is asked for, as its advice says."""
        deadline = time.monotonic() + 120
        response = send()
        while response.status_code == 503 and time.monotonic() < deadline:
            time.sleep(0.2)
            response = send()
        assert response.status_code == 200, response.text
        return response.json()

    def problem(self, status: int, path: str, **params: Any) -> Any:
        """The problem of a route that must refuse."""
        response = self.read.get(path, params=params or None)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/problem+json"
        return response.json()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.stop()
        self.app.state.deps.close()
        self.engine.close()
        self.store.close()
        documented.check(self.answers)


@contextlib.contextmanager
def service(home: Path, **settings: Any) -> Iterator[Service]:
    """A running service, with its own home."""
    running = Service(home, **settings)
    try:
        yield running
    finally:
        running.close()


class Report(NamedTuple):
    """A batch of one process's events."""

    sender: schema.Sender
    events: list[tuple[object, ...]]
    payloads: dict[int, object]
    """By seq."""
    clock: float
    """Unix seconds of the last event."""


def _specs(payload: Mapping[str, Any]) -> dict[str, object]:
    """Return the tensors of a payload as a probe announces them; {} for a raw caller's."""
    return {
        name: [tag, [*shape], None] for name, (tag, shape, *_) in payload.get("tensors", {}).items()
    }


class Rank:
    """One process of a training, as its probe would speak; without a service it only drafts."""

    def __init__(
        self,
        service: Service | None,
        *,
        run: str = "r",
        rank: int = 0,
        role: str = "actor",
        key: str = "a1",
        world_size: int | None = 2,
        start: float = 1_000.0,
        incarnation: str | None = None,
        greets: bool = True,
        display_name: str | None = None,
        **hello: object,
    ) -> None:
        """Send its hello, or, unless it greets, leave `hello` to be sent with those of others."""
        self.service = service
        self.clock = start
        self.seq = 0
        name = incarnation or f"{run}-{key}-{role}-{rank}"
        self.sender = schema.Sender(
            name, run, key, role, rank, started=start, display_name=display_name
        )
        if world_size:
            hello["world_size"] = world_size
        self.hello = self.draft(schema.HELLO, **hello)
        if greets:
            self._take(self.hello)

    def say(self, kind: str, handed: object = None, /, **fields: object) -> int:
        """Send one event straight to the engine; return its seq."""
        self._take(self.draft(kind, handed, **fields))
        return self.seq

    def draft(self, kind: str, handed: object = None, /, **fields: object) -> Report:
        """Return one event that is not sent yet."""
        self.seq += 1
        self.clock += 0.25
        event = schema.Event(kind, self.seq, self.clock, self.clock - 500.0, fields).wire()
        payloads = {} if handed is None else {self.seq: handed}
        return Report(self.sender, [event], payloads, self.clock)

    def _take(self, report: Report) -> None:
        assert self.service is not None
        self.service.engine.take_together([report])

    def acknowledge(self) -> None:
        """Have the plan of now in force: what it says next tells so."""
        assert self.service is not None
        revision = self.service.get("/plan")["revision"]
        self.sender = dataclasses.replace(self.sender, plan_revision=revision)

    def stage(
        self,
        stage: str,
        step: int | None,
        payload: Mapping[str, object] | None = None,
        /,
        seconds: float = 1.0,
        **fields: object,
    ) -> int:
        """Begin and end a stage."""
        self._take(self.draft_stage(stage, step, payload, seconds, **fields))
        return self.seq

    def draft_stage(
        self,
        stage: str,
        step: int | None,
        payload: Mapping[str, Any] | None = None,
        /,
        seconds: float = 1.0,
        **fields: object,
    ) -> Report:
        """Return begin and end of a stage that are not sent yet, as a probe's batch has them."""
        begun = self.draft(schema.BEGIN, stage=stage, step=step, **fields)
        self.clock += seconds - 0.25
        ended = self._draft_end(stage, step, payload, **fields)
        return Report(self.sender, begun.events + ended.events, ended.payloads, self.clock)

    def hand(
        self,
        stage: str,
        step: int | None,
        payload: Mapping[str, Any],
        /,
        scalars: Mapping[str, float] | None = None,
        **part: object,
    ) -> int:
        """Begin a stage, and end it with a payload whose tensors are announced by name."""
        announced = {"tensors": _specs(payload), "bytes": 1, "meta": payload["meta"]}
        self.begin(stage, step, **part)
        end = {"stage": stage, "step": step, "payload": announced, **part}
        return self.say(schema.END, payload, **end, **({"scalars": scalars} if scalars else {}))

    def begin(self, stage: str, step: int | None, **fields: object) -> int:
        return self.say(schema.BEGIN, stage=stage, step=step, **fields)

    def end(
        self,
        stage: str,
        step: int | None,
        payload: Mapping[str, object] | None = None,
        /,
        **fields: object,
    ) -> int:
        self._take(self._draft_end(stage, step, payload, **fields))
        return self.seq

    def _draft_end(
        self,
        stage: str,
        step: int | None,
        payload: Mapping[str, Any] | None,
        /,
        **fields: object,
    ) -> Report:
        if payload is not None:
            announced = {
                "tensors": _specs(payload), "bytes": 1, "meta": payload.get("meta") or {},
            }  # fmt: skip
            fields["payload"] = announced
        return self.draft(schema.END, payload, stage=stage, step=step, **fields)
