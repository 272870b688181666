"""The two ways to the service: Ray actor calls, or HTTP where the process's Ray has no service.

Every call answers at once with a `concurrent.futures.Future`; nothing here waits for the service,
except `drain`. ray is looked up only where the process imported it itself, and asked only once
it is initialised: `ray.get_actor` in a process without Ray would start a cluster.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, NamedTuple, Protocol

from stagescope import discovery
from stagescope.wire.errors import StagescopeError, Unreachable
from stagescope_workers.transport.calls import in_thread
from stagescope_workers.transport.http_link import HttpLink

COORDINATOR: Final = "DebugCoordinator"
API: Final = "ApiServer"
NAMESPACE: Final = "stagescope"
_JOIN_SECONDS: Final = 5.0
_READ_SECONDS: Final = 30.0

_log = logging.getLogger("stagescope.workers")
_forked_from_ray = False
_warned_in: set[int] = set()
"""Processes (a fork has its parent's memory) that were told that nothing is reported."""


class Link(Protocol):
    """What the courier needs of a way to the service."""

    @property
    def address(self) -> str:
        """Where it leads to, in words."""
        ...

    def pack(self, payload: dict[str, Any]) -> object:
        """Return `payload` in the form in which `record` sends it."""
        ...

    def record(
        self, sender: tuple[Any, ...], events: list[tuple[Any, ...]], payloads: dict[int, object]
    ) -> Future[dict[str, Any]]:
        """Send a batch; the answer comes after its commit."""
        ...

    def poll(
        self, sender: tuple[Any, ...], revision: int, unreceipted: list[int], wait: float
    ) -> Future[dict[str, Any]]:
        """Ask for the plan and receipts, and renew the lease."""
        ...

    def metrics(self, run: str, attempt_key: str | None, step: int) -> Future[dict[str, Any]]:
        """Ask what `GET /steps/{step}/metrics` answers; the coordinator is not asked.

        The future fails with NotFound while nothing of the step was measured, and with another
        error where the API is dead, restarting or silent.
        """
        ...

    def moved(self) -> bool:
        """Say whether this link leads nowhere now and another one must be made."""
        ...

    def drain(
        self, run: str | None, timeout: float, attempt_key: str | None = None
    ) -> Mapping[str, Any]:
        """Wait, `timeout` seconds at most, for the receipts of a whole run.

        With an attempt key that start of the training is over: its processes take leave first.
        """
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class RayPlace(NamedTuple):
    """Where this process stands in a Ray cluster."""

    attempt_key: str
    node_id: str
    is_driver: bool
    """With this process its job ends, and every actor of it that is not detached."""


def _ray() -> Any:
    """Return ray if this process has imported and initialised it, else None."""
    ray = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)
    if is_initialized is None or _forked_from_ray:
        return None
    return ray if is_initialized() else None


def _note_fork() -> None:
    # A forked child inherits "initialised" but none of the threads that would carry its calls.
    global _forked_from_ray
    _forked_from_ray = _forked_from_ray or _ray() is not None


os.register_at_fork(after_in_child=_note_fork)


