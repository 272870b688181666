"""The ingestors' interface for the coordinator, and the work of one of them. No Ray in here.

`Ingestor` (see `ingest.actor`) runs an `IngestWorker` in an actor on each node.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

from stagescope_service.core.findings import describe
from stagescope_service.core.instructions import (
    AnnouncedDump,
    IngestJob,
    PayloadJob,
    PayloadKey,
    StepJob,
)
from stagescope_service.ingest import kept_files
from stagescope_service.ingest.cluster_state import ActorDeath
from stagescope_service.ingest.kept_files import Keeper, KeptDescription
from stagescope_service.ingest.reader import Outcome, PayloadReader
from stagescope_service.ingest.recompute import JoinAnswer, Recomputer, Source
from stagescope_service.ingest.rollout_join import RolloutRows
from stagescope_service.ingest.run_files import RemovedFiles, RunFiles, count_files, remove_files
from stagescope_service.store.artifacts import confine, read_piece, ring_directory
from stagescope_service.store.contract import Put
from stagescope_service.store.ring import DEFAULT_RESERVE, Pinned, Ring, rings_left
from stagescope_service.store.tensorfile import disk_errors
from stagescope_wire.errors import Forbidden, StagescopeError, Unreachable
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.stacks import read_watchdog

logger = logging.getLogger(__name__)

T = TypeVar("T")
TokenRange = tuple[int, int, int]
"""Row of a payload, first and last position (half open)."""


class IngestorDied(Unreachable):
    """The ingestor's process ended during a call; Ray starts it again."""


class IngestorClient(abc.ABC):
    """The ingestors of all nodes, one method a call.

    `node_id` is the node with the data. If it is None or gone, another node serves the call
    (`node_of`). No method holds up the event loop.

    Raises:
        Unreachable: by a method whose answer cannot say that the ingestor does not answer.
    """

    home: str
    """The node of the coordinator."""

    @abc.abstractmethod
    def node_of(self, node_id: str | None) -> str:
        """Return the node whose ingestor serves calls for `node_id`, as far as is known."""

    async def learn_nodes(self, node_ids: Iterable[str | None]) -> None:  # noqa: B027
        """Learn which of these nodes live; `node_of` knows it afterwards.

        Raises:
            Unreachable: the cluster does not say which nodes it has.
        """

    def lost_nodes(self) -> Mapping[str, str]:
        """Return the nodes that the cluster lost, as far as is known, and why each."""
        return {}

    async def actor_deaths(self) -> Mapping[tuple[str, int], ActorDeath]:
        """Return (node id, process id) -> death, of the actors that Ray says died on their own."""
        return {}

    def cluster_problem(self) -> str:
        """Return why the cluster does not answer; "" if it does."""
        return ""

    def start_relays(self, nodes: Set[str]) -> None:  # noqa: B027 - in one process there are none
        """Let the relays of these nodes run; call it often."""

    @abc.abstractmethod
    async def ingest(
        self, node_id: str | None, key: PayloadKey, job: IngestJob, payload: object
    ) -> Outcome:
        """Read a payload. An ingestor that dies makes the outcome `lost`; nothing is raised."""

    @abc.abstractmethod
    async def _call(self, node_id: str | None, method: str, *arguments: object) -> Any:
        """Call a method of the `IngestWorker` of a node.

        Raises:
            Unreachable: the ingestor does not answer.
        """

    async def recompute(
        self,
        node_id: str | None,
        key: PayloadKey,
        job: StepJob,
        pair: tuple[str, str],
        skips: Sequence[TokenRange],
    ) -> bytes | None:
        """Return a payload's summary without tokens that count elsewhere.

        Returns None if the ring no longer holds the payload or no ingestor answers.
        """
        try:
            return await self._call(node_id, "recompute", key, job, pair, skips)  # type: ignore[no-any-return]
        except Unreachable:
            return None

    async def join(
        self, node_id: str | None, key: PayloadKey, job: PayloadJob, sources: Sequence[Source]
    ) -> JoinAnswer | None:
        """Join a trainer's payload with rollouts; None as in `recompute`.

        The rollouts of a gone node are on the node that took its ring over, if one did.
        """
        sources = [
            each if each.node_id is None else each._replace(node_id=self.node_of(each.node_id))
            for each in sources
        ]
        try:
            return await self._call(node_id, "join", key, job, sources)  # type: ignore[no-any-return]
        except Unreachable:
            return None

    async def build_operator_table(self, node_id: str | None, job: AnnouncedDump) -> list[Put]:
        """Build a dump's operator table and return its rows.

        Raises:
            IngestorDied: its process ended meanwhile.
            StagescopeError: a transient failure, such as a full disk.
        """
        return await self._call(node_id, "build_operator_table", job)  # type: ignore[no-any-return]

    async def read_watchdogs(
        self, node_id: str | None, paths: Mapping[str, str]
    ) -> dict[str, JsonObject]:
        """Return incarnation -> content of its watchdog's file, for the processes with a file."""
        return await self._call(node_id, "read_watchdogs", paths)  # type: ignore[no-any-return]

    async def kept_files(self, node_id: str) -> list[str]:
        """Return the paths of the kept files below the data directory of a node."""
        return await self._call(node_id, "kept_files")  # type: ignore[no-any-return]

    async def describe_kept(self, node_id: str, paths: Sequence[str]) -> list[KeptDescription]:
        """Return the rows of the files that can be read."""
        return await self._call(node_id, "describe_kept", paths)  # type: ignore[no-any-return]

    async def discard(self, node_id: str, paths: Sequence[str]) -> list[str]:
        """Delete files; return those that do not exist any more."""
        return await self._call(node_id, "discard", paths)  # type: ignore[no-any-return]

    async def count_run(self, node_id: str, files: RunFiles) -> RemovedFiles:
        """Return what `remove_run` would delete now.

        Raises:
            Unreachable: the ingestor does not answer.
        """
        ring: list[int] = await self._call(node_id, "ring_sizes", files.attempt_ids)
        found: RemovedFiles = await self._call(node_id, "count_files", files)
        return RemovedFiles(found.files + len(ring), found.bytes + sum(ring), found.problems)

    async def remove_run(self, node_id: str, files: RunFiles) -> RemovedFiles:
        """Delete the files of a run on a node, its payloads in the ring too.

        Raises:
            Unreachable: the ingestor does not answer; the same call may be made again.
        """
        ring: list[int] = await self._call(node_id, "leave_ring", files.attempt_ids)
        removed: RemovedFiles = await self._call(node_id, "remove_files", files)
        return RemovedFiles(removed.files + len(ring), removed.bytes + sum(ring), removed.problems)

    async def pin(self, node_id: str | None, attempt_id: int, step: int) -> Pinned:
        """Pin the payloads of a step in a node's ring; `reason` is why that failed."""
        try:
            return await self._call(node_id, "pin", attempt_id, step)  # type: ignore[no-any-return]
        except Unreachable as error:
            return Pinned(0, 0, error.wrong)

    async def unpin(self, node_id: str | None, attempt_id: int, step: int) -> bool:
        """Release the payloads of a step; return whether the node's ring did."""
        try:
            return await self._call(node_id, "unpin", attempt_id, step)  # type: ignore[no-any-return]
        except Unreachable:
            return False


