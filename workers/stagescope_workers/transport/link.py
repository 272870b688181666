"""Links to the service: Ray actor calls, HTTP where the process's Ray has no service, or a spool.

Every call returns at once with a `concurrent.futures.Future`; only `drain` waits for the service.
Ray is used only if the process imported it itself. It is called only once it is initialised:
`ray.get_actor` in a process without Ray would start a cluster.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, NamedTuple

from stagescope_wire import discovery, spool
from stagescope_wire.discovery import API_NAME, COORDINATOR_NAME, NAMESPACE
from stagescope_wire.errors import StagescopeError, Unreachable
from stagescope_wire.framing import WirePayload
from stagescope_wire.nonfinite import JsonObject
from stagescope_workers.transport.calls import Payloads, Reply, ServiceLink, Wire, in_thread
from stagescope_workers.transport.http_link import HttpLink
from stagescope_workers.transport.spool_link import SpoolLink

_JOIN_SECONDS: Final = 5.0
_READ_SECONDS: Final = 30.0
_DIRECT_SECONDS: Final = 30.0
"""How long the coordinator is called directly after a relay failed."""
_NO_RELAY_SECONDS: Final = 2.0
_RELAY_SECONDS: Final = 1.0
"""Seconds in which a relay that has not answered a call must confirm that it is alive."""

_GUARDS: Final = "_guards_stagescope"
_SHUTDOWN_SECONDS: Final = 5.0
"""How long `ray.shutdown` waits for a call that the probe makes."""

_log = logging.getLogger("stagescope.workers")
_forked_from_ray = False
before_shutdown: Final[list[Callable[[], None]]] = []
"""Called before this process leaves its Ray cluster by `ray.shutdown`; none of them raises."""
_ray_calls = threading.RLock()
"""Held by each call of the probe into Ray, and by `ray.shutdown`."""
_warned_in: set[int] = set()
"""Process ids that have logged that nothing is reported (a fork has its parent's memory)."""


class RayProcess(NamedTuple):
    """The ids of this process in a Ray cluster."""

    attempt_key: str
    node_id: str
    is_driver: bool
    """When a driver ends, its job and every actor that is not detached end, too."""


def _ray() -> ModuleType | None:
    """Return ray if this process has imported and initialised it, else None."""
    ray = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)
    if is_initialized is None or _forked_from_ray:
        return None
    return ray if is_initialized() else None


def _note_fork() -> None:
    # A forked child inherits the state "initialised", but none of Ray's threads.
    global _forked_from_ray, _ray_calls
    _forked_from_ray = _forked_from_ray or _ray() is not None
    _ray_calls = threading.RLock()  # another thread of the parent may have held it


@contextlib.contextmanager
def _calling(ray: ModuleType) -> Iterator[None]:
    """Call Ray only while this process is in a cluster, and delay `ray.shutdown` meanwhile.

    Otherwise Ray would start another cluster for the call, or end this process during it.

    Raises:
        Unreachable: this process has left the cluster.
    """
    with _ray_calls:
        if not ray.is_initialized():
            raise Unreachable("this process has left the service's Ray cluster")
        yield


def guard_shutdown() -> None:
    """Let `ray.shutdown` wait for the probe's calls, if this process has imported ray."""
    ray: Any = sys.modules.get("ray")
    shutdown = getattr(ray, "shutdown", None)
    if shutdown is None or hasattr(shutdown, _GUARDS):
        return

    @functools.wraps(shutdown)
    def guarded(*arguments: Any, **named: Any) -> Any:
        for call in before_shutdown:
            call()
        lock = _ray_calls
        is_held = lock.acquire(timeout=_SHUTDOWN_SECONDS)
        try:
            return shutdown(*arguments, **named)
        finally:
            if is_held:
                lock.release()

    setattr(guarded, _GUARDS, True)
    ray.shutdown = guarded


os.register_at_fork(after_in_child=_note_fork)


def ray_process() -> RayProcess | None:
    """Return the ids that Ray gives this process; None without Ray.

    The attempt key is the session (one start of a cluster) and the job: job ids begin at 01000000
    again on every new cluster.
    """
    ray = _ray()
    if ray is None:
        return None
    context = ray.get_runtime_context()
    try:
        session = context.get_session_name()
    except AttributeError:  # Ray before 2.5x
        session = ray._private.worker.global_worker.node.session_name
    is_driver = context.worker.mode == ray.SCRIPT_MODE
    return RayProcess(f"{session}-{context.get_job_id()}", str(context.get_node_id()), is_driver)


def ray_entrypoint() -> str | None:
    """Return the command line of the driver of this process's Ray job; None where unknown.

    A worker's own command line is Ray's; the driver's is in the cluster's table of jobs. This calls
    the cluster: not for the training thread.
    """

    def read(ray: Any) -> str | None:
        job = ray.get_runtime_context().get_job_id()
        table = ray._private.state.jobs()  # no public call without the dashboard
        return next((each["Entrypoint"] or None for each in table if each["JobID"] == job), None)

    return _read_from_ray(read)


