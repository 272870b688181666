"""The Ingestor: one detached actor a node; reads payloads where they lie. A thin Ray shell.

It reserves no CPU, computes in one thread of low priority, and holds at most `ingestor_bytes` of
payloads at a time. Its work is keyed by the payload's identity, and thus idempotent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final, TypeAlias

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stagescope_service.background import BackgroundTasks
from stagescope_service.core.findings import describe
from stagescope_service.core.instructions import AnnouncedDump, IngestJob, PayloadJob, PayloadKey
from stagescope_service.ingest.cluster_state import ActorDeath, HeadWatch, NodeList, own_deaths
from stagescope_service.ingest.ingestors import IngestorClient, IngestorDied, IngestWorker
from stagescope_service.ingest.reader import Outcome
from stagescope_service.ingest.recompute import JoinAnswer, Source
from stagescope_service.ingest.relay_actor import start_relays
from stagescope_service.ingest.rollout_join import RolloutRows
from stagescope_service.ingest.work_queue import Superseded, WorkQueue
from stagescope_service.priority import be_nice
from stagescope_service.settings import Settings
from stagescope_service.statistics import warm
from stagescope_service.store.contract import Put
from stagescope_service.store.ring import DEFAULT_RESERVE
from stagescope_wire.discovery import NAMESPACE, ingestor_name
from stagescope_wire.errors import Unreachable

logger = logging.getLogger(__name__)

Caller: TypeAlias = str | None
"""The coordinator that waits for a call's answer; None: another process does."""

_CALLS: Final = 20_000
"""Most pending calls of an ingestor: enough for a new coordinator beside all of a dead one's."""
_WITHOUT_QUEUE: Final = frozenset(
    {"read_watchdogs", "kept_files", "describe_kept", "discard", "count_files", "remove_files"}
)
"""Methods that run in parallel with the reading of payloads."""
_NICE: Final = 10
_RETRY_SECONDS: Final = 2.0
_READ_SECONDS: Final = 120.0
_UNREACHABLE_SECONDS: Final = 60.0
"""How long a payload waits for a node that may be lost; Ray knows after about 15."""
_UNAVAILABLE: Final = (exceptions.ActorUnavailableError, exceptions.ActorUnschedulableError)
"""The errors of a node that does not answer, and of a node that is known to be lost."""
_GONE: Final = (
    exceptions.ObjectLostError,  # OwnerDiedError, ReferenceCountingAssertionError, ...
    exceptions.ObjectFetchTimedOutError,
    exceptions.GetTimeoutError,
    exceptions.RayTaskError,
    exceptions.RayActorError,
)


