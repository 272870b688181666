"""Triggers on the real catalogue, statistics, state machine and rings, without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from tests.support.local import LocalCoordinator
from tests.support.measure import Handed, payload
from tests.support.parallel import Reported
from tests.support.stores import opened

from stagescope_service.coordinator.rules.actions import PinAnswer, TriggerActions, gone_of
from stagescope_service.coordinator.rules.watch import TriggerWatch
from stagescope_service.coordinator.rules.webhooks import Webhooks
from stagescope_service.core.instructions import NonFiniteScalars
from stagescope_service.rules.document import Rules
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Put
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables import FindingRow, FiringRow
from stagescope_service.store.tables.findings import FiredActions
from stagescope_wire.errors import StagescopeError
from stagescope_wire.schema import BEGIN, END, END_STEP, FINISH, HELLO, LOG, Event, Sender
from stagescope_wire.tensorfile import WireTensor

STAGE = "actor_compute_log_prob"
PAGE = "https://head.example.com"
"""The address at which people open the page."""


def rule(name: str = "mean", **changes: object) -> dict[str, object]:
    """A rule that fires on every step of more than a little mismatch."""
    return {
        "name": name,
        "metric": "logprob_abs_diff/mean",
        "when": {">": 0.5},
        "cooldown": 0,
        "actions": {"finding": {"severity": "error", "advice": "look"}},
        **changes,
    }


def rules_of(*rules: Mapping[str, object], runs: Mapping[str, object] | None = None) -> Rules:
    """A document."""
    return Rules.parse({"rules": list(rules), "runs": runs or {}})


class Orderer:
    """Stands for `POST /captures`: keeps what it was asked for."""

    def __init__(self, store: SqlStore) -> None:
        self.store = store
        self.specs: list[dict[str, Any]] = []
        self.error: StagescopeError | None = None

    async def __call__(self, spec: Mapping[str, object], by: str) -> Mapping[str, object]:
        if self.error is not None:
            raise self.error
        self.specs.append({**spec, "by": by})
        capture_id = f"capture-{len(self.specs)}"
        row = {"capture_id": capture_id, "run": spec["run"], "spec": dict(spec), "by": by}
        row |= {"state": "agreed", "created_wall": float(len(self.specs))}
        self.store.submit([Put("captures", row)]).result(30)
        return row

    def end(self, capture_id: str, **dump: object) -> None:
        """Let a capture come to its end, with one dump of one rank."""
        location = {"incarnation": "i", "work_key": capture_id, "capture_id": capture_id}
        rows = [
            Put("captures", {"capture_id": capture_id, "state": "done", "removed_wall": 1.0}),
            Put(
                "dumps",
                {**location, "attempt_id": 1, "step": 1, "role": "actor", "rank": 0, **dump},
            ),
        ]
        self.store.submit(rows).result(30)


@contextmanager
def training(folder: Path, ring_bytes: int = 1 << 24) -> Iterator[RuleBench]:
    """A run that is to begin, on a catalogue in `folder`."""
    with opened(folder) as (store, catalogue):
        yield RuleBench(store, catalogue, folder, ring_bytes)


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine in a loop of its own."""

    async def all_of_it() -> None:
        await work()

    asyncio.run(all_of_it())