def ray_directory() -> str | None:
    """Return the directory of the driver of this process's Ray job; None where unknown.

    A worker's own directory is the one in which its node was started.
    """

    def read(ray: Any) -> str | None:
        worker = ray._private.worker.global_worker  # no public call
        paths = worker.core_worker.get_job_config().py_driver_sys_path
        # Ray appends the driver's directory last. A job with its own working_dir has none: its
        # workers run in that.
        return str(paths[-1]) if paths else None

    return _read_from_ray(read)


def _read_from_ray(read: Callable[[Any], str | None]) -> str | None:
    ray = _ray()
    if ray is not None:
        with contextlib.suppress(Exception), _calling(ray):
            return read(ray)
    return None


class RayLink(ServiceLink):
    """Calls to the detached coordinator of the cluster that this process has joined.

    A service with many ranks requests that they call through the relay of their node, whose methods
    are the coordinator's. After any error, or if the relay is silent, they call directly again for
    a while.
    """

    _relays_after: ClassVar[float] = -math.inf
    """No relay is called before; monotonic clock, seconds. It is shared by all links of the
    process, since another link follows one that fails."""

    def __init__(self, ray: ModuleType, handle: Any, namespace: str) -> None:
        self._ray = ray
        self._handle = handle
        self._namespace = namespace
        self._relay: Any = None
        self._is_relay_requested = False
        self._answers: dict[Future[Reply], object] = {}
        self._address = f"the Ray cluster at {_cluster_address(ray)}"

    @property
    def address(self) -> str:
        """A description of the address."""
        through = "" if self._relay is None else ", through the relay of this node"
        return self._address + through

    @property
    def is_open(self) -> bool:
        """Whether this process is in its cluster; if not, a call would start another cluster."""
        return bool(self._ray.is_initialized())

    @classmethod
    def find(cls, namespace: str = NAMESPACE) -> RayLink | None:
        """Return a link, or None while Ray is not initialised or no coordinator has the name."""
        ray = _ray()
        if ray is None:
            return None
        guard_shutdown()
        try:
            with _calling(ray):
                handle = ray.get_actor(COORDINATOR_NAME, namespace=namespace)
                return cls(ray, handle, namespace)
        except (ValueError, Unreachable):
            return None

    def pack(self, payload: WirePayload) -> object:
        """Put `payload` into the object store, where an Ingestor of the same node reads it."""
        with _calling(self._ray):
            return self._ray.put(payload)

    def record(self, sender: Wire, events: list[Wire], payloads: Payloads) -> Future[Reply]:
        """Send a batch; refs inside `payloads` are passed on, not read, by the coordinator."""
        return self._call("record_events", sender=sender, events=events, payloads=payloads or None)

    def poll(
        self, sender: Wire, revision: int, unreceipted: list[int], wait: float
    ) -> Future[Reply]:
        """Request the plan and receipts, and renew the lease."""
        return self._call(
            "poll", sender=sender, revision=revision, unreceipted=unreceipted, wait=wait
        )

    def _call(self, method: str, **arguments: object) -> Future[Reply]:
        with _calling(self._ray):
            relay = self._find_relay()
            actor = self._handle if relay is None else relay
            ref = getattr(actor, method).remote(**arguments)
            future: Future[Reply] = ref.future()
        # The ref must live as long as its future, or Ray discards the answer.
        self._answers[future] = ref
        future.add_done_callback(self._done)
        return future

    def _done(self, future: Future[Reply]) -> None:
        """Take note of an answer; in a thread of Ray's."""
        self._answers.pop(future)
        if future.cancelled() or future.exception() is not None:
            self._leave_relay()
        elif "not_ready" not in (answer := future.result()):
            self._is_relay_requested = answer.get("relay") is True

    def _find_relay(self) -> Any:
        """Return the relay for the next call; None for the coordinator itself."""
        if not self._is_relay_requested or time.monotonic() < RayLink._relays_after:
            self._relay = None
            return None
        relay = self._relay
        if relay is None:
            name = discovery.relay_name(self._ray.get_runtime_context().get_node_id())
            try:
                relay = self._ray.get_actor(name, namespace=self._namespace)
            except Exception:  # it is being started, or cannot be looked up now
                RayLink._relays_after = time.monotonic() + _NO_RELAY_SECONDS
            self._relay = relay
        return relay

    def _leave_relay(self) -> None:
        self._relay = None
        RayLink._relays_after = time.monotonic() + _DIRECT_SECONDS

    def is_silent(self) -> bool:
        """Return whether the relay in use does not answer; waits a second for it, then leaves it.

        If the coordinator is silent, the service is silent: no other way leads to it.
        """
        relay = self._relay
        if relay is None:
            return False
        try:
            with _calling(self._ray):
                self._ray.get(relay.pid.remote(), timeout=_RELAY_SECONDS)
        except Exception:
            self._leave_relay()
            return True
        return False

    def metrics(self, run: str, attempt_key: str | None, step: int) -> Future[Reply]:
        """Request metrics from the API's actor: its HTTP address may be local to the head node."""
        return in_thread(lambda: self._metrics(run, attempt_key, step))

    def _metrics(self, run: str, attempt_key: str | None, step: int) -> Reply:
        with _calling(self._ray):
            try:
                api = self._ray.get_actor(API_NAME, namespace=self._namespace)
            except ValueError as error:
                raise Unreachable("no API runs on this Ray cluster") from error
            # Ray would queue a call to an actor that restarts; here the caller retries instead.
            step_metrics = api.step_metrics.options(max_task_retries=0)
            ref = step_metrics.remote(run=run, attempt_key=attempt_key, step=step)
            future: Future[str] = ref.future()
        try:
            answer: Reply = json.loads(future.result(_READ_SECONDS))
        except FutureTimeout as error:
            raise Unreachable(f"the API did not answer within {_READ_SECONDS:.0f} s") from error
        return answer

    def moved(self) -> bool:
        """Return whether the name is free, or belongs to another actor than the one in use."""
        try:
            with _calling(self._ray):
                handle = self._ray.get_actor(COORDINATOR_NAME, namespace=self._namespace)
        except Exception:
            return True
        return bool(handle._actor_id != self._handle._actor_id)

    def drain(
        self,
        run: str | None,
        timeout: float,
        attempt_key: str | None = None,
        *,
        ended_by: JsonObject | None = None,
    ) -> JsonObject:
        """Wait, `timeout` seconds at most, for all receipts of a run; see `ServiceLink`."""
        asked: dict[str, object] = {"run": run, "timeout": timeout, "attempt_key": attempt_key}
        if ended_by is not None:  # a coordinator of an earlier version does not know it
            asked["ended_by"] = ended_by
        with _calling(self._ray):
            ref = self._handle.drain.remote(**asked)
        answer: JsonObject = self._ray.get(ref, timeout=timeout + 1.0)
        return answer

    def close(self) -> None:
        """Do nothing: the actor is detached."""


