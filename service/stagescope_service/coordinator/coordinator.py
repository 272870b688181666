"""The coordinator without Ray: what ranks and the API call (`api.dependencies.Commands`)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

from stagescope.engines.registry import check_engine
from stagescope.wire.captures import validate_capture
from stagescope.wire.errors import NotFound, NotReady, StagescopeError
from stagescope.wire.links import Link
from stagescope.wire.nonfinite import Json, JsonObject
from stagescope.wire.plan import StoredCapture, StoredPlan
from stagescope_service.coordinator.arguments import (
    AttemptId,
    Fields,
    Message,
    Name,
    Ranks,
    Revision,
    Seconds,
    Seqs,
    StepNumber,
    check_batch,
    checked,
    names_checked,
)
from stagescope_service.coordinator.capture_references import with_baseline, with_ranks
from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.draining import Draining
from stagescope_service.coordinator.effects import REAL_CLOCK, Clock, Effects
from stagescope_service.coordinator.intake import Intake
from stagescope_service.coordinator.load import Load, resident_bytes
from stagescope_service.coordinator.raw_calls import RawCalls
from stagescope_service.coordinator.restore import restore
from stagescope_service.core import operator_tables
from stagescope_service.core.captures.keep_policy import KeepPolicy, read_keep_policy
from stagescope_service.core.captures.plan import Plan
from stagescope_service.core.captures.requests import CaptureRequests
from stagescope_service.core.completeness import PARTIAL
from stagescope_service.core.entities import ANNOUNCED
from stagescope_service.core.findings import ATTEMPT_BUNDLED, finding
from stagescope_service.core.instructions import Aggregate, Instruction, Put, Rejudge
from stagescope_service.core.stack_requests import choose
from stagescope_service.core.state import State
from stagescope_service.ingest.ingestors import IngestorClient
from stagescope_service.ingest.relay import Batch, RelayAnswer, RelayedPoll
from stagescope_service.settings import Settings
from stagescope_service.store.contract import Delete, Snapshot, Store
from stagescope_service.triggers.rules import Rules

logger = logging.getLogger(__name__)

_KEEP_POLICY: Final = "standing_keep"
"""Key of `meta`: what the settings' file has runs keep, and since which revision."""
_MAX_WAIT: Final = 60.0
"""Seconds that one call waits for an agreement."""

Reply = dict[str, Json]


class Restored(NamedTuple):
    """What is known of earlier attempts."""

    state: State
    plan: Plan
    """The captures in force."""


