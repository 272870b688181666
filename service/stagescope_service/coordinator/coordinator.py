"""Where calls come in: batches of events, polls, outcomes, orders. No Ray in here.

One event loop owns the state. A call changes it, hands the rows to the store, and answers after
the commit; what must happen then (reading payloads, aggregating steps) goes to the `Effects`. That
is the `Executor`'s work; what comes without a probe goes to `RawCalls`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from stagescope.wire.errors import InvalidEvent, NotFound
from stagescope.wire.schema import FINISH, Event, Sender
from stagescope_service.coordinator.executor import Executor
from stagescope_service.coordinator.hang_watch import HangWatch
from stagescope_service.coordinator.load import Load
from stagescope_service.coordinator.raw_calls import RawCalls
from stagescope_service.core import departures, reports
from stagescope_service.core.captures.agreement import ASKED
from stagescope_service.core.captures.plan import Entry, Plan
from stagescope_service.core.captures.requests import CaptureRequests
from stagescope_service.core.entities import Process
from stagescope_service.core.findings import finding
from stagescope_service.core.hang_detection import StuckRules
from stagescope_service.core.instructions import (
    Delete,
    Effects,
    Instruction,
    PayloadKey,
    Put,
    Settled,
)
from stagescope_service.core.stack_requests import choose
from stagescope_service.core.state import State
from stagescope_service.store.contract import Store

logger = logging.getLogger(__name__)

_LEAVE_SECONDS: Final = 10.0
"""After which a process that was asked to take leave and was not heard of since counts as gone."""
_MOST_NAMED: Final = 20
_LOOK_SECONDS: Final = 0.02


@dataclasses.dataclass(slots=True)
class _Leave:
    """What a process is asked: to send what it has, and to take leave."""

    request_id: str
    since: float
    is_handed_out: bool = False


class Coordinator:
    """Takes calls in and answers them; used from one event loop only."""

    def __init__(
        self,
        state: State,
        store: Store,
        plan: Plan,
        effects: Effects,
        *,
        coordinator: str,
        poll_seconds: float,
        stuck_rules: StuckRules = StuckRules(),  # noqa: B008 - frozen
        wall: Callable[[], float] = time.time,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.plan = plan
        self.orders = CaptureRequests(plan, state)
        self.hangs = HangWatch(state, stuck_rules, late_seconds=1.5 * poll_seconds)
        self.load = Load(state)
        self.executor = Executor(state, store, plan, effects)
        self.raw_calls = RawCalls(
            state, self.executor, poll_seconds=poll_seconds, wall=wall, mono=mono
        )
        self.coordinator = coordinator
        self.poll_seconds = poll_seconds
        self.wall = wall
        self.mono = mono
        self._taken = 0
        self._leaving: dict[str, _Leave] = {}
        self._listened = mono()
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin every lease now, once calls are answered: nobody could be heard before."""
        self._listened = self.mono()
        self.state.renew_all(self._listened)
        self.state.registry.listening_since = self.wall()

    @property
    def events_taken(self) -> int:
        """Events that were taken in so far, raw calls included."""
        return self._taken + self.raw_calls.taken

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
            NotReady: the catalogue cannot be written now, or too much waits; nothing was taken.
        """
        self.executor.check_ready()
        sender = Sender.parse(sender_wire)
        async with self.load.admit(len(events)):
            answer = await self._record(sender, events, payloads)
        if pause := self.load.pause:
            answer["pause"] = pause
        return answer

    async def _record(
        self, sender: Sender, events: Sequence[object], payloads: Mapping[int, object] | None
    ) -> dict[str, Any]:
        refused: dict[int, str] = {}
        in_part: dict[int, str] = {}
        out: list[Instruction] = []
        newest: float | None = None
        for wire in events:
            try:
                event = Event.parse(wire)
                newest = event.wall
                has_payload = payloads is not None and event.seq in payloads
                taken = self.state.handle(
                    sender, event, self.mono(), has_payload=has_payload, arrived=self.wall()
                )
                if has_payload and payloads is not None:
                    self.executor.hold(taken, payloads[event.seq])
                if (said := reports.refused_in_part(taken)) is not None:
                    in_part[event.seq] = said
                out += taken
                if event.kind == FINISH:
                    self._leaving.pop(sender.incarnation, None)
            except InvalidEvent as error:  # noqa: PERF203 - refused alone, so caught alone
                refused[_seq_of(wire)] = str(error)
                out += self._refusal(sender, error)
        self._taken += len(events) - len(refused)
        if newest is not None and sender.clock_offset is not None:
            self.load.arrived(self.wall() - sender.clock_offset - newest)
        dumps = [order for order in out if isinstance(order, Put) and order.table == "dumps"]
        ordered = [
            put
            for dump in dumps
            for put in self.orders.reported(dump.row, self.mono(), self.wall())
        ]
        await self.executor.carry_out(out)
        # What a rank missed may be asked again: then every rank is to hear of it.
        await self.order(ordered)
        settled = [order for order in out if isinstance(order, Settled)]
        uncommitted = self.executor.uncommitted
        receipts = {order.key.seq: order.state for order in settled if order.key not in uncommitted}
        return {
            "coordinator": self.coordinator,
            "wall": self.wall(),
            "received": len(events) - len(refused),
            "refused": refused,
            **({"refused_in_part": in_part} if in_part else {}),
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
        self.executor.check_ready()
        sender = Sender.parse(sender_wire)
        heard = self._heard(sender, revision)
        await self.executor.carry_out(heard)
        if heard and self.plan.entries:
            self._look_soon()
        seqs = [seq for seq in unreceipted if isinstance(seq, int)]
        # While calls are too many, each is to wait longer; what is asked for ends it at once.
        poll_seconds = self.poll_seconds + self.load.pause
        deadline = self.mono() + max(0.0, min(wait, poll_seconds))
        while True:
            receipts = self.executor.receipts(sender.incarnation, seqs)
            left = deadline - self.mono()
            asked = self.state.stack_requests.is_news(sender.incarnation)
            asked = asked or self._is_to_leave(sender.incarnation)
            if receipts or asked or revision != self.plan.revision or left <= 0:
                break
            await self.executor.wait(sender.incarnation, left)
        changed = revision != self.plan.revision
        return {
            "coordinator": self.coordinator,
            "wall": self.wall(),
            "revision": self.plan.revision,
            "plan": self.plan.wire(sender.run) if changed else None,
            "receipts": receipts,
            "requests": [
                *self.state.stack_requests.hand_out(sender.incarnation),
                *self._to_leave(sender.incarnation),
            ],
            "poll_seconds": poll_seconds,
        }

    def _heard(self, sender: Sender, revision: int) -> list[Instruction]:
        out = self.state.renew(sender.incarnation, self.mono(), self.wall())
        process = self.state.registry.processes.get(sender.incarnation)
        if process is not None and process.plan_revision != revision:
            process.plan_revision = revision
            row = {"incarnation": process.incarnation, "plan_revision": revision}
            out.append(Put("processes", row))
        return out

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
        self.executor.check_ready()
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
        await self.executor.carry_out([*out, Put("audit", row)])
        deadline = wall + seconds
        return {
            "request_id": request_id,
            "deadline_wall": deadline,
            "asked": asked,
            "refused": refused,
        }

    async def watchdog(self, incarnation: str, fields: Mapping[str, Any]) -> None:
        """Take in what the file of a process's watchdog says."""
        await self.executor.carry_out(self.hangs.watchdog(incarnation, fields, self.wall()))

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
        self.executor.release(key)
        settled = self.state.settle(key, state, reason, self.wall(), **columns)
        await self.executor.carry_out([*rows, *settled])

    async def write(self, rows: Sequence[Put | Delete]) -> None:
        """Commit rows that change nothing of the state."""
        await self.executor.carry_out(rows)

    def unread(self, key: PayloadKey) -> None:
        """Note that nobody reads a payload any more, and that it may be offered again."""
        self.executor.release(key)
        self.state.unread(key)

    async def expire(self) -> None:
        """Let go of processes that fell silent; to be called several times a lease.

        While the catalogue cannot be written, events arrive late, or this process was held up
        itself, nobody could be heard: then every lease begins anew, and nobody is stuck.
        """
        now, wall = self.mono(), self.wall()
        held_up = now - self._listened > self.state.lease_seconds / 2
        self._listened = now
        if not self.executor.store.health().healthy:
            self.state.renew_all(now)
            self.state.registry.listening_since = wall
            return
        await self.executor.carry_out(self.load.look(now, wall))
        if held_up or self.load.is_late(now):
            self.state.renew_all(now)
            self.state.registry.listening_since = wall
        else:
            await self.executor.carry_out(self.state.expire(now, wall))
            await self.executor.carry_out(self.hangs.look(now, wall))
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
        await self.executor.carry_out([*puts])
        self.plan.publish(publication)
        self.executor.notify_all()

    async def agreed(self, capture_id: str, wait: float) -> Entry | None:
        """Wait until an order is no longer only asked, `wait` seconds at most."""
        deadline = self.mono() + wait
        while (entry := self.plan.entries.get(capture_id)) is not None:
            left = deadline - self.mono()
            if entry.agreement.phase != ASKED or left <= 0:
                break
            await self.executor.wait(f"capture/{capture_id}", left)
        return entry

    async def drain(
        self, run: str | None, timeout: float, attempt_key: str | None = None
    ) -> dict[str, Any]:
        """Wait until nothing of a run (None: of any) is still to be read.

        With an attempt key, the training of that start is over: each of its processes is asked
        to take leave, which it does once all that it has was sent.

        Returns `{"run", "drained": bool, "pending": n, "known": bool, "missing": [...]}`; `known`
        says whether anything of the run, or else of the start, ever came, and `missing` names the
        ranks of the start that never came, fell silent, or did not answer.
        """
        deadline = self.mono() + timeout
        missing: list[str] = []
        if attempt_key is not None:
            missing = await self._part(run, attempt_key, deadline)
        while pending := self.state.pending(run):
            left = deadline - self.mono()
            if left <= 0:
                break
            await self.executor.wait(pending[0].incarnation, min(left, 0.5))
        registry = self.state.registry
        known = registry.is_known(run)
        if run is None and attempt_key is not None:
            known = bool(registry.of_key(None, attempt_key))
        return {
            "run": run,
            "drained": not pending and not missing and (known or attempt_key is None),
            "pending": len(pending),
            "known": known,
            "missing": missing,
        }

    async def _part(self, run: str | None, attempt_key: str, deadline: float) -> list[str]:
        """Have the processes of a start take leave; return who did not, or is missing."""
        unknown_until = min(deadline, self.mono() + _LEAVE_SECONDS)
        for incarnation in [*self._leaving]:
            process = self.state.registry.processes.get(incarnation)
            if process is None or not process.live:
                del self._leaving[incarnation]
        while True:
            attempts = self.state.registry.of_key(run, attempt_key)
            present = [
                process
                for attempt in attempts
                for process in attempt.processes.values()
                if process.live and not process.raw
            ]
            for process in present:
                if process.incarnation not in self._leaving:
                    self._leaving[process.incarnation] = _Leave(uuid.uuid4().hex, self.mono())
                    self.executor.notify([process.incarnation])
            named = itertools.chain.from_iterable(each.missing() for each in attempts)
            missing = [*itertools.islice(named, _MOST_NAMED)]
            waited = [each for each in present if not self._is_silent(each)]
            left = (deadline if attempts else unknown_until) - self.mono()
            may_come = any(not spoke for _, _, spoke in missing)
            # A run that is named may be another job's: then nobody is asked.
            nobody = not attempts and run is not None and self.state.registry.is_known(run)
            if left <= 0 or nobody or (attempts and not waited and not may_come):
                break
            name = waited[0].incarnation if waited else attempt_key
            await self.executor.wait(name, min(left, 0.2))
        out: list[Instruction] = []
        for process in present:
            if self._is_silent(process):  # the driver that says so ends it, if it did not yet
                out += departures.leave(self.state.registry, process, self.wall(), finished=True)
                process.finish_seq = process.begun_seq
                del self._leaving[process.incarnation]
        await self.executor.carry_out(out)
        ranks = dict.fromkeys((role, rank) for role, rank, _ in missing)
        ranks |= dict.fromkeys((process.role, process.rank) for process in present)
        return [f"{role} rank {rank}" for role, rank in ranks][:_MOST_NAMED]

    def _to_leave(self, incarnation: str) -> list[dict[str, str]]:
        asked = self._leaving.get(incarnation)
        if asked is None:
            return []
        asked.is_handed_out = True
        return [{"what": FINISH, "request_id": asked.request_id}]

    def _is_to_leave(self, incarnation: str) -> bool:
        """Whether a process is to take leave, and no poll has told it yet."""
        asked = self._leaving.get(incarnation)
        return asked is not None and not asked.is_handed_out

    def _is_silent(self, process: Process) -> bool:
        """Whether a process did not answer: Ray ends an actor with its last handle, unheard."""
        asked = self._leaving.get(process.incarnation)
        patience = _LEAVE_SECONDS + self.load.pause
        quiet = self.wall() - process.heard > patience
        return quiet and asked is not None and self.mono() - asked.since > patience


def _seq_of(wire: object) -> int:
    seq = wire[2] if isinstance(wire, tuple | list) and len(wire) > 2 else None
    return seq if isinstance(seq, int) else -1
