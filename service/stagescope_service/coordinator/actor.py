"""The DebugCoordinator: the detached actor that every rank talks to. A thin Ray shell.

Its constructor touches nothing that can fail: the catalogue is opened in the background, again
and again until it works, and until then every call answers `not_ready`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray

from stagescope.engines.registry import check_engine
from stagescope.wire.captures import validate_capture
from stagescope.wire.errors import NotReady, StagescopeError
from stagescope_service.coordinator import control_socket
from stagescope_service.coordinator.arguments import (
    AttemptId,
    Fields,
    Name,
    Ranks,
    Revision,
    Seconds,
    Seqs,
    StepNumber,
    check_batch,
    checked,
)
from stagescope_service.coordinator.capture_references import with_baseline, with_ranks
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.coordinator.effects import RayEffects
from stagescope_service.coordinator.load import Memory, resident_bytes
from stagescope_service.coordinator.restore import restore
from stagescope_service.core import operator_tables
from stagescope_service.core.captures.keep_policy import KeepPolicy, read_keep_policy
from stagescope_service.core.captures.plan import Plan
from stagescope_service.core.findings import describe
from stagescope_service.core.hang_detection import StuckRules
from stagescope_service.core.instructions import Aggregate, Put
from stagescope_service.core.state import State
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Delete, Snapshot
from stagescope_service.store.sql import SqlStore
from stagescope_service.triggers.rules import Rules

logger = logging.getLogger(__name__)

NAME: Final = "DebugCoordinator"
NAMESPACE: Final = "stagescope"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_STANDING: Final = "standing_keep"
"""Key of `meta`: what the settings' file has runs keep, and since which revision."""
_CONTROL: Final = (
    "plan", "add_capture", "remove_capture", "set_triggers", "pin", "unpin",
    "add_engine", "remove_engine", "ask_stacks", "status", "drain",
)  # fmt: skip
"""What the API calls past the ranks' calls."""
_LONGEST_WAIT: Final = 60.0
"""Seconds that one call waits for an agreement."""

Reply = dict[str, Any]


