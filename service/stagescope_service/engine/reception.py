"""Where calls come in: batches of events, polls, raw calls, orders. No Ray in here.

One event loop owns the state. A call changes it, hands the rows to the store, and answers after
the commit; what must happen then (reading payloads, forming wholes) goes to the `Floor`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from stagescope.errors import InvalidEvent, NotFound, NotReady, StagescopeError
from stagescope.keeping import read_keep, wanted_by
from stagescope.schema import BEGIN, END, Event, Sender, Work, check_run_name
from stagescope_service.engine.findings import finding
from stagescope_service.engine.hangs.watch import HangWatch
from stagescope_service.engine.instructions import (
    Ask,
    Assemble,
    Delete,
    Digest,
    Ingest,
    Instruction,
    PayloadKey,
    Put,
    ReadWatchdogs,
    Settled,
    Weigh,
)
from stagescope_service.engine.orders.agreement import ASKED
from stagescope_service.engine.orders.desk import Orders
from stagescope_service.engine.orders.plans import Entry, Plan
from stagescope_service.engine.registry import UNKEYED
from stagescope_service.engine.spans import RAW_SEQ
from stagescope_service.engine.stack_requests import choose
from stagescope_service.engine.state import State
from stagescope_service.engine.stuck import StuckRules
from stagescope_service.store.base import Store

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.02


class Floor(Protocol):
    """What carries out instructions that are not rows."""

    def ingest(self, order: Ingest, payload: object) -> None:
        """Have an ingestor read a payload; its outcome comes back by `Reception.settle`."""

    def assemble(self, order: Assemble) -> None:
        """Form the whole of a step."""

    def read_watchdogs(self, order: ReadWatchdogs) -> None:
        """Read files of watchdogs; what they say comes back by `Reception.watchdog`."""

    def digest(self, order: Digest) -> None:
        """Have an ingestor make a dump's operator table."""

    def weigh(self, order: Weigh) -> None:
        """Compare the recorded weights of a version."""


