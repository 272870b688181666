"""The API's actor: uvicorn in a thread, and the calls of the coordinator behind its routes."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import exceptions

from stagescope.wire.errors import NotReady, StagescopeError, Unreachable
from stagescope_service import service_file
from stagescope_service.api.auth import Tokens
from stagescope_service.api.server import ApiServer as HttpServer
from stagescope_service.api.server import raise_file_limit
from stagescope_service.coordinator import control_socket
from stagescope_service.coordinator.actor import NAME, NAMESPACE
from stagescope_service.ingest.actor import Ingestors
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue

if TYPE_CHECKING:
    from stagescope_service.api.dependencies import Dependencies

_CALL_SECONDS: Final = 15.0
_QUESTIONS: Final = frozenset({"plan", "poll", "status", "drain", "record_events"})
"""Calls that may be made again whatever became of the first one."""
_BY_RAY: Final = frozenset({"record_events", "poll"})
"""Calls that hand object refs on, or that each rank has one of on the way all the time."""
_MAY_STAND: Final = (
    "it may still carry that out, or have done so: look at what is in force before the same call "
    "is made again"
)

Reply = dict[str, Any]


class CoordinatorCommands:
    """`api.Commands` of the live coordinator, over its socket or by Ray (see `engine.control`)."""

    def __init__(self, settings: Settings) -> None:
        self._handle: Any = None
        self._settings = settings

    async def record_events(
        self,
        *,
        sender: Sequence[Any],
        events: Sequence[Sequence[Any]],
        payloads: Mapping[int, Any] | None = None,
    ) -> Reply:
        """Hand a batch on; its payloads go through this node's object store."""
        refs = {seq: ray.put(payload) for seq, payload in (payloads or {}).items()}
        return await self._call("record_events", sender=sender, events=events, payloads=refs)

    async def poll(
        self, *, sender: Sequence[Any], revision: int, unreceipted: Sequence[int], wait: float
    ) -> Reply:
        """Hand a poll on."""
        return await self._call(
            "poll", sender=sender, revision=revision, unreceipted=unreceipted, wait=wait
        )

    async def plan(self) -> Reply:
        """Return the plan in force."""
        return await self._call("plan")

    async def add_capture(self, *, spec: Mapping[str, Any], by: str, wait: float = 0.0) -> Reply:
        """Order a capture."""
        return await self._call("add_capture", spec=dict(spec), by=by, wait=wait)

    async def remove_capture(self, *, capture_id: str, by: str) -> Reply:
        """Withdraw a capture."""
        return await self._call("remove_capture", capture_id=capture_id, by=by)

    async def set_triggers(self, *, document: Mapping[str, Any], by: str) -> Reply:
        """Put rules in force."""
        return await self._call("set_triggers", document=dict(document), by=by)

    async def pin(self, *, attempt_id: int, step: int, by: str) -> Reply:
        """Let what is held of a step stay."""
        return await self._call("pin", attempt_id=attempt_id, step=step, by=by)

    async def unpin(self, *, attempt_id: int, step: int, by: str) -> Reply:
        """Let the payloads of a step leave the rings."""
        return await self._call("unpin", attempt_id=attempt_id, step=step, by=by)

    async def add_engine(self, *, engine: Mapping[str, Any], by: str) -> Reply:
        """Register an engine."""
        return await self._call("add_engine", engine=dict(engine), by=by)

    async def remove_engine(self, *, name: str, by: str) -> Reply:
        """Take an engine out of the registry."""
        return await self._call("remove_engine", name=name, by=by)

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        """Return a piece of a file from the ingestor of its node."""
        try:
            ingestor = self._ingestors().of(node_id)
            if ingestor is None:
                raise Unreachable(
                    f"node {node_id} is gone, and with it {path}",
                    advice="a data_dir that all nodes share outlives its nodes",
                )
            ref = ingestor.read_artifact.remote(path, offset, size)
            piece: bytes = ray.get(ref, timeout=_CALL_SECONDS)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, StagescopeError):
                raise error.cause from None
            raise
        except exceptions.RayError as error:
            raise Unreachable(
                f"node {node_id} does not answer: {type(error).__name__}",
                advice="the same call may be made again",
            ) from error
        return piece

    def _ingestors(self) -> Ingestors:
        return Ingestors(self._settings)

    async def ask_stacks(
        self,
        *,
        attempt_id: int,
        role: str | None,
        ranks: Sequence[int] | None,
        seconds: float,
        by: str,
    ) -> Reply:
        """Ask processes for their stacks."""
        return await self._call(
            "ask_stacks", attempt_id=attempt_id, role=role, ranks=ranks, seconds=seconds, by=by
        )

    async def status(self) -> Reply:
        """Return how the coordinator is."""
        return await self._call("status")

    async def drain(
        self, *, run: str | None, timeout: float, attempt_key: str | None = None
    ) -> Reply:
        """Wait for the receipts of a run."""
        return await self._call("drain", run=run, timeout=timeout, attempt_key=attempt_key)

    async def _call(self, method: str, **arguments: Any) -> Reply:
        """Call a method of the coordinator, past the calls of the ranks where that is possible.

        Raises:
            NotReady: it cannot be reached, or did not answer a question in time.
            Unreachable: it did not answer an order in time, and may have carried it out.
            StagescopeError: what the method raised.
        """
        seconds = _CALL_SECONDS + float(arguments.get("wait") or 0.0)
        try:
            return await asyncio.wait_for(self._ask(method, arguments), seconds)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, StagescopeError):
                raise error.cause from None
            raise
        except (ValueError, exceptions.RayError) as error:
            self._handle = None
            raise NotReady(
                f"the coordinator cannot be reached: {type(error).__name__}",
                advice="Ray is restarting it; the same call may be made again",
            ) from error
        except asyncio.TimeoutError as error:
            wrong = f"the coordinator did not answer {method} within {seconds:.0f} s"
            if method in _QUESTIONS:
                raise NotReady(wrong, advice="the same call may be made again") from error
            raise Unreachable(wrong, advice=_MAY_STAND) from error

    async def _ask(self, method: str, arguments: Mapping[str, Any]) -> Reply:
        if method not in _BY_RAY:
            try:
                return await control_socket.call(self._settings.home, method, arguments)
            except control_socket.Broken as error:
                if error.asked and method not in _QUESTIONS:
                    raise Unreachable(
                        f"the coordinator ended before it answered {method}", advice=_MAY_STAND
                    ) from error
        if self._handle is None:
            self._handle = await asyncio.to_thread(ray.get_actor, NAME, namespace=NAMESPACE)
        ref = getattr(self._handle, method).remote(**arguments)
        answer: Reply = await asyncio.wrap_future(ref.future())
        return answer