def find_link(
    url: str | None, token: str | None, namespace: str, *, waited: float = math.inf
) -> ServiceLink | None:
    """Return a link to the service, or None where there is none.

    Where the caller gives a `url`, only that is used. Otherwise the order is: the coordinator of
    the Ray cluster that this process has joined, STAGESCOPE_URL, service.json. The last two are
    read as by `stagescope.attach`; a `file://` URL names a spool. A process that imported ray gets
    some seconds (`waited` so far) to join a cluster.

    Raises:
        InvalidInput: an invalid URL.
    """
    link = None if url is not None else RayLink.find(namespace)
    if link is not None:
        return link
    may_join = "ray" in sys.modules and url is None
    if may_join and waited < _JOIN_SECONDS:
        return None
    if (directory := _spool(url)) is not None:
        return SpoolLink(directory)
    try:
        service = discovery.find(url, token)
    except Unreachable:
        return None
    return HttpLink(service.url, service.operate_token, found=service.found)


def _spool(url: str | None) -> Path | None:
    return spool.directory_of(url or os.environ.get("STAGESCOPE_URL"))


def describe_search(url: str | None, namespace: str) -> str:
    """Return a description of where `find_link` searches, and what it finds there."""
    try:
        if (directory := _spool(url)) is not None:
            return f"the spool {directory}"
        service = discovery.find(url)
        http = f"{service.url}, from {service.found}"
    except StagescopeError as error:
        http = error.wrong
    except Exception as error:  # httpx that cannot be imported: it ends no training
        http = f"{type(error).__name__}: {error}"
    if url is not None:
        return http
    ray = _ray()
    cluster = "this process has not joined Ray" if ray is None else f"at {_cluster_address(ray)}"
    actor = f"the actor {COORDINATOR_NAME} in namespace {namespace}"
    return f"{actor} of its Ray cluster ({cluster}); {http}"


def warn_unconnected(name: str, url: str | None, namespace: str, problem: str = "") -> None:
    """Log, once per process, that nothing is reported, what was tried and what to set.

    Args:
        name: name of the probe or call that could not report.
        url, namespace: as for `find_link`.
        problem: the error of the last call, where there was a link.
    """
    if os.getpid() in _warned_in:
        return
    _warned_in.add(os.getpid())
    _log.warning(
        "%s: nothing is reported, for %s; looked for: %s. Set "
        "STAGESCOPE_URL and STAGESCOPE_TOKEN_FILE, or join the service's Ray cluster (`stagescope "
        "serve` prints how; ray.init with its address needs RAY_AUTH_MODE=token). The search "
        "continues until the process ends",
        name,
        problem or "no service has answered",
        describe_search(url, namespace),
    )


def _cluster_address(ray: ModuleType) -> str:
    try:
        return str(ray.get_runtime_context().gcs_address)
    except Exception:
        return "an unknown address"