class IngestWorker:
    """The work of one node's ingestor; one call at a time, except calls on files.

    Args:
        node_id: the node's id.
        data_dir: the service's directory on this node.
        roots: directories whose files it may read.
        ring_bytes: size of the ring.
        reserve_bytes: bytes that it leaves free on the disk.
        alive: returns the ids of the live nodes; the rings of others are taken over. None:
            no ring is taken over.
    """

    def __init__(
        self,
        node_id: str,
        data_dir: Path,
        roots: Sequence[Path],
        *,
        ring_bytes: int,
        reserve_bytes: int = DEFAULT_RESERVE,
        alive: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self.node_id = node_id
        self._data_dir = data_dir
        self._roots = roots
        self._ring_bytes = ring_bytes
        self._reserve_bytes = reserve_bytes
        self._alive = alive
        self._reader: PayloadReader | None = None

    @property
    def reader(self) -> PayloadReader:
        """Its reader of payloads, opened with the first call."""
        if self._reader is None:
            directory = ring_directory(self._data_dir, self.node_id)
            ring = Ring(
                directory,
                self._ring_bytes,
                reserve_bytes=self._reserve_bytes,
                left=self._rings_left(directory),
            )
            keeper = Keeper(self._data_dir, self.node_id, self._reserve_bytes)
            self._reader = PayloadReader(self._data_dir, self.node_id, ring, keeper)
        return self._reader

    def _rings_left(self, own: Path) -> list[Path]:
        if self._alive is None:
            return []
        try:
            alive = {ring_directory(self._data_dir, node).name for node in self._alive()}
            return rings_left(own.parent, own.name, alive)
        except Exception as error:  # neither the disk's nor Ray's refuses a payload
            logger.warning("the rings of gone nodes are not taken over: %s", describe(error))
            return []

    def ingest(self, key: PayloadKey, job: IngestJob, value: object) -> Outcome:
        """Read a payload whose tensors are in memory."""
        try:
            return self.reader.read(key, job, value)
        except Exception as error:  # an error of one payload must not end the ingestor
            return Outcome("refused", f"the service failed to read it: {describe(error)}", [], {})

    # --- the ring: None where it cannot be used, or holds the payload no longer ---------------
    def recompute(
        self, key: PayloadKey, job: StepJob, pair: tuple[str, str], skips: Sequence[TokenRange]
    ) -> bytes | None:
        """Return a payload's summary without tokens that count elsewhere."""
        return self._of_ring(Recomputer.recompute, key, job, pair, skips)

    def samples(self, key: PayloadKey, job: StepJob) -> list[str] | None:
        """Return the sample ids of a payload."""
        return self._of_ring(Recomputer.samples, key, job)

    def rollouts(self, sources: Sequence[Source], sample_ids: Sequence[str]) -> list[RolloutRows]:
        """Return the rows of these samples in rollouts of this node."""
        return self._of_ring(Recomputer.rollouts, sources, sample_ids) or []

    def join(
        self, key: PayloadKey, job: PayloadJob, rollouts: Sequence[RolloutRows]
    ) -> JoinAnswer | None:
        """Join a trainer's payload with rollouts."""
        return self._of_ring(Recomputer.join, key, job, rollouts)

    def pin(self, attempt_id: int, step: int) -> Pinned:
        """Pin the payloads of a step."""
        pinned = self._of_ring(Recomputer.pin, attempt_id, step)
        return pinned or Pinned(0, 0, f"node {self.node_id} has no usable ring")

    def unpin(self, attempt_id: int, step: int) -> bool:
        """Release the payloads of a step."""
        return bool(self._of_ring(Recomputer.unpin, attempt_id, step))

    def ring_sizes(self, attempt_ids: Sequence[int]) -> list[int]:
        """Return the sizes in bytes of the payloads of attempts in the ring."""
        return self.reader.ring.sizes_of(attempt_ids)

    def leave_ring(self, attempt_ids: Sequence[int]) -> list[int]:
        """Remove the payloads of attempts from the ring; return their sizes in bytes.

        Raises:
            StoreError: the disk refused it.
        """
        ring = self.reader.ring
        with disk_errors(ring.directory):
            return ring.remove_attempts(attempt_ids)

    def _of_ring(self, work: Callable[..., T], *arguments: object) -> T | None:
        try:
            return work(Recomputer(self.reader), *arguments)
        except StagescopeError:
            return None

    # --- files ------------------------------------------------------------------------------
    def build_operator_table(self, job: AnnouncedDump) -> list[Put]:
        """Build a dump's operator table; see `ingest.operator_tables`."""
        # A local import: the coordinator imports this module and needs no Parquet.
        from stagescope_service.ingest.operator_tables import build_operator_table

        return build_operator_table(job, self._roots, self.node_id)

    def read_artifact(self, path: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of a file.

        Raises:
            Forbidden: it lies outside of the allowed roots.
            NotFound: there is no such file.
        """
        return read_piece(confine(path, self._roots), offset, size)

    @staticmethod
    def read_watchdogs(paths: Mapping[str, str]) -> dict[str, JsonObject]:
        """Return incarnation -> content of its watchdog's file, for the processes with a file."""
        found: dict[str, JsonObject] = {}
        for incarnation, path in paths.items():
            try:
                fields = read_watchdog(path)
            except (Forbidden, OSError) as error:
                logger.warning("the watchdog's file of %s cannot be read: %s", incarnation, error)
                continue
            if fields is not None:
                found[incarnation] = fields
        return found

    def kept_files(self) -> list[str]:
        """Return the paths of the kept files."""
        return kept_files.find(self._data_dir)

    def describe_kept(self, paths: Sequence[str]) -> list[KeptDescription]:
        """Return the rows of the kept files that can be read."""
        inside = [str(confine(path, self._roots)) for path in paths]
        return kept_files.describe(inside, self.node_id)

    def discard(self, paths: Sequence[str]) -> list[str]:
        """Delete kept files; return those that do not exist any more."""
        return kept_files.discard(self._data_dir, paths)

    def count_files(self, files: RunFiles) -> RemovedFiles:
        """Return the files that `remove_files` would delete."""
        return count_files(self._data_dir, files)

    def remove_files(self, files: RunFiles) -> RemovedFiles:
        """Delete the files of a run, except those in the ring."""
        return remove_files(self._data_dir, files)