class ApiServer:
    """The API's actor: uvicorn in a thread, reading the catalogue, calling the coordinator."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = Settings(**settings)
        self._server: HttpServer | None = None
        self._problem = "the API is starting"
        self._started = time.time()
        self._stopping = threading.Event()
        # Nothing that can fail may run in a constructor: a restarted one would end the actor.
        threading.Thread(target=self._keep_serving, name="api-starter", daemon=True).start()

    def _keep_serving(self) -> None:
        while not self._stopping.is_set():
            server = self._server
            if server is None or not server.running:
                try:
                    self._server = self._serve()
                    self._problem = ""
                except (StagescopeError, OSError) as error:
                    self._problem = str(error)
            self._stopping.wait(0.5)

    def _serve(self) -> HttpServer:
        # Here alone: whoever starts or stops a service imports this file, and needs no route.
        from stagescope_service.api.app import make_app

        settings = self._settings
        settings.data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        raise_file_limit()
        tokens = Tokens.load(settings) if settings.auth else None
        app = make_app(
            catalogue=Catalogue(settings.catalogue_url),
            commands=CoordinatorCommands(settings),
            settings=settings,
            tokens=tokens,
        )
        # After a restart the port is kept, so that notebooks and URLs go on working.
        port = service_file.last_port(settings) or settings.port
        server = HttpServer(
            app, host=settings.host, port=port, header_seconds=settings.header_seconds
        )
        server.start(wait_for_port=5.0)
        said = {"url": server.url, "pid": os.getpid(), "host": socket.gethostname()}
        service_file.change(settings, said)
        return server

    def where(self) -> dict[str, Any]:
        """Return how the API is; `url` is None while it does not serve, `problem` says why."""
        server = self._server
        url = server.url if server is not None and server.running else None
        return {
            "url": url,
            "problem": self._problem,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "home": str(self._settings.home),
        }

    def step_metrics(self, *, run: str, step: int, attempt_key: str | None = None) -> bytes:
        """Return what `GET /steps/{step}/metrics` answers, for processes of the cluster.

        The API's address is loopback by default: a trainer on another node cannot ask it. Runs in
        a thread of the actor's own, beside those of the HTTP server.

        Raises:
            NotReady: the API does not serve (yet).
            NotFound: no such run, attempt or step, or nothing was measured of it (yet).
        """
        from stagescope_service.api import steps
        from stagescope_service.api.encoding import encode

        server = self._server
        if server is None or not server.running:
            raise NotReady(
                f"the API does not serve: {self._problem or 'it is being started anew'}",
                advice="the same call may be made again",
            )
        deps: Dependencies = server.app.state.deps
        target = deps.finder.step(run, None, step, key=attempt_key)
        return encode(steps.metrics_of(deps, target))

    def stop(self) -> None:
        """Let go of the port."""
        self._stopping.set()
        if self._server is not None:
            self._server.stop()
