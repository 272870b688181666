"""The coordinator without Ray: the calls of ranks and of the API (`api.dependencies.Commands`)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

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
from stagescope_service.coordinator.composition import Parts
from stagescope_service.coordinator.load import resident_bytes
from stagescope_service.coordinator.raw_calls import RawCalls
from stagescope_service.coordinator.restore import restore
from stagescope_service.coordinator.runner import REAL_CLOCK, Clock
from stagescope_service.core import operators as operator_tables
from stagescope_service.core.captures.active_plan import Plan
from stagescope_service.core.captures.keep_policy import KeepPolicy, read_keep_policy
from stagescope_service.core.catalogue_rows import audit_row
from stagescope_service.core.completeness import PARTIAL
from stagescope_service.core.entities import ANNOUNCED
from stagescope_service.core.findings import ATTEMPT_BUNDLED, finding
from stagescope_service.core.hangs.stack_requests import ORDERED, choose
from stagescope_service.core.instructions import Aggregate, Instruction, Put, Rejudge
from stagescope_service.core.state import State
from stagescope_service.ingest.ingestors import IngestorClient
from stagescope_service.ingest.relay import Batch, RelayAnswer, RelayedPoll
from stagescope_service.rules.document import Rules
from stagescope_service.settings import Settings
from stagescope_service.store.contract import Delete, Snapshot, Store
from stagescope_wire.engines.registry import check_engine
from stagescope_wire.errors import NotFound, NotReady, StagescopeError
from stagescope_wire.links import Link
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.plan import StoredCapture, StoredPlan

logger = logging.getLogger(__name__)

_KEEP_POLICY: Final = "standing_keep"
"""Key of `meta`: what the settings' file has runs keep, and the first revision with it."""

Reply = dict[str, Json]


