"""A service in one process, without Ray: real store, state machine, statistics and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from tests.support import documented, measure

from stagescope.wire import schema
from stagescope.wire.errors import InvalidEvent, Unreachable
from stagescope_service.api.app import make_app
from stagescope_service.api.auth import Tokens
from stagescope_service.api.server import ApiServer
from stagescope_service.coordinator.weight_comparer import judge
from stagescope_service.core.captures.plan import Plan
from stagescope_service.core.captures.requests import CaptureRequests
from stagescope_service.core.instructions import (
    Aggregate,
    BuildOperatorTable,
    CompareWeights,
    Ingest,
    PayloadKey,
    Put,
    Settled,
)
from stagescope_service.core.reports import refused_in_part
from stagescope_service.core.stack_requests import choose
from stagescope_service.core.state import State
from stagescope_service.ingest.operator_tables import build_operator_table
from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.settings import Settings
from stagescope_service.store.artifacts import read_piece
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Delete
from stagescope_service.store.sql import SqlStore


class LocalEngine:
    """The coordinator's calls, on the real parts, in the caller's process."""

    def __init__(self, store: SqlStore, catalogue: Catalogue) -> None:
        self.store = store
        self.catalogue = catalogue
        self.state = State()
        self.in_force = Plan()
        self.orders = CaptureRequests(self.in_force, self.state)
        self.not_ready: str | None = None
        self.receipts: dict[PayloadKey, str] = {}
        self.changed = asyncio.Event()
        self.audit: list[tuple[str, str]] = []
        self.weight_names: Sequence[tuple[str, str]] = ()
        self.nodes: dict[str, Path] = {}
        self.intake: PayloadReader | None = None
        self.keep: tuple[str, ...] = ()
        self.roots: list[Path] = []
        self._lock = threading.Lock()

    def take(
        self,
        sender: schema.Sender,
        events: Sequence[Any],
        payloads: Mapping[int, Any] | None = None,
        in_part: dict[int, str] | None = None,
    ) -> dict[int, str]:
        """Carry out events; return those that are refused; `in_part` takes in what is in part."""
        refused = {}
        with self._lock:
            for wire in events:
                try:
                    event = schema.Event.parse(wire)
                    payload = (payloads or {}).get(event.seq)
                    out = self.state.handle(
                        sender, event, event.wall, has_payload=payload is not None
                    )
                except InvalidEvent as error:
                    refused[wire[2] if isinstance(wire, tuple) and len(wire) > 2 else 0] = str(
                        error
                    )
                    continue
                if in_part is not None and (said := refused_in_part(out)) is not None:
                    in_part[event.seq] = said
                self._carry_out(out, payload)
        return refused

    def fall_silent(self, rank: Rank) -> None:
        """Let a rank's lease run out, as where its process was killed."""
        with self._lock:
            self.state.registry.processes[rank.sender.incarnation].lease_until = -1.0
            self._carry_out(self.state.expire(0.0, rank.clock))

    def _carry_out(self, instructions: Sequence[Any], payload: Any = None) -> None:
        writes = [item for item in instructions if isinstance(item, Put | Delete)]
        if writes:
            self.store.submit(writes).result(30)
        for item in instructions:
            if isinstance(item, Ingest) and self.intake is not None:
                job = {**item.job, "keep": self.keep}
                outcome = self.intake.take(item.key, job, payload)
                self.store.submit(outcome.rows).result(30)
                settled = (outcome.state, outcome.reason, time.time())
                self._carry_out(self.state.settle(item.key, *settled))
            elif isinstance(item, Ingest):
                found = measure.summary_rows(item.key, item.job, payload)
                self.store.submit(found).result(30)
                self._carry_out(self.state.settle(item.key, "ingested", None, time.time()))
            elif isinstance(item, CompareWeights):
                self.store.submit(judge(self.catalogue, item, self.weight_names)).result(30)
            elif isinstance(item, BuildOperatorTable):
                self.store.submit(build_operator_table(item.job, self.roots, "here")).result(30)
            elif isinstance(item, Settled):
                self.receipts[item.key] = item.state
            elif isinstance(item, Aggregate):
                found = measure.whole_rows(self.catalogue, item.attempt_id, item.step)
                self.store.submit(found).result(30)

    async def record_events(
        self,
        *,
        sender: Sequence[Any],
        events: Sequence[Sequence[Any]],
        payloads: Mapping[int, Any] | None = None,
    ) -> dict[str, Any]:
        if self.not_ready:
            return {"coordinator": "c1", "not_ready": self.not_ready}
        who = schema.Sender.parse(sender)
        in_part: dict[int, str] = {}
        refused = await asyncio.to_thread(self.take, who, events, payloads, in_part)
        mine = {key.seq: state for key, state in self.receipts.items() if key[0] == who.incarnation}
        return {
            "coordinator": "c1",
            "wall": time.time(),
            "received": len(events) - len(refused),
            "refused": refused,
            **({"refused_in_part": in_part} if in_part else {}),
            "receipts": mine,
            "revision": self.in_force.revision,
        }

    async def poll(
        self, *, sender: Sequence[Any], revision: int, unreceipted: Sequence[int], wait: float
    ) -> dict[str, Any]:
        who = schema.Sender.parse(sender)
        with contextlib.suppress(asyncio.TimeoutError):
            if revision == self.in_force.revision:
                await asyncio.wait_for(self.changed.wait(), wait)
        changed = revision != self.in_force.revision
        keys = {seq: PayloadKey(who.incarnation, seq) for seq in unreceipted}
        return {
            "coordinator": "c1",
            "wall": time.time(),
            "revision": self.in_force.revision,
            "plan": self.in_force.wire(who.run) if changed else None,
            "receipts": {s: self.receipts[k] for s, k in keys.items() if k in self.receipts},
            "requests": self.state.stack_requests.hand_out(who.incarnation),
            "poll_seconds": 20.0,
        }

    async def drain(
        self, *, run: str | None, timeout: float, attempt_key: str | None = None
    ) -> dict[str, Any]:
        pending = self.state.pending(run)
        known = self.state.registry.is_known(run)
        counts = {"pending": len(pending), "drained": not pending}
        return {"run": run, **counts, "known": known, "missing": []}

    async def plan(self) -> dict[str, Any]:
        return self.in_force.stored()

    async def add_capture(
        self, *, spec: Mapping[str, Any], by: str, wait: float = 0.0
    ) -> dict[str, Any]:
        entry = self.orders.add(spec, by=by, mono=time.monotonic(), wall=time.time())
        self.audit.append((by, "add"))
        self.write([self.orders.row(entry), *self.orders.look(time.monotonic(), time.time())])
        entry = self.in_force.entries.get(entry.capture_id, entry)
        return {**entry.stored(), "notes": self.orders.notes(entry)}

    async def remove_capture(self, *, capture_id: str, by: str) -> dict[str, Any]:
        entry, rows = self.orders.remove(capture_id, by=by, wall=time.time())
        self.audit.append((by, "remove"))
        self.write(rows)
        return entry.stored()

    def write(self, rows: Sequence[Put]) -> None:
        self.store.submit(rows).result(30)
        self.in_force.publish(self.in_force.publication())
        self.changed.set()
        self.changed = asyncio.Event()

    async def set_triggers(self, *, document: Mapping[str, Any], by: str) -> dict[str, Any]:
        known = self.catalogue.trigger_rules()
        revision = 1 if known is None else known["revision"] + 1
        row = {"revision": revision, "wall": time.time(), "by": by, "source": "set"}
        self.store.submit([Put("trigger_rules", {**row, "document": dict(document)})]).result(30)
        return {"revision": revision}

    async def pin(self, *, attempt_id: int, step: int, by: str) -> dict[str, Any]:
        place = {"attempt_id": attempt_id, "step": step}
        self.store.submit([Put("steps", {**place, "pinned": True})]).result(30)
        return {**place, "pinned": True, "payloads": 1, "bytes": 2, "gone": 0, "reasons": []}

    async def unpin(self, *, attempt_id: int, step: int, by: str) -> dict[str, Any]:
        place = {"attempt_id": attempt_id, "step": step}
        self.store.submit([Put("steps", {**place, "pinned": False})]).result(30)
        return {**place, "unpinned": True}

    async def add_engine(self, *, engine: Mapping[str, Any], by: str) -> dict[str, Any]:
        row = {**engine, "by": by, "wall": time.time()}
        self.audit.append((by, "add_engine"))
        self.store.submit([Put("engines", row)]).result(30)
        return row

    async def remove_engine(self, *, name: str, by: str) -> dict[str, Any]:
        self.audit.append((by, "remove_engine"))
        self.store.submit([Delete("engines", {"name": name})]).result(30)
        return {"name": name}

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        if node_id not in self.nodes:
            raise Unreachable(f"node {node_id} is gone")
        return read_piece(self.nodes[node_id] / path.lstrip("/"), offset, size)

    async def ask_stacks(
        self,
        *,
        attempt_id: int,
        role: str | None,
        ranks: Sequence[int] | None,
        seconds: float,
        by: str,
    ) -> dict[str, Any]:
        attempt = self.state.attempt(attempt_id)
        assert attempt is not None
        processes, refused = choose(attempt, role, ranks)
        wall = time.time()
        for process in processes:
            out = self.state.stack_requests.ask(
                process, "request", by=by, reason="ordered", wall=wall, seconds=seconds
            )
            self._carry_out(out)
        asked = [{"role": process.role, "rank": process.rank} for process in processes]
        return {
            "request_id": "request",
            "deadline_wall": wall + seconds,
            "asked": asked,
            "refused": refused,
        }

    async def status(self) -> dict[str, Any]:
        said = {"coordinator": "c1", "wall": time.time()}
        return {**said, **({"not_ready": self.not_ready} if self.not_ready else {})}