class DebugCoordinator:
    """Takes in what ranks report; see `Coordinator` for what each call promises."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings_json = dict(settings)
        self._coordinator = uuid.uuid4().hex
        self._started = time.time()
        self._reason = "the catalogue is being opened"
        self._reception: Coordinator | None = None
        self._task: asyncio.Task[None] | None = None
        self._store: SqlStore | None = None
        self._effects: RayEffects | None = None
        self._control: asyncio.Server | None = None

    # --- events -------------------------------------------------------------------------
    async def record_events(
        self,
        *,
        sender: Sequence[Any],
        events: Sequence[Any],
        payloads: Mapping[int, Any] | None = None,
    ) -> Reply:
        """Take in a batch; returns after its commit."""
        check_batch(events, payloads)
        try:
            return await self._ready().record(sender, events, payloads)
        except NotReady as error:
            return self._not_ready(error)

    @checked
    async def poll(
        self,
        *,
        sender: Sequence[Any],
        revision: Revision,
        unreceipted: Seqs = (),
        wait: Seconds = 20.0,
    ) -> Reply:
        """Renew the lease; returns news of the plan and receipts, after `wait` at most."""
        try:
            return await self._ready().poll(sender, revision, unreceipted, wait)
        except NotReady as error:
            return self._not_ready(error)

    async def begin_stage(self, **fields: Any) -> Reply:
        """A raw caller begins a stage: run, step, stage, rank; role, world_size, attempt_key."""
        return await self._raw("begin", fields)

    async def end_stage(self, *, payload: Mapping[str, Any] | None = None, **fields: Any) -> Reply:
        """A raw caller ends a stage; with a payload it returns at the payload's receipt."""
        return await self._raw("end", {"status": "ok", **fields}, payload)

    async def log_scalars(self, **fields: Any) -> Reply:
        """A raw caller hands over scalars: run, step, scalars."""
        return await self._raw("log", fields)

    async def end_step(self, **fields: Any) -> Reply:
        """A raw caller closes a step: run, step."""
        return await self._raw("end_step", fields)

    async def finish(self, **fields: Any) -> Reply:
        """A raw caller takes leave: run."""
        return await self._raw("finish", fields)

    async def _raw(
        self, kind: str, fields: Mapping[str, Any], payload: Mapping[str, Any] | None = None
    ) -> Reply:
        # The task's id is the same on every retry that Ray makes.
        delivery = str(ray.get_runtime_context().get_task_id())
        while True:
            try:
                return await self._ready().raw_calls.take(kind, delivery, fields, payload)
            except NotReady:  # noqa: PERF203
                # A raw caller has no queue of its own: it waits here.
                await asyncio.sleep(_FIRST_PAUSE)

    # --- orders -------------------------------------------------------------------------
    async def plan(self) -> Reply:
        """Return the plan in force."""
        return self._ready().plan.stored()

    @checked
    async def add_capture(self, *, spec: Fields, by: Name, wait: Seconds = 0.0) -> Reply:
        """Order a capture; returns it with its id once it is agreed on, or after `wait` seconds."""
        reception = self._ready()
        reception.executor.check_ready()  # before the plan changes: who is refused may ask again
        settings = self._settings()
        roots = [str(root) for root in settings.roots]
        valid = validate_capture(spec, allowed_roots=roots)
        if valid["data_dir"] is None:
            valid["data_dir"] = str(settings.data_path)
        catalogue = Catalogue(settings.catalogue_url)
        valid = await asyncio.to_thread(with_ranks, catalogue, valid)
        valid = await asyncio.to_thread(with_baseline, catalogue, valid, settings.roots)
        orders = reception.orders
        entry = orders.add(valid, by=by, mono=time.monotonic(), wall=time.time())
        await reception.order([orders.row(entry), _audit(by, "add_capture", entry.stored())])
        await reception.look()
        found = await reception.agreed(entry.capture_id, min(wait, _LONGEST_WAIT))
        if found is not None:
            return {**found.stored(), "notes": orders.notes(entry)}
        # It ended at once: what became of it is in the catalogue.
        row = await asyncio.to_thread(catalogue.capture, entry.capture_id)
        return {**(entry.stored() if row is None else row["spec"]), "notes": orders.notes(entry)}

    @checked
    async def remove_capture(self, *, capture_id: Name, by: Name) -> Reply:
        """Withdraw a capture and return it."""
        reception = self._ready()
        reception.executor.check_ready()
        entry, rows = reception.orders.remove(capture_id, by=by, wall=time.time())
        await reception.order([*rows, _audit(by, "remove_capture", entry.stored())])
        return entry.stored()

    @checked
    async def set_triggers(self, *, document: Fields, by: Name) -> Reply:
        """Put rules in force; returns their revision."""
        self._ready().executor.check_ready()
        assert self._effects is not None
        return {"revision": await self._effects.triggers.put(Rules.parse(document), by=by)}

    @checked
    async def pin(self, *, attempt_id: AttemptId, step: StepNumber, by: Name) -> Reply:
        """Let the payloads and the kept files of a step stay until it is unpinned."""
        reception = self._ready()
        reception.executor.check_ready()
        assert self._effects is not None
        place = {"attempt_id": attempt_id, "step": step}
        held = await self._effects.pin(attempt_id, step)
        # Without a payload in a ring, too: kept files that are still to come are to stay.
        rows = [Put("steps", {**place, "pinned": True})]
        await reception.write([*rows, _audit(by, "pin", place)])
        return {**place, "pinned": True, **dataclasses.asdict(held)}

    @checked
    async def unpin(self, *, attempt_id: AttemptId, step: StepNumber, by: Name) -> Reply:
        """Let the payloads of a step leave the rings when room is needed."""
        reception = self._ready()
        reception.executor.check_ready()
        assert self._effects is not None
        place = {"attempt_id": attempt_id, "step": step}
        done = await self._effects.unpin(attempt_id, step)
        rows = [Put("steps", {**place, "pinned": False})] if done else []
        await reception.write([*rows, _audit(by, "unpin", place)])
        return {**place, "unpinned": done}

    @checked
    async def add_engine(self, *, engine: Fields, by: Name) -> Reply:
        """Register a long-lived engine, or register it anew; nothing here ever asks it."""
        reception = self._ready()
        reception.executor.check_ready()
        row = {**check_engine(engine), "by": by, "wall": time.time()}
        await reception.write([Put("engines", row), _audit(by, "add_engine", row)])
        return row

    @checked
    async def remove_engine(self, *, name: Name, by: Name) -> Reply:
        """Take an engine out of the registry."""
        reception = self._ready()
        reception.executor.check_ready()
        gone = {"name": name}
        await reception.write([Delete("engines", gone), _audit(by, "remove_engine", gone)])
        return gone

    async def _ordered(self, spec: Mapping[str, Any], by: str) -> Reply:
        """Order what a trigger asks for, as anyone would."""
        return await self.add_capture(spec=spec, by=by)

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
        """Ask processes for their stacks, which come into the catalogue; see `Coordinator`."""
        return await self._ready().ask_stacks(attempt_id, role, ranks, seconds=seconds, by=by)

    # --- service ------------------------------------------------------------------------
    async def status(self) -> Reply:
        """Return how the coordinator is; `not_ready` is the reason why it cannot serve."""
        self._wake()
        status: Reply = {
            "coordinator": self._coordinator,
            "pid": os.getpid(),
            "started": self._started,
            "wall": time.time(),
        }
        try:
            reception = self._ready()
            health = reception.executor.store.health()
            if not health.healthy:
                raise NotReady(health.reason)
        except NotReady as error:
            return {**status, "not_ready": str(error)}
        processes = reception.state.registry.processes.values()
        return {
            **status,
            "events_taken": reception.events_taken,
            "load": reception.load.status(),
            "memory_bytes": resident_bytes(),
            "live_processes": sum(process.live for process in processes),
            "pending_payloads": sum(len(process.payloads) for process in processes),
            "revision": reception.plan.revision,
            "poll_seconds": reception.poll_seconds,
            "keeping": None if self._effects is None else self._effects.retention.health(),
        }

    @checked
    async def drain(
        self, *, run: Name | None, timeout: Seconds = 30.0, attempt_key: Name | None = None
    ) -> Reply:
        """Wait until nothing of a run (None: of any) is still to be read; see `Coordinator`."""
        return await self._ready().drain(run, timeout, attempt_key)

    async def stop(self) -> None:
        """Write what is queued and close the catalogue; what follows is not ready."""
        self._reason = "the service is stopping"
        if self._task is not None:
            self._task.cancel()
        if self._control is not None:
            self._control.close()
        self._reception = None
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    # --- the inside ---------------------------------------------------------------------
    def _settings(self) -> Settings:
        return Settings(**self._settings_json)

    def _wake(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _ready(self) -> Coordinator:
        self._wake()
        if self._reception is None:
            raise NotReady(self._reason, advice="the same call may be made again")
        return self._reception

    def _not_ready(self, error: NotReady) -> Reply:
        reply: Reply = {"coordinator": self._coordinator, "not_ready": str(error)}
        if self._reception is not None and (pause := self._reception.load.pause):
            reply["pause"] = pause
        return reply

    async def _run(self) -> None:
        """Open the catalogue, whatever it takes, then look after leases."""
        settings = self._settings()
        await self._serve_control(settings)
        reception = await self._open(settings)
        self._reception = reception
        pause = max(0.05, min(1.0, settings.lease_seconds / 10))
        memory = Memory()
        while True:
            await asyncio.sleep(pause)
            try:
                memory.look(time.monotonic())
                await reception.expire()
                if self._effects is not None:
                    self._effects.look()
            except Exception:
                logger.exception("leases could not be looked after")

    async def _serve_control(self, settings: Settings) -> None:
        """Let orders and questions come past the calls of the ranks, where a socket can be."""
        methods = {name: getattr(self, name) for name in _CONTROL}
        try:
            settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._control = await control_socket.serve(settings.home, methods)
        except OSError as error:
            logger.warning("orders wait behind the calls of ranks: %s", describe(error))

    async def _open(self, settings: Settings) -> Coordinator:
        pause = _FIRST_PAUSE
        while True:
            try:
                settings.data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
                store = self._store = SqlStore(settings.catalogue_url)
                await asyncio.to_thread(store.open)
                snapshot = await asyncio.to_thread(store.snapshot)
                break
            except (StagescopeError, OSError) as error:
                self._reason = f"the catalogue cannot be opened: {describe(error)}"
                logger.warning("%s", self._reason)
                if self._store is not None:
                    await asyncio.to_thread(self._store.close, 0.0)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        state = State(lease_seconds=settings.lease_seconds)
        restore(state, snapshot, time.monotonic())
        standing, revision, rows = await _standing(settings, snapshot)
        in_force = [row["spec"] for row in snapshot.captures if row["removed_wall"] is None]
        floor = self._effects = RayEffects(settings, self._ordered)
        floor.reception = Coordinator(
            state,
            store,
            Plan(in_force, revision=revision, standing=standing),
            floor,
            coordinator=self._coordinator,
            poll_seconds=settings.poll_seconds,
            stuck_rules=StuckRules(floor=settings.stuck_seconds, factor=settings.stuck_factor),
        )
        floor.reception.hangs.adopt(snapshot.findings)
        floor.reception.load.adopt(snapshot.findings)
        state.stack_requests.adopt(snapshot.asked_stacks)
        await floor.reception.write(rows)
        floor.open(settings)
        floor.retention.adopt_findings(snapshot.findings)
        for order in _unformed(snapshot):
            floor.aggregate(order)
        runs = {row["attempt_id"]: row["run"] for row in snapshot.attempts}
        for row in snapshot.undigested:
            floor.build_operator_table(operator_tables.again(row, runs[row["attempt_id"]]))
        floor.reception.begin()
        return floor.reception


async def _standing(settings: Settings, snapshot: Snapshot) -> tuple[KeepPolicy, int, list[Put]]:
    """Return what the settings' file has runs keep, and the revision under which ranks know it.

    A file that cannot be read any more changes nothing, and the audit says so.
    """
    stored = snapshot.meta.get(_STANDING) or {"revision": 0, "keep": {}}
    known, revision = stored["keep"], max(snapshot.last_revision, stored["revision"])
    try:
        found: KeepPolicy = {}
        if settings.keep is not None:
            found = await asyncio.to_thread(read_keep_policy, settings.keep)
    except StagescopeError as error:
        logger.warning("what is to be kept is as before: %s", error)
        refused = _audit(f"file {settings.keep}", "keep_refused", {"problem": str(error)})
        return known, revision, [refused]
    if found == known:
        return known, revision, []
    value = {"revision": revision + 1, "keep": found}
    audit = _audit(f"file {settings.keep}", "set_keep", {"keep": found})
    return found, revision + 1, [Put("meta", {"key": _STANDING, "value": value}), audit]


def _unformed(snapshot: Snapshot) -> list[Aggregate]:
    """Return the closed steps whose summary may lack what its coordinator had no time to add."""
    ended = {row["attempt_id"] for row in snapshot.attempts if row["ended_wall"] is not None}
    pending = {(row["attempt_id"], row["step"]) for row in snapshot.payloads}
    # A step that closed lately may wait for rollouts, of which only its coordinator knew.
    late = [
        (row["attempt_id"], row["step"])
        for row in snapshot.steps
        if row["closed_wall"] is not None
        and (row["whole_wall"] is None or row["attempt_id"] not in ended)
    ]
    due = dict.fromkeys([*snapshot.unformed, *late])
    return [Aggregate(*place) for place in due if place not in pending]


def _audit(by: str, action: str, detail: Mapping[str, Any]) -> Put:
    return Put("audit", {"wall": time.time(), "by": by, "action": action, "detail": dict(detail)})
