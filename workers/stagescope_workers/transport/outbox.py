"""The bounded queue of events to send, and of sent events that wait for their payload's receipt.

The policy when a bound is reached is `oldest bodies first`:

1. Payload bytes over `max_bytes`: they are those of drafts, and of refs that pin the object store
   until the receipt. The oldest bodies that are not offered to the service are dropped. If that is
   not enough, the new one is dropped. An offered body stays: the service may be reading it, and
   releasing our ref would free nothing. The END event stays, marked `payload_dropped`.
2. Events over `max_events`: the oldest LOG events (scalars) first; without any, a new LOG; else
   the oldest event. HELLO, FINISH, DROPPED are few and are never dropped.

Every drop is counted by kind, reason and work; `report_drops` turns the counts into DROPPED events
once the service can be reached. Nothing here waits, sends, or knows Ray.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from stagescope_wire.framing import WirePayload
from stagescope_wire.nonfinite import Json
from stagescope_wire.schema import BEGIN, DROPPED, END, FINISH, HELLO, LOG, SCHEMA, WORK_FIELDS
from stagescope_workers import steady_clock
from stagescope_workers.device import DeviceTimer, HostCopy

_log = logging.getLogger("stagescope.workers")

DEFAULT_MAX_BYTES: Final = 1 << 30
DEFAULT_MAX_EVENTS: Final = 100_000
BATCH_EVENTS: Final = 256
BATCH_BYTES: Final = 64 << 20
LINGER: Final = 0.25
"""Seconds that a BEGIN, or an END without tensors, waits for further events. The end of a stage is
sent with the beginning of the next, and a short stage in one call. A call costs the coordinator
milliseconds, as much as dozens of events, and sending competes with the stage itself for the
interpreter. A process that is killed loses the events of this time."""
_LINGERS: Final = frozenset({BEGIN, END})

_NOT_TAKEN: Final = frozenset({"lost", "refused"})
"""Receipts of payloads that arrived but cannot be measured."""
_NEVER_DROPPED: Final = frozenset({HELLO, FINISH, DROPPED})
_MAX_DETAILS: Final = 1000  # drops counted by work; further ones are counted without their work


class PackablePayload(Protocol):
    """A payload before it is packed."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        ...

    def finish(self) -> WirePayload:
        """Return the payload, once what its device copies has arrived; not in training."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """One queued or sent event, with its payload."""

    kind: str
    seq: int
    wall: float
    mono: float
    fields: dict[str, Json]
    draft: PackablePayload | None = None
    packed: object = None
    """The payload as the link sends it (a ref, or the value), once it is packed."""
    nbytes: int = 0
    awaits: Sequence[HostCopy | DeviceTimer] = ()
    """Device work that must finish before the entry can be sent."""
    finalise: Callable[[dict[str, Json]], None] | None = None
    """Completes the fields off the training thread (device seconds, scalars on a device)."""

    def wire(self) -> tuple[object, ...]:
        """Return the event in its wire form."""
        return (SCHEMA, self.kind, self.seq, self.wall, self.mono, self.fields)

    @property
    def has_body(self) -> bool:
        """Whether the event has a payload."""
        return self.draft is not None or self.packed is not None


class Outbox:
    """A bounded queue of events; any thread may call any method, and none waits.

    An entry is queued, then in the batch in flight, and removed at the event's receipt; an entry
    with a body is then unreceipted until the payload's receipt.
    """

    def __init__(
        self,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_events: int = DEFAULT_MAX_EVENTS,
        on_put: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_events = max_events
        self.bytes = 0
        self.due = 0.0
        """When the queued events are to be sent, by `time.monotonic`."""
        self.dropped: collections.Counter[str] = collections.Counter()
        """The number of drops so far, by kind: event, payload, scalar."""
        self._not_taken: collections.Counter[str] = collections.Counter()
        self._on_put = on_put
        self._lock = threading.Lock()
        self._seq = 0
        self._queued: collections.OrderedDict[int, Entry] = collections.OrderedDict()
        self._logs: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._bodies: collections.OrderedDict[int, Entry] = collections.OrderedDict()
        self._flight: list[Entry] = []
        self._unreceipted: dict[int, Entry] = {}
        self._unreported: dict[tuple[str, str, tuple[object, ...] | None], list[int]] = {}

    def put(
        self,
        kind: str,
        fields: dict[str, Json],
        *,
        draft: PackablePayload | None = None,
        awaits: Sequence[HostCopy | DeviceTimer] = (),
        finalise: Callable[[dict[str, Json]], None] | None = None,
    ) -> Entry:
        """Queue an event with its payload; drop others by the policy where a bound is reached."""
        wall, mono = steady_clock.now()
        nbytes = draft.nbytes if draft is not None else 0
        with self._lock:
            self._seq += 1
            entry = Entry(
                kind, self._seq, wall, mono, fields, draft, None, nbytes, awaits, finalise
            )
            if draft is not None:
                self._admit_body(entry)
            if kind in _NEVER_DROPPED or self._admit_event(entry):
                if kind not in _LINGERS or draft is not None:
                    self.due = 0.0
                elif not self._queued:
                    self.due = mono + LINGER
                self._queued[entry.seq] = entry
                if kind == LOG:
                    self._logs[entry.seq] = None
        self._on_put()
        return entry

    def _admit_body(self, entry: Entry) -> None:
        if entry.nbytes <= self.max_bytes:
            while self.bytes + entry.nbytes > self.max_bytes and self._bodies:
                oldest = next(iter(self._bodies.values()))
                self._drop_body(oldest, f"over {self.max_bytes} bytes were waiting")
        self.bytes += entry.nbytes
        self._bodies[entry.seq] = entry
        if self.bytes > self.max_bytes:
            self._drop_body(entry, f"over {self.max_bytes} bytes were waiting")

    def _admit_event(self, entry: Entry) -> bool:
        reason = f"over {self.max_events} events were waiting"
        if len(self._queued) + len(self._flight) < self.max_events:
            return True
        if self._logs:
            oldest_log = self._logs.popitem(last=False)[0]
            dropped: Entry | None = self._queued.pop(oldest_log)
        else:
            dropped = None if entry.kind == LOG else self._oldest_event()
        if dropped is None:
            self._drop_event(entry, reason)
            return False
        self._drop_event(dropped, reason)
        return True

    def _oldest_event(self) -> Entry | None:
        for seq, entry in self._queued.items():
            if entry.kind not in _NEVER_DROPPED:
                return self._queued.pop(seq)
        return None

    def _drop_event(self, entry: Entry, reason: str) -> None:
        if entry.has_body:
            self._drop_body(entry, reason)
        scalars = len(entry.fields.get("scalars") or ())
        if scalars:
            self._count("scalar", scalars, 0, reason, entry)
        self._count("event", 1, 0, reason, entry)

    def _drop_body(self, entry: Entry, reason: str) -> None:
        described = entry.fields.get("payload") or {}
        entry.fields["payload"] = None
        entry.fields["payload_dropped"] = {
            "reason": reason,
            "bytes": described.get("bytes", entry.nbytes),
            "tensors": described.get("tensors", {}),
        }
        self._count("payload", 1, entry.nbytes, reason, entry)
        self._forget_body(entry)

    def _forget_body(self, entry: Entry) -> None:
        self.bytes -= entry.nbytes
        entry.draft = entry.packed = None
        entry.nbytes = 0
        self._bodies.pop(entry.seq, None)

    def _count(self, what: str, count: int, nbytes: int, reason: str, entry: Entry) -> None:
        self.dropped[what] += count
        work = tuple(entry.fields.get(name) for name in WORK_FIELDS)
        key: tuple[str, str, tuple[object, ...] | None] = (what, reason, work)
        if key not in self._unreported and len(self._unreported) >= _MAX_DETAILS:
            key = (what, reason, None)
        counted = self._unreported.setdefault(key, [0, 0])
        counted[0] += count
        counted[1] += nbytes

    def report_drops(self) -> None:
        """Queue a DROPPED event for each kind of drop since the last report."""
        with self._lock:
            unreported, self._unreported = self._unreported, {}
        for (what, reason, work), (count, nbytes) in unreported.items():
            fields: dict[str, object] = {
                "what": what, "count": count, "bytes": nbytes, "reason": reason
            }  # fmt: skip
            if work is not None:
                fields.update(zip(WORK_FIELDS, work, strict=True))
            self.put(DROPPED, fields)

    def next_batch(self, limit: int = BATCH_EVENTS, limit_bytes: int = BATCH_BYTES) -> list[Entry]:
        """Return the batch in flight, or make the oldest entries the batch.

        The same list is returned until `acknowledge`, `put_back` or `discard` ends its flight.
        Entries that wait for a device are skipped: a device that hangs must not hide which stage
        the process entered next.
        """
        with self._lock:
            if not self._flight:
                self._flight = self._choose(limit, limit_bytes)
                for entry in self._flight:
                    del self._queued[entry.seq]
                    self._logs.pop(entry.seq, None)
                self.due = 0.0
            return self._flight

    def _choose(self, limit: int, limit_bytes: int) -> list[Entry]:
        chosen: list[Entry] = []
        nbytes = skipped = 0
        for entry in self._queued.values():
            if entry.kind == FINISH and skipped:
                break  # it means that everything else was sent
            if not all(awaited.ready() for awaited in entry.awaits):
                skipped += 1
                continue
            if chosen and (len(chosen) >= limit or nbytes + entry.nbytes > limit_bytes):
                break
            chosen.append(entry)
            nbytes += entry.nbytes
        return chosen

    def pack(self, entry: Entry, pack: Callable[[WirePayload], object]) -> None:
        """Complete the fields of an entry in flight, and convert its body to its wire form, once.

        A body that cannot be packed (the object store or the disk is full) is dropped and counted.
        """
        finalise, entry.finalise = entry.finalise, None
        if finalise is not None:
            try:
                finalise(entry.fields)
            except Exception as error:
                _log.debug("event %d could not be completed: %r", entry.seq, error)
        draft = entry.draft
        if entry.packed is None and draft is not None:
            try:
                packed = pack(draft.finish())
            except Exception as error:
                self.drop_body(
                    entry, f"could not be packed: {type(error).__name__}: {error!s:.200}"
                )
                return
            with self._lock:
                if entry.draft is draft:  # else it was dropped meanwhile
                    entry.packed, entry.draft = packed, None

    def drop_body(self, entry: Entry, reason: str) -> None:
        """Drop the body of an entry, and count it."""
        with self._lock:
            if entry.has_body:
                self._drop_body(entry, reason)

    def offer(self, batch: Iterable[Entry]) -> None:
        """Note that the bodies of `batch` are offered to the service, and stay until a receipt."""
        with self._lock:
            for entry in batch:
                self._bodies.pop(entry.seq, None)

    def acknowledge(self) -> list[Entry]:
        """End the flight: the events of the batch are committed. Return the batch."""
        with self._lock:
            batch, self._flight = self._flight, []
            for entry in batch:
                if entry.has_body:
                    self._unreceipted[entry.seq] = entry
            return batch

    def put_back(self) -> None:
        """End the flight without a receipt: the entries are queued again, at the front."""
        with self._lock:
            self._return(self._flight)
            self._flight = []

    def discard(self, reason: str) -> None:
        """Drop and count the batch in flight, which the service cannot accept."""
        with self._lock:
            for entry in self._flight:
                self._drop_event(entry, reason)
            self._flight = []

    @property
    def not_arrived(self) -> collections.Counter[str]:
        """How much the service will never have, by what it is and why; without what waits."""
        dropped = {f"{what}s dropped here": count for what, count in self.dropped.items()}
        return self._not_taken + collections.Counter(dropped)

    def refuse(self, seqs: Iterable[int]) -> None:
        """Count acknowledged events that the service refused, and release their bodies."""
        with self._lock:
            for seq in seqs:
                entry = self._unreceipted.pop(int(seq), None)
                if entry is not None:
                    self._forget_body(entry)
                self._not_taken["events refused"] += 1

    def settle(self, receipts: Mapping[int, str]) -> None:
        """Release the bodies that have a payload receipt of any kind."""
        with self._lock:
            for seq, state in receipts.items():
                entry = self._unreceipted.pop(int(seq), None)
                if entry is not None:
                    self._forget_body(entry)
                    if state in _NOT_TAKEN:
                        self._not_taken[f"payloads {state}"] += 1

    def offer_again(self) -> int:
        """Queue every unreceipted event with its payload again; return their number."""
        with self._lock:
            entries = sorted(self._unreceipted.values(), key=lambda entry: entry.seq)
            self._unreceipted.clear()
            self._return(entries)
            return len(entries)

    def _return(self, entries: list[Entry]) -> None:
        self.due = 0.0
        for entry in reversed(entries):
            self._queued[entry.seq] = entry
            self._queued.move_to_end(entry.seq, last=False)
            if entry.has_body:
                self._bodies[entry.seq] = entry
                self._bodies.move_to_end(entry.seq, last=False)
            if entry.kind == LOG:
                self._logs[entry.seq] = None
                self._logs.move_to_end(entry.seq, last=False)

    def unreceipted(self) -> list[int]:
        """Return the sequence numbers of events whose payload has no receipt yet."""
        with self._lock:
            return sorted(self._unreceipted)

    def awaits_receipt(self, step: int) -> bool:
        """Return whether a payload of `step` has no receipt yet."""
        with self._lock:
            bodies = (*self._bodies.values(), *self._flight, *self._unreceipted.values())
            return any(body.has_body and body.fields.get("step") == step for body in bodies)

    @property
    def waiting(self) -> int:
        """Events that the service has not acknowledged."""
        with self._lock:
            return len(self._queued) + len(self._flight)

    @property
    def payloads(self) -> int:
        """Payloads without a receipt: queued, in flight, or sent."""
        with self._lock:
            bodies = {entry.seq for entry in self._flight if entry.has_body}
            return len(bodies | self._bodies.keys() | self._unreceipted.keys())

    @property
    def has_drops(self) -> bool:
        """Whether there are drops to report."""
        return bool(self._unreported)

    @property
    def is_empty(self) -> bool:
        """Whether everything was acknowledged, payloads included."""
        with self._lock:
            return not (self._queued or self._flight or self._unreceipted)