class Coordinator:
    """Takes in what ranks report and what the API asks for; used from one event loop.

    Args:
        settings: of the service.
        store: the catalogue, open.
        ingestors: of all nodes.
        restored: what is known of earlier attempts; see `open`.
        name: of this incarnation.
        clock: of the service.
    """

    effects_type: ClassVar[type[Effects]] = Effects

    def __init__(
        self,
        settings: Settings,
        store: Store,
        ingestors: IngestorClient,
        *,
        restored: Restored | None = None,
        name: str = "",
        clock: Clock = REAL_CLOCK,
    ) -> None:
        if restored is None:
            restored = Restored(State(lease_seconds=settings.lease_seconds), Plan())
        self.state, self.plan_in_force = restored
        self.capture_requests = CaptureRequests(self.plan_in_force, self.state)
        self.commits = Commits(self.state, store)
        self.load = Load(self.state, relay_ranks=settings.relay_ranks)
        self.effects = self.effects_type(
            settings,
            self.commits,
            self.plan_in_force,
            ingestors,
            self._capture_for_trigger,
            clock,
        )
        self.hangs = self.effects.hangs
        self.draining = Draining(self.effects, self.load)
        poll_seconds = settings.poll_seconds
        self.intake = Intake(
            self.effects,
            self.capture_requests,
            self.load,
            self.draining,
            coordinator=name or uuid.uuid4().hex,
            poll_seconds=poll_seconds,
        )
        self.raw_calls = RawCalls(self.effects, poll_seconds=poll_seconds)
        self._ingestors = ingestors
        self._settings = settings
        self._catalogue = self.effects.catalogue
        self._wall, self._mono = clock

    @classmethod
    async def open(
        cls, settings: Settings, store: Store, ingestors: IngestorClient, *, name: str = ""
    ) -> Coordinator:
        """Return a coordinator that goes on where an earlier one ended.

        Raises:
            StagescopeError: the catalogue cannot be read.
        """
        snapshot = await asyncio.to_thread(store.snapshot)
        state = State(lease_seconds=settings.lease_seconds)
        restore(state, snapshot, time.monotonic())
        policy, revision, rows = await _keep_policy(settings, snapshot)
        in_force = [row["spec"] for row in snapshot.captures if row["removed_wall"] is None]
        plan = Plan(in_force, revision=revision, keep_policy=policy)
        opened = cls(settings, store, ingestors, restored=Restored(state, plan), name=name)
        opened.adopt(snapshot)
        left_over = _left_over(snapshot)
        effects = opened.effects
        await effects.write(rows)
        # Nothing fails from here on: whoever opens again has no work of this one beside it.
        effects.open(left_over)
        opened.intake.begin()
        return opened

    def adopt(self, snapshot: Snapshot) -> None:
        """Take over the findings and requests for stacks that an earlier coordinator made."""
        self.state.refusals.adopt(snapshot.findings)
        self.hangs.adopt(snapshot.findings)
        self.load.adopt(snapshot.findings)
        self.effects.retention.adopt_findings(snapshot.findings)
        self.state.stack_requests.adopt(snapshot.asked_stacks)

    @property
    def check_seconds(self) -> float:
        """Seconds between two calls of `check`."""
        return max(0.05, min(1.0, self._settings.lease_seconds / 10))

    async def check(self) -> None:
        """Expire leases, check requests and files; to be called several times a lease."""
        await self.intake.expire()
        self.effects.retire_files()
        await self.effects.rejudge()
        self._ingestors.start_relays(self.load.relay_nodes)

    # --- events -----------------------------------------------------------------------------
    @names_checked
    async def record_events(
        self,
        *,
        sender: Sequence[object],
        events: Sequence[object],
        payloads: Mapping[int, object] | None = None,
    ) -> Mapping[str, object]:
        """Take in a batch; returns after its commit; see `Intake.record`."""
        check_batch(events, payloads)
        return await self.intake.record(sender, events, payloads)

    @checked
    async def poll(
        self,
        *,
        sender: Sequence[object],
        revision: Revision,
        unreceipted: Seqs = (),
        wait: Seconds = 20.0,
    ) -> JsonObject:
        """Renew the lease; returns news of the plan and receipts, after `wait` at most."""
        return await self.intake.poll(sender, revision, unreceipted, wait)

    @names_checked
    async def record_together(self, *, batches: Sequence[Batch]) -> RelayAnswer:
        """Take in the batches that a relay collected; see `Intake.record_together`."""
        return await self.intake.record_together(batches)

    @names_checked
    async def poll_together(self, *, polls: Sequence[RelayedPoll], wait: float) -> RelayAnswer:
        """Answer the polls that wait at a relay; see `Intake.poll_together`."""
        return await self.intake.poll_together(polls, wait)

    @checked
    async def drain(
        self, *, run: Name | None, timeout: Seconds = 30.0, attempt_key: Name | None = None
    ) -> JsonObject:
        """Wait until nothing of a run (None: of any) is still to be read; see `Draining`."""
        return await self.draining.drain(run, timeout, attempt_key)

    # --- captures ---------------------------------------------------------------------------
    @names_checked
    async def plan(self) -> StoredPlan:
        """Return the plan in force."""
        return self.plan_in_force.stored()

    @checked
    async def add_capture(self, *, spec: Fields, by: Name, wait: Seconds = 0.0) -> Reply:
        """Request a capture; returns it once it is agreed on, or after `wait` seconds."""
        settings, requests = self._settings, self.capture_requests
        # In a thread: resolving the links of a path may wait for a slow file system.
        roots = [str(root) for root in settings.roots]
        valid = await asyncio.to_thread(validate_capture, spec, allowed_roots=roots)
        self.commits.check_ready()  # before the plan changes: who is refused may ask again
        if valid["data_dir"] is None:
            valid["data_dir"] = str(settings.data_path)
        valid = await asyncio.to_thread(with_ranks, self._catalogue, valid)
        valid = await asyncio.to_thread(with_baseline, self._catalogue, valid, settings.roots)
        entry = requests.add(valid, by=by, mono=self._mono(), wall=self._wall())
        audit = self._audit(by, "add_capture", entry.stored())
        await self.intake.change_plan([requests.row(entry), audit])
        await self.intake.check_requests()
        found = await self.intake.agreed(entry.capture_id, min(wait, _MAX_WAIT))
        if found is not None:
            return {**found.stored(), "notes": requests.notes(entry)}
        # It ended at once: what became of it is in the catalogue.
        row = await asyncio.to_thread(self._catalogue.capture, entry.capture_id)
        return {**(entry.stored() if row is None else row["spec"]), "notes": requests.notes(entry)}

    async def _capture_for_trigger(self, spec: JsonObject, by: str) -> Reply:
        return await self.add_capture(spec=spec, by=by)

    @checked
    async def remove_capture(self, *, capture_id: Name, by: Name) -> StoredCapture:
        """Withdraw a capture and return it."""
        self.commits.check_ready()
        entry, rows = self.capture_requests.remove(capture_id, by=by, wall=self._wall())
        audit = self._audit(by, "remove_capture", entry.stored())
        await self.intake.change_plan([*rows, audit])
        return entry.stored()

    @checked
    async def set_triggers(self, *, document: Fields, by: Name) -> Reply:
        """Put rules in force; returns their revision."""
        self.commits.check_ready()
        return {"revision": await self.effects.triggers.put(Rules.parse(document), by=by)}

    @checked
    async def test_webhook(self, *, rule: Name, by: Name) -> Reply:
        """Send a test message to the webhook of a rule in force; returns what came of it.

        Raises:
            NotFound: no rule in force is called so.
            InvalidInput: it has no webhook.
        """
        self.commits.check_ready()
        tested = await self.effects.triggers.test_webhook(rule)
        await self.effects.write([self._audit(by, "test_webhook", tested)])
        return {**tested}

    # --- pins -------------------------------------------------------------------------------
    @checked
    async def pin(self, *, attempt_id: AttemptId, step: StepNumber, by: Name) -> Reply:
        """Keep the payloads and the kept files of a step until it is unpinned.

        Raises:
            NotFound: the attempt has no such step.
        """
        self.commits.check_ready()
        await self._check_step(attempt_id, step)
        key = {"attempt_id": attempt_id, "step": step}
        pinned = await self.effects.retention.pin(attempt_id, step)
        # Without a payload in a ring, too: kept files that are still to come are to stay.
        rows = [Put("steps", {**key, "pinned": True}), self._audit(by, "pin", key)]
        await self.effects.write(rows)
        return {**key, "pinned": True, **dataclasses.asdict(pinned)}

    @checked
    async def unpin(self, *, attempt_id: AttemptId, step: StepNumber, by: Name) -> Reply:
        """Let the payloads of a step leave the rings when room is needed.

        Raises:
            NotFound: the attempt has no such step.
        """
        self.commits.check_ready()
        await self._check_step(attempt_id, step)
        key = {"attempt_id": attempt_id, "step": step}
        done = await self.effects.retention.unpin(attempt_id, step)
        rows = [Put("steps", {**key, "pinned": False})] if done else []
        await self.effects.write([*rows, self._audit(by, "unpin", key)])
        return {**key, "unpinned": done}

    async def _check_step(self, attempt_id: int, step: int) -> None:
        """Refuse a step that never began: its row would be the newest step of the run.

        Raises:
            NotFound: the attempt has no such step.
        """
        if await asyncio.to_thread(self._catalogue.step, attempt_id, step) is None:
            raise NotFound(
                f"there is no step {step} of an attempt with id {attempt_id}",
                see=(Link("steps"),),
            )

    @checked
    async def note_bundle(
        self,
        *,
        run: Name,
        attempt_id: AttemptId,
        step: StepNumber | None,
        message: Message,
        path: Message | None,
    ) -> Reply:
        """Write the finding that says where the bundle of an attempt is, or why there is none.

        Raises:
            NotFound: the run has no such attempt.
        """
        self.commits.check_ready()
        row = await asyncio.to_thread(self._catalogue.attempt, attempt_id)
        if row is None or row["run"] != run:
            raise NotFound(f"run {run} has no attempt whose attempt_id is {attempt_id}")
        put = finding(
            ATTEMPT_BUNDLED, message, run=run, attempt_id=attempt_id, step=step, wall=self._wall(),
            severity="warning" if path is None else "info", evidence={"path": path},
            advice="" if path is None else f"`stagescope attach {path}` opens it, anywhere",
        )  # fmt: skip
        await self.effects.write([put])
        return {"finding_id": str(put.row["finding_id"])}

    # --- engines ----------------------------------------------------------------------------
    @checked
    async def add_engine(self, *, engine: Fields, by: Name) -> Reply:
        """Register a long-lived engine, or register it anew; the service never calls it."""
        self.commits.check_ready()
        row = {**check_engine(engine), "by": by, "wall": self._wall()}
        await self.effects.write([Put("engines", row), self._audit(by, "add_engine", row)])
        return row

    @checked
    async def remove_engine(self, *, name: Name, by: Name) -> Reply:
        """Remove an engine from the registry.

        Raises:
            NotFound: no engine has this name.
        """
        self.commits.check_ready()
        key = {"name": name}
        engines = await asyncio.to_thread(self.effects.catalogue.engines)
        if not any(row["name"] == name for row in engines):
            raise NotFound(f"no engine is called {name!r:.100}", see=(Link("engines"),))
        await self.effects.write([Delete("engines", key), self._audit(by, "remove_engine", key)])
        return key

    # --- stacks -----------------------------------------------------------------------------
    @checked
    async def ask_stacks(
        self,
        *,
        attempt_id: AttemptId,
        role: Name | None,
        ranks: Ranks | None,
        seconds: Seconds,
        by: Name,
    ) -> Reply:
        """Ask processes of an attempt for their stacks; answers once that is on disk.

        Returns `{"request_id", "deadline_wall", "asked": [{"role", "rank"}], "refused": [{"role",
        "rank", "reason"}]}`; the stacks come into the catalogue.

        Raises:
            NotFound: the attempt is over.
            InvalidInput: too many processes at once.
        """
        self.commits.check_ready()
        attempt = self.state.attempt(attempt_id)
        if attempt is None or attempt.over:
            raise NotFound("the attempt is over: no process of it is left")
        processes, refused = choose(attempt, role, ranks)
        request_id, wall = uuid.uuid4().hex, self._wall()
        out: list[Instruction] = []
        for process in processes:
            out += self.state.stack_requests.ask(
                process, request_id, by=by, reason="ordered", wall=wall, seconds=seconds
            )
        requested = [{"role": process.role, "rank": process.rank} for process in processes]
        detail = {"request_id": request_id, "attempt_id": attempt_id, "asked": requested}
        await self.effects.carry_out([*out, self._audit(by, "ask_stacks", detail)])
        return {
            "request_id": request_id,
            "deadline_wall": wall + seconds,
            "asked": requested,
            "refused": refused,
        }

    # --- the service ------------------------------------------------------------------------
    async def status(self) -> Reply:
        """Return how the coordinator is.

        Raises:
            NotReady: the catalogue cannot be written.
        """
        health = self.commits.store.health()
        if not health.healthy:
            raise NotReady(health.reason)
        processes = self.state.registry.processes.values()
        return {
            "coordinator": self.intake.coordinator,
            "pid": os.getpid(),
            "wall": self._wall(),
            "events_taken": self.intake.events_taken + self.raw_calls.recorded,
            "load": self.load.status(),
            "memory_bytes": resident_bytes(),
            "live_processes": sum(process.live for process in processes),
            "pending_payloads": sum(len(process.payloads) for process in processes),
            "revision": self.plan_in_force.revision,
            "poll_seconds": self.intake.poll_seconds,
            "keeping": self.effects.retention.health(),
            "cluster_problem": self._ingestors.cluster_problem() or None,
        }

    def _audit(self, by: str, action: str, detail: JsonObject) -> Put:
        return _audit_row(self._wall(), by, action, detail)