class Ingestor:
    """Reads the payloads that lie on one node: an `IngestWorker` in an actor."""

    def __init__(
        self,
        node_id: str,
        data_dir: str,
        ring_bytes: int,
        most_bytes: int,
        roots: Sequence[str],
        reserve_bytes: int = DEFAULT_RESERVE,
    ) -> None:
        self._node_id = node_id
        self._worker = IngestWorker(
            node_id,
            Path(data_dir),
            [Path(root) for root in roots],
            ring_bytes=ring_bytes,
            reserve_bytes=reserve_bytes,
            alive=_living_nodes,
        )
        thread = concurrent.futures.ThreadPoolExecutor(
            1, initializer=_start_worker, initargs=(node_id,)
        )
        # The thread starts with its first task: load the kernel now, not in the first step.
        thread.submit(_nothing)
        self._queue = WorkQueue(thread, most_bytes)

    async def serve(self, coordinator: str) -> None:
        """Serve this coordinator; the calls of earlier ones are dropped."""
        self._queue.serve(coordinator)

    async def ingest(
        self, key: PayloadKey, job: IngestJob, payload: tuple[object], caller: Caller = None
    ) -> Outcome:
        """Read a payload and return its outcome.

        The payload comes inside a tuple. Ray itself would read a ref argument before the call, and
        never end if the ref's owner has died. Then this actor would answer no other call.
        """
        size = job.get("bytes") or 0
        return await self._queue.run(caller, self._read, key, job, *payload, size=size)

    async def join(
        self, key: PayloadKey, job: PayloadJob, sources: Sequence[Source], caller: Caller = None
    ) -> JoinAnswer | None:
        """Join a trainer's payload with rollouts; None: not kept.

        The loop, not the thread, waits for other nodes' ingestors: two that call each other would
        otherwise deadlock.
        """
        sample_ids = await self._queue.run(caller, self._worker.samples, key, job)
        if sample_ids is None:
            return None
        by_node: dict[str, list[Source]] = {}
        for source in sources:
            by_node.setdefault(source.node_id or self._node_id, []).append(source)
        calls = [self._rollouts_of(node, own, sample_ids) for node, own in by_node.items()]
        found = [rows for some in await asyncio.gather(*calls) for rows in some]
        return await self._queue.run(caller, self._worker.join, key, job, found)

    async def rollouts(
        self, sources: Sequence[Source], sample_ids: Sequence[str]
    ) -> list[RolloutRows]:
        """Return the rows of these samples in payloads of this node's ring.

        Another node's ingestor calls it, possibly before its coordinator has called here.
        """
        return await self._queue.run(None, self._worker.rollouts, sources, sample_ids)

    async def _rollouts_of(
        self, node: str, sources: Sequence[Source], sample_ids: Sequence[str]
    ) -> list[RolloutRows]:
        if node == self._node_id:
            return await self.rollouts(sources, sample_ids)
        try:
            name = ingestor_name(node)  # in a thread: the lookup waits for the GCS
            other: Any = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
            found: list[RolloutRows] = await other.rollouts.remote(sources, sample_ids)
        except (ValueError, exceptions.RayError):
            return []  # that node is gone; the answer lists its samples as left out
        return found

    async def call(self, method: str, *arguments: object, caller: Caller = None) -> Any:
        """Call a method of the `IngestWorker`: at its turn, or at once if it only touches files."""
        work = getattr(self._worker, method)
        if method in _WITHOUT_QUEUE:
            return await asyncio.to_thread(work, *arguments)
        return await self._queue.run(caller, work, *arguments)

    async def read_artifact(self, path: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of a file of this node; see `IngestWorker.read_artifact`."""
        return await asyncio.to_thread(self._worker.read_artifact, path, offset, size)

    async def pid(self) -> int:
        """Return the process id (tests kill it)."""
        return os.getpid()

    def _read(self, key: PayloadKey, job: IngestJob, payload: object) -> Outcome:
        try:
            value = _fetched(payload)
        except _GONE as error:
            return Outcome("lost", f"it could not be read: {describe(error)}", [], {})
        return self._worker.ingest(key, job, value)


def _start_worker(node_id: str) -> None:
    # Only this thread computes; the actor's loop stays responsive.
    be_nice(_NICE)
    began = time.monotonic()
    compiled: list[str] = []

    def compiling() -> None:
        compiled.append(node_id)
        logger.warning(
            "node %s compiles the statistics, once for an installation: its payloads wait, half a "
            "minute or so",
            node_id,
        )

    warm(compiling)
    if compiled:
        logger.warning("node %s has compiled, in %.0f s", node_id, time.monotonic() - began)


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _actor_deaths() -> dict[tuple[str, int], ActorDeath]:
    from ray._private import state  # no public call without the dashboard

    return own_deaths(state.actors(actor_state_name="DEAD").values())


def _living_nodes() -> set[str]:
    return {node["NodeID"] for node in _nodes() if node["Alive"]}


def _nothing() -> None:
    """Start the worker's thread."""


def _fetched(payload: object) -> object:
    """Return a payload with all its refs read."""
    if isinstance(payload, ray.ObjectRef):
        return ray.get(payload, timeout=_READ_SECONDS)
    if isinstance(payload, Mapping) and "schema" not in payload:
        return {name: _fetched(item) for name, item in payload.items()}
    return payload


class Ingestors:
    """Finds the ingestor of a node, and creates it if there is none."""

    def __init__(self, settings: Settings) -> None:
        self._arguments = (
            str(settings.data_path),
            settings.ring_bytes,
            settings.ingestor_bytes,
            [str(root) for root in settings.roots],
            settings.reserve_bytes,
        )
        self._handles: dict[str, object] = {}
        self._home = ray.get_runtime_context().get_node_id()
        self.nodes = NodeList(_nodes)

    @property
    def home(self) -> str:
        """The node of this process."""
        return str(self._home)

    def known_handle(self, node: str) -> Any | None:
        """Return the handle of a node's ingestor if it was looked up before."""
        return self._handles.get(node)

    def handle_for(self, node: str) -> Any:
        """Return the handle of a node's ingestor; if it is not known, ask the cluster."""
        handle = self._handles.get(node)
        if handle is None:
            options = {
                "name": ingestor_name(node),
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
                "num_cpus": 0,
                "max_restarts": -1,
                "max_task_retries": 2,
                "max_concurrency": _CALLS,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            handle = ray.remote(Ingestor).options(**options).remote(node, *self._arguments)
            self._handles[node] = handle
        return handle

    def handle_of(self, node_id: str) -> Any | None:
        """Return the handle of a node's own ingestor; None if the node is not alive."""
        if self.nodes.is_due():
            self.nodes.look()
        return self.handle_for(node_id) if node_id in self.nodes.alive else None

    def place(self, node_id: str | None) -> str:
        """Return the node whose ingestor reads data that is recorded for a node.

        It is the home node if the newest list does not show the node as alive.
        """
        return node_id if node_id is not None and node_id in self.nodes.alive else self.home

    def forget(self, node_id: str | None) -> None:
        """Look the ingestor of a node up again next time."""
        for node in {node_id or self.home, self.place(node_id)}:
            self._handles.pop(node, None)
        self.nodes.doubt()


class RayIngestors(IngestorClient):
    """The ingestors of all nodes, over their actors.

    Queries to the cluster run in a thread: while the GCS is away, they wait for it.
    """

    def __init__(self, settings: Settings, coordinator: str) -> None:
        self._actors = Ingestors(settings)
        self._nodes = self._actors.nodes
        self._coordinator = coordinator
        self._serving: dict[str, object] = {}
        """Node -> handle of its ingestor that serves this coordinator."""
        self._introducing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.home = self._actors.home
        self._head = HeadWatch(str(ray.get_runtime_context().gcs_address))
        self._tasks = BackgroundTasks()
        self._looking: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._relayed: set[str] = set()

    def node_of(self, node_id: str | None) -> str:
        """Return the node whose ingestor serves calls for `node_id`, as far as is known."""
        return self._actors.place(node_id)

    async def learn_nodes(self, node_ids: Iterable[str | None]) -> None:
        """Read the list of nodes if it is old and one of these is not alive in it."""
        if self._nodes.is_due_for(node_ids):
            await asyncio.wait([self._look_soon()])
        if not self._nodes.alive:
            raise Unreachable(
                "the Ray cluster does not say which nodes it has", advice="the service asks again"
            )

    def start_relays(self, nodes: Set[str]) -> None:
        """Let the relays of these nodes run."""
        missing = nodes - self._relayed
        if missing and (self._starting is None or self._starting.done()):
            self._starting = self._tasks.start(self._start(missing))

    async def _start(self, nodes: Set[str]) -> None:
        own = [node for node in nodes if self._actors.place(node) == node]
        try:
            await asyncio.to_thread(start_relays, own)
            self._relayed |= nodes  # another cluster's, too: they have no relay
        except Exception as error:
            logger.warning("the relays of %d nodes were not started: %s", len(nodes), error)

    def lost_nodes(self) -> Mapping[str, str]:
        """Return the nodes that the cluster lost, as of some seconds ago, and why each."""
        if self._nodes.is_due():
            self._look_soon()
        return self._nodes.lost

    async def actor_deaths(self) -> Mapping[tuple[str, int], ActorDeath]:
        """Return the deaths of actors, as the head has them."""
        await asyncio.to_thread(self._head.check)
        return await asyncio.to_thread(_actor_deaths)

    def _look_soon(self) -> asyncio.Task[None]:
        if self._looking is None or self._looking.done():
            self._looking = self._tasks.start(self._look())
        return self._looking

    def cluster_problem(self) -> str:
        """Return why the cluster does not answer, once it has not for some seconds."""
        return self._head.problem(time.monotonic())

    async def _look(self) -> None:
        self._head.asked(time.monotonic())
        try:
            await asyncio.to_thread(self._head.check)
            await asyncio.to_thread(self._nodes.look)
        except Exception as error:  # the list stays as it was
            if self._head.failed(describe(error)):
                logger.warning("the list of nodes cannot be read: %s", describe(error))
        else:
            self._head.answered()

    async def _handle(self, node_id: str | None) -> Any:
        """Return the handle of a node's ingestor, which serves this coordinator.

        Raises:
            RayActorError: it does not answer.
            Unreachable: the cluster does not say where it is.
        """
        await self.learn_nodes([node_id])
        node = self._actors.place(node_id)
        async with self._introducing[node]:
            handle: Any = self._actors.known_handle(node) or await self._looked_up(node)
            if self._serving.get(node) is not handle:
                await handle.serve.remote(self._coordinator)
                self._serving[node] = handle
        return handle

    async def _looked_up(self, node: str) -> Any:
        try:
            return await asyncio.to_thread(self._actors.handle_for, node)
        except Exception as error:
            raise Unreachable(
                f"the ingestor of node {node} was not found: {describe(error)}",
                advice="the service looks it up again",
            ) from error

    async def _called(self, node_id: str | None, method: str, *arguments: object) -> Any:
        """Call a method of a node's ingestor, which may wait in its queue."""
        handle = await self._handle(node_id)
        try:
            return await getattr(handle, method).remote(*arguments, caller=self._coordinator)
        except exceptions.RayTaskError as error:
            if not isinstance(error.cause, Superseded):
                raise
        # An earlier coordinator's call, sent before its end, arrived after this one's introduction.
        self._serving.clear()
        handle = await self._handle(node_id)
        return await getattr(handle, method).remote(*arguments, caller=self._coordinator)

    async def ingest(
        self, node_id: str | None, key: PayloadKey, job: IngestJob, payload: object
    ) -> Outcome:
        """Read a payload; try once more if the ingestor died over it.

        While its node cannot be reached, it is tried again until Ray knows whether the node is
        lost. Then the home node's ingestor finds out what happened to the payload.
        """
        reason = ""
        deadline = time.monotonic() + _UNREACHABLE_SECONDS
        tries = 0
        while tries < 2:
            try:
                return await self._called(node_id, "ingest", key, job, (payload,))  # type: ignore[no-any-return]
            # The payload is unchanged, and its refs are held.
            except Unreachable as error:  # noqa: PERF203
                reason = error.wrong
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(_RETRY_SECONDS)
            except (exceptions.RayActorError, *_UNAVAILABLE) as error:
                reason = f"its ingestor died while reading it: {describe(error)}"
                self._actors.forget(node_id)
                if isinstance(error, _UNAVAILABLE) and time.monotonic() < deadline:
                    await asyncio.sleep(_RETRY_SECONDS)
                else:
                    tries += 1
            except Exception as error:  # any other error is final for this payload
                reason = f"it could not be handed to an ingestor: {describe(error)}"
                break
        return Outcome("lost", reason, [], {})

    async def build_operator_table(self, node_id: str | None, job: AnnouncedDump) -> list[Put]:
        """Build a dump's operator table."""
        try:
            return await self._called(node_id, "call", "build_operator_table", job)  # type: ignore[no-any-return]
        except exceptions.RayActorError as error:
            self._actors.forget(node_id)
            raise IngestorDied(describe(error)) from error

    async def _call(self, node_id: str | None, method: str, *arguments: object) -> Any:
        try:
            if method == "join":  # it also calls other nodes
                return await self._called(node_id, method, *arguments)
            return await self._called(node_id, "call", method, *arguments)
        except exceptions.RayError as error:
            self._actors.forget(node_id)
            raise Unreachable(
                f"the ingestor of node {node_id} cannot be reached: {describe(error)}",
                advice="Ray restarts it",
            ) from error
