"""The API's actor: uvicorn in a thread, and the coordinator's methods for its routes.

Every process that looks up the actor imports this file, the trainer's too. So the service and its
libraries are imported only where the actor itself runs.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict, cast

import ray
from ray import exceptions

from stagescope_service.coordinator import control_socket
from stagescope_service.coordinator.actor import COMMANDS
from stagescope_wire.discovery import COORDINATOR_NAME, NAMESPACE
from stagescope_wire.errors import NotReady, StagescopeError, Unreachable
from stagescope_wire.nonfinite import JsonObject

if TYPE_CHECKING:
    from pathlib import Path

    from stagescope_service.http.access_tokens import AccessTokens
    from stagescope_service.http.server import ApiServer
    from stagescope_service.ingest.actor import Ingestors
    from stagescope_service.settings import Settings
    from stagescope_service.store.queries.runs import DiedAttempt
    from stagescope_service.views.reading.dependencies import Commands, Dependencies, Reply
    from stagescope_wire.framing import WirePayload

logger = logging.getLogger(__name__)

_CALL_SECONDS: Final = 15.0
_IDEMPOTENT: Final = frozenset({"plan", "poll", "status", "drain", "record_events"})
"""Methods that may be called again whatever the result of the first call."""
_BY_RAY: Final = frozenset({"record_events", "poll"})
"""Methods that take object refs, or that have a call pending for every rank."""
_MAY_BE_DONE: Final = (
    "the service may have carried out the call, or may still do so. Look at the current state "
    "before you repeat the call"
)


class ApiLocation(TypedDict):
    """Where the API serves."""

    url: str | None
    """None while it does not serve."""
    problem: str
    """Why it does not serve."""
    pid: int
    host: str
    started: float
    """Unix seconds."""
    home: str


class CoordinatorCommands:
    """`Commands` of the live coordinator, by its control socket or by Ray."""

    def __init__(self, settings: Settings) -> None:
        self._handle: object = None  # actor handles are untyped in ray
        self._settings = settings
        self._ingestors: Ingestors | None = None
        self._finding_ingestor = threading.Lock()

    async def record_events(
        self,
        *,
        sender: Sequence[object],
        events: Sequence[Sequence[object]],
        payloads: Mapping[int, WirePayload] | None = None,
    ) -> Reply:
        """Send a batch; its payloads go through this node's object store."""
        refs = await asyncio.to_thread(_put, payloads) if payloads else {}
        return await self._call("record_events", sender=sender, events=events, payloads=refs)

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        """Return a part of a file from the ingestor of its node."""
        try:
            ingestor = self._ingestor_of(node_id)
            if ingestor is None:
                raise Unreachable(
                    f"node {node_id} is gone, and with it {path}",
                    advice="a data_dir that all nodes share outlives its nodes",
                )
            ref = ingestor.read_artifact.remote(path, offset, size)
            content: bytes = ray.get(ref, timeout=_CALL_SECONDS)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, StagescopeError):
                raise error.cause from None
            raise
        except exceptions.RayError as error:
            if self._ingestors is not None:
                self._ingestors.forget(node_id)
            raise Unreachable(
                f"node {node_id} does not answer: {type(error).__name__}",
                advice="the same call may be made again",
            ) from error
        return content

    def _ingestor_of(self, node_id: str) -> Any | None:
        """Return the handle of a node's ingestor; None if the node is not alive.

        A file is read in many parts: the list of nodes and the handles are kept between them.
        """
        from stagescope_service.ingest.actor import Ingestors

        with self._finding_ingestor:  # a list that another thread is reading is empty
            if self._ingestors is None:
                self._ingestors = Ingestors(self._settings)
            return self._ingestors.handle_of(node_id)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[object, object, Reply]]:
        """Return a call of a method of `Coordinator`; `Commands` has their signatures."""
        if name not in (*COMMANDS, "poll", "status"):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    async def _call(self, method: str, *, wait: float | None = None, **arguments: object) -> Reply:
        """Call a method of the coordinator, by its socket where possible: Ray queues calls.

        Args:
            method: its name.
            wait: seconds that the method itself may wait, where it has such an argument.
            arguments: the others.

        Raises:
            NotReady: it cannot be reached, or did not answer an idempotent call in time.
            Unreachable: it did not answer another call in time, and may have carried it out.
            StagescopeError: the method's own error.
        """
        seconds = _CALL_SECONDS + (wait or 0.0)
        if wait is not None:
            arguments["wait"] = wait
        try:
            return await asyncio.wait_for(self._send(method, arguments), seconds)
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
            if method in _IDEMPOTENT:
                raise NotReady(wrong, advice="the same call may be made again") from error
            raise Unreachable(wrong, advice=_MAY_BE_DONE) from error

    async def _send(self, method: str, arguments: Mapping[str, object]) -> Reply:
        if method not in _BY_RAY:
            try:
                return await control_socket.call(self._settings.home, method, arguments)
            except control_socket.Broken as error:
                if error.was_sent and method not in _IDEMPOTENT:
                    raise Unreachable(
                        f"the coordinator ended before it answered {method}", advice=_MAY_BE_DONE
                    ) from error
        if self._handle is None:
            self._handle = await asyncio.to_thread(
                ray.get_actor, COORDINATOR_NAME, namespace=NAMESPACE
            )
        ref = getattr(self._handle, method).remote(**arguments)
        answer: Reply = await asyncio.wrap_future(ref.future())
        return answer


