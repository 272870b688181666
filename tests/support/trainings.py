"""Trainings by hand and by generator, and a dict of dicts to write them to."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from stagescope_service.coordinator.restore import restore
from stagescope_service.core.arrival import Arrival
from stagescope_service.core.entities import Attempt, Span, Step
from stagescope_service.core.instructions import (
    Aggregate,
    Delete,
    Ingest,
    Instruction,
    PayloadKey,
    Put,
    Settled,
)
from stagescope_service.core.state import State
from stagescope_service.store.contract import Snapshot
from stagescope_service.store.tables import TABLES
from stagescope_wire.schema import (
    BEGIN,
    DROPPED,
    DUMP,
    END,
    END_STEP,
    FINISH,
    HELLO,
    LOG,
    REFUSED,
    Event,
    Sender,
)

KEYS = {name: [column.name for column in table.primary_key] for name, table in TABLES.items()}
COLUMNS = {name: [column.name for column in table.columns] for name, table in TABLES.items()}

Row = dict[str, Any]


class Rows:
    """The catalogue as a dict of dicts: a Put sets the columns that it names."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[tuple[object, ...], Row]] = defaultdict(dict)

    def apply(self, orders: Iterable[Instruction]) -> None:
        for order in orders:
            if isinstance(order, Put):
                assert set(order.row) <= set(COLUMNS[order.table]), order
                key = tuple(order.row[name] for name in KEYS[order.table])
                self.tables[order.table].setdefault(key, {}).update(order.row)
            elif isinstance(order, Delete):
                assert order.where
                table = self.tables[order.table]
                gone = [
                    key
                    for key, row in table.items()
                    if all(row.get(name) == value for name, value in order.where.items())
                ]
                for key in gone:
                    del table[key]

    def of(self, table: str, **where: object) -> list[Row]:
        """Return rows with every column (None where it was never set)."""
        blank = dict.fromkeys(COLUMNS[table])
        found = [blank | row for _, row in sorted(self.tables[table].items(), key=repr)]
        return [row for row in found if all(row[name] == value for name, value in where.items())]

    def one(self, table: str, **where: object) -> Row:
        (row,) = self.of(table, **where)
        return row

    def snapshot(self, closed_steps: int = 8) -> Snapshot:
        """Read what the store's own snapshot would (`store.base.Snapshot`)."""
        attempts = self.of("attempts")
        newest: dict[str, Row] = {}
        for row in attempts:
            if row["run"] not in newest or newest[row["run"]]["number"] < row["number"]:
                newest[row["run"]] = row
        newest_ids = {row["attempt_id"] for row in newest.values()}
        live = {row["attempt_id"] for row in attempts if row["ended_wall"] is None} | newest_ids
        chosen: list[Row] = []
        for attempt in attempts:
            steps = self.of("steps", attempt_id=attempt["attempt_id"])
            closed = [row for row in steps if row["closed_wall"] is not None]
            chosen += [row for row in steps if row["closed_wall"] is None]
            chosen += sorted(closed, key=lambda row: row["step"])[-closed_steps:]
        locations = {(row["attempt_id"], row["step"]) for row in chosen}

        def kept(row: Row) -> bool:
            return (row["attempt_id"], row["step"]) in locations and row["attempt_id"] in live

        def is_open(row: Row) -> bool:
            if row["end_wall"] is not None:
                return False
            quiet = row["status"] == "unfinished" and row["step"] is None
            return row["status"] in ("open", None) or (quiet and row["attempt_id"] in live)

        unread = {row["incarnation"] for row in self.of("payloads", state="announced")}
        found: dict[str, Any] = {
            "runs": self.of("runs"),
            "attempts": attempts,
            "processes": [
                row
                for row in self.of("processes")
                if (row["finished_wall"] is None and row["lapsed_wall"] is None)
                or row["attempt_id"] in live
                or row["incarnation"] in unread
            ],
            "steps": chosen,
            "stages": [row for row in self.of("stages") if is_open(row) or kept(row)],
            "payloads": [
                row for row in self.of("payloads") if row["state"] == "announced" or kept(row)
            ],
            "captures": [],
            "findings": [
                row
                for row in self.of("findings")
                if row["attempt_id"] is None or row["attempt_id"] in newest_ids
            ],
            "last_attempt_id": max((row["attempt_id"] for row in attempts), default=0),
            "last_revision": 0,
            "meta": {},
            "armed": self.of("dumps", state="armed"),
            "undigested": [
                row
                for row in self.of("operators")
                if row["mark"] is not None and row["digested_mark"] != row["mark"]
            ],
        }
        return Snapshot(**found)


