"""The state machine: events in, instructions out.

Pure: it reads no clock, no store and no Ray. `handle` accepts events in any order and any number of
times; any of them may be lost. Every row has a natural key, so a repetition writes the same row.
Only `handle`, `settle`, `expire` and `restore` change the state, in one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from stagescope_service.core import (
    departures,
    handshake_findings,
    payloads,
    reports,
    spans,
    steps,
    verdicts,
)
from stagescope_service.core.arrival import PLAIN, Arrival, work_of
from stagescope_service.core.canary import records as canary_records
from stagescope_service.core.catalogue_rows import span_row
from stagescope_service.core.entities import (
    FAILED,
    OPEN,
    REFUSED,
    SPANS_REMEMBERED,
    UNFINISHED,
    Attempt,
    PendingPayload,
    Process,
    Span,
    Step,
)
from stagescope_service.core.findings import Refusals
from stagescope_service.core.hangs.stack_requests import StackRequests
from stagescope_service.core.instructions import (
    CompareWeights,
    Instruction,
    JudgeCanary,
    PayloadKey,
    Put,
    Settled,
)
from stagescope_service.core.registry import Registry
from stagescope_service.core.spans import ReceivedEvent
from stagescope_service.core.weights import records as weight_records
from stagescope_wire.errors import NotReady
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import CANARY, WEIGHTS, Event, Sender, Work

FINDINGS_REMEMBERED: Final = 10_000


class State:
    """The state machine: live attempts and processes, and recently closed steps.

    `lease_seconds`: how long a process counts as live after its last event or poll. A raw caller,
    which does not poll, has `raw_lease_seconds`.
    """

    def __init__(self, *, lease_seconds: float = 45.0, raw_lease_seconds: float = 3600.0) -> None:
        self.registry = Registry()
        self.stack_requests = StackRequests()
        self.refusals = Refusals()
        self._findings: dict[str, float] = {}
        self._manifests = weight_records.Manifests()
        self.lease_seconds = lease_seconds
        self.raw_lease_seconds = raw_lease_seconds
        self.deleting: set[str] = set()
        """Runs that are being deleted: what is reported of them waits."""

    # --- events -----------------------------------------------------------------------------
    def handle(
        self,
        sender: Sender,
        event: Event,
        now: float,
        arrival: Arrival = PLAIN,
    ) -> list[Instruction]:
        """Apply one event.

        Args:
            sender: the event's sender.
            event: the event.
            now: the service's clock, seconds; only differences count.
            arrival: how it came.

        Raises:
            InvalidEvent: this event cannot be applied; nothing has changed.
        """
        work = work_of(event)
        reported = weight_records.read(event, work) if event.kind == WEIGHTS else None
        scored = canary_records.read(event, work) if event.kind == CANARY else None
        attempt, process, received, out = self._receive(sender, event, work, now, arrival)
        ours = received.ours
        match event.kind:
            case "begin":
                out += self._begin(attempt, process, received)
            case "end":
                out += self._end(attempt, process, received, arrival)
            case "hello":
                out += self._adopt_handshake(attempt, process, event)
            case "log":
                out += steps.open_step(attempt, work.step, ours)[1]
                out += self._of_start(process, reports.scalars(attempt, process, event, work))
                out += steps.close_due(attempt, ours)
            case "end_step" if work.step is not None:
                out += steps.end_step(attempt, work.step, ours)
            case "finish" if arrival.raw or event.seq > process.begun_seq:
                out += self._of_start(process, reports.crash(attempt, process, event))
                out += departures.leave(self.registry, process, ours, finished=True, own=event.wall)
                process.finish_seq = None if arrival.raw else event.seq
            case "dropped":
                out += self._of_start(process, reports.dropped(attempt, process, event, work))
            case "refused":
                out += self._of_start(process, [reports.refused(attempt, process, event, work)])
            case "dump":
                out += reports.dump(attempt, process, event, work)
            case "weights" if reported is not None:
                attempt, reached = self._reach(process, received)
                out += reached
                out += weight_records.put(process, event, work, reported, self._manifests)
                out.append(CompareWeights(attempt.attempt_id, reported.version))
            case "canary" if scored is not None:
                attempt, reached = self._reach(process, received)
                scored_row = canary_records.put(process, event, work, scored)
                out += [*reached, scored_row, JudgeCanary(attempt.run)]
            case "stacks":
                out += self.stack_requests.answered(
                    attempt, process, event.fields, work, received.at
                )
        return self._noted(out)

    def _receive(
        self, sender: Sender, event: Event, work: Work, now: float, arrival: Arrival
    ) -> tuple[Attempt, Process, ReceivedEvent, list[Instruction]]:
        """Return the attempt and the process of an event; one thought gone lives again."""
        _, raw, late, arrived, _ = arrival
        lease = now + (self.raw_lease_seconds if raw else self.lease_seconds)
        # The service's own times are on its own clock: the clocks of its senders differ.
        ours, at = spans.on_our_clock(sender, event.wall, arrived)
        process, out = self.registry.process_for(sender, event, ours, lease, raw, late)
        attempt = self.registry.attempts[process.attempt_id]
        contact = at if arrived is None else arrived
        if contact > process.last_contact:
            process.last_contact = contact
        if process.lapsed:
            out += departures.wake(self.registry, process, event.wall)
        if attempt.ended_wall is not None:
            out += steps.resume(attempt, process)
        if attempt.silent_roles or attempt.absent_ranks:
            out += steps.end_silence(attempt, ours)
        return attempt, process, ReceivedEvent(sender, event, work, arrived, ours, at), out

    def _adopt_handshake(
        self, attempt: Attempt, process: Process, event: Event
    ) -> list[Instruction]:
        resized, out = self.registry.adopt_handshake(process, event.fields, event.wall)
        if not self.registry.may_leave(process):
            out += handshake_findings.handshake_fields(attempt, process)
        return out + (verdicts.rejudge_all(attempt) if resized else [])

    def watchdog(
        self, process: Process, fields: Mapping[str, object], work: Work, wall: float
    ) -> list[Instruction]:
        """Apply the watchdog file of a lapsed process (the fields of a STACKS event).

        Its step may be new here: the BEGIN is still queued in the process, which does not run.
        """
        out = self._bind(process, work.step, wall)
        attempt = self.registry.attempt_of(process)
        if work.step is not None:
            out += steps.open_step(attempt, work.step, wall)[1]
            out += steps.advance(attempt, process, work.step)
            out += steps.close_due(attempt, wall)
        return self._noted(out + self.stack_requests.answered(attempt, process, fields, work, wall))

    def _noted(self, out: list[Instruction]) -> list[Instruction]:
        """Keep the first time of findings that are made again."""
        for at, each in enumerate(out):
            if type(each) is Put and each.table == "findings":
                row = each.row
                first = self.remember_finding(row["finding_id"], row["first_wall"])
                out[at] = Put("findings", {**row, "first_wall": first})
        return out

    def remember_finding(self, finding_id: str, wall: float) -> float:
        """Return the first time of a finding, `wall` included."""
        first = min(self._findings.get(finding_id, wall), wall)
        self._findings[finding_id] = first
        if len(self._findings) > FINDINGS_REMEMBERED:
            del self._findings[next(iter(self._findings))]
        return first

    def _of_start(self, process: Process, rows: list[Instruction]) -> list[Instruction]:
        """Return `rows`, and remember them if the process may still belong to a later attempt."""
        if self.registry.may_leave(process):
            # If not all findings are in memory, none counts as new, and none is withdrawn.
            is_full = len(self._findings) >= FINDINGS_REMEMBERED
            reports.remember_unbound(process, rows, None if is_full else self._findings)
        return rows

    def _bind(self, process: Process, step: int | None, wall: float) -> list[Instruction]:
        if process.bound or step is None:
            return []
        may_leave = self.registry.may_leave(process)
        left, out = self.registry.bind(process, step, wall)
        attempt = self.registry.attempt_of(process)
        if left is not None:
            for each in attempt.processes.values():
                out += handshake_findings.handshake_fields(attempt, each)
                out += reports.follow(attempt, each, step)
            # Its known world size may have come from the process that left it.
            out += verdicts.rejudge_all(left)
            out += steps.end_if_left(left)
            out += steps.close_due(left, wall)
            size = left.world_size(process.role)
            had_rank = size is None or process.rank < size
            if process.unkeyed and had_rank and not left.by_rank.get((process.role, process.rank)):
                out.append(reports.began_alone(attempt, left, process, wall))
        elif may_leave:
            out += handshake_findings.handshake_fields(attempt, process)
        if left is None and not process.raw and self.registry.restarts.stays_without_key(process):
            out.append(reports.started_again(attempt, process, wall))
        process.unbound_rows.clear()
        return out

    def _begin(
        self, attempt: Attempt, process: Process, received: ReceivedEvent
    ) -> list[Instruction]:
        event, work, ours = received.event, received.work, received.ours
        out: list[Instruction] = []
        if process.finished and departures.goes_on(process, event.seq):
            out += departures.wake(self.registry, process, event.wall)
        if event.seq > process.begun_seq:
            process.begun_seq = event.seq
        if not process.bound:
            out += self._bind(process, work.step, ours)
            attempt = self.registry.attempt_of(process)
        step, opened = steps.open_step(attempt, work.step, ours)
        out += opened
        span, begun = spans.begin(attempt, step, process, received)
        out += begun
        if begun and work.step is not None:
            out += spans.begun_again(attempt, step, process, span, event.wall)
        spans.note_begin(step, process, span, received.at)
        if process.finished and process.open_spans:
            # It finished before this BEGIN arrived.
            left = event.wall if process.left_wall is None else process.left_wall
            out += departures.abandon(attempt, process, left, "its process reported its end")
        elif len(process.open_spans) > SPANS_REMEMBERED:
            forgotten = process.open_spans.pop(next(iter(process.open_spans)))
            forgotten.status = UNFINISHED
            out.append(span_row(attempt.attempt_id, forgotten))
            reason = "its end never arrived"
            out.append(departures.stage_loss(attempt, process, forgotten.work, reason, event.wall))
        out += self._stand(
            attempt, process, step, span, ours, opened=bool(opened), repeated=len(begun) > 1
        )
        return out

    def _stand(
        self,
        attempt: Attempt,
        process: Process,
        step: Step,
        span: Span,
        wall: float,
        *,
        opened: bool,
        repeated: bool,
    ) -> list[Instruction]:
        """Update the position of a process, and the verdicts that depend on it.

        Args:
            attempt: of the process.
            process: that did the work.
            step: of the work.
            span: the work.
            wall: when, by the service's clock.
            opened: the event opened the step.
            repeated: the event is of work that was done before, so that other spans count now.
        """
        out = reports.stage_name(attempt, process, span.work.stage, wall)
        if step is attempt.stepless:
            return out
        if step.closed_wall is not None:
            out += verdicts.rejudge_rank(attempt, step, span)
            if repeated and not attempt.pending.get(step.step):
                out += steps.aggregate(attempt, step.step, wall)
            if step.evicted and span.status != OPEN:
                # Its verdict has left memory: aggregation corrects it from the catalogue.
                out += steps.aggregate(attempt, step.step, wall)
        # The BEGIN may be lost: the END shows the position of this rank as well.
        advanced = steps.advance(attempt, process, step.step)
        out += advanced
        if attempt.ended_wall is not None:
            out += steps.resume(attempt, process)
        if opened or advanced:  # else no step can have become due
            out += steps.close_due(attempt, wall)
        return out

    def _end(
        self, attempt: Attempt, process: Process, received: ReceivedEvent, arrival: Arrival
    ) -> list[Instruction]:
        event, work, ours = received.event, received.work, received.ours
        if "payload" in event.fields:
            payloads.recall(process, event.seq, arrival.stored)
        out: list[Instruction] = []
        if not process.bound:
            out += self._bind(process, work.step, ours)
            attempt = self.registry.attempt_of(process)
        step, opened = steps.open_step(attempt, work.step, ours)
        out += opened
        unfinished = len(process.unfinished)
        span, ended = spans.end(attempt, step, process, received)
        out += ended
        if ended and span.begin_seq is None and work.step is not None:
            out += spans.begun_again(attempt, step, process, span, event.wall)
        spans.note_end(step, process, span, received.at, event.fields, event.mono)
        if ended and span.status == FAILED:
            out += self._of_start(process, [reports.failed_stage(attempt, process, event, work)])
        if len(process.unfinished) < unfinished or process.returned:
            out += departures.take_leave_back(process, work)
        out += reports.scalars(attempt, process, event, work)
        if work.step is None:
            out += reports.stepless(attempt, process, event, work)
        announced = event.fields.get("payload")
        dropped = event.fields.get("payload_dropped")
        if announced is not None and isinstance(announced, Mapping):
            out += payloads.announce(attempt, process, event, work, announced, arrival.has_payload)
        elif dropped is not None and isinstance(dropped, Mapping):
            out += payloads.announce_dropped(attempt, process, event, work, dropped)
        out += self._stand(
            attempt, process, step, span, ours, opened=bool(opened), repeated=len(ended) > 1
        )
        return out

    # --- weights ----------------------------------------------------------------------------
    def _reach(
        self, process: Process, received: ReceivedEvent
    ) -> tuple[Attempt, list[Instruction]]:
        """Return the attempt of a report about weights, with its process at the report's step."""
        work, ours = received.work, received.ours
        out = self._bind(process, work.step, ours)
        attempt = self.registry.attempt_of(process)
        out += steps.open_step(attempt, work.step, ours)[1]
        out += steps.close_due(attempt, ours)
        return attempt, out

    def driver_ended(
        self, run: str | None, key: str, fields: JsonObject, wall: float
    ) -> list[Instruction]:
        """Apply the exception that ended the driver of a start (the fields of a FINISH)."""
        attempts = [each for each in self.registry.of_key(run, key) if not each.over]
        return self._noted([reports.driver_end(each, fields, wall) for each in attempts])

    # --- payloads ---------------------------------------------------------------------------
    def settle(
        self, key: PayloadKey, state: str, reason: str | None, wall: float, **columns: Any
    ) -> list[Instruction]:
        """Set the final state of a payload: 'ingested', 'lost', 'refused' or 'dropped'."""
        process = self.registry.processes.get(key.incarnation)
        payload = None if process is None else process.payloads.get(key)
        if process is None or payload is None:
            return [Settled(key, state)]
        attempt = self.registry.attempts[payload.attempt_id]
        return payloads.settle(attempt, process, payload, state, reason, wall, **columns)

    def payload(self, key: PayloadKey) -> PendingPayload | None:
        """Return a payload that is not settled."""
        process = self.registry.processes.get(key.incarnation)
        return None if process is None else process.payloads.get(key)

    def refuse(self, payload: PendingPayload, reason: str, wall: float) -> list[Instruction]:
        """Settle a payload again, as 'refused': the catalogue did not accept its first outcome."""
        process = self.registry.processes.get(payload.key.incarnation)
        attempt = self.registry.attempts.get(payload.attempt_id)
        if process is None or attempt is None:
            return []
        return payloads.settle(attempt, process, payload, REFUSED, reason, wall)

    def forgotten_payloads(self, sender: Sender, seqs: Iterable[int]) -> list[int]:
        """Return the payloads of these ENDs whose state only the catalogue knows."""
        process = self.registry.processes.get(sender.incarnation)
        if process is not None:
            return payloads.forgotten(process, seqs)
        attempt = self.registry.known_attempt(sender)
        return [*seqs] if attempt is not None and attempt.has_past else []

    def note_payloads(self, incarnation: str, stored: int | None, seqs: Iterable[int]) -> None:
        """Note that a process's payloads were looked up in the catalogue.

        Args:
            incarnation: of the process.
            stored: the highest seq of its payloads there.
            seqs: of the payloads that it announced since.
        """
        process = self.registry.processes.get(incarnation)
        if process is not None and process.payloads_through is None:
            newest = -1 if stored is None else stored
            if not process.raw:
                process.payloads_through = max([newest, *seqs])
            elif stored is None:
                process.payloads_through = newest

    def unread(self, key: PayloadKey) -> None:
        """Mark a payload as not being ingested; the holder of its refs may offer it again."""
        process = self.registry.processes.get(key.incarnation)
        payload = None if process is None else process.payloads.get(key)
        if payload is not None:
            payload.in_flight = False

    # --- leases -----------------------------------------------------------------------------
    def renew(self, incarnation: str, now: float, wall: float) -> list[Instruction]:
        """Renew a process's lease (its poll)."""
        process = self.registry.processes.get(incarnation)
        if process is None:
            return []
        process.lease_until = max(process.lease_until, now + self.lease_seconds)
        process.last_contact = max(process.last_contact, wall)
        process.last_poll = max(process.last_poll, wall)
        return departures.wake(self.registry, process, wall) if process.lapsed else []

    def renew_all(self, now: float) -> None:
        """Renew the lease of every process, after a time in which no poll could be answered."""
        for process in self.registry.processes.values():
            process.lease_until = max(process.lease_until, now + self.lease_seconds)

    def expire(
        self, now: float, wall: float, lost_nodes: Collection[str] = ()
    ) -> list[Instruction]:
        """Mark the processes whose lease has expired as lapsed.

        Losses name the node of those that were on one that the Ray cluster lost.
        """
        out: list[Instruction] = []
        for process in [*self.registry.processes.values()]:
            if process.lease_until >= now:
                continue
            if not (process.finished or process.lapsed):
                out += departures.leave(
                    self.registry, process, wall, finished=False, lost_nodes=lost_nodes
                )
            elif process.payloads:
                out += departures.lose_unread(self.registry, process, wall, lost_nodes)
        for attempt in self.registry.attempts.values():
            departures.release(attempt, wall)
            self.registry.forget(attempt, now)
        return out

    def rejudge(self, attempt_id: int, step: int) -> list[Instruction]:
        """Return the present verdict on a closed step that is in memory."""
        attempt = self.attempt(attempt_id)
        return [] if attempt is None else verdicts.rejudge_now(attempt, step)

    # --- deletion ---------------------------------------------------------------------------
    def check_not_deleting(self, run: str) -> None:
        """Raise `NotReady` while a run is being deleted: what follows begins it anew."""
        if run in self.deleting:
            raise NotReady(
                f"run {run} is being deleted; what is reported now begins it anew",
                advice="the same call may be made again",
            )

    def remove(self, run: str, findings: Iterable[str]) -> list[int]:
        """Forget a run that is not live, and findings of it; return the ids of its attempts."""
        for finding_id in findings:
            self._findings.pop(finding_id, None)
            self.refusals.forget(finding_id)
        return self.registry.remove(run)

    # --- asking -----------------------------------------------------------------------------
    def pending(self, run: str | None) -> list[PayloadKey]:
        """Return the unsettled payloads of a run, or of every run (None)."""
        return [
            key
            for process in self.registry.processes.values()
            if run in (None, self.registry.attempt_of(process).run)
            for key in process.payloads
        ]

    def attempt(self, attempt_id: int) -> Attempt | None:
        """Return an attempt by its id."""
        return self.registry.attempts.get(attempt_id)
