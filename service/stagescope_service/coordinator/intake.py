"""Receives batches of events and polls. No Ray in here.

One event loop owns the state. A call changes it, has the rows committed, and answers after the
commit; `Runner` starts the work that depends on the rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.coordinator.answers import (
    BatchAnswer,
    ErrorAnswer,
    NotReadyAnswer,
    PollAnswer,
)
from stagescope_service.coordinator.arguments import check_batch
from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.draining import Draining
from stagescope_service.coordinator.load import Load
from stagescope_service.coordinator.payload_reading import PayloadReading
from stagescope_service.coordinator.plan_changes import PlanChanges
from stagescope_service.coordinator.runner import Clock, Runner
from stagescope_service.coordinator.starts import PAUSE_SECONDS, Starts, hellos
from stagescope_service.core import reports
from stagescope_service.core.arrival import Arrival
from stagescope_service.core.entities import REFUSED
from stagescope_service.core.findings import REFUSED_EVENT, describe, finding
from stagescope_service.core.instructions import Instruction, PayloadKey, Put, Settled
from stagescope_service.ingest.relay import Batch, RelayAnswer, RelayedPoll
from stagescope_service.store.contract import RefusedWrite
from stagescope_service.store.queries.measurements import SettledPayloads
from stagescope_wire.errors import InvalidEvent, NotReady, StagescopeError
from stagescope_wire.schema import END, FINISH, Event, Sender

logger = logging.getLogger(__name__)

_SEQUENCE: Final = (tuple, list)  # a union takes three times as long to make and to check
_UNDECIDED: Final = "it waits for what the other ranks report, to know whether all started again"


class _ReadBatch(NamedTuple):
    sender: Sender
    events: Sequence[object]
    payloads: Mapping[int, object]


class _Recorded(NamedTuple):
    """The result of a batch, before the commit."""

    batch: _ReadBatch
    instructions: list[Instruction]
    refused: dict[int, str]
    in_part: dict[int, str]
    by_event: list[tuple[int, Sequence[Instruction]]]
    """(seq, the instructions of its event)."""

    def note_refused(self, refused: Sequence[RefusedWrite]) -> None:
        """Note the events of rows that the catalogue refused."""
        for write, reason in refused:
            for seq, instructions in self.by_event:
                if any(each is write for each in instructions):
                    self.in_part.setdefault(seq, reason)


class _Poll(NamedTuple):
    sender: Sender
    revision: int
    unreceipted: list[int]
    until: float
    """Monotonic clock, seconds."""
    is_first: bool
    """Whether it waits for nothing: the first poll of a link."""


class Intake:
    """Receives what ranks report; used from one event loop.

    Args:
        runner: carries out instructions.
        commits: says what is on disk.
        payloads: has payloads read.
        plan_changes: commits changes of the plan.
        load: limits how much is accepted at a time.
        draining: requests processes to leave.
        clock: the service's clock.
        coordinator: its name.
        poll_seconds: seconds until a poll without news ends.
        page: returns the address at which people open the page; None while no API serves.
    """

    def __init__(
        self,
        runner: Runner,
        commits: Commits,
        payloads: PayloadReading,
        plan_changes: PlanChanges,
        load: Load,
        draining: Draining,
        clock: Clock,
        *,
        coordinator: str,
        poll_seconds: float,
        page: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.coordinator = coordinator
        self.poll_seconds = poll_seconds
        self.events_taken = 0
        """Events of accepted batches so far."""
        self._page = page
        self._runner = runner
        self._commits = commits
        self._state = commits.state
        self._payloads = payloads
        self._plan_changes = plan_changes
        self._plan = plan_changes.plan
        self._load = load
        self._draining = draining
        self._wall, self._mono = clock
        self._starts = Starts(self._state)

    # --- batches ----------------------------------------------------------------------------
    async def record(
        self,
        sender_wire: object,
        events: Sequence[object],
        payloads: Mapping[int, object] | None = None,
    ) -> BatchAnswer:
        """Record a batch and answer once it is committed; a bad event is refused alone.

        Raises:
            InvalidEvent: the sender cannot be read: then nothing of the batch is recorded.
            NotReady: the catalogue cannot be written now, or too much waits; nothing was recorded.
        """
        self._commits.check_ready()
        sender = Sender.parse(sender_wire)
        self._state.check_not_deleting(sender.run)
        step = await self._step_in_question(sender, events)
        if step is not None and await self._starts.is_undecided(sender.incarnation, step, events):
            raise NotReady(_UNDECIDED, advice="the same call may be made again")
        return await self._record(sender, events, payloads)

    async def _step_in_question(self, sender: Sender, events: Sequence[object]) -> int | None:
        """Return the step with which a batch may begin a new start, after its HELLO is recorded."""
        step = self._starts.step_in_question(sender, events)
        if step is not None and not self._starts.is_known(sender.incarnation):
            hello = self._handle(_ReadBatch(sender, hellos(events), {}), None)
            self.events_taken -= len(hello.batch.events)  # it counts with its batch
            await self._plan_changes.carry_out(hello.instructions)
        return step

    async def _record(
        self,
        sender: Sender,
        events: Sequence[object],
        payloads: Mapping[int, object] | None,
    ) -> BatchAnswer:
        self._load.admit(len(events))
        try:
            async with self._load.slots:
                stored = await self._stored_payloads(sender, events)
                async with self._commits.turn(sender.incarnation):
                    taken = self._handle(_ReadBatch(sender, events, payloads or {}), stored)
                    taken.note_refused(await self._plan_changes.carry_out(taken.instructions))
        finally:
            self._load.committed(len(events))
        return self._batch_answer(taken)

    async def _stored_payloads(
        self, sender: Sender, events: Sequence[object]
    ) -> SettledPayloads | None:
        """Look up payloads that are offered again after this coordinator forgot or never knew them.

        Raises:
            NotReady: the catalogue cannot be read now.
        """
        offered = [*_announced_seqs(events)]
        asked = self._state.forgotten_payloads(sender, offered) if offered else []
        if not asked:
            return None
        return await self._payloads.stored(sender.incarnation, asked)

    async def record_together(self, batches: Sequence[Batch]) -> RelayAnswer:
        """Record the batches of several ranks, each independently and like `record`.

        The store writes them in one transaction. The errors that `record` raises are answers here.

        Args:
            batches: (sender, events, payloads) of each.
        """
        recorded = [self._record_relayed(batch) for batch in batches]
        return self._relay_answer(await asyncio.gather(*recorded))

    async def _record_relayed(self, batch: Batch) -> BatchAnswer | NotReadyAnswer | ErrorAnswer:
        sender_wire, events, payloads = batch
        try:
            check_batch(events, payloads)
            self._commits.check_ready()
            sender = Sender.parse(sender_wire)
            self._state.check_not_deleting(sender.run)
            # A wait in here would hold up the call that the relay has under way, and with it the
            # HELLOs that are waited for.
            step = await self._step_in_question(sender, events)
            if step is not None and self._starts.is_in_question(sender.incarnation, step, events):
                return self._comes_too_early()
            return await self._record(sender, events, payloads)
        except NotReady as error:
            return self.not_ready(error)
        except Exception as error:
            logger.exception("a relayed batch of %.200r failed", sender_wire)
            return {"error": describe(error)}

    def not_ready(self, error: NotReady) -> NotReadyAnswer:
        """Return the answer that tells a rank to repeat its call."""
        answer: NotReadyAnswer = {"coordinator": self.coordinator, "not_ready": str(error)}
        if pause := self._load.pause:
            answer["pause"] = pause
        return answer

    def _comes_too_early(self) -> NotReadyAnswer:
        return {
            "coordinator": self.coordinator,
            "not_ready": _UNDECIDED,
            "pause": max(PAUSE_SECONDS, self._load.pause),
        }

    def _relay_answer(self, answers: Sequence[Mapping[str, object] | None]) -> RelayAnswer:
        return {"answers": answers, "gather_seconds": self._load.gather_seconds}

    def _handle(self, batch: _ReadBatch, stored: SettledPayloads | None) -> _Recorded:
        sender, events, payloads = batch
        refused: dict[int, str] = {}
        in_part: dict[int, str] = {}
        out: list[Instruction] = []
        by_event: list[tuple[int, Sequence[Instruction]]] = []
        newest: float | None = None
        now, arrived = self._mono(), self._wall()
        states = {} if stored is None else stored.states
        without_payload = Arrival(wall=arrived)
        for wire in events:
            try:
                event = Event.parse(wire)
                newest = event.wall
                has_payload = event.seq in payloads
                arrival = without_payload
                if has_payload or event.seq in states:
                    arrival = Arrival(has_payload, wall=arrived, stored=states.get(event.seq))
                instructions = self._state.handle(sender, event, now, arrival)
            except InvalidEvent as error:
                refused[_seq_of(wire)] = str(error)
                out += self._refusal(sender, error)
                continue
            except Exception as error:  # what other events of the batch changed must be written
                logger.exception("event %.200r of %s could not be handled", wire, sender)
                seq, reason = _seq_of(wire), describe(error)
                refused[seq] = reason
                out += self._refusal(sender, error)
                if self._state.payload(key := PayloadKey(sender.incarnation, seq)) is not None:
                    out += self._state.settle(key, REFUSED, reason, arrived)
                continue
            if has_payload:
                self._payloads.hold(instructions, payloads[event.seq])
            if (part := reports.refused_in_part(instructions)) is not None:
                in_part[event.seq] = part
            out += instructions
            by_event.append((event.seq, instructions))
            if event.kind == FINISH:
                self._draining.finished(sender.incarnation)
        if stored is not None:
            self._state.note_payloads(sender.incarnation, stored.newest, _announced_seqs(events))
        out += self._acknowledge(sender.incarnation, sender.plan_revision)
        self.events_taken += len(events) - len(refused)
        if newest is not None and sender.clock_offset is not None:
            self._load.arrived(self._wall() - sender.clock_offset - newest)
        return _Recorded(batch, out, refused, in_part, by_event)

    def _batch_answer(self, taken: _Recorded) -> BatchAnswer:
        sender, events, _ = taken.batch
        receipts = {
            each.key.seq: each.state
            for each in taken.instructions
            if type(each) is Settled and self._commits.is_written(each.key)
        }
        answer: BatchAnswer = {
            "coordinator": self.coordinator,
            "wall": self._wall(),
            "received": len(events) - len(taken.refused),
            "refused": taken.refused,
            "receipts": receipts,
            "revision": self._plan.revision,
        }
        if taken.in_part:
            answer["refused_in_part"] = taken.in_part
        # A rank whose poll waits behind the events of others learns of a capture request here.
        if sender.plan_revision not in (None, self._plan.revision):
            answer["plan"] = self._plan.wire(sender.run)
        if (key := self._key_without_own(sender.incarnation)) is not None:
            answer["attempt_key"] = key
        if pause := self._load.pause:
            answer["pause"] = pause
        if self._load.relays:
            answer["relay"] = True
        return answer

    def _refusal(self, sender: Sender, error: Exception) -> list[Instruction]:
        process = self._state.registry.processes.get(sender.incarnation)
        found = finding(
            REFUSED_EVENT,
            describe(error),
            run=sender.run,
            attempt_id=None if process is None else process.attempt_id,
            wall=self._wall(),
            role=sender.role,
            rank=sender.rank,
            advice="the rest of its batch was taken in",
        )
        return [self._state.refusals.add(found)]

    # --- polls ------------------------------------------------------------------------------
    async def poll(
        self, sender_wire: object, revision: int, unreceipted: Iterable[object], wait: float
    ) -> PollAnswer:
        """Renew a lease; answer when the plan changed, a payload settled or a request waits."""
        self._commits.check_ready()
        poll = self._poll(Sender.parse(sender_wire), revision, unreceipted, wait)
        await self._renew([poll], [0.0])
        while not (self._has_news(poll) or self._mono() >= poll.until):
            await self._commits.wait([poll.sender.incarnation], poll.until - self._mono())
        return self._poll_answer(poll)

    async def poll_together(self, polls: Sequence[RelayedPoll], wait: float) -> RelayAnswer:
        """Answer the polls of several ranks as soon as one of them has news, or its wait is over.

        Args:
            polls: the polls of the ranks that wait.
            wait: seconds until the polls without news get None: they wait on.

        Raises:
            NotReady: the catalogue cannot be written.
        """
        self._commits.check_ready()
        answers: dict[int, PollAnswer | ErrorAnswer] = {}
        waiting: dict[int, _Poll] = {}
        new: list[tuple[_Poll, float]] = []
        for number, each in enumerate(polls):
            try:
                poll = self._poll(
                    Sender.parse(each["sender"]),
                    int(each["revision"]),
                    each["unreceipted"],
                    float(each["wait"]),
                )
            except (StagescopeError, TypeError, ValueError) as error:
                answers[number] = {"error": describe(error)}
                continue
            waiting[number] = poll
            if (ago := each["called_ago"]) is not None:
                new.append((poll, ago))
        await self._renew([poll for poll, _ in new], [ago for _, ago in new])
        until = min([self._mono() + wait, *(poll.until for poll in waiting.values())])
        names = [poll.sender.incarnation for poll in waiting.values()]
        while not (answers or any(map(self._has_news, waiting.values()))):
            if (left := until - self._mono()) <= 0:
                break
            await self._commits.wait(names, left)
        now = self._mono()
        for number, poll in waiting.items():
            if now >= poll.until or self._has_news(poll):
                answers[number] = self._poll_answer(poll)
        return self._relay_answer([answers.get(number) for number in range(len(polls))])

    def _poll(
        self, sender: Sender, revision: int, unreceipted: Iterable[object], wait: float
    ) -> _Poll:
        seqs = [seq for seq in unreceipted if isinstance(seq, int)]
        until = self._mono() + max(0.0, min(wait, self._wait_seconds))
        return _Poll(sender, revision, seqs, until, is_first=wait <= 0)

    @property
    def _wait_seconds(self) -> float:
        # While too many calls come, each must wait longer; news end the wait at once.
        return self.poll_seconds + self._load.pause

    async def _renew(self, polls: Sequence[_Poll], called_ago: Sequence[float]) -> None:
        """Renew the leases of processes, each from the time of its call, given in seconds ago."""
        out: list[Instruction] = []
        for poll, ago in zip(polls, called_ago, strict=True):
            incarnation = poll.sender.incarnation
            out += self._state.renew(incarnation, self._mono() - ago, self._wall() - ago)
            out += self._acknowledge(incarnation, poll.revision)
        await self._runner.carry_out(out)
        if out:
            self._plan_changes.check_soon()

    def _has_news(self, poll: _Poll) -> bool:
        incarnation = poll.sender.incarnation
        return bool(
            poll.revision != self._plan.revision
            or self._commits.receipts(incarnation, poll.unreceipted)
            or self._state.stack_requests.is_news(incarnation)
            or self._draining.has_news(incarnation)
        )

    def _poll_answer(self, poll: _Poll) -> PollAnswer:
        incarnation = poll.sender.incarnation
        changed = poll.revision != self._plan.revision
        answer: PollAnswer = {
            "coordinator": self.coordinator,
            "wall": self._wall(),
            "revision": self._plan.revision,
            "plan": self._plan.wire(poll.sender.run) if changed else None,
            "receipts": self._commits.receipts(incarnation, poll.unreceipted),
            "requests": [
                *self._state.stack_requests.hand_out(incarnation),
                *self._draining.hand_out(incarnation),
            ],
            "poll_seconds": self._wait_seconds,
        }
        if poll.is_first and (page := self._page()) is not None:
            answer["page"] = page
        if (key := self._key_without_own(incarnation)) is not None:
            answer["attempt_key"] = key
        if self._load.relays:
            answer["relay"] = True
        return answer

    def _key_without_own(self, incarnation: str) -> str | None:
        """Return the attempt's key for a process that has none of its own.

        None while it may still turn out to belong to a later attempt: its dumps lie by that key.
        """
        process = self._state.registry.processes.get(incarnation)
        if process is None or not process.unkeyed or self._state.registry.may_leave(process):
            return None
        return self._state.registry.attempt_of(process).key

    def _acknowledge(self, incarnation: str, revision: int | None) -> list[Instruction]:
        """Note the plan's revision that a process uses; capture requests wait for it."""
        process = self._state.registry.processes.get(incarnation)
        if process is None or revision is None or process.plan_revision == revision:
            return []
        # A poll may be read after a batch that was sent later, and then holds an older revision.
        # (One beyond the plan's own was acknowledged before the catalogue came from a backup.)
        if revision < (process.plan_revision or 0) <= self._plan.revision:
            return []
        process.plan_revision = revision
        self._plan_changes.check_soon()
        return [Put("processes", {"incarnation": incarnation, "plan_revision": revision})]


def _announced_seqs(events: Iterable[object]) -> Iterator[int]:
    """Yield the seqs of the ENDs that announce a payload, of events that may be malformed."""
    for wire in events:
        if not isinstance(wire, _SEQUENCE) or len(wire) < 6 or wire[1] != END:
            continue
        if isinstance(wire[2], int) and isinstance(wire[5], Mapping) and "payload" in wire[5]:
            yield wire[2]


def _seq_of(wire: object) -> int:
    seq = wire[2] if isinstance(wire, _SEQUENCE) and len(wire) > 2 else None
    return seq if isinstance(seq, int) else -1