class Service:
    """Everything that a test of the API talks to; its answers are as the document says.

    Args:
        home: of the service.
        recorded: whether answers are held to the document at the end; a benchmark's are not.
        settings: of the service.
    """

    def __init__(self, home: Path, *, recorded: bool = True, **settings: Any) -> None:
        self.settings = Settings(home=home, port=0, **settings)
        self.store = SqlStore(self.settings.catalogue_url)
        self.store.open()
        self.catalogue = Catalogue(self.settings.catalogue_url)
        self.engine = LocalEngine(self.store, self.catalogue)
        self.engine.weight_names = self.settings.weight_names
        self.engine.roots.append(self.settings.data_path)
        self.tokens = Tokens.load(self.settings) if self.settings.auth else None
        self.now: float | None = None
        self.app = make_app(
            catalogue=self.catalogue,
            commands=self.engine,
            settings=self.settings,
            tokens=self.tokens,
            clock=lambda: time.time() if self.now is None else self.now,
        )
        self.answers: list[documented.Answered] = []
        # Round the app, whose own middleware stays as it is.
        served: Any = documented.Recorder(self.app, self.answers) if recorded else self.app
        self.server = ApiServer(served, port=0, header_seconds=self.settings.header_seconds)
        self.server.start()
        self._clients: list[httpx.Client] = []
        self.read = self.client(self.tokens.read if self.tokens else None)
        self.operate = self.client(self.tokens.operate if self.tokens else None)

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
        response = self.read.get(path, params=params or None)
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
        self.catalogue.close()
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