def ray_place() -> RayPlace | None:
    """Return the attempt key and node id that Ray gives this process; None without Ray.

    The key is the session (one start of a cluster) and the job: job ids begin at 01000000 again
    on every new cluster.
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
    return RayPlace(f"{session}-{context.get_job_id()}", str(context.get_node_id()), is_driver)


def ray_entrypoint() -> str | None:
    """Return the command line of the driver of this process's Ray job; None where nothing tells.

    A worker's own command line is Ray's; the driver's stands in the cluster's table of jobs. Asks
    the cluster: never to be called by the training thread.
    """
    ray = _ray()
    if ray is None:
        return None
    with contextlib.suppress(Exception):  # no public call without Ray's dashboard
        job = ray.get_runtime_context().get_job_id()
        table = ray._private.state.jobs()
        return next((each["Entrypoint"] or None for each in table if each["JobID"] == job), None)
    return None


class RayLink:
    """Calls to the detached coordinator of the cluster that this process has joined."""

    def __init__(self, ray: Any, handle: Any, namespace: str) -> None:
        self._ray = ray
        self._handle = handle
        self._namespace = namespace
        self._answers: dict[Future[dict[str, Any]], Any] = {}
        self.address = f"the Ray cluster at {_cluster_address(ray)}"

    @classmethod
    def find(cls, namespace: str = NAMESPACE) -> RayLink | None:
        """Return a link, or None while Ray is not initialised or no coordinator has the name."""
        ray = _ray()
        if ray is None:
            return None
        try:
            handle = ray.get_actor(COORDINATOR, namespace=namespace)
        except ValueError:
            return None
        return cls(ray, handle, namespace)

    def pack(self, payload: dict[str, Any]) -> object:
        """Put `payload` into the object store, where an Ingestor of the same node reads it."""
        return self._ray.put(payload)

    def record(
        self, sender: tuple[Any, ...], events: list[tuple[Any, ...]], payloads: dict[int, object]
    ) -> Future[dict[str, Any]]:
        """Send a batch; refs inside `payloads` are passed on, not read, by the coordinator."""
        call = self._handle.record_events.remote
        return self._future(call(sender=sender, events=events, payloads=payloads or None))

    def poll(
        self, sender: tuple[Any, ...], revision: int, unreceipted: list[int], wait: float
    ) -> Future[dict[str, Any]]:
        """Ask for the plan and receipts, and renew the lease."""
        call = self._handle.poll.remote
        return self._future(
            call(sender=sender, revision=revision, unreceipted=unreceipted, wait=wait)
        )

    def metrics(self, run: str, attempt_key: str | None, step: int) -> Future[dict[str, Any]]:
        """Ask the API's actor: its address may be one of the head node alone."""
        return in_thread(lambda: self._metrics(run, attempt_key, step))

    def _metrics(self, run: str, attempt_key: str | None, step: int) -> dict[str, Any]:
        try:
            api = self._ray.get_actor(API, namespace=self._namespace)
        except ValueError as error:
            raise Unreachable("no API runs on this Ray cluster") from error
        # Ray would hold a call to an actor that restarts: a question is asked again, not kept.
        ask = api.step_metrics.options(max_task_retries=0)
        ref = ask.remote(run=run, attempt_key=attempt_key, step=step)
        try:
            answer: dict[str, Any] = json.loads(ref.future().result(_READ_SECONDS))
        except FutureTimeout as error:
            raise Unreachable(f"the API did not answer within {_READ_SECONDS:.0f} s") from error
        return answer

    def moved(self) -> bool:
        """Say whether the name is free, or belongs to another actor than the one called so far."""
        try:
            handle = self._ray.get_actor(COORDINATOR, namespace=self._namespace)
        except Exception:
            return True
        return bool(handle._actor_id != self._handle._actor_id)

    def drain(
        self, run: str | None, timeout: float, attempt_key: str | None = None
    ) -> Mapping[str, Any]:
        """Wait, `timeout` seconds at most, for the receipts of a whole run; see `Link`."""
        ref = self._handle.drain.remote(run=run, timeout=timeout, attempt_key=attempt_key)
        answer: Mapping[str, Any] = self._ray.get(ref, timeout=timeout + 1.0)
        return answer

    def close(self) -> None:
        """Nothing to let go of: the actor is detached."""

    def _future(self, ref: Any) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = ref.future()
        # The ref must live as long as its future, or Ray forgets the answer.
        self._answers[future] = ref
        future.add_done_callback(self._answers.pop)
        return future


def find_link(
    url: str | None, token: str | None, namespace: str, *, waited: float = math.inf
) -> Link | None:
    """Return the way to the service that is open now, or None.

    A `url` that the caller names is the only way. Else the order is: the coordinator of the Ray
    cluster that this process has joined, STAGESCOPE_URL, service.json; the last two as
    `stagescope.attach` reads them. A process that imported ray is given some seconds (of `waited`)
    to join a cluster.

    Raises:
        InvalidInput: a URL that is none.
    """
    link = None if url is not None else RayLink.find(namespace)
    if link is not None:
        return link
    may_join = "ray" in sys.modules and url is None
    if may_join and waited < _JOIN_SECONDS:
        return None
    try:
        place = discovery.find(url, token)
    except Unreachable:
        return None
    return HttpLink(place.url, place.operate_token, found=place.found)


def looked_for(url: str | None, namespace: str) -> str:
    """Return in words where `find_link` looks for the service, and what is there."""
    try:
        place = discovery.find(url)
        known = f"{place.url}, from {place.found}"
    except StagescopeError as error:
        known = error.wrong
    if url is not None:
        return known
    ray = _ray()
    where = "this process has not joined Ray" if ray is None else f"at {_cluster_address(ray)}"
    return f"the actor {COORDINATOR} in namespace {namespace} of its Ray cluster ({where}); {known}"


def warn_unconnected(who: str, url: str | None, namespace: str, problem: str = "") -> None:
    """Log, once in a process, that nothing is reported, what was looked for and what to set.

    Args:
        who: could not report.
        url, namespace: as for `find_link`.
        problem: what the last call failed with, where there was a way to a service.
    """
    if os.getpid() in _warned_in:
        return
    _warned_in.add(os.getpid())
    _log.warning(
        "%s: nothing is reported, for no service has answered; looked for: %s%s. Set "
        "STAGESCOPE_URL and STAGESCOPE_TOKEN_FILE, or join the service's Ray cluster (`stagescope "
        "serve` prints how). The search goes on until the process ends",
        who,
        looked_for(url, namespace),
        f" ({problem})" if problem else "",
    )


def _cluster_address(ray: Any) -> str:
    try:
        return str(ray.get_runtime_context().gcs_address)
    except Exception:
        return "an unknown address"