@dataclasses.dataclass(frozen=True, repr=False)
class Delivery:
    """An event as a rank hands it over."""

    sender: Sender
    event: Event
    has_payload: bool = False
    raw: bool = False

    def __repr__(self) -> str:
        fields = {name: value for name, value in self.event.fields.items() if value is not None}
        return f"{self.sender.incarnation}#{self.event.seq}:{self.event.kind}{fields}"

    @property
    def key(self) -> PayloadKey:
        return PayloadKey(self.sender.incarnation, self.event.seq)


class Rank:
    """One incarnation of a rank: each call makes the next event and keeps it."""

    ticks = itertools.count()

    def __init__(
        self,
        rank: int = 0,
        role: str = "actor",
        *,
        run: str = "r",
        key: str | None = "job-1",
        incarnation: str | None = None,
        started: float = 1000.0,
        raw: bool = False,
        node: str | None = "node-1",
    ) -> None:
        self.raw = raw
        self.wall = started
        self.seq = 0
        self.said: list[Delivery] = []
        name = incarnation or f"{run}-{key}-{role}{rank}-{started}"
        self.sender = Sender(
            name, run, key, role, rank, node_id=node, started=None if raw else started
        )

    def say(self, kind: str, has_payload: bool = False, /, **fields: object) -> Delivery:
        self.seq += 1
        self.wall += 0.25
        event = Event(kind, self.seq, self.wall, self.wall - 500.0, fields)
        delivery = Delivery(self.sender, event, has_payload, self.raw)
        self.said.append(delivery)
        return delivery

    def hello(self, **fields: object) -> Delivery:
        return self.say(HELLO, **fields)

    def begin(self, step: int | None, stage: str = "actor_update", **fields: object) -> Delivery:
        return self.say(BEGIN, step=step, stage=stage, **fields)

    def end(
        self,
        begun: Delivery | None,
        *,
        payload: bool = False,
        status: str = "ok",
        tell: bool = True,
        **fields: object,
    ) -> Delivery:
        """End what `begun` began (`tell`: and say where), or what `fields` name."""
        body: dict[str, object] = {}
        if begun is not None:
            body = {**begun.event.fields}
            body.pop("device_time", None)
            body |= {"begin_wall": begun.event.wall, "begin_mono": begun.event.mono}
            if tell:
                body["begin_seq"] = begun.event.seq
        if payload:
            body["payload"] = {
                "tensors": {"old_log_probs": ["float32", [2, 3], None]},
                "bytes": 24,
                "meta": {},
            }
        return self.say(END, payload, **{**body, "status": status, **fields})

    def work(
        self, step: int | None, stage: str = "actor_update", **fields: object
    ) -> list[Delivery]:
        payload = bool(fields.pop("payload", False))
        begun = self.begin(step, stage, **fields)
        return [begun, self.end(begun, payload=payload)]

    def log(self, step: int | None, stage: str | None = None, **scalars: float) -> Delivery:
        return self.say(LOG, step=step, stage=stage, scalars=scalars)

    def end_step(self, step: int) -> Delivery:
        return self.say(END_STEP, step=step)

    def dropped(self, what: str = "event", count: int = 1, **fields: object) -> Delivery:
        return self.say(DROPPED, what=what, count=count, reason="full", **fields)

    def refused(self, what: str = "tensor", **fields: object) -> Delivery:
        return self.say(REFUSED, what=what, message="wrong shape", **fields)

    def dump(self, step: int, stage: str, state: str, **fields: object) -> Delivery:
        return self.say(DUMP, step=step, stage=stage, capture_id="c1", state=state, **fields)

    def finish(self) -> Delivery:
        return self.say(FINISH)