class Rank:
    """One process of a training, as its probe would speak."""

    def __init__(
        self,
        service: Service,
        *,
        run: str = "r",
        rank: int = 0,
        role: str = "actor",
        key: str = "a1",
        world_size: int | None = 2,
        start: float = 1_000.0,
        incarnation: str | None = None,
        **hello: Any,
    ) -> None:
        self.service = service
        self.clock = start
        self.seq = 0
        name = incarnation or f"{run}-{key}-{role}-{rank}"
        self.sender = schema.Sender(name, run, key, role, rank, started=start)
        self.say(schema.HELLO, **({"world_size": world_size} if world_size else {}), **hello)

    def say(self, kind: str, handed: Any = None, /, **fields: Any) -> int:
        """Send one event straight to the engine; return its seq."""
        self.seq += 1
        self.clock += 0.25
        event = schema.Event(kind, self.seq, self.clock, self.clock - 500.0, fields).wire()
        payloads = None if handed is None else {self.seq: handed}
        refused = self.service.engine.take(self.sender, [event], payloads)
        assert not refused, refused
        return self.seq

    def stage(
        self, stage: str, step: int | None, payload: Any = None, seconds: float = 1.0, **fields: Any
    ) -> int:
        """Begin and end a stage."""
        self.begin(stage, step, **fields)
        self.clock += seconds - 0.25
        return self.end(stage, step, payload, **fields)

    def begin(self, stage: str, step: int | None, **fields: Any) -> int:
        return self.say(schema.BEGIN, stage=stage, step=step, **fields)

    def end(self, stage: str, step: int | None, payload: Any = None, **fields: Any) -> int:
        if payload is not None:
            announced = {"tensors": {}, "bytes": 1, "meta": payload.get("meta") or {}}
            fields["payload"] = announced
        return self.say(schema.END, payload, stage=stage, step=step, **fields)