def _put(payloads: Mapping[int, WirePayload]) -> dict[int, object]:
    """Store payloads in this node's object store: a copy, not for the event loop."""
    return {seq: ray.put(payload) for seq, payload in payloads.items()}


class ApiActor:
    """The API's actor: serves HTTP in a thread, reads the catalogue, calls the coordinator."""

    def __init__(self, settings: JsonObject) -> None:  # JSON of `Settings`
        from stagescope_service.settings import Settings

        self._settings = Settings(**settings)
        self._server: ApiServer | None = None
        self._problem = "the API is starting"
        self._started = time.time()
        self._stopping = threading.Event()
        self._keeping: threading.Thread | None = None
        # Whatever may fail runs in the thread: an error in a restarted constructor ends the actor.
        threading.Thread(target=self._keep_serving, name="api-starter", daemon=True).start()

    def _keep_serving(self) -> None:
        while not self._stopping.is_set():
            server = self._server
            if server is None or not server.running:
                gc.disable()  # nothing of what is imported and built is garbage: see `prepare`
                try:
                    self._server = self._serve()
                    self._problem = ""
                    self._prepare(self._server)
                except (StagescopeError, OSError) as error:
                    self._problem = str(error)
                except Exception as error:  # whatever it is, the next try may succeed
                    problem = f"{type(error).__name__}: {error}"
                    if problem != self._problem:
                        logger.exception("the API cannot be started; it is tried again")
                    self._problem = problem
                finally:
                    gc.enable()
            self._stopping.wait(0.5)

    def _serve(self) -> ApiServer:
        from stagescope_service import service_file
        from stagescope_service.http.access_tokens import AccessTokens
        from stagescope_service.http.app import make_app
        from stagescope_service.http.server import ApiServer, raise_file_limit
        from stagescope_service.store.catalogue import Catalogue

        settings = self._settings
        settings.data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        raise_file_limit()
        tokens = AccessTokens.load(settings) if settings.auth else None
        app = make_app(
            catalogue=Catalogue(settings.catalogue_url),
            commands=cast("Commands", CoordinatorCommands(settings)),
            settings=settings,
            tokens=tokens,
        )
        # The port stays the same after a restart, so that notebooks and URLs remain valid.
        port = service_file.last_port(settings) or settings.port
        server = ApiServer(
            app, host=settings.host, port=port, header_seconds=settings.header_seconds
        )
        server.start(wait_for_port=5.0)
        self._keep_bundles(app.state.deps, tokens)
        location = {"url": server.url, "pid": os.getpid(), "host": socket.gethostname()}
        service_file.change(settings, location)
        return server

    @staticmethod
    def _prepare(server: ApiServer) -> None:
        from stagescope_service.http.app import prepare

        prepare(server.app)

    def _keep_bundles(self, deps: Dependencies, tokens: AccessTokens | None) -> None:
        """Make bundles of attempts that die, in a thread that nothing waits for.

        A server that is restarted continues with the existing thread.
        """
        from stagescope_service.report.bundle.keeper import BundleKeeper

        if self._keeping is not None:
            return

        def note(attempt: DiedAttempt, step: int | None, message: str, path: Path | None) -> None:
            asyncio.run(
                deps.commands.note_bundle(
                    run=attempt["run"], attempt_id=attempt["attempt_id"], step=step,
                    message=message, path=None if path is None else str(path),
                )
            )  # fmt: skip

        secrets = () if tokens is None else (tokens.read, tokens.operate)
        keeper = BundleKeeper(deps, note, secrets)
        self._keeping = threading.Thread(
            target=keeper.run, args=(self._stopping,), name="api-bundles", daemon=True
        )
        self._keeping.start()

    def where(self) -> ApiLocation:
        """Return where the API serves."""
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
        """Return the answer of `GET /steps/{step}/metrics`, for processes of the cluster.

        The API's address is loopback by default: a trainer on another node cannot reach it. Runs
        in a thread of the actor, beside those of the HTTP server.

        Raises:
            NotReady: the API does not serve (yet).
            NotFound: no such run, attempt or step, or nothing was measured of it (yet).
        """
        from stagescope_service.views.encoding import encode
        from stagescope_service.views.steps import numbers

        server = self._server
        if server is None or not server.running:
            raise NotReady(
                f"the API does not serve: {self._problem or 'it is restarting'}",
                advice="the same call may be made again",
            )
        deps: Dependencies = server.app.state.deps
        target = deps.finder.step(run, None, step, key=attempt_key)
        return encode(numbers.metrics_of(deps, target))

    def stop(self) -> None:
        """Stop serving and release the port."""
        self._stopping.set()
        if self._server is not None:
            self._server.stop()
            self._server.app.state.deps.judgements.close()
