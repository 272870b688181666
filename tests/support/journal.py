"""A training that is killed and resumed at any moment, with a journal of what it handed over.

The coordinator, its catalogue and its ring are the real ones; ranks are simulated event by event,
as their probes would send. The journal knows nothing of the service: what each step must hold
follows from what was handed over alone.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
from tests.support.local import LocalCoordinator
from tests.support.stores import rows_of
from tests.support.trainings import Delivery, Rank, check_memory

from stagescope_service.coordinator.coordinator import steps_to_aggregate
from stagescope_service.coordinator.restore import restore
from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.state import State
from stagescope_service.statistics import StepSummary
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.parts import part_key
from stagescope_service.store.sql import SqlStore
from stagescope_service.store.tables import StepRow
from stagescope_service.views.reading.completeness import gaps
from stagescope_wire.errors import NotReady
from stagescope_wire.schema import BEGIN, END, Work

MEASURED = "actor_compute_log_prob"
LEASE = 45.0
RANKS = 2


class Process:
    """One incarnation of a rank: works step by step, and holds what is not acknowledged."""

    def __init__(self, world: World, rank: int, key: str, step: int) -> None:
        self.world = world
        self.rank = rank
        self.step = step
        self.done = step - 1
        self.said = Rank(
            rank, run=world.run, key=key, started=world.wall, incarnation=next(world.names)
        )
        self.key = key
        self.todo: list[tuple[str, int | None]] = []
        self.open: Delivery | None = None
        self.outbox: list[Delivery] = []
        self.payloads: dict[int, tuple[Delivery, dict[str, object]]] = {}
        self.coordinator: object = None
        self._put(self.said.hello(world_size=RANKS))

    @property
    def name(self) -> str:
        return self.said.sender.incarnation

    def _put(self, delivery: Delivery) -> Delivery:
        self.outbox.append(delivery)
        return delivery

    def work(self) -> None:
        """Do the next thing: begin or end a part, or go on to the next step."""
        chance = self.world.chance
        self.said.wall = self.world.wall
        if self.open is not None:
            stage = self.open.event.fields["stage"]
            measured = stage == MEASURED
            ended = self._put(self.said.end(self.open, payload=measured))
            if measured:
                payload = self.world.payload(self, self.step)
                self.payloads[ended.event.seq] = (ended, payload)
            self.open = None
            if not self.todo:
                self.done, self.step = self.step, self.step + 1
            return
        if not self.todo:
            if not self.world.may_begin(self):
                return
            count = chance.randint(1, 3)
            self.todo = [*((MEASURED, part) for part in range(count)), ("actor_update", None)]
        stage, part = self.todo.pop(0)
        fields = {} if part is None else {"microbatch": part}
        self.open = self._put(self.said.begin(self.step, stage, **fields))

    async def send(self, *, acknowledged: bool = True, most: int = 1000) -> None:
        """Send what waits, and, to a new coordinator, what it holds no receipt of."""
        local = self.world.local
        if self.coordinator is not local:
            self.coordinator = local
            waiting = {each.event.seq for each in self.outbox}
            again = [each for each, _ in self.payloads.values() if each.event.seq not in waiting]
            self.outbox = [*again, *self.outbox]
        batch = self.outbox[:most]
        if not batch:
            return
        held = {each.event.seq for each in batch} & self.payloads.keys()
        try:
            answer = await local.coordinator.parts.intake.record(
                self.said.sender.wire(),
                [each.event.wire() for each in batch],
                {seq: self.payloads[seq][1] for seq in held},
            )
        except NotReady:
            return
        assert not answer["refused"], answer
        for each in batch:
            self.world.heard[self.name, each.event.seq] = each
        if acknowledged:
            self.outbox = self.outbox[len(batch) :]
            incomplete = answer.get("refused_in_part", {})
            self.world.acknowledged |= {
                (self.name, each.event.seq) for each in batch if each.event.seq not in incomplete
            }
            self._settle(answer["receipts"])

    async def poll(self) -> None:
        local = self.world.local
        if self.coordinator is local:
            try:
                answer = await local.coordinator.parts.intake.poll(
                    self.said.sender.wire(), 0, [*self.payloads], 0.0
                )
            except NotReady:
                return
            self._settle(answer["receipts"])

    def _settle(self, receipts: dict[int, str]) -> None:
        for seq, state in receipts.items():
            self.payloads.pop(seq, None)
            self.world.receipts[self.name, seq] = state


class World:
    """A run on a service of which anything may be killed."""

    def __init__(
        self,
        store: SqlStore,
        folder: Path,
        run: str,
        chance: random.Random,
        ids: str,
        *,
        has_every_row: bool = True,
    ) -> None:
        self.has_every_row = has_every_row
        """Whether the store took every row. Where it refused the one that says that a part was done
        again, the earlier one answers too after a restart; the finding `refused_row` says so."""
        self.store, self.folder, self.run, self.chance = store, folder, run, chance
        self.ids = ids
        """Whether rows have ids: "none", the same ones in every start ("stable"), or "fresh"."""
        self.collectives = chance.random() < 0.5
        """Whether a rank waits at the end of a step for the others."""
        self.backlog = chance.random() < 0.5
        """Whether the ingestors are so far behind that whole steps wait to be read."""
        self.wall = 1000.0
        self.names = (f"{run}-{number}" for number in itertools.count())
        self.heard: dict[tuple[str, int], Delivery] = {}
        self.acknowledged: set[tuple[str, int]] = set()
        """(incarnation, seq) of events that the coordinator acknowledged as a whole."""
        self.receipts: dict[tuple[str, int], str] = {}
        self.tokens: dict[str, int] = {}
        self.log: list[str] = []
        self.catalogue = Catalogue(store.url)
        self.jobs = 0
        self.live: list[Process] = []
        self.start_coordinator()
        self.start_driver(1)

    # --- the service ----------------------------------------------------------------------
    def start_coordinator(self) -> None:
        """Start a coordinator on what the catalogue holds."""
        state = State(lease_seconds=LEASE)
        snapshot = self.store.snapshot()
        restore(state, snapshot, self.wall)
        if self.has_every_row:
            check_memory(state)
        self.local = LocalCoordinator(self.store, self.folder, state=state, clock=lambda: self.wall)
        for step in steps_to_aggregate(snapshot):
            self.local.parts.runner.start(step)

    # --- the training ---------------------------------------------------------------------
    def start_driver(self, step: int, key: str | None = None) -> None:
        self.jobs += 1
        key = key or f"job-{self.jobs}"
        self.live = [Process(self, rank, key, step) for rank in range(RANKS)]

    def restart(self, rank: int, step: int) -> None:
        self.live[rank] = Process(self, rank, self.live[rank].key, step)

    def may_begin(self, process: Process) -> bool:
        if not self.collectives:
            return True
        return all(other.done >= process.step - 1 for other in self.live)

    def payload(self, process: Process, step: int) -> dict[str, object]:
        rows = self.chance.randint(1, 3)
        sizes = [self.chance.randint(1, 20) for _ in range(rows)]
        width = max(sizes)
        mask = np.zeros((rows, width), np.int64)
        for row, size in enumerate(sizes):
            mask[row, :size] = 1
        q = np.full(mask.shape, -1.0, np.float32)
        p = np.full(mask.shape, -1.0 - 0.01 * self.chance.randint(1, 50), np.float32)
        tensors = {
            "old_log_probs": ("float32", p.shape, p, None),
            "rollout_log_probs": ("float32", q.shape, q, None),
            "response_mask": ("int64", mask.shape, mask, None),
        }
        seq = process.said.seq
        self.tokens[part_key(process.name, seq)] = sum(sizes)
        strings: dict[str, list[str]] = {}
        owner = process.name if self.ids == "fresh" else "s"
        if self.ids != "none":
            name = f"{owner}-{step}-{process.rank}-{seq}"
            strings["sample_ids"] = [f"{name}-{row}" for row in range(rows)]
        return {"schema": 1, "tensors": tensors, "strings": strings, "meta": {}}

    # --- what happens ---------------------------------------------------------------------
    async def go_on(self) -> None:
        """Let one thing happen."""
        chance, what = self.chance, self.chance.random()
        self.wall += 0.25
        process = chance.choice(self.live)
        if what < 0.45:
            process.work()
        elif what < 0.72:
            await process.send(acknowledged=chance.random() < 0.9, most=chance.choice([1, 3, 1000]))
        elif what < 0.86:
            if self.backlog and chance.random() < 0.9:
                return
            await self.local.work(most=chance.choice([1, 2, 1000]))
        elif what < 0.91:
            await process.poll()
        elif what < 0.93:
            await self.pass_time(chance.choice([5.0, 30.0, 60.0]))
        elif what < 0.94:
            await self.kill()

    async def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / 5.0)):
            self.wall += 5.0
            for process in self.live:
                await process.poll()
            await self.local.coordinator.parts.leases.expire()

    async def kill(self) -> None:
        """Kill some at once, and start them again."""
        chance = self.chance
        whom = chance.sample(["coordinator", "rank", "rank", "driver"], chance.choice([1, 2, 2, 3]))
        done = min(process.done for process in self.live)
        checkpoint = chance.randint(max(1, done - 1), done + 1)
        steps = [process.step for process in self.live]
        before = {process.name for process in self.live}
        self.log.append(f"killed {', '.join(whom)} at {steps}, resumed at {checkpoint}")
        if "driver" in whom:
            key = self.live[0].key if chance.random() < 0.5 else None
            self.start_driver(checkpoint, key)
        elif whom.count("rank") == 2 or ("rank" in whom and chance.random() < 0.5):
            # Whoever is recreated in one job brings the others along.
            for rank in range(RANKS):
                self.restart(rank, checkpoint)
        elif "rank" in whom:
            rank = chance.randrange(RANKS)
            self.restart(rank, self.live[rank].done + 1)
        # What a process owned and nobody has read is gone with it.
        self.local.ingestors.dead |= before - {process.name for process in self.live}
        if "coordinator" in whom:
            if chance.random() < 0.3:
                self.wall += chance.choice([5.0, 60.0])
            self.start_coordinator()

    async def finish(self) -> None:
        """Let everybody end what it does, and the service hear of it."""
        last = max(process.step for process in self.live)
        for _ in range(1000):
            self.wall += 0.25
            for process in self.live:
                if process.step <= last:
                    process.work()
            if all(process.step > last for process in self.live):
                break
        for process in self.live:
            process.said.wall = self.wall
            process.outbox.append(process.said.finish())
            await process.send()
        await self.local.work()
        for _ in range(12):
            self.wall += 10.0  # a coordinator that was held up for longer gives everybody time
            await self.local.coordinator.parts.leases.expire()
        await self.local.work()

    # --- the verdict ----------------------------------------------------------------------
    def unwritten(self) -> list[tuple[str, int]]:
        """Return (incarnation, seq) of the events that were acknowledged and are not on disk.

        Among them are payloads whose receipt says another state than the catalogue.
        """
        stages, rows = rows_of(self.store, "stages"), rows_of(self.store, "payloads")
        begun = {(row["incarnation"], row["begin_seq"]) for row in stages}
        ended = {(row["incarnation"], row["end_seq"]) for row in stages}
        payloads = {(row["incarnation"], row["seq"]): row["state"] for row in rows}
        found: list[tuple[str, int]] = []
        for key in sorted(self.acknowledged):
            event = self.heard[key].event
            stored = {BEGIN: begun, END: ended}.get(event.kind, {key})
            if key not in stored or ("payload" in event.fields and key not in payloads):
                found.append(key)
        return found + [key for key, state in self.receipts.items() if payloads.get(key) != state]

    def wrong(self) -> list[str]:
        """Return the steps whose answer is not what the journal says, and what was killed."""
        found: list[str] = []
        for attempt in self.catalogue.attempts(self.run):
            attempt_id = attempt["attempt_id"]
            processes = {row["incarnation"] for row in self.catalogue.processes(attempt_id)}
            for listed in self.catalogue.steps(attempt_id, limit=1000):
                row = self.catalogue.step(attempt_id, listed["step"])
                assert row is not None
                problem = self._problem(row, processes)
                if problem:
                    where = f"attempt {attempt['number']}, step {row['step']}"
                    found.append(f"{where}, {row['completeness']}: {problem}; {self.log}")
        return found

    def _problem(self, row: StepRow, processes: set[str]) -> str | None:
        if row["closed_wall"] is None:
            return "is open"
        payloads = {
            part_key(payload["incarnation"], payload["seq"]): payload["state"]
            for payload in self.catalogue.payloads(row["attempt_id"], row["step"], limit=1000)
        }
        lost = {key for key, state in payloads.items() if state == "lost"}
        if lost - self._losses(row):
            return f"lost without a word: {lost - self._losses(row)}"
        sent = self.sent(processes, row["step"])
        whole = StepSummary.from_bytes(row["step_summary"]) if row["step_summary"] else None
        counted = {*whole.counted} if whole else set()
        if counted - sent:
            return f"counted too much: {counted - sent}"
        if sent - lost - counted:
            return f"counted too little: {[(key, payloads[key]) for key in sent - lost - counted]}"
        tokens = sum(self.tokens[key] for key in counted)
        if whole and whole.total.masked != tokens:
            return f"{whole.total.masked} tokens for {tokens}"
        return self._unsaid(row, payloads, counted, lost & sent)

    def _unsaid(
        self, row: StepRow, payloads: dict[str, str], counted: set[str], lost: set[str]
    ) -> str | None:
        """Return what the step's answers do not say of payloads that are not in its numbers."""
        location = (row["attempt_id"], row["step"])
        listed = self.catalogue.steps(location[0], before=location[1] + 1, limit=1)
        said = gaps(self.catalogue, listed).get(location)
        if payloads and not counted and not (said or "").startswith("no numbers"):
            return f"has no numbers, and the answers say {said!r}"
        if lost and f"{len(lost)} payload{'' if len(lost) == 1 else 's'} lost" not in (said or ""):
            return f"lost {len(lost)} payloads, and the answers say {said!r}"
        return (
            f"nothing is missing, and the answers say {said!r}"
            if not lost and counted and said
            else None
        )

    def _losses(self, row: StepRow) -> set[str]:
        listed = {
            each["loss_id"]
            for each in self.catalogue.losses(attempt_id=row["attempt_id"], step=row["step"])
        }
        return {
            part_key(name, seq)
            for (name, seq), each in self.heard.items()
            if each.has_payload
            and row_id(name, Work.parse(each.event.fields).key, "payload", seq) in listed
        }

    def sent(self, processes: set[str], step: int) -> set[str]:
        """Return what each rank's newest incarnation sent of a step, as the service heard it."""
        begun: dict[int, list[tuple[float, str]]] = {}
        parts: dict[str, set[str]] = {}
        for (name, seq), each in self.heard.items():
            fields = each.event.fields
            if name not in processes or fields.get("stage") != MEASURED or fields["step"] != step:
                continue
            begun.setdefault(each.sender.rank, []).append((each.sender.started or 0.0, name))
            if each.has_payload:
                parts.setdefault(name, set()).add(part_key(name, seq))
        return {key for own in begun.values() for key in parts.get(max(own)[1], ())}
