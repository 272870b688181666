"""The DebugCoordinator: the detached actor that every rank talks to. A thin Ray shell.

Every process of a training that looks up the actor imports this file. The service and its
libraries take about a second of Python, so only the process of the actor itself imports them.

Its constructor touches nothing that can fail. The catalogue is opened in the background, again
and again until it works; until then every call answers `not_ready`.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import ray

from stagescope_service.background import BackgroundTasks
from stagescope_service.coordinator import control_socket
from stagescope_service.priority import take_ordinary_priority
from stagescope_wire.errors import NotReady, StagescopeError
from stagescope_wire.nonfinite import JsonObject

if TYPE_CHECKING:
    from pathlib import Path

    from stagescope_service.coordinator.coordinator import Coordinator
    from stagescope_service.settings import Settings
    from stagescope_service.store.sql import SqlStore

logger = logging.getLogger(__name__)

COMMANDS: Final = (
    "plan", "add_capture", "remove_capture", "set_triggers", "test_webhook", "pin",
    "unpin", "change_run", "delete_run", "add_engine", "remove_engine", "ask_stacks", "drain",
    "note_bundle",
)  # fmt: skip
"""Methods of `Coordinator` that the actor has, too; the API also calls them over a socket."""
_FIRST_PAUSE, _MAX_PAUSE = 0.1, 2.0
_CLOSE_SECONDS: Final = 10.0
"""Seconds for queued writes when the service stops."""
_UNWRITABLE: Final = "the catalogue cannot be written"
GC_THRESHOLDS: Final = (50_000, 10, 5)
"""Few of the state's objects are garbage. With Python's defaults (700, 10, 10) the search for it
took a sixth of the time of an event. Only a search of all objects finds those that outlive two
searches: with (50_000, 20, 100) it came after three hours of 14 steps a second."""

Reply = JsonObject


class DebugCoordinator:
    """Receives what ranks report; see `Coordinator` for what each call promises."""

    def __init__(self, settings: JsonObject) -> None:
        self._settings_json = dict(settings)
        self._name = uuid.uuid4().hex
        self._started = time.time()
        self._problem = self._reason = "the catalogue is being opened"
        self._coordinator: Coordinator | None = None
        self._tasks = BackgroundTasks()
        self._task: asyncio.Task[None] | None = None
        self._store: SqlStore | None = None
        self._control: asyncio.Server | None = None
        gc.set_threshold(*GC_THRESHOLDS)
        # Now, while no call waits; the methods below import what they use from it.
        importlib.import_module("stagescope_service.coordinator.coordinator")
        gc.collect()  # an import leaves cycles
        gc.freeze()  # what stays of it is not searched again
        # It needs little, and every rank keeps what it does not acknowledge. The API stays nice: a
        # question never takes a core from a training.
        take_ordinary_priority()

    # --- raw calls --------------------------------------------------------------------------
    async def begin_stage(self, **fields: object) -> Reply:
        """Begin a raw caller's stage: run, step, stage, rank; docs/raw-calls.md has all."""
        return await self._raw("begin", fields)

    async def end_stage(
        self, *, payload: Mapping[str, object] | None = None, **fields: object
    ) -> Reply:
        """End a stage of a raw caller; with a payload, return at the payload's receipt.

        Its fields: docs/raw-calls.md.
        """
        return await self._raw("end", {"status": "ok", **fields}, payload)

    async def log_scalars(self, **fields: Any) -> Reply:
        """Receive scalars of a raw caller: run, step, scalars."""
        return await self._raw("log", fields)

    async def end_step(self, **fields: object) -> Reply:
        """Close a step for a raw caller: run, step."""
        return await self._raw("end_step", fields)

    async def finish(self, **fields: object) -> Reply:
        """Let a raw caller leave: run."""
        return await self._raw("finish", fields)

    async def _raw(
        self, kind: str, fields: JsonObject, payload: Mapping[str, object] | None = None
    ) -> Reply:
        # The task's id is the same on every retry that Ray makes.
        delivery = str(ray.get_runtime_context().get_task_id())
        while True:
            try:
                return await self._ready().raw_calls.record(kind, delivery, fields, payload)
            except NotReady:  # noqa: PERF203
                # A raw caller has no queue of its own: it waits here.
                await asyncio.sleep(_FIRST_PAUSE)

    # --- calls of ranks and relays: while nothing can be written, the answer says `not_ready` ---
    async def record_events(self, **arguments: Any) -> Reply:
        """See `Coordinator.record_events`."""
        try:
            return {**await self._ready().record_events(**arguments)}
        except NotReady as error:
            return self._not_ready(error)

    async def poll(self, **arguments: Any) -> Reply:
        """See `Coordinator.poll`."""
        try:
            return {**await self._ready().poll(**arguments)}
        except NotReady as error:
            return self._not_ready(error)

    async def record_together(self, **arguments: Any) -> Reply:
        """See `Coordinator.record_together`."""
        try:
            return {**await self._ready().record_together(**arguments)}
        except NotReady as error:
            return self._not_ready(error)

    async def poll_together(self, **arguments: Any) -> Reply:
        """See `Coordinator.poll_together`."""
        try:
            return {**await self._ready().poll_together(**arguments)}
        except NotReady as error:
            return self._not_ready(error)

    # --- commands; `Coordinator` checks their arguments ----------------------------------------
    async def plan(self, **arguments: Any) -> Reply:
        """See `Coordinator.plan`."""
        return {**await self._ready().plan(**arguments)}

    async def add_capture(self, **arguments: Any) -> Reply:
        """See `Coordinator.add_capture`."""
        return {**await self._ready().add_capture(**arguments)}

    async def remove_capture(self, **arguments: Any) -> Reply:
        """See `Coordinator.remove_capture`."""
        return {**await self._ready().remove_capture(**arguments)}

    async def set_triggers(self, **arguments: Any) -> Reply:
        """See `Coordinator.set_triggers`."""
        return {**await self._ready().set_triggers(**arguments)}

    async def test_webhook(self, **arguments: Any) -> Reply:
        """See `Coordinator.test_webhook`."""
        return {**await self._ready().test_webhook(**arguments)}

    async def pin(self, **arguments: Any) -> Reply:
        """See `Coordinator.pin`."""
        return {**await self._ready().pin(**arguments)}

    async def unpin(self, **arguments: Any) -> Reply:
        """See `Coordinator.unpin`."""
        return {**await self._ready().unpin(**arguments)}

    async def change_run(self, **arguments: Any) -> Reply:
        """See `Coordinator.change_run`."""
        return {**await self._ready().change_run(**arguments)}

    async def delete_run(self, **arguments: Any) -> Reply:
        """See `Coordinator.delete_run`."""
        return {**await self._ready().delete_run(**arguments)}

    async def add_engine(self, **arguments: Any) -> Reply:
        """See `Coordinator.add_engine`."""
        return {**await self._ready().add_engine(**arguments)}

    async def remove_engine(self, **arguments: Any) -> Reply:
        """See `Coordinator.remove_engine`."""
        return {**await self._ready().remove_engine(**arguments)}

    async def ask_stacks(self, **arguments: Any) -> Reply:
        """See `Coordinator.ask_stacks`."""
        return {**await self._ready().ask_stacks(**arguments)}

    async def drain(self, **arguments: Any) -> Reply:
        """See `Coordinator.drain`."""
        return {**await self._ready().drain(**arguments)}

    async def note_bundle(self, **arguments: Any) -> Reply:
        """See `Coordinator.note_bundle`."""
        return {**await self._ready().note_bundle(**arguments)}

    # --- service ----------------------------------------------------------------------------
    async def status(self) -> Reply:
        """Return how the coordinator is; `not_ready` is the reason why it cannot serve.

        `problem` is the reason without details that not every user may see, such as paths.
        """
        own = {"coordinator": self._name, "pid": os.getpid(), "started": self._started}
        try:
            return {**own, **await self._ready().status()}
        except NotReady as error:
            problem = self._problem if self._coordinator is None else _UNWRITABLE
            return {**own, "wall": time.time(), "not_ready": str(error), "problem": problem}

    async def stop(self) -> None:
        """Write what is queued and close the catalogue; calls that follow are not ready."""
        self._problem = self._reason = "the service is stopping"
        if self._task is not None:
            self._task.cancel()
        if self._control is not None:
            self._control.close()
        self._coordinator = None
        await self._close_store(_CLOSE_SECONDS)

    def _ready(self) -> Coordinator:
        if self._task is None:
            self._task = self._tasks.start(self._run())
        if self._coordinator is None:
            raise NotReady(self._reason, advice="the same call may be made again")
        return self._coordinator

    def _not_ready(self, error: NotReady) -> Reply:
        if self._coordinator is not None:
            return self._coordinator.not_ready(error)
        return {"coordinator": self._name, "not_ready": str(error)}

    async def _run(self) -> None:
        """Open the catalogue, with as many tries as it takes, then check leases."""
        from stagescope_service.coordinator.load import Memory

        coordinator = self._coordinator = await self._opened()
        pause = coordinator.check_seconds
        memory = Memory()
        while True:
            await asyncio.sleep(pause)
            try:
                memory.check(time.monotonic())
                await coordinator.check()
            except Exception:
                logger.exception("leases could not be checked")

    async def _serve_control(self, settings: Settings) -> None:
        """Let commands overtake the calls of the ranks, if a socket can be made."""
        methods = {name: getattr(self, name) for name in (*COMMANDS, "status")}
        try:
            await asyncio.to_thread(_make_directory, settings.home)
            self._control = await control_socket.serve(settings.home, methods)
        except OSError as error:
            logger.warning("commands wait behind the calls of ranks: %s", error)

    async def _opened(self) -> Coordinator:
        """Return the coordinator. No error ends the tries: what caused it may go away."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._open()
            except Exception as error:
                self._note_failure(error)
            await self._close_store(0.0)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    async def _open(self) -> Coordinator:
        from stagescope_service.coordinator.coordinator import Coordinator
        from stagescope_service.ingest.actor import RayIngestors
        from stagescope_service.settings import Settings
        from stagescope_service.store.sql import SqlStore

        settings = Settings(**self._settings_json)
        if self._control is None:
            await self._serve_control(settings)
        await asyncio.to_thread(_make_directory, settings.data_path)
        store = self._store = SqlStore(settings.catalogue_url)
        await asyncio.to_thread(store.open)
        ingestors = RayIngestors(settings, self._name)
        return await Coordinator.open(settings, store, ingestors, name=self._name)

    def _note_failure(self, error: Exception) -> None:
        from stagescope_service.core.findings import describe

        reason = f"the catalogue cannot be opened: {describe(error)}"
        if reason != self._reason:  # else every try would log the same
            is_known = isinstance(error, StagescopeError | OSError)
            logger.warning("%s", reason, exc_info=None if is_known else error)
        cause = error.__cause__ or error
        kind = type(getattr(cause, "orig", None) or cause).__name__  # the driver's own error
        self._reason, self._problem = reason, f"the catalogue cannot be opened ({kind})"

    async def _close_store(self, timeout: float) -> None:
        if self._store is not None:
            try:
                await asyncio.to_thread(self._store.close, timeout)
            except Exception:
                logger.exception("the catalogue was not closed")


def _make_directory(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