class Coordinator:
    """Receives reports of ranks and requests of the API; used from one event loop.

    Args:
        parts: the parts of this coordinator; see `composition`.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._runner = parts.runner
        self._commits = parts.commits
        self._retention = parts.retention
        self._catalogue = parts.catalogue
        self._state = parts.state
        self._intake = parts.intake
        self._wall = parts.clock.wall

    @classmethod
    async def open(
        cls,
        settings: Settings,
        store: Store,
        ingestors: IngestorClient,
        *,
        name: str = "",
        clock: Clock = REAL_CLOCK,
    ) -> Coordinator:
        """Return a coordinator that continues where an earlier one ended.

        Args:
            settings: the service's settings.
            store: the open catalogue.
            ingestors: the ingestors of all nodes.
            name: the name of this incarnation; by default a new one.
            clock: the service's clock.

        Raises:
            StagescopeError: the catalogue cannot be read.
        """
        snapshot = await asyncio.to_thread(store.snapshot)
        state = State(lease_seconds=settings.lease_seconds)
        restore(state, snapshot, clock.mono())
        policy, revision, rows = await _keep_policy(settings, snapshot)
        active = [row["spec"] for row in snapshot.captures if row["removed_wall"] is None]
        plan = Plan(active, revision=revision, keep_policy=policy)
        name = name or uuid.uuid4().hex
        parts = Parts(settings, store, ingestors, state, plan, name=name, clock=clock)
        parts.adopt(snapshot)
        await parts.runner.write(rows)
        # Nothing fails from here on: a caller that opens again finds no work of this one under way.
        parts.begin(_left_over(snapshot))
        return cls(parts)

    @property
    def check_seconds(self) -> float:
        """Seconds between two calls of `check`."""
        return max(0.05, min(1.0, self.parts.settings.lease_seconds / 10))

    async def check(self) -> None:
        """Expire leases, check requests and files; call it several times a lease."""
        await self.parts.leases.expire()
        self._runner.run(self._retention.check())
        await self.parts.steps.rejudge()
        self.parts.ingestors.start_relays(self.parts.load.relay_nodes)

    # --- events -----------------------------------------------------------------------------
    @names_checked
    async def record_events(
        self,
        *,
        sender: Sequence[object],
        events: Sequence[object],
        payloads: Mapping[int, object] | None = None,
    ) -> Mapping[str, object]:
        """Record a batch; return after its commit; see `Intake.record`."""
        check_batch(events, payloads)
        return await self._intake.record(sender, events, payloads)

    @checked
    async def poll(
        self,
        *,
        sender: Sequence[object],
        revision: Revision,
        unreceipted: Seqs = (),
        wait: Seconds = 20.0,
    ) -> JsonObject:
        """Renew the lease; return news of the plan and receipts, after at most `wait`."""
        return await self._intake.poll(sender, revision, unreceipted, wait)

    @names_checked
    async def record_together(self, *, batches: Sequence[Batch]) -> RelayAnswer:
        """Record the batches that a relay collected; see `Intake.record_together`."""
        return await self._intake.record_together(batches)

    @names_checked
    async def poll_together(self, *, polls: Sequence[RelayedPoll], wait: float) -> RelayAnswer:
        """Answer the polls that wait at a relay; see `Intake.poll_together`."""
        return await self._intake.poll_together(polls, wait)

    @checked
    async def drain(
        self,
        *,
        run: Name | None,
        timeout: Seconds = 30.0,
        attempt_key: Name | None = None,
        ended_by: Fields | None = None,
    ) -> JsonObject:
        """Wait until nothing of a run, or of any run (None), is left to read; see `Draining`."""
        return await self.parts.draining.drain(run, timeout, attempt_key, ended_by)

    @property
    def raw_calls(self) -> RawCalls:
        """The calls of processes without a probe."""
        return self.parts.raw_calls

    # --- captures ---------------------------------------------------------------------------
    @names_checked
    async def plan(self) -> StoredPlan:
        """Return the active plan."""
        return self.parts.plan.stored()

    @checked
    async def add_capture(self, *, spec: Fields, by: Name, wait: Seconds = 0.0) -> Reply:
        """Request a capture; return it once it is agreed on, or after `wait` seconds."""
        return await self.parts.captures.add(spec, by=by, wait=wait)

    @checked
    async def remove_capture(self, *, capture_id: Name, by: Name) -> StoredCapture:
        """Withdraw a capture and return it."""
        return await self.parts.captures.remove(capture_id, by=by)

    @checked
    async def set_triggers(self, *, document: Fields, by: Name) -> Reply:
        """Activate rules; return their revision."""
        self._commits.check_ready()
        return {"revision": await self.parts.triggers.put(Rules.parse(document), by=by)}

    @checked
    async def test_webhook(self, *, rule: Name, by: Name) -> Reply:
        """Send a test message to the webhook of an active rule; return the result.

        Raises:
            NotFound: no active rule has this name.
            InvalidInput: it has no webhook.
        """
        self._commits.check_ready()
        tested = await self.parts.triggers.test_webhook(rule)
        await self._runner.write([self._audit(by, "test_webhook", tested)])
        return {**tested}

    # --- pins -------------------------------------------------------------------------------
    @checked
    async def pin(self, *, attempt_id: AttemptId, step: StepNumber, by: Name) -> Reply:
        """Keep the payloads and the kept files of a step until it is unpinned.

        Raises:
            NotFound: the attempt has no such step.
        """
        self._commits.check_ready()
        await self._check_step(attempt_id, step)
        key = {"attempt_id": attempt_id, "step": step}
        pinned = await self._retention.pin(attempt_id, step)
        # Also without a payload in a ring: kept files that are still to come must stay.
        rows = [Put("steps", {**key, "pinned": True}), self._audit(by, "pin", key)]
        await self._runner.write(rows)
        return {**key, "pinned": True, **dataclasses.asdict(pinned)}

    @checked
    async def unpin(self, *, attempt_id: AttemptId, step: StepNumber, by: Name) -> Reply:
        """Let the payloads of a step leave the rings when room is needed.

        Raises:
            NotFound: the attempt has no such step.
        """
        self._commits.check_ready()
        await self._check_step(attempt_id, step)
        key = {"attempt_id": attempt_id, "step": step}
        done = await self._retention.unpin(attempt_id, step)
        rows = [Put("steps", {**key, "pinned": False})] if done else []
        await self._runner.write([*rows, self._audit(by, "unpin", key)])
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
        self._commits.check_ready()
        row = await asyncio.to_thread(self._catalogue.attempt, attempt_id)
        if row is None or row["run"] != run:
            raise NotFound(f"run {run} has no attempt whose attempt_id is {attempt_id}")
        put = finding(
            ATTEMPT_BUNDLED, message, run=run, attempt_id=attempt_id, step=step, wall=self._wall(),
            severity="warning" if path is None else "info", evidence={"path": path},
            advice="" if path is None else f"`stagescope attach {path}` opens it, anywhere",
        )  # fmt: skip
        await self._runner.write([put])
        return {"finding_id": str(put.row["finding_id"])}

    # --- runs -------------------------------------------------------------------------------
    @checked
    async def change_run(self, *, run: Name, changes: Fields, by: Name) -> Reply:
        """Set `hidden` or `display_name` of a run; see `RunChanges.change`."""
        self._commits.check_ready()
        await self.parts.runs.change(run, changes, by)
        return {"run": run}

    @checked
    async def delete_run(self, *, run: Name, dry_run: bool, by: Name, wait: Seconds) -> Reply:
        """Delete a run with its files; see `RunChanges.delete`."""
        self._commits.check_ready()
        return {**await self.parts.runs.delete(run, by, dry_run=dry_run, wait=wait)}

    # --- engines ----------------------------------------------------------------------------
    @checked
    async def add_engine(self, *, engine: Fields, by: Name) -> Reply:
        """Register a long-lived engine, or replace its registration; the service never calls it."""
        self._commits.check_ready()
        row = {**check_engine(engine), "by": by, "wall": self._wall()}
        await self._runner.write([Put("engines", row), self._audit(by, "add_engine", row)])
        return row

    @checked
    async def remove_engine(self, *, name: Name, by: Name) -> Reply:
        """Remove an engine from the registry.

        Raises:
            NotFound: no engine has this name.
        """
        self._commits.check_ready()
        key = {"name": name}
        engines = await asyncio.to_thread(self._catalogue.engines)
        if not any(row["name"] == name for row in engines):
            raise NotFound(f"no engine is called {name!r:.100}", see=(Link("engines"),))
        await self._runner.write([Delete("engines", key), self._audit(by, "remove_engine", key)])
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
        """Request the stacks of an attempt's processes; answer once the request is on disk.

        Returns `{"request_id", "deadline_wall", "asked": [{"role", "rank"}], "refused": [{"role",
        "rank", "reason"}]}`; the catalogue receives the stacks.

        Raises:
            NotFound: the attempt is over.
            InvalidInput: too many processes at once.
        """
        self._commits.check_ready()
        attempt = self._state.attempt(attempt_id)
        if attempt is None or attempt.over:
            raise NotFound("the attempt is over: no process of it is left")
        processes, refused = choose(attempt, role, ranks)
        request_id, wall = uuid.uuid4().hex, self._wall()
        out: list[Instruction] = []
        for process in processes:
            out += self._state.stack_requests.ask(
                process, request_id, by=by, reason=ORDERED, wall=wall, seconds=seconds
            )
        requested = [{"role": process.role, "rank": process.rank} for process in processes]
        detail = {"request_id": request_id, "attempt_id": attempt_id, "asked": requested}
        await self._runner.carry_out([*out, self._audit(by, "ask_stacks", detail)])
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
        health = self._commits.store.health()
        if not health.healthy:
            raise NotReady(health.reason)
        processes = self._state.registry.processes.values()
        return {
            "coordinator": self._intake.coordinator,
            "pid": os.getpid(),
            "wall": self._wall(),
            "events_taken": self._intake.events_taken + self.parts.raw_calls.recorded,
            "load": self.parts.load.status(),
            "memory_bytes": resident_bytes(),
            "live_processes": sum(process.live for process in processes),
            "pending_payloads": sum(len(process.payloads) for process in processes),
            "revision": self.parts.plan.revision,
            "poll_seconds": self._intake.poll_seconds,
            "keeping": self._retention.health(),
            "cluster_problem": self.parts.ingestors.cluster_problem() or None,
        }

    def not_ready(self, error: NotReady) -> Reply:
        """Return the answer to a rank's call while the catalogue cannot be written."""
        return {**self._intake.not_ready(error)}

    def _audit(self, by: str, action: str, detail: JsonObject) -> Put:
        return audit_row(self._wall(), by, action, detail)