class Reception:
    """Takes calls in and answers them; used from one event loop only."""

    def __init__(
        self,
        state: State,
        store: Store,
        plan: Plan,
        floor: Floor,
        *,
        coordinator: str,
        poll_seconds: float,
        stuck_rules: StuckRules = StuckRules(),  # noqa: B008 - frozen
        wall: Callable[[], float] = time.time,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.store = store
        self.plan = plan
        self.orders = Orders(plan, state)
        self.hangs = HangWatch(state, stuck_rules, late_seconds=1.5 * poll_seconds)
        self.floor = floor
        self.coordinator = coordinator
        self.poll_seconds = poll_seconds
        self.wall = wall
        self.mono = mono
        self.events_taken = 0
        self._listened = mono()
        self._looking: asyncio.Task[None] | None = None
        self._payloads: dict[PayloadKey, object] = {}
        # Settled in memory and not yet on disk: whoever heard of it would let the payload go.
        self._uncommitted: Counter[PayloadKey] = Counter()
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    # --- batches ------------------------------------------------------------------------
    async def record(
        self,
        sender_wire: object,
        events: Sequence[object],
        payloads: Mapping[int, object] | None = None,
    ) -> dict[str, Any]:
        """Take in a batch and answer once it is committed; a bad event is refused alone.

        Raises:
            InvalidEvent: the sender cannot be read: then nothing of the batch is taken.
            NotReady: the catalogue cannot be written now; nothing was taken.
        """
        self.check_ready()
        sender = Sender.parse(sender_wire)
        refused: dict[int, str] = {}
        out: list[Instruction] = []
        for wire in events:
            try:
                event = Event.parse(wire)
                has_payload = payloads is not None and event.seq in payloads
                taken = self.state.handle(
                    sender, event, self.mono(), has_payload=has_payload, arrived=self.wall()
                )
                if has_payload and payloads is not None:
                    self._hold(taken, payloads[event.seq])
                out += taken
            except InvalidEvent as error:  # noqa: PERF203 - refused alone, so caught alone
                refused[_seq_of(wire)] = str(error)
                out += self._refusal(sender, error)
        self.events_taken += len(events) - len(refused)
        dumps = [order for order in out if isinstance(order, Put) and order.table == "dumps"]
        ordered = [
            put
            for dump in dumps
            for put in self.orders.reported(dump.row, self.mono(), self.wall())
        ]
        await self._carry_out(out)
        # What a rank missed may be asked again: then every rank is to hear of it.
        await self.order(ordered)
        settled = [order for order in out if isinstance(order, Settled)]
        receipts = {
            order.key.seq: order.state for order in settled if order.key not in self._uncommitted
        }
        return {
            "coordinator": self.coordinator,
            "wall": self.wall(),
            "received": len(events) - len(refused),
            "refused": refused,
            "receipts": receipts,
            "revision": self.plan.revision,
        }

    def _refusal(self, sender: Sender, error: InvalidEvent) -> list[Instruction]:
        process = self.state.registry.processes.get(sender.incarnation)
        return [
            finding(
                "refused_event",
                str(error),
                run=sender.run,
                attempt_id=None if process is None else process.attempt_id,
                wall=self.wall(),
                role=sender.role,
                rank=sender.rank,
                advice="the rest of its batch was taken in",
            )
        ]

    # --- polls --------------------------------------------------------------------------
    async def poll(
        self, sender_wire: object, revision: int, unreceipted: Iterable[object], wait: float
    ) -> dict[str, Any]:
        """Renew a lease; answer when the plan changed, a payload settled or stacks are wanted."""
        self.check_ready()
        sender = Sender.parse(sender_wire)
        heard = self._heard(sender, revision)
        await self._carry_out(heard)
        if heard and self.plan.entries:
            self._look_soon()
        seqs = [seq for seq in unreceipted if isinstance(seq, int)]
        deadline = self.mono() + max(0.0, min(wait, self.poll_seconds))
        while True:
            receipts = self._receipts(sender.incarnation, seqs)
            left = deadline - self.mono()
            asked = self.state.stack_requests.is_news(sender.incarnation)
            if receipts or asked or revision != self.plan.revision or left <= 0:
                break
            await self._wait(sender.incarnation, left)
        changed = revision != self.plan.revision
        return {
            "coordinator": self.coordinator,
            "wall": self.wall(),
            "revision": self.plan.revision,
            "plan": self.plan.wire(sender.run) if changed else None,
            "receipts": receipts,
            "requests": self.state.stack_requests.hand_out(sender.incarnation),
            "poll_seconds": self.poll_seconds,
        }

    def _heard(self, sender: Sender, revision: int) -> list[Instruction]:
        out = self.state.renew(sender.incarnation, self.mono(), self.wall())
        process = self.state.registry.processes.get(sender.incarnation)
        if process is not None and process.plan_revision != revision:
            process.plan_revision = revision
            row = {"incarnation": process.incarnation, "plan_revision": revision}
            out.append(Put("processes", row))
        return out

    def _receipts(self, incarnation: str, seqs: Iterable[int]) -> dict[int, str]:
        process = self.state.registry.processes.get(incarnation)
        if process is None:
            return {}
        return {
            seq: process.settled[seq]
            for seq in seqs
            if seq in process.settled and PayloadKey(incarnation, seq) not in self._uncommitted
        }

    async def _wait(self, incarnation: str, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[incarnation].add(future)
        try:
            await asyncio.wait({future}, timeout=seconds)
        finally:
            waiting = self._waiting[incarnation]
            waiting.discard(future)
            if not waiting:
                del self._waiting[incarnation]

    def _notify(self, incarnations: Iterable[str]) -> None:
        for incarnation in incarnations:
            for future in self._waiting.get(incarnation, ()):
                if not future.done():
                    future.set_result(None)

    # --- raw calls ----------------------------------------------------------------------
    async def raw(
        self,
        kind: str,
        delivery: str,
        fields: Mapping[str, Any],
        payload: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        """Take in a call of somebody without a probe.

        Args:
            kind: the kind of event.
            delivery: names this delivery: the same on every retry of the call.
            fields: run, role, rank, attempt_key, world_size and the event's own fields.
            payload: name -> ref or array; the answer then waits for the payload's receipt.

        Raises:
            InvalidInput: a run, role, rank, step, stage or payload that cannot be right.
            NotReady: the catalogue cannot be written now; nothing was taken.
        """
        self.check_ready()
        if payload is not None and not isinstance(payload, Mapping):
            raise InvalidEvent(
                f"the payload is a {type(payload).__name__}",
                expected="a dict of names to tensors or to refs of them",
            )
        run = check_run_name(fields.get("run"))
        role, rank = fields.get("role") or "actor", fields.get("rank") or 0
        attempt_key = fields.get("attempt_key")
        seq = RAW_SEQ + int(hashlib.blake2b(delivery.encode(), digest_size=7).hexdigest(), 16)
        newest = self.state.registry.newest(run)
        key = attempt_key or (newest.key if newest else UNKEYED)
        name = f"raw/{run}/{key}/{role}/{rank}"
        sender = Sender.parse(Sender(name, run, attempt_key, role, rank).wire())
        wall, mono = self.wall(), self.mono()
        body = {name: value for name, value in fields.items() if value is not None}
        self.state.check(Event(kind, seq, wall, mono, body))  # before anything is changed
        out: list[Instruction] = []
        if body.get("world_size") is not None:
            hello = Event("hello", seq, wall, mono, {"world_size": body["world_size"]})
            out += self.state.handle(sender, hello, mono, raw=True)
        if kind in (BEGIN, END) and body.get("occurrence") is None:
            work = Work.parse(body)
            body["occurrence"] = self.state.raw_occurrence(sender.incarnation, work, kind, seq)
        if payload is not None:
            body["payload"] = {"tensors": dict.fromkeys(payload), "meta": {}}
        event = Event(kind, seq, wall, mono, body)
        has_payload = payload is not None
        taken = self.state.handle(sender, event, mono, has_payload=has_payload, raw=True)
        self._hold(taken, payload)
        out += taken
        self.events_taken += 1
        await self._carry_out(out)
        process = self.state.registry.processes[sender.incarnation]
        answer = {
            "run": run,
            "attempt": self.state.registry.attempt_of(process).number,
            "step": body.get("step"),
            "stage": body.get("stage"),
            "occurrence": body.get("occurrence"),
        }
        if payload is not None:
            answer["payload"] = await self._settled(PayloadKey(sender.incarnation, seq))
        return answer

    async def _settled(self, key: PayloadKey) -> str:
        while not (receipts := self._receipts(key.incarnation, [key.seq])):
            await self._wait(key.incarnation, self.poll_seconds)
        return receipts[key.seq]

    # --- stacks ---------------------------------------------------------------------------
    async def ask_stacks(
        self,
        attempt_id: int,
        role: str | None,
        ranks: Collection[int] | None,
        *,
        seconds: float,
        by: str,
    ) -> dict[str, Any]:
        """Ask processes of an attempt for their stacks; answers once that is on disk.

        Returns `{"request_id", "deadline_wall", "asked": [{"role", "rank"}], "refused": [{"role",
        "rank", "reason"}]}`; the stacks come into the catalogue.

        Raises:
            NotFound: the attempt is over.
            InvalidInput: too many processes at once.
        """
        self.check_ready()
        attempt = self.state.attempt(attempt_id)
        if attempt is None or attempt.over:
            raise NotFound("the attempt is over: nobody is left to be asked")
        processes, refused = choose(attempt, role, ranks)
        request_id, wall = uuid.uuid4().hex, self.wall()
        out: list[Instruction] = []
        for process in processes:
            out += self.state.stack_requests.ask(
                process, request_id, by=by, reason="ordered", wall=wall, seconds=seconds
            )
        asked = [{"role": process.role, "rank": process.rank} for process in processes]
        detail = {"request_id": request_id, "attempt_id": attempt_id, "asked": asked}
        row = {"wall": wall, "by": by, "action": "ask_stacks", "detail": detail}
        await self._carry_out([*out, Put("audit", row)])
        deadline = wall + seconds
        return {
            "request_id": request_id,
            "deadline_wall": deadline,
            "asked": asked,
            "refused": refused,
        }

    async def watchdog(self, incarnation: str, fields: Mapping[str, Any]) -> None:
        """Take in what the file of a process's watchdog says."""
        await self._carry_out(self.hangs.watchdog(incarnation, fields, self.wall()))

    # --- outcomes and orders ------------------------------------------------------------
    async def settle(
        self,
        key: PayloadKey,
        state: str,
        reason: str | None,
        rows: Sequence[Put] = (),
        **columns: Any,
    ) -> None:
        """Take in what became of a payload, with the rows that came of it."""
        self._payloads.pop(key, None)
        settled = self.state.settle(key, state, reason, self.wall(), **columns)
        await self._carry_out([*rows, *settled])

    async def write(self, rows: Sequence[Put | Delete]) -> None:
        """Commit rows that change nothing of the state."""
        await self._carry_out(rows)

    def unread(self, key: PayloadKey) -> None:
        """Note that nobody reads a payload any more, and that it may be offered again."""
        self._payloads.pop(key, None)
        self.state.unread(key)

    async def expire(self) -> None:
        """Let go of processes that fell silent; to be called several times a lease.

        While the catalogue cannot be written, or this process was held up itself, nobody could be
        heard: then every lease begins anew.
        """
        now = self.mono()
        held_up = now - self._listened > self.state.lease_seconds / 2
        self._listened = now
        if held_up or not self.store.health().healthy:
            self.state.renew_all(now)
        else:
            wall = self.wall()
            await self._carry_out(self.state.expire(now, wall))
            await self._carry_out(self.hangs.look(now, wall))
            await self.look()

    def _look_soon(self) -> None:
        # Of a thousand ranks that acknowledge at once, each would have all of them looked through.
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_later())

    async def _look_later(self) -> None:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            await self.look()
        except Exception:
            logger.exception("orders could not be looked after")

    async def look(self) -> None:
        """See whether an order can be agreed on, or has ended."""
        if self.plan.entries:
            await self.order(self.orders.look(self.mono(), self.wall()))

    async def order(self, puts: Sequence[Put]) -> None:
        """Commit changes of the plan, then let every rank know."""
        if not puts:
            return
        publication = self.plan.publication()
        await self._carry_out([*puts])
        self.plan.publish(publication)
        self._notify(list(self._waiting))

    async def agreed(self, capture_id: str, wait: float) -> Entry | None:
        """Wait until an order is no longer only asked, `wait` seconds at most."""
        deadline = self.mono() + wait
        while (entry := self.plan.entries.get(capture_id)) is not None:
            left = deadline - self.mono()
            if entry.agreement.phase != ASKED or left <= 0:
                break
            await self._wait(f"capture/{capture_id}", left)
        return entry

    async def drain(self, run: str | None, timeout: float) -> dict[str, Any]:
        """Wait until nothing of a run (None: of any) is still to be read.

        Returns `{"run", "drained": bool, "pending": n}`.
        """
        deadline = self.mono() + timeout
        while pending := self.state.pending(run):
            left = deadline - self.mono()
            if left <= 0:
                break
            await self._wait(pending[0].incarnation, min(left, 0.5))
        return {"run": run, "drained": not pending, "pending": len(pending)}

    # --- the inside ---------------------------------------------------------------------
    def _hold(self, instructions: Sequence[Instruction], payload: object) -> None:
        """Keep refs for as long as an ingestor reads them, and no longer."""
        for order in instructions:
            if isinstance(order, Ingest):
                self._payloads[order.key] = payload

    def check_ready(self) -> None:
        """Raise `NotReady` while the catalogue cannot be written."""
        health = self.store.health()
        if not health.healthy:
            raise NotReady(
                f"the catalogue cannot be written: {health.reason}",
                advice="nothing was taken in; the same call may be made again",
            )

    async def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Commit the rows, and only then do what the rest says."""
        rows = [order for order in instructions if isinstance(order, Put | Delete)]
        if rows:
            keys = [order.key for order in instructions if isinstance(order, Settled)]
            self._uncommitted.update(keys)
            try:
                await asyncio.wrap_future(self.store.submit(rows))
            finally:
                self._uncommitted.subtract(keys)
                for key in keys:
                    if self._uncommitted[key] <= 0:
                        del self._uncommitted[key]
        settled: set[str] = set()
        for order in instructions:
            if isinstance(order, Ingest):
                self._ingest(order)
            elif isinstance(order, Assemble):
                self.floor.assemble(order)
            elif isinstance(order, Digest):
                self.floor.digest(order)
            elif isinstance(order, Weigh):
                self.floor.weigh(order)
            elif isinstance(order, ReadWatchdogs):
                self.floor.read_watchdogs(order)
            elif isinstance(order, Ask):
                settled.add(order.incarnation)
            elif isinstance(order, Settled):
                settled.add(order.key.incarnation)
        self._notify(settled)

    def _ingest(self, order: Ingest) -> None:
        payload = self._payloads.get(order.key)
        if payload is None:
            logger.error("payload %s has no refs; its process may offer it again", order.key)
            self.state.unread(order.key)
            return
        process = self.state.registry.processes[order.key.incarnation]
        place = {"stage": order.job["stage"], "step": order.job["step"]}
        place |= {"role": process.role, "rank": process.rank}
        words = self.plan.keeps(run=order.job["run"], **place)
        said = read_keep(process.settings.get("keep"))
        order.job["keep"] = [*words, *(() if said is None else wanted_by(said, **place))]
        self.floor.ingest(order, payload)


def _seq_of(wire: object) -> int:
    seq = wire[2] if isinstance(wire, tuple | list) and len(wire) > 2 else None
    return seq if isinstance(seq, int) else -1


def describe(error: BaseException) -> str:
    """Return an error as one line for a reason."""
    text = str(error) if isinstance(error, StagescopeError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:1000]
