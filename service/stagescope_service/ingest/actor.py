"""The Ingestor: one detached actor a node; reads payloads where they lie. A thin Ray shell.

It claims no CPU, computes in one thread of low priority, and holds at most `ingestor_bytes` of
payloads at a time. Everything that it does is named by the payload's identity, so that doing it
twice changes nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stagescope.wire.errors import Forbidden, StagescopeError
from stagescope.wire.stacks import read_watchdog
from stagescope_service.core.findings import describe
from stagescope_service.core.instructions import PayloadKey
from stagescope_service.ingest import kept_files
from stagescope_service.ingest.kept_files import Keeper
from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.ingest.recompute import Recomputer, Source
from stagescope_service.ingest.rollout_join import RolloutRows
from stagescope_service.settings import Settings
from stagescope_service.statistics import warm
from stagescope_service.store.artifacts import confine, read_piece, ring_directory
from stagescope_service.store.ring import DEFAULT_RESERVE, Ring

logger = logging.getLogger(__name__)

T = TypeVar("T")

NAMESPACE: Final = "stagescope"
_NICE: Final = 10
_NODES_SECONDS: Final = 2.0
_READ_SECONDS: Final = 120.0
_GONE: Final = (
    exceptions.ObjectLostError,  # OwnerDiedError, ReferenceCountingAssertionError, ...
    exceptions.ObjectFetchTimedOutError,
    exceptions.GetTimeoutError,
    exceptions.RayTaskError,
    exceptions.RayActorError,
)


def ingestor_name(node_id: str) -> str:
    """Return the actor's name."""
    return f"ingestor-{node_id}"