async def _keep_policy(settings: Settings, snapshot: Snapshot) -> tuple[KeepPolicy, int, list[Put]]:
    """Return what the settings' file has runs keep, and the revision that ranks know it by.

    A file that can no longer be read changes nothing, and makes an audit entry.
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
        return known, revision, [audit_row(wall, by, "keep_refused", {"problem": str(error)})]
    if found == known:
        return known, revision, []
    row = {"key": _KEEP_POLICY, "value": {"revision": revision + 1, "keep": found}}
    audit = audit_row(wall, by, "set_keep", {"keep": found})
    return found, revision + 1, [Put("meta", row), audit]


def _left_over(snapshot: Snapshot) -> list[Instruction]:
    """Return work that an earlier coordinator may have left."""
    judged = (row for row in snapshot.steps if row["completeness"] == PARTIAL)
    runs = {row["attempt_id"]: row["run"] for row in snapshot.attempts}
    return [
        *steps_to_aggregate(snapshot),
        *(Rejudge(row["attempt_id"], row["step"]) for row in judged),
        *(operator_tables.again(row, runs[row["attempt_id"]]) for row in snapshot.undigested),
    ]


def steps_to_aggregate(snapshot: Snapshot) -> list[Aggregate]:
    """Return the closed steps whose summary an earlier coordinator possibly left incomplete."""
    ended = {row["attempt_id"] for row in snapshot.attempts if row["ended_wall"] is not None}
    # The snapshot has the payloads of a live attempt's last steps, read or not.
    unread = (row for row in snapshot.payloads if row["state"] == ANNOUNCED)
    pending = {(row["attempt_id"], row["step"]) for row in unread}
    # A step that closed lately may wait for rollouts that only its coordinator knew.
    late = [
        (row["attempt_id"], row["step"])
        for row in snapshot.steps
        if row["closed_wall"] is not None
        and (row["summary_wall"] is None or row["attempt_id"] not in ended)
    ]
    due = dict.fromkeys([*snapshot.unaggregated, *late])
    return [Aggregate(*key) for key in due if key not in pending]