class Bench:
    """A state machine with a catalogue, a clock and somebody who reads payloads."""

    def __init__(self, state: State | None = None, rows: Rows | None = None) -> None:
        self.state = state or State(lease_seconds=45.0)
        self.rows = rows or Rows()
        self.now = 0.0
        self.ingests: list[Ingest] = []
        self.settled: list[Settled] = []
        self.assembled: list[Aggregate] = []

    def carry_out(self, out: Sequence[Instruction]) -> list[Instruction]:
        self.rows.apply(out)
        for order in out:
            if isinstance(order, Ingest):
                self.ingests.append(order)
            elif isinstance(order, Settled):
                self.settled.append(order)
            elif isinstance(order, Aggregate):
                self.assembled.append(order)
        return list(out)

    def give(self, *deliveries: Delivery) -> list[Instruction]:
        """Deliver events one after the other."""
        out: list[Instruction] = []
        for each in deliveries:
            self.now += 0.001
            out += self.carry_out(
                self.state.handle(
                    each.sender, each.event, self.now, Arrival(each.has_payload, each.raw)
                )
            )
        return out

    def settle(
        self, key: PayloadKey, state: str = "ingested", wall: float = 0.0
    ) -> list[Instruction]:
        reason = None if state == "ingested" else "because"
        return self.carry_out(self.state.settle(key, state, reason, wall))

    def settle_all(self) -> None:
        """Read every payload that was handed to an ingestor."""
        ingests, self.ingests = self.ingests, []
        for order in ingests:
            self.settle(order.key)

    def silence(self, wall: float = 5000.0) -> list[Instruction]:
        """Let so much time pass that every lease runs out."""
        self.now += 10_000.0
        return self.carry_out(self.state.expire(self.now, wall))

    def restart(self) -> None:
        """Go on with a new state machine on what is in the catalogue."""
        self.state = State(lease_seconds=self.state.lease_seconds)
        restore(self.state, self.rows.snapshot(), self.now)
        check_memory(self.state)

    def attempt(self, number: int = 1, run: str = "r") -> Row:
        return self.rows.one("attempts", run=run, number=number)

    def step(self, number: int, attempt: int = 1) -> Row:
        return self.rows.one("steps", attempt_id=self.attempt(attempt)["attempt_id"], step=number)


def check_memory(state: State) -> None:
    """Hold the invariants of what the state machine remembers."""
    registry = state.registry
    for attempt in registry.attempts.values():
        live = [each.max_step for each in attempt.processes.values() if each.live]
        assert attempt.clock == Counter(step for step in live if step is not None)
        assert all(count > 0 for count in attempt.clock.values())
        assert attempt.open == {n for n, step in attempt.steps.items() if step.closed_wall is None}
        assert len(attempt.steps) - len(attempt.open) <= 8
        assert sorted(attempt.processes) == sorted(
            each.incarnation for ranks in attempt.by_rank.values() for each in ranks
        )
        for step in [*attempt.steps.values(), attempt.stepless]:
            for (incarnation, key), spans in step.spans.items():
                assert [span.revision for span in spans] == sorted({s.revision for s in spans})
                for span in spans:
                    process = registry.processes.get(incarnation)
                    if process is None or span.begin_seq is None:
                        continue
                    held = process.open_spans.get((key, span.revision)) is span
                    assert held == (span.status == "open"), span
                    held = process.unfinished.get((key, span.revision)) is span
                    assert held == (span.status == "unfinished"), span
            check_who_answers(attempt, step)
        pending = {key for keys in attempt.pending.values() for key in keys}
        assert pending == {key for each in attempt.processes.values() for key in each.payloads}
    for name, process in registry.processes.items():
        assert process.incarnation == name
        assert registry.attempts[process.attempt_id].processes[name] is process


def check_who_answers(attempt: Attempt, step: Step) -> None:
    """Of a part that was done repeatedly one span answers: the last of the newest incarnation.

    Where that one began no such part, nor a lower one, the next older one answers.
    """
    stages: dict[object, list[Span]] = defaultdict(list)
    for spans in step.spans.values():
        for span in spans:
            work = span.work
            version = work.policy_version if work.step is None else None
            stages[span.role, span.rank, work.stage, version].append(span)
    for location, spans in stages.items():
        ages = {name: _age(attempt, name) for name in {span.incarnation for span in spans}}
        for span in spans:
            # By its step, where it has one: whichever policy version either begin named.
            alike = [
                s for s in spans
                if s.incarnation == span.incarnation and s.work.part == span.work.part
            ]  # fmt: skip
            newer = [s for s in spans if ages[s.incarnation] > ages[span.incarnation]]
            answers = span.revision == max(s.revision for s in alike) and not any(
                s.work.part <= span.work.part for s in newer
            )
            assert bool(span.superseded) != answers, (location, span)


def _age(attempt: Attempt, incarnation: str) -> tuple[float, str]:
    process = attempt.processes.get(incarnation)
    return (0.0, incarnation) if process is None else process.age