class Ingestor:
    """Reads payloads for one node."""

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
        self._data_dir = Path(data_dir)
        self._roots = [Path(root) for root in roots]
        self._ring_bytes = ring_bytes
        self._reserve_bytes = reserve_bytes
        self._intake: PayloadReader | None = None
        self._room = _Room(most_bytes)
        # One thread: two payloads at once would only take turns, and hold twice the memory.
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, initializer=_start_worker, initargs=(node_id,)
        )
        # The thread begins with its first task: the kernel is loaded now, not in the first step.
        self._pool.submit(_nothing)

    async def ingest(
        self, key: tuple[str, int], job: dict[str, Any], payload: Any
    ) -> dict[str, Any]:
        """Read a payload and return what became of it (`Outcome.wire`)."""
        size = job.get("bytes") or 0
        await self._room.enter(size)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._pool, self._read, PayloadKey(*key), job, payload
            )
        finally:
            self._room.leave(size)

    async def restate(
        self,
        key: tuple[str, int],
        job: dict[str, Any],
        pair: tuple[str, str],
        skips: Sequence[tuple[int, int, int]],
    ) -> bytes | None:
        """Return a payload's summary without tokens that counted elsewhere; None: not kept."""
        return await self._again(
            Recomputer.restate, PayloadKey(*key), job, (pair[0], pair[1]), skips
        )

    async def join(
        self, key: tuple[str, int], job: dict[str, Any], sources: Sequence[tuple[Any, ...]]
    ) -> dict[str, Any] | None:
        """Join a trainer's payload with rollouts (`Recomputer.join`); None: not kept.

        Between its two turns in the thread it waits for other nodes' ingestors in the loop: two
        that ask each other would otherwise wait for ever.
        """
        wanted = await self._again(Recomputer.samples, PayloadKey(*key), job)
        if wanted is None:
            return None
        by_node: dict[str, list[Source]] = {}
        for source in (Source(*fields) for fields in sources):
            by_node.setdefault(source.node_id or self._node_id, []).append(source)
        asked = [self._rollouts_of(node, some, wanted) for node, some in by_node.items()]
        found = [rows for some in await asyncio.gather(*asked) for rows in some]
        return await self._again(Recomputer.join, PayloadKey(*key), job, found)

    async def rollouts(
        self, sources: Sequence[tuple[Any, ...]], wanted: Sequence[str]
    ) -> list[RolloutRows]:
        """Return the rows of wanted samples in payloads of this node's ring."""
        some = [Source(*fields) for fields in sources]
        return await self._again(Recomputer.rollouts, some, wanted) or []

    async def _rollouts_of(
        self, node: str, sources: Sequence[Source], wanted: Sequence[str]
    ) -> list[RolloutRows]:
        if node == self._node_id:
            return await self.rollouts(sources, wanted)
        try:
            other: Any = ray.get_actor(ingestor_name(node), namespace=NAMESPACE)
            found: list[RolloutRows] = await other.rollouts.remote(
                [tuple(source) for source in sources], wanted
            )
        except (ValueError, exceptions.RayError):
            return []  # that node is gone: its samples stay without a rollout, and that is said
        return found

    async def _again(self, what: Callable[..., T], *arguments: Any) -> T | None:
        """Do something with the ring in the thread; None where it cannot be done."""

        def work() -> T | None:
            try:
                return what(Recomputer(self._here()), *arguments)
            except StagescopeError:
                return None

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def digest(self, job: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Make a dump's operator table; return the rows that came of it.

        Raises:
            Exception: what may pass, as `StoreError` of a full disk, and what nobody foresaw.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._digest, job)

    async def read_watchdogs(self, paths: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Return what the watchdogs of processes of this node wrote; without those that did not."""
        return await asyncio.to_thread(_read_watchdogs, paths)

    async def read_artifact(self, path: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of a file of this node that lies in an allowed root.

        Raises:
            Forbidden: it lies elsewhere.
            NotFound: there is no such file.
        """
        return await asyncio.to_thread(read_piece, confine(path, self._roots), offset, size)

    async def kept_files(self) -> list[str]:
        """Return the paths of the kept files that lie below data_dir."""
        return await asyncio.to_thread(kept_files.find, self._data_dir)

    async def describe_kept(
        self, paths: Sequence[str]
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (artifact row, job) of those kept files that can be read."""
        mine = [str(confine(path, self._roots)) for path in paths]
        return await asyncio.to_thread(kept_files.describe, mine, self._node_id)

    async def discard(self, paths: Sequence[str]) -> list[str]:
        """Delete kept files; return those that are not there any more."""
        return await asyncio.to_thread(kept_files.discard, self._data_dir, paths)

    async def pin(self, attempt_id: int, step: int) -> tuple[int, int, str] | None:
        """Pin the payloads of a step (`Ring.pin_step`); None: the ring cannot be used."""
        return await self._again(Recomputer.pin, attempt_id, step)

    async def unpin(self, attempt_id: int, step: int) -> bool:
        """Let the payloads of a step go when room is needed; False: its marker stays."""
        return bool(await self._again(Recomputer.unpin, attempt_id, step))

    async def pid(self) -> int:
        """Return the process id (tests kill it)."""
        return os.getpid()

    def _here(self) -> PayloadReader:
        if self._intake is None:
            reserve = self._reserve_bytes
            directory = ring_directory(self._data_dir, self._node_id)
            ring = Ring(directory, self._ring_bytes, reserve_bytes=reserve)
            keeper = Keeper(self._data_dir, self._node_id, reserve)
            self._intake = PayloadReader(self._data_dir, self._node_id, ring, keeper)
        return self._intake

    def _read(self, key: PayloadKey, job: Mapping[str, Any], payload: Any) -> dict[str, Any]:
        try:
            value = _fetched(payload)
        except _GONE as error:
            reason = f"it could not be read: {describe(error)}"
            return {"state": "lost", "reason": reason, "rows": [], "columns": {}}
        try:
            return self._here().take(key, job, value).wire()
        except Exception as error:  # one payload must not end the ingestor
            reason = f"the service failed to read it: {describe(error)}"
            return {"state": "refused", "reason": reason, "rows": [], "columns": {}}

    def _digest(self, job: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        # Here, since the coordinator reads this file too and has no use for Parquet.
        from stagescope_service.ingest.operator_tables import build_operator_table

        rows = build_operator_table(job, self._roots, self._node_id)
        return [(put.table, dict(put.row)) for put in rows]


def _start_worker(node_id: str) -> None:
    # Only this thread computes; the loop of the actor stays as quick as any.
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
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


def _nothing() -> None:
    """Have the worker's thread begin."""


def _fetched(payload: Any) -> Any:
    """Return a payload with every ref in it read."""
    if isinstance(payload, ray.ObjectRef):
        return ray.get(payload, timeout=_READ_SECONDS)
    if isinstance(payload, Mapping) and "schema" not in payload:
        return {name: _fetched(item) for name, item in payload.items()}
    return payload


class _Room:
    """How many bytes of payloads may be in memory; one that is larger alone still gets in."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._changed = asyncio.Condition()

    async def enter(self, size: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._used or self._used + size <= self._most)
            self._used += size

    def leave(self, size: int) -> None:
        self._used -= size
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Ingestors:
    """Finds the ingestor of a node, made where there is none."""

    def __init__(self, settings: Settings) -> None:
        self._arguments = (
            str(settings.data_path),
            settings.ring_bytes,
            settings.ingestor_bytes,
            [str(root) for root in settings.roots],
            settings.reserve_bytes,
        )
        self._handles: dict[str, Any] = {}
        self._home = ray.get_runtime_context().get_node_id()
        self._alive: set[str] = set()
        self._looked = 0.0

    @property
    def home(self) -> str:
        """The node of the process that asks."""
        return str(self._home)

    def on(self, node_id: str | None) -> Any:
        """Return the handle for a node; the home node's where it is not known or not alive."""
        node = self.place(node_id)
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
                "max_concurrency": 1000,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            handle = ray.remote(Ingestor).options(**options).remote(node, *self._arguments)
            self._handles[node] = handle
        return handle

    def of(self, node_id: str) -> Any | None:
        """Return the handle of a node's own ingestor, None where the node is not alive."""
        return self.on(node_id) if self._is_alive(node_id) else None

    def place(self, node_id: str | None) -> str:
        """Return the node whose ingestor reads what is said to lie on a node."""
        return node_id if node_id is not None and self._is_alive(node_id) else self.home

    def forget(self, node_id: str | None) -> None:
        """Look the ingestor of a node up again next time."""
        self._handles.pop(node_id or self.home, None)
        self._looked = 0.0

    def _is_alive(self, node_id: str) -> bool:
        # The list of nodes is a call to the cluster: not one for each payload.
        now = time.monotonic()
        if now - self._looked > _NODES_SECONDS:
            nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            self._alive = {node["NodeID"] for node in nodes if node["Alive"]}
            self._looked = now
        return node_id in self._alive

    def all(self) -> dict[str, Any]:
        """Return the handles by node id."""
        return dict(self._handles)


def _read_watchdogs(paths: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return what watchdogs wrote, by incarnation; for those who run on the node of the files."""
    found: dict[str, dict[str, Any]] = {}
    for incarnation, path in paths.items():
        try:
            fields = read_watchdog(path)
        except (Forbidden, OSError) as error:
            logger.warning("the watchdog's file of %s cannot be read: %s", incarnation, error)
            continue
        if fields is not None:
            found[incarnation] = fields
    return found