async def _keep_policy(settings: Settings, snapshot: Snapshot) -> tuple[KeepPolicy, int, list[Put]]:
    """Return what the settings' file has runs keep, and the revision under which ranks know it.

    A file that cannot be read any more changes nothing, and the audit says so.
    """
    stored = snapshot.meta.get(_KEEP_POLICY) or {"revision": 0, "keep": {}}
    known, revision = stored["keep"], max(snapshot.last_revision, stored["revision"])
    wall, by = time.time(), f"file {settings.keep}"
    try:
        found: KeepPolicy = {}
        if settings.keep is not None:
            found = await asyncio.to_thread(read_keep_policy, settings.keep)
    except StagescopeError as error:
        logger.warning("the keep policy stays as it is: %s", error)
        return known, revision, [_audit_row(wall, by, "keep_refused", {"problem": str(error)})]
    if found == known:
        return known, revision, []
    row = {"key": _KEEP_POLICY, "value": {"revision": revision + 1, "keep": found}}
    audit = _audit_row(wall, by, "set_keep", {"keep": found})
    return found, revision + 1, [Put("meta", row), audit]


def _left_over(snapshot: Snapshot) -> list[Instruction]:
    """Return what an earlier coordinator may have been about to do."""
    judged = (row for row in snapshot.steps if row["completeness"] == PARTIAL)
    runs = {row["attempt_id"]: row["run"] for row in snapshot.attempts}
    return [
        *steps_to_aggregate(snapshot),
        *(Rejudge(row["attempt_id"], row["step"]) for row in judged),
        *(operator_tables.again(row, runs[row["attempt_id"]]) for row in snapshot.undigested),
    ]


def steps_to_aggregate(snapshot: Snapshot) -> list[Aggregate]:
    """Return the closed steps whose summary may lack what an earlier coordinator did not add."""
    ended = {row["attempt_id"] for row in snapshot.attempts if row["ended_wall"] is not None}
    # Of a live attempt the snapshot has the payloads of its last steps, read or not.
    unread = (row for row in snapshot.payloads if row["state"] == ANNOUNCED)
    pending = {(row["attempt_id"], row["step"]) for row in unread}
    # A step that closed lately may wait for rollouts, of which only its coordinator knew.
    late = [
        (row["attempt_id"], row["step"])
        for row in snapshot.steps
        if row["closed_wall"] is not None
        and (row["summary_wall"] is None or row["attempt_id"] not in ended)
    ]
    due = dict.fromkeys([*snapshot.unaggregated, *late])
    return [Aggregate(*key) for key in due if key not in pending]


def _audit_row(wall: float, by: str, action: str, detail: JsonObject) -> Put:
    return Put("audit", {"wall": wall, "by": by, "action": action, "detail": dict(detail)})