class RuleBench:
    """A run of two ranks, whose steps are handed over, aggregated and held against rules."""

    def __init__(
        self, store: SqlStore, catalogue: Catalogue, data_dir: Path, ring_bytes: int = 1 << 24
    ) -> None:
        self.run = "r"
        self.store, self.catalogue = store, catalogue
        self.local = LocalCoordinator(store, data_dir, ring_bytes)
        self.orders = Orderer(store)
        self.webhook_hosts: tuple[str, ...] = ()
        self.webhooks = Webhooks(seconds=5.0, pauses=(0.0, 0.0))
        self.now = 1_000.0
        self.seqs: dict[str, int] = {}
        self.triggers = self.restarted()

    def restarted(self) -> TriggerWatch:
        """What a new coordinator has: nothing but the catalogue."""
        acting = TriggerActions(
            self.catalogue, self.pin, self.orders, self.webhooks,
            page=lambda: PAGE, wall=lambda: self.now,
        )  # fmt: skip
        self.triggers = TriggerWatch(
            self.catalogue, self.local.coordinator.parts.runner.write, acting,
            webhook_hosts=self.webhook_hosts, wall=lambda: self.now,
        )  # fmt: skip
        self.local.parts.steps._triggers = self.triggers
        runner = self.local.parts.runner
        runner.on(NonFiniteScalars, lambda each: runner.run(self.triggers.warn_non_finite(each)))
        return self.triggers

    async def pin(self, attempt_id: int, step: int) -> PinAnswer:
        """Pin on the one node that there is."""
        kept = self.catalogue.artifacts(attempt_id, step, kind="ring", deleted=None)
        pinned = self.local.ingestors.worker(None).reader.ring.pin_step(attempt_id, step)
        reasons = (pinned.reason,) if pinned.reason else ()
        gone = 0 if reasons else gone_of(kept, pinned.payloads)
        return PinAnswer(pinned.payloads, pinned.bytes, gone, reasons)

    # --- a training -----------------------------------------------------------------------
    async def step(
        self,
        number: int,
        noise: float = 0.0,
        *,
        key: str = "a1",
        absent: Sequence[int] = (),
        seconds: float = 1.0,
        poison: float | None = None,
        hold: bool = False,
        tensors: Mapping[str, WireTensor] | None = None,
        scalars: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Have both ranks do a step and begin the next; `hold` lets nothing be held against it.

        `scalars` are logged in a stage `actor_update` by the ranks that it names.
        """
        await self.hear(number, noise, key=key, absent=absent, seconds=seconds, poison=poison,
                        tensors=tensors, scalars=scalars or {})  # fmt: skip
        await self.judge(hold=hold)

    async def judge(self, *, hold: bool = False) -> None:
        """Hold the rules against every step that was aggregated since."""
        aggregated, self.local.queue.aggregated = self.local.queue.aggregated, []
        if not hold:
            for order in aggregated:
                await self.triggers.aggregated(order.attempt_id, order.step)

    async def hand_over(self, number: int, rank: int) -> None:
        """Have a rank end its stage of a step with a payload, however late."""
        work = {"step": number, "stage": STAGE}
        about = {"tensors": {}, "bytes": 1, "meta": {}}
        handed = payload(seed=7 * number + rank, first_sample=4 * rank)
        fields = {**work, "status": "ok", "payload": about}
        await self.local.record([self._say(self._sender("a1", rank), END, fields, handed)])

    async def log(self, number: int, rank: int, **scalars: float) -> None:
        """Have a rank log scalars of a step, whatever became of the step."""
        fields = {"step": number, "stage": "actor_update", "scalars": scalars}
        await self.local.record([self._say(self._sender("a1", rank), LOG, fields)])
        await self.judge()

    async def hear(
        self,
        number: int,
        noise: float,
        *,
        key: str,
        absent: Sequence[int],
        seconds: float,
        poison: float | None,
        tensors: Mapping[str, WireTensor] | None,
        scalars: Mapping[int, Mapping[str, float]],
    ) -> None:
        said: list[Reported] = []
        self.now += 10.0
        for rank in (0, 1):
            sender = self._sender(key, rank)
            if self.seqs.setdefault(sender.incarnation, 0) == 0:
                said.append(self._say(sender, HELLO, {"world_size": 2}))
            work = {"step": number, "stage": STAGE}
            said.append(self._say(sender, BEGIN, work))
            if rank in absent:
                continue
            handed = payload(seed=7 * number + rank, noise=noise, first_sample=4 * rank)
            handed["tensors"].update(tensors or {})
            if poison is not None and rank == 1:
                handed["tensors"]["old_log_probs"][2][2, 8] = poison
            about = {"tensors": {}, "bytes": 1, "meta": {}}
            said.append(self._say(sender, END, {**work, "status": "ok", "payload": about},
                                  handed, seconds if rank else 1.0))  # fmt: skip
        for rank, named in scalars.items():
            sender = self._sender(key, rank)
            update = {"step": number, "stage": "actor_update"}
            said.append(self._say(sender, BEGIN, update))
            said.append(self._say(sender, END, {**update, "status": "ok", "scalars": named}))
        said.append(self._say(self._sender(key, 0), END_STEP, {"step": number}))
        await self.local.record(said)

    async def leave(self, key: str = "a1") -> None:
        """Have both ranks report their end."""
        said = []
        for rank in (0, 1):
            sender = self._sender(key, rank)
            said.append(self._say(sender, FINISH, {}))
        await self.local.record(said)
        self.local.queue.aggregated = []

    def _sender(self, key: str, rank: int) -> Sender:
        return Sender(f"{key}-{rank}", self.run, key, "actor", rank, started=1000.0)

    def _say(
        self,
        sender: Sender,
        kind: str,
        fields: dict[str, object],
        handed: Handed | None = None,
        seconds: float = 0.0,
    ) -> Reported:
        self.seqs[sender.incarnation] += 1
        wall = self.now + seconds
        event = Event(kind, self.seqs[sender.incarnation], wall, wall, fields)
        return Reported(sender, event, handed)

    # --- what came of it --------------------------------------------------------------------
    def fired(self) -> list[tuple[int, int, str]]:
        """(attempt, step, rule) of the firings that stand."""
        return sorted(
            (row["attempt_id"], row["step"], row["rule"])
            for row in self.catalogue.firings(run=self.run)
            if row["withdrawn_wall"] is None
        )

    def firing(self, step: int, name: str = "mean") -> FiringRow:
        """The one firing of a rule at a step."""
        (row,) = self.catalogue.firings(run=self.run, step=step, rule=name)
        return row

    def actions(self, step: int, name: str = "mean") -> FiredActions:
        """What came of the actions of a rule's one firing at a step."""
        actions = self.firing(step, name)["actions"]
        assert actions is not None
        return actions

    def firing_of(self, attempt_id: int, step: int, name: str) -> FiringRow:
        """The firing of a rule at a step of an attempt."""
        (row,) = self.catalogue.firings(attempt_id=attempt_id, step=step, rule=name)
        return row

    def findings(self, kind: str) -> list[FindingRow]:
        """Findings of a kind, by step."""
        found = self.catalogue.findings(run=self.run, kind=kind)
        return sorted(found, key=lambda row: row["step"] or 0)


@dataclasses.dataclass
class Hook:
    """A webhook's server on loopback, and what it was told."""

    url: str
    told: list[dict[str, Any]]
    answers: list[int]
    """Status of each of the next answers; 204 when there are none left."""


@contextmanager
def hook() -> Iterator[Hook]:
    """Serve a webhook."""
    told: list[dict[str, object]] = []
    answers: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(answers.pop(0) if answers else 204)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args  # nothing of it on the tests' stderr

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        port = server.server_address[1]
        yield Hook(f"http://user:pw@127.0.0.1:{port}/SECRET?token=HIDDEN", told, answers)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
