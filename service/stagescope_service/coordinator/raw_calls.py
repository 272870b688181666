"""Calls of processes without a probe, which Ray may retry.

A raw call has neither an incarnation nor a sequence number: both are derived here, so that a
retried call is the same event.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping

from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.payload_reading import PayloadReading
from stagescope_service.coordinator.raw_fields import (
    PAGE,
    call_name,
    check_plain,
    plain_fields,
    unknown_fields,
)
from stagescope_service.coordinator.runner import Clock, Runner
from stagescope_service.core import reports, spans, steps
from stagescope_service.core.arrival import Arrival, work_of
from stagescope_service.core.catalogue_rows import integer, text
from stagescope_service.core.entities import FAILED, OK
from stagescope_service.core.findings import REFUSED_CALL, finding
from stagescope_service.core.instructions import Instruction, PayloadKey
from stagescope_service.core.registry import UNKEYED, Registry
from stagescope_service.core.spans import RAW_SEQ
from stagescope_service.statistics.payload import are_texts
from stagescope_service.store.queries.measurements import SettledPayloads
from stagescope_wire.errors import InvalidEvent, InvalidInput, NotFound
from stagescope_wire.names import closest, display_name, run_name, storable_id
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import BEGIN, END, FINISH, HELLO, Event, Sender, Work
from stagescope_wire.tensors import PAYLOAD_STRINGS


class RawCalls:
    """Handles raw calls; used from one event loop."""

    def __init__(
        self,
        runner: Runner,
        commits: Commits,
        payloads: PayloadReading,
        clock: Clock,
        *,
        poll_seconds: float,
    ) -> None:
        self._runner = runner
        self._commits = commits
        self._state = commits.state
        self._payloads = payloads
        self._poll_seconds = poll_seconds
        self._wall, self._mono = clock
        self.recorded = 0

    async def record(
        self,
        kind: str,
        delivery: str,
        fields: JsonObject,
        payload: Mapping[str, object] | None = None,
    ) -> dict[str, Json]:
        """Handle a raw call.

        Args:
            kind: the kind of event.
            delivery: identifies the call; the same on every retry.
            fields: run, role, rank, attempt_key, world_size and the event's own fields.
            payload: name -> ref or array; the answer then waits for the payload's receipt.

        Returns:
            The key of the event. `over`: whether its attempt had ended. `refused_in_part`, if
            present: the part of the call that was refused; the rest was accepted. `payload`: the
            payload's final state, with `payload_reason` if it was refused.

        Raises:
            InvalidInput: an invalid run, role, rank, step, stage or payload, or a field that looks
                misspelt.
            NotReady: the catalogue cannot be written now; nothing was accepted.
        """
        self._commits.check_ready()
        fields = plain_fields(fields)
        if fields.get("run") is None or not str(fields["run"]).strip():
            unknown_fields(kind, fields)  # another name for it is the better answer
            raise InvalidInput(
                f"{call_name(kind)} has no run",
                expected="run: the name of the run, a text",
                advice=f"{PAGE} lists the fields",
            )
        run = run_name(fields.get("run"))
        self._state.check_not_deleting(run)
        seq = RAW_SEQ + int(hashlib.blake2b(delivery.encode(), digest_size=7).hexdigest(), 16)
        body = {name: value for name, value in fields.items() if value is not None}
        event = Event(kind, seq, self._wall(), self._mono(), body)
        try:  # before anything is changed
            check_plain(kind, fields)
            unknown = unknown_fields(kind, fields)
            sender = self._sender(run, fields)
            work_of(event)
            _check_values(kind, fields, payload)
        except InvalidEvent as error:
            await self._runner.carry_out([self._refusal(run, kind, fields, error)])
            raise
        if kind == FINISH:
            bare = dataclasses.replace(event, fields={})
            async with self._commits.turn(delivery):
                return await self._finish(run, bare, body, unknown)
        stored = None
        if payload is not None and self._state.forgotten_payloads(sender, [seq]):
            stored = await self._payloads.stored(sender.incarnation, [seq])
        sender, out = self._handle(sender, event, body, fields, payload, stored)
        process = self._state.registry.processes[sender.incarnation]
        attempt = self._state.registry.attempt_of(process)
        if unknown:
            name = call_name(kind)
            out.append(reports.unknown_fields(attempt, process.role, name, unknown, event.wall))
        self.recorded += 1
        async with self._commits.turn(delivery):
            await self._runner.carry_out(out)
        answer = {
            "run": run,
            "attempt": attempt.number,
            "over": attempt.over,
            "step": body.get("step"),
            "stage": body.get("stage"),
            "occurrence": body.get("occurrence"),
        }
        if (reported := reports.refused_in_part(out)) is not None:
            answer["refused_in_part"] = reported
        if payload is not None:
            answer["payload"] = await self._settled(PayloadKey(sender.incarnation, seq))
            if (reason := process.reasons.get(seq)) is not None:
                answer["payload_reason"] = reason
        return answer

    def _handle(
        self,
        sender: Sender,
        event: Event,
        body: dict[str, Json],
        fields: JsonObject,
        payload: Mapping[str, object] | None,
        stored: SettledPayloads | None,
    ) -> tuple[Sender, list[Instruction]]:
        """Hand a checked call to the state machine.

        Args:
            sender: the call's sender.
            event: the call's event; its fields are `body`.
            body: receives the occurrence if the call names none, and the payload.
            fields: the call's fields.
            payload: the call's payload.
            stored: the catalogue's entry about it, if it was looked up.

        Returns:
            The sender, of the attempt that the call belongs to, and the instructions.
        """
        kind, run, registry = event.kind, sender.run, self._state.registry
        late = kind != BEGIN and self._has_finished(sender)
        out: list[Instruction] = []
        if kind == BEGIN and self._starts_again(run, sender, Work.parse(body)):
            newest = registry.newest(run)
            assert newest is not None
            out += registry.open_restart(newest, event.wall)[1]
            sender = self._sender(run, fields)
        if body.get("world_size") is not None:
            size = {"world_size": body["world_size"]}
            hello = dataclasses.replace(event, kind=HELLO, fields=size)
            out += self._state.handle(sender, hello, event.mono, Arrival(raw=True, late=late))
        if kind in (BEGIN, END) and body.get("occurrence") is None:
            work = Work.parse(body)
            body["occurrence"] = _occurrence(registry, sender.incarnation, work, kind, event.seq)
        if payload is not None:
            # The content of a ref is unknown until it is read.
            names = [name for name, value in payload.items() if not _is_text(name, value)]
            body["payload"] = {"tensors": dict.fromkeys(names), "meta": {}}
        known = None if stored is None else stored.states.get(event.seq)
        arrival = Arrival(payload is not None, raw=True, late=late, stored=known)
        handled = self._state.handle(sender, event, event.mono, arrival)
        if stored is not None:
            self._state.note_payloads(sender.incarnation, stored.newest, ())
        self._payloads.hold(handled, payload)
        return sender, out + handled

    async def _finish(
        self, run: str, event: Event, fields: JsonObject, unknown: Collection[str]
    ) -> dict[str, Json]:
        """Mark the raw callers of an attempt, or of a role or rank, as finished.

        Processes with a probe finish by themselves.

        Raises:
            NotFound: no such run or attempt.
            InvalidEvent: the attempt has no such role or rank.
        """
        attempt = self._state.registry.find(run, fields.get("attempt_key"))
        if attempt is None:
            raise NotFound(f"no run {run!r} has reported, or no attempt of that key")
        named = [
            process
            for process in attempt.processes.values()
            if fields.get("role", process.role) == process.role
            and fields.get("rank", process.rank) == process.rank
        ]
        if not named:
            known = sorted({(process.role, process.rank) for process in attempt.processes.values()})
            error = InvalidEvent(
                f"finish of {_named(fields)}: attempt {attempt.number} has no such process",
                expected=f"one of {', '.join(f'{role} {rank}' for role, rank in known[:8])}"
                + (f" and {len(known) - 8} more" if len(known) > 8 else ""),
            )
            await self._runner.carry_out([self._refusal(run, FINISH, fields, error)])
            raise error
        left = [process for process in named if process.raw and not process.finished]
        out: list[Instruction] = []
        for process in left:
            sender = Sender(process.incarnation, run, None, process.role, process.rank)
            out += self._state.handle(sender, event, event.mono, Arrival(raw=True))
        if unknown:
            role = str(fields.get("role") or "every role")
            out.append(reports.unknown_fields(attempt, role, FINISH, unknown, event.wall))
        self.recorded += 1
        await self._runner.carry_out(out)
        answer = {
            "run": run,
            "attempt": attempt.number,
            "finished": [{"role": process.role, "rank": process.rank} for process in left],
            "over": attempt.over,
        }
        if (reported := reports.refused_in_part(out)) is not None:
            answer["refused_in_part"] = reported
        return answer

    def _starts_again(self, run: str, sender: Sender, work: Work) -> bool:
        """Return whether a BEGIN without an attempt key belongs to the run's next attempt.

        It does if the raw callers have finished and this call is not late. A late call belongs to
        the last step, and to a stage that the caller has not begun in it.
        """
        attempt = self._state.registry.newest(run)
        if sender.attempt_key is not None or attempt is None or not attempt.over:
            return False
        everyone = attempt.processes.values()
        if not attempt.unkeyed or not all(each.raw and each.finished for each in everyone):
            return False
        if work.step is None or work.step != attempt.top_step:
            return work.step is not None
        step = attempt.steps.get(work.step)
        if step is None:  # it has left memory, long after they finished
            return True
        found = spans.of_stage(step, sender.incarnation, work)
        return any(span.begin_seq is not None and span.end_seq is not None for span in found)

    def _has_finished(self, sender: Sender) -> bool:
        """Return whether the attempt of a call is over because all its processes finished."""
        attempt = self._state.registry.find(sender.run, sender.attempt_key)
        return attempt is not None and steps.took_leave(attempt)

    def _sender(self, run: str, fields: JsonObject) -> Sender:
        """Return the sender of a call, identified by name.

        Raises:
            InvalidEvent: an invalid role, rank or attempt_key.
        """
        role, rank = _role(fields), _rank(fields)
        attempt_key = fields.get("attempt_key")
        newest = self._state.registry.newest(run)
        key = attempt_key or (newest.key if newest else UNKEYED)
        # The caller knows the parts of the name, not the name: they are checked first.
        sender = Sender.parse(Sender("raw", run, attempt_key, role, rank).wire())
        name = storable_id(f"raw/{run}/{key}/{role}/{rank}")
        shown = display_name(fields["run"]) if fields["run"] != run else None
        return dataclasses.replace(sender, incarnation=name, display_name=shown)

    def _refusal(self, run: str, kind: str, fields: JsonObject, error: InvalidEvent) -> Instruction:
        """Return the finding of a refused call: many callers never read the answer."""
        attempt = self._state.registry.newest(run)
        role, rank = _role(fields), _rank(fields)
        found = finding(
            REFUSED_CALL,
            f"{kind} of {text(role, 100)} rank {text(rank, 100)}: {error}"[:2000],
            run=run,
            attempt_id=None if attempt is None else attempt.attempt_id,
            wall=self._wall(),
            stage=text(fields.get("stage"), 200),
            role=text(role, 100),
            rank=None if (number := integer(rank)) is None or number < 0 else number,
            advice="nothing of this call was taken",
        )
        return self._state.refusals.add(found)

    async def _settled(self, key: PayloadKey) -> str:
        while not (receipts := self._commits.receipts(key.incarnation, [key.seq])):
            await self._commits.wait([key.incarnation], self._poll_seconds)
        return receipts[key.seq]


def _is_text(name: str, value: object) -> bool:
    """Return whether a value of a payload is no tensor: texts of rows, or metadata."""
    if value is None or isinstance(value, str | int | float | Mapping):
        return True
    if (
        name == "versions" or closest(name) is not None
    ):  # a misspelt name is found by its announcement
        return False
    return name in PAYLOAD_STRINGS or are_texts(value, name)


def _role(fields: JsonObject) -> Json:
    role = fields.get("role")
    return "actor" if role is None else role


def _rank(fields: JsonObject) -> Json:
    rank = fields.get("rank")
    return 0 if rank is None else rank


def _named(fields: JsonObject) -> str:
    """Return `role actr, rank 55` for a call that names one or both."""
    return ", ".join(f"{n} {text(fields[n], 100)}" for n in ("role", "rank") if n in fields)


def _occurrence(registry: Registry, incarnation: str, work: Work, kind: str, seq: int) -> int:
    """Return the occurrence of a raw call that does not name one: in order of arrival.

    A retried call gets the same occurrence; an END belongs to the first open one, a BEGIN to the
    first one that has only an END so far.
    """
    process = registry.processes.get(incarnation)
    if process is None:
        return 0
    attempt = registry.attempt_of(process)
    step = attempt.stepless if work.step is None else attempt.steps.get(work.step)
    found = [] if step is None else spans.of_stage(step, incarnation, work)
    for span in found:
        if seq == (span.begin_seq if kind == BEGIN else span.end_seq):
            return span.work.part.occurrence
    missing = "end_seq" if kind == END else "begin_seq"
    # Two calls that a caller makes without waiting may run in reverse order.
    halves = [span.work.part.occurrence for span in found if getattr(span, missing) is None]
    if halves:
        return min(halves)
    return 1 + max((span.work.part.occurrence for span in found), default=-1)


def _check_values(kind: str, fields: JsonObject, payload: Mapping[str, object] | None) -> None:
    """Check what a raw call says besides the names of its fields.

    Raises:
        InvalidEvent: its status, world_size or payload is wrong.
    """
    if fields.get("status") not in (None, OK, FAILED):
        raise InvalidEvent(
            f"the status of {call_name(kind)} is {fields['status']!r:.100}",
            expected=f"{OK!r} or {FAILED!r}",
        )
    if (size := fields.get("world_size")) is not None and integer(size) is None:
        raise InvalidEvent(
            f"the world_size is {size!r:.100}", expected="the number of ranks of the role"
        )
    if payload is not None and not isinstance(payload, Mapping):
        raise InvalidEvent(
            f"the payload is a {type(payload).__name__}",
            expected="a dict of names to tensors or to refs of them",
        )
    names: Iterable[object] = payload or ()  # of a caller that may not know the types
    odd = next((name for name in names if not isinstance(name, str)), None)
    if odd is not None:
        raise InvalidEvent(
            f"the payload has a {type(odd).__name__}, {odd!r:.100}, for a name",
            expected="a text, such as old_log_probs",
        )
