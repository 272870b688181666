"""The state machine: events in, instructions out; who is in which stage of which step.

Pure: it reads no clock, touches no store and no Ray. `handle` may be given any event in any
order, any number of times, and with any of them lost: every row that it writes has a natural key,
so that a repetition writes what stands there already. All state is mutated through `handle`,
`settle`, `expire` and `restore` alone, by one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagescope.errors import InvalidEvent
from stagescope.schema import (
    BEGIN,
    DUMP,
    END,
    END_STEP,
    Event,
    Sender,
    Work,
)
from stagescope_service.engine import spans, steps
from stagescope_service.engine.entities import (
    ANNOUNCED,
    LOST,
    UNFINISHED,
    Attempt,
    Payload,
    Process,
    Step,
)
from stagescope_service.engine.findings import finding
from stagescope_service.engine.instructions import (
    Delete,
    Ingest,
    Instruction,
    PayloadKey,
    Put,
    Settled,
)
from stagescope_service.engine.registry import Registry
from stagescope_service.engine.rows import (
    attempt_row,
    digest,
    loss_row,
    payload_row,
    process_row,
    scalar_rows,
    work_columns,
)


class State:
    """Everything live, and what was closed lately.

    `lease_seconds`: how long a process counts as alive after its last word. A raw caller, which
    does not poll, has `raw_lease_seconds`.
    """

    def __init__(self, *, lease_seconds: float = 45.0, raw_lease_seconds: float = 3600.0) -> None:
        self.registry = Registry()
        self.lease_seconds = lease_seconds
        self.raw_lease_seconds = raw_lease_seconds

    # --- events -----------------------------------------------------------------------------
    def handle(
        self,
        sender: Sender,
        event: Event,
        now: float,
        *,
        has_payload: bool = False,
        raw: bool = False,
    ) -> list[Instruction]:
        """Take in one event.

        Args:
            sender: who sent it.
            event: what it says.
            now: the service's clock, seconds; only differences count.
            has_payload: the payload's refs came with this END.
            raw: the sender is a raw caller, known by name and not by an incarnation.

        Raises:
            InvalidEvent: this event cannot be carried out; nothing was changed by it.
        """
        work = Work.parse(event.fields)
        if event.kind in (BEGIN, END, DUMP) and work.stage is None:
            raise InvalidEvent(f"{event.kind} event {event.seq} has no stage", expected="a name")
        if event.kind == END_STEP and work.step is None:
            raise InvalidEvent(f"end_step event {event.seq} has no step", expected="an int")
        lease = now + (self.raw_lease_seconds if raw else self.lease_seconds)
        process, out = self.registry.process_for(sender, event, lease, raw=raw)
        out += self._wake(process)
        match event.kind:
            case "hello":
                out += self.registry.introduce(process, event.fields)
            case "begin":
                out += self._begin(process, sender, event, work)
            case "end":
                out += self._end(process, sender, event, work, has_payload)
            case "log":
                attempt = self.registry.attempt_of(process)
                out += steps.open_step(attempt, work.step, event.wall)[1]
                out += self._scalars(process, event, work)
            case "end_step":
                attempt = self.registry.attempt_of(process)
                if work.step is not None:
                    out += steps.close_through(attempt, work.step, event.wall, "end_step")
            case "finish":
                out += self._leave(process, event.wall, finished=True)
            case "dropped":
                out += self._dropped(process, event, work)
            case "refused":
                out.append(self._refused(process, event, work))
            case "dump":
                out += self._dump(process, event, work)
        return out

    def _begin(
        self, process: Process, sender: Sender, event: Event, work: Work
    ) -> list[Instruction]:
        out: list[Instruction] = []
        if work.step is not None and not process.bound:
            out += self.registry.bind(process, work.step, event.wall)
        attempt = self.registry.attempt_of(process)
        step, opened = steps.open_step(attempt, work.step, event.wall)
        out += opened
        out += spans.begin(attempt, step, process, sender, event, work)
        if work.step is not None:
            out += steps.advance(attempt, process, work.step, event.wall)
        return out

    def _end(
        self, process: Process, sender: Sender, event: Event, work: Work, has_payload: bool
    ) -> list[Instruction]:
        out: list[Instruction] = []
        if work.step is not None and not process.bound:
            out += self.registry.bind(process, work.step, event.wall)
        attempt = self.registry.attempt_of(process)
        step, opened = steps.open_step(attempt, work.step, event.wall)
        out += opened
        was_unfinished = bool(step.spans) and spans.is_unfinished(step, process, work)
        span, ended = spans.end(attempt, step, process, sender, event, work)
        out += ended
        if was_unfinished and span.status != UNFINISHED:
            lost = digest(process.incarnation, work.key, "stage", "")
            out.append(Delete("losses", {"loss_id": lost}))
        out += self._scalars(process, event, work)
        if work.step is not None:
            # The beginning may be lost: the end, too, says where this rank stands.
            out += steps.advance(attempt, process, work.step, event.wall)
        announced = event.fields.get("payload")
        if isinstance(announced, Mapping):
            out += self._announce(process, step, event, work, announced, has_payload)
        if step.closed_wall is not None:
            out += steps.rejudge(attempt, step)
        return out

    def _announce(
        self,
        process: Process,
        step: Step,
        event: Event,
        work: Work,
        announced: Mapping[str, Any],
        has_payload: bool,
    ) -> list[Instruction]:
        """Note a payload and, where its refs are here, have it read."""
        key = PayloadKey(process.incarnation, event.seq)
        if key.seq in process.settled:
            return [Settled(key, process.settled[key.seq])]
        payload = process.payloads.get(key)
        out: list[Instruction] = []
        if payload is None:
            payload = Payload(key, process.attempt_id, work)
            process.payloads[key] = payload
            step.pending.add(key)
            columns = {
                "tensors": announced.get("tensors"),
                "meta": announced.get("meta"),
                "bytes": announced.get("bytes"),
                "node_id": process.node_id,
                "announced_wall": event.wall,
            }
            out.append(payload_row(process, key, work, ANNOUNCED, **columns))
        if announced.get("dropped"):
            return out + self.settle(key, "dropped", str(announced["dropped"]), event.wall)
        if has_payload and not payload.in_flight:
            payload.in_flight = True
            attempt = self.registry.attempt_of(process)
            job = {
                "run": attempt.run,
                "attempt_id": attempt.attempt_id,
                "attempt_key": attempt.key,
                "role": process.role,
                "rank": process.rank,
                "data_rank": process.data_rank,
                "layout": dict(process.layout),
                **work_columns(work),
                "bytes": announced.get("bytes"),
            }
            out.append(Ingest(key, process.node_id, job))
        return out

    def _scalars(self, process: Process, event: Event, work: Work) -> list[Instruction]:
        scalars = event.fields.get("scalars")
        if not isinstance(scalars, Mapping):
            return []
        return [*scalar_rows(process, work, scalars, event.wall)]

    def _dropped(self, process: Process, event: Event, work: Work) -> list[Instruction]:
        """Count what the process had to drop; each such event is a loss of its own."""
        fields = event.fields
        what, count = str(fields.get("what", "event")), fields.get("count", 1)
        count = count if isinstance(count, int) else 1
        attempt = self.registry.attempt_of(process)
        columns = {"count": count, "bytes": fields.get("bytes"), "wall": event.wall}
        reason = str(fields.get("reason", "the process dropped it"))[:1000]
        out: list[Instruction] = [
            loss_row(attempt, process, work, what, reason, identity=event.seq, **columns)
        ]
        plural = {"payload": "payloads"}.get(what, "events")
        process.dropped[f"{plural}:{event.seq}"] = count
        total = sum(n for key, n in process.dropped.items() if key.startswith(plural))
        out.append(process_row(process, **{f"dropped_{plural}": total}))
        return out

    def _refused(self, process: Process, event: Event, work: Work) -> Instruction:
        attempt = self.registry.attempt_of(process)
        what = str(event.fields.get("what", "input"))[:200]
        return finding(
            f"refused_{what}",
            str(event.fields.get("message", ""))[:2000],
            run=attempt.run,
            attempt_id=attempt.attempt_id,
            wall=event.wall,
            step=work.step,
            stage=work.stage,
            role=process.role,
            rank=process.rank,
            advice="the call in the training process had bad input; training went on",
        )

    def _dump(self, process: Process, event: Event, work: Work) -> list[Instruction]:
        fields = event.fields
        capture_id = str(fields.get("capture_id", ""))
        row = {
            "incarnation": process.incarnation,
            "work_key": work.key,
            "capture_id": capture_id,
            "attempt_id": process.attempt_id,
            "role": process.role,
            "rank": process.rank,
            **work_columns(work),
            "node_id": process.node_id,
            "wall": event.wall,
        }
        names = ("path", "state", "bytes", "files", "seconds", "task", "level", "error")
        row |= {name: fields.get(name) for name in (*names, "overrides", "estimate")}
        out: list[Instruction] = [Put("dumps", row)]
        if fields.get("state") in ("failed", "missed", "truncated"):
            attempt = self.registry.attempt_of(process)
            reason = f"dump {fields['state']}: {fields.get('error') or 'no reason given'}"
            columns = {"identity": capture_id, "count": 1, "wall": event.wall}
            out.append(loss_row(attempt, process, work, "dump", reason[:1000], **columns))
        return out

    # --- payloads ---------------------------------------------------------------------------
    def settle(
        self, key: PayloadKey, state: str, reason: str | None, wall: float, **columns: Any
    ) -> list[Instruction]:
        """Bring a payload to its end: 'ingested', 'lost', 'refused' or 'dropped'."""
        process = self.registry.processes.get(key.incarnation)
        payload = None if process is None else process.payloads.pop(key, None)
        if process is None or payload is None:
            return [Settled(key, state)]
        process.settle(key.seq, state)
        attempt = self.registry.attempts[payload.attempt_id]
        work = payload.work
        row = payload_row(process, key, work, state, reason=reason, settled_wall=wall, **columns)
        out: list[Instruction] = [row]
        if state == "ingested":
            # It may have been listed as lost while its process was quiet.
            identity = (process.incarnation, work.key, "payload", key.seq)
            out.append(Delete("losses", {"loss_id": digest(*identity)}))
        else:
            loss = {"identity": key.seq, "count": 1, "bytes": columns.get("bytes"), "wall": wall}
            out.append(loss_row(attempt, process, work, "payload", reason or state, **loss))
        out += steps.payload_settled(attempt, work.step, key)
        return [*out, Settled(key, state)]

    def unread(self, key: PayloadKey) -> None:
        """Say that no ingestor reads this payload any more; whoever holds its refs may offer."""
        process = self.registry.processes.get(key.incarnation)
        payload = None if process is None else process.payloads.get(key)
        if payload is not None:
            payload.in_flight = False

    # --- leases -----------------------------------------------------------------------------
    def renew(self, incarnation: str, now: float) -> list[Instruction]:
        """Renew a process's lease (its poll)."""
        process = self.registry.processes.get(incarnation)
        if process is None:
            return []
        process.lease_until = max(process.lease_until, now + self.lease_seconds)
        return self._wake(process)

    def expire(self, now: float, wall: float) -> list[Instruction]:
        """Let go of the processes whose lease ran out."""
        out: list[Instruction] = []
        for process in [*self.registry.processes.values()]:
            if process.lease_until >= now:
                continue
            if not (process.finished or process.lapsed):
                out += self._leave(process, wall, finished=False)
            elif process.payloads:
                out += self._lose_unread(process, wall)
        return out

    def _leave(self, process: Process, wall: float, *, finished: bool) -> list[Instruction]:
        attempt = self.registry.attempt_of(process)
        column = "finished_wall" if finished else "lapsed_wall"
        steps.retire(attempt, process)
        if finished:
            process.finished = True
        else:
            process.lapsed = True
        out: list[Instruction] = [process_row(process, **{column: wall})]
        why = "its process took leave" if finished else "its process fell silent"
        for step in [attempt.loose, *attempt.steps.values()]:
            for span, row in spans.abandon(attempt, step, process):
                out.append(row)
                reason = f"{why} inside the stage"
                out.append(
                    loss_row(attempt, process, span.work, "stage", reason, count=1, wall=wall)
                )
        if not finished:
            out += self._lose_unread(process, wall)
        return out + steps.after_leaving(attempt, wall)

    def _lose_unread(self, process: Process, wall: float) -> list[Instruction]:
        """Give up the payloads that no ingestor is reading; whoever holds one may offer it yet."""
        out: list[Instruction] = []
        for payload in [*process.payloads.values()]:
            if not payload.in_flight:
                reason = "its process fell silent before the payload was read"
                out += self.settle(payload.key, LOST, reason, wall)
                process.settled.pop(payload.key.seq, None)
        return out

    def _wake(self, process: Process) -> list[Instruction]:
        """Take back a lapse: the process spoke again."""
        if not process.lapsed:
            return []
        process.lapsed = False
        attempt = self.registry.attempt_of(process)
        out: list[Instruction] = [process_row(process, lapsed_wall=None)]
        for step in [attempt.loose, *attempt.steps.values()]:
            for row in spans.revive(attempt, step, process):
                out.append(row)
                key = row.row["work_key"] if isinstance(row, Put) else ""
                lost = digest(process.incarnation, key, "stage", "")
                out.append(Delete("losses", {"loss_id": lost}))
        steps.rejoin(attempt, process)
        if attempt.ended_wall is not None:
            attempt.ended_wall = None
            out.append(attempt_row(attempt, end_reason=None))
        return out

    # --- asking -----------------------------------------------------------------------------
    def pending(self, run: str) -> list[PayloadKey]:
        """Return the unsettled payloads of a run."""
        return [
            key
            for process in self.registry.processes.values()
            if self.registry.attempt_of(process).run == run
            for key in process.payloads
        ]

    def attempt(self, attempt_id: int) -> Attempt | None:
        """Return an attempt by its id."""
        return self.registry.attempts.get(attempt_id)
