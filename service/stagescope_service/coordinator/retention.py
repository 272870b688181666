"""Retention of kept files by bytes, age and steps, and of rows by steps; pinned steps stay.

No Ray here. Files are deleted node by node, the rows of old steps in small transactions.

The catalogue lists every kept file; a node's ingestor deletes files. Files without a row (after a
crash between the two), and files whose node has a new id, are adopted at the start.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from stagescope_service.coordinator.rules.actions import PinAnswer, gone_of
from stagescope_service.core.findings import NOT_KEPT
from stagescope_service.core.instructions import IngestJob, Put
from stagescope_service.ingest.ingestors import IngestorClient
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import RemoveRows, WriteRows
from stagescope_service.store.queries.files import KeptFile, KeptPlace
from stagescope_service.store.queries.runs import RemovableStep
from stagescope_service.store.tables import ArtifactRow, FindingRow
from stagescope_wire.errors import StagescopeError
from stagescope_wire.nonfinite import JsonObject

logger = logging.getLogger(__name__)

_CHECK_SECONDS: Final = 60.0
_BATCH: Final = 1000
_ROWS: Final = 2000
"""Rows that are removed in one transaction."""
_STEPS: Final = 100
_MAX_RUNS: Final = 100_000
_MAX_FILES: Final = 100_000
_COUNTS: Final = 3
"""Most counts in a row, if payloads are accounted for during each of them."""
_MAX_STAGES: Final = 1000
_DAY: Final = 86_400.0
_SLACK: Final = 50
"""A deletion frees 1/50 of the limit beyond what is needed, so that not every payload deletes."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of kept files: bytes on each node, age in days, newest steps of an attempt."""

    bytes: int
    days: float | None = None
    steps: int | None = None
    row_steps: int | None = None
    """Newest steps of a run that keep their rows in the catalogue; None keeps all."""


@dataclasses.dataclass(frozen=True)
class Reservation:
    """Bytes for the kept parts of a payload that is under way; none where `refused` says why."""

    node: str
    stage: tuple[int, str]
    """Attempt and stage of the payload."""
    announced: int
    """Bytes of its tensors, as its process announced them."""
    bytes: int
    refused: str
    counts: int
    """Counts of the kept bytes that began before."""


class Retention:
    """Makes room for kept files, and reports if there is none; used from one event loop only.

    Args:
        catalogue: the store's reading side.
        ingestors: the ingestors of all nodes; a call raises `Unreachable` if the node is gone.
        write: commits rows.
        limits: the limits of kept files.
        wall: Unix seconds of the service.
        mono: monotonic seconds.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        ingestors: IngestorClient,
        write: WriteRows,
        limits: Limits,
        *,
        wall: Callable[[], float] = time.time,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalogue = catalogue
        self._ingestors = ingestors
        self._write = write
        self._limits = limits
        self._wall = wall
        self._mono = mono
        self._checked = mono()
        self._bytes: Counter[str] | None = None
        self._counts = 0
        self._added: Counter[str] = Counter()
        """Bytes that were added since the last count began; it may include them or not."""
        self._reserved: Counter[str] = Counter()
        self._beside: OrderedDict[tuple[int, str], int] = OrderedDict()
        """Attempt and stage -> most bytes of a kept file beside the announced ones: its texts."""
        self._reasons: dict[str, str] = {}
        self._not_kept = 0
        self._open: dict[int, str] = {}
        self._newest: dict[int, int] = {}
        self._adopted: set[str] = set()
        self._changing = asyncio.Lock()
        self._removing = asyncio.Lock()

    def adopt_findings(self, findings: Iterable[FindingRow]) -> None:
        """Adopt the open findings of an earlier coordinator about files that were not kept."""
        for row in findings:
            attempt_id = row["attempt_id"]
            if row["kind"] == NOT_KEPT and row["over_wall"] is None and attempt_id is not None:
                self._open[attempt_id] = row["finding_id"]

    def health(self) -> JsonObject:
        """Return whether all requested files are kept; if not, the reasons and their count."""
        reasons = {node: reason for node, reason in self._reasons.items() if reason}
        return {
            "healthy": not reasons,
            "reason": "; ".join(reasons.values()) or None,
            "not_kept": self._not_kept,
            "bytes": dict(self._bytes or {}),
            "limit_bytes": self._limits.bytes,
        }

    # --- payloads -------------------------------------------------------------------------
    async def make_room(self, node_id: str | None, job: IngestJob) -> Reservation:
        """Reserve room for the kept parts of a payload, or say why there is none.

        `settled` releases it.
        """
        node, announced = self._ingestors.node_of(node_id), int(job.get("bytes") or 0)
        stage = (job["attempt_id"], job["stage"])
        needed = announced + self._beside.get(stage, 0)
        try:
            async with self._changing:
                refused = await self._room(node, needed, (job["attempt_id"], job["step"]))
        except StagescopeError:
            logger.exception("whether there is room for kept files of node %s is not known", node)
            refused = ""
        reserved = 0 if refused else needed
        self._reserved[node] += reserved
        return Reservation(node, stage, announced, reserved, refused, self._counts)

    async def _room(self, node: str, needed: int, own: tuple[int, int | None]) -> str:
        most = self._limits.bytes
        for _ in range(_COUNTS):
            if self._bytes is not None and self._excess(node, needed) <= 0:
                break
            await self._count()
            if not self._added[node]:  # else some bytes may be counted twice
                break
        if (excess := self._excess(node, needed)) > 0:
            await self._free(node, excess + most // _SLACK, own)
        if self._excess(node, needed) <= 0:
            return ""
        held = most + self._excess(node, 0)
        return (
            f"kept files take {held} of the {most} bytes that they may on node {node}, and what "
            "is left is pinned or of this step"
        )

    def _excess(self, node: str, needed: int) -> int:
        held = 0 if self._bytes is None else self._bytes[node]
        return held + self._reserved[node] + needed - self._limits.bytes

    async def _count(self) -> None:
        self._counts += 1
        self._added.clear()
        try:
            rows = await asyncio.to_thread(self._catalogue.kept_bytes)
        except StagescopeError:
            self._bytes = None
            raise
        self._bytes = Counter({row["node_id"]: row["bytes"] for row in rows})
        self._bytes.update(self._added)

    async def _free(self, node: str, excess: int, own: tuple[int, int | None]) -> None:
        """Delete the oldest steps of a node, each completely, except the one that is being kept."""
        rows = await asyncio.to_thread(self._catalogue.kept_files, node_id=node, limit=_BATCH)
        rows = [row for row in rows if (row["attempt_id"], row["step"]) != own]
        chosen: list[KeptFile] = []
        for row in rows:
            of_last = chosen and _step_of(chosen[-1]) == _step_of(row)
            if excess <= 0 and not of_last:
                break
            chosen.append(row)
            excess -= row["bytes"]
        await self._delete(node, chosen)

    async def settled(self, reservation: Reservation, rows: Sequence[Put]) -> None:
        """Account for a payload for which room was reserved, after the commit of its rows."""
        node = reservation.node
        kept = [put for put in rows if put.table == "artifacts" and put.row.get("kind") == "kept"]
        # At once: payloads that wait for the lock, and for this room, would find none.
        self._reserved[node] -= reservation.bytes
        size = sum(put.row["bytes"] for put in kept)
        self._added[node] += size
        if self._bytes is not None:
            self._bytes[node] += size
        self._note_size(reservation, size)
        if self._counts != reservation.counts:
            await self._count_again()
        for put in kept:
            self._reasons[node] = ""
            await self._close(put.row["attempt_id"])
            await self._retire_steps(put.row["attempt_id"], put.row["step"])
        for put in rows:
            if put.table == "findings" and put.row.get("kind") == NOT_KEPT:
                self._reasons[node] = str(put.row["message"])
                self._open[put.row["attempt_id"]] = put.row["finding_id"]
                self._not_kept += 1

    async def _count_again(self) -> None:
        """Count what may have been counted twice.

        A count since a reservation has its rows or not: they were committed before it or after
        it. A count that begins now has them, and the rows of all that wait for the lock.
        """
        began = self._counts
        async with self._changing:
            if self._counts == began:
                await self._count()

    async def recount(self) -> None:
        """Count the kept bytes after somebody else deleted files."""
        async with self._changing:
            await self._count()

    def _note_size(self, reservation: Reservation, size: int) -> None:
        beside = max(size - reservation.announced, self._beside.pop(reservation.stage, 0))
        self._beside[reservation.stage] = beside
        while len(self._beside) > _MAX_STAGES:
            self._beside.popitem(last=False)

    async def _close(self, attempt_id: int) -> None:
        """End the findings about files of an attempt that were not kept."""
        if (finding_id := self._open.pop(attempt_id, None)) is not None:
            over = {"finding_id": finding_id, "over_wall": self._wall()}
            await self._write([Put("findings", over)])

    async def _retire_steps(self, attempt_id: int, step: int | None) -> None:
        most = self._limits.steps
        if most is None or step is None or step <= self._newest.get(attempt_id, -1):
            return
        self._newest[attempt_id] = step
        newest = await asyncio.to_thread(self._catalogue.newest_kept_steps, attempt_id, limit=most)
        if len(newest) == most:
            await self._retire(attempt_id=attempt_id, before_step=newest[-1])

    # --- age ------------------------------------------------------------------------------
    async def check(self) -> None:
        """Delete files that are too old, and rows of old steps; checks once a minute."""
        if self._mono() < self._checked + _CHECK_SECONDS:
            return
        self._checked = self._mono()
        if self._limits.days is not None:
            await self._retire(before_wall=self._wall() - self._limits.days * _DAY)
        if self._limits.row_steps is not None and not self._removing.locked():
            try:
                await self.remove_rows()
            except StagescopeError:
                logger.exception("rows of old steps could not be removed; it is tried again")

    # --- rows of the catalogue --------------------------------------------------------------
    async def remove_rows(self) -> None:
        """Remove the rows of old steps; the next call continues after an interruption."""
        async with self._removing:
            for run in await asyncio.to_thread(self._runs):
                while steps := await asyncio.to_thread(self._removable, run):
                    for row in steps:
                        await self._remove_rows_of(row)

    def _runs(self) -> list[str]:
        return [row["run"] for row in self._catalogue.runs(limit=_MAX_RUNS)]

    def _removable(self, run: str) -> list[RemovableStep]:
        keep = self._limits.row_steps
        return [] if keep is None else self._catalogue.removable_steps(run, keep, limit=_STEPS)

    async def _remove_rows_of(self, row: RemovableStep) -> None:
        """Remove a step's rows in small transactions, so that others can write in between."""
        key = {"attempt_id": row["attempt_id"], "step": row["step"]}
        if row["rows_removed"] is None:
            # From here on answers say so. Steps that were not aggregated never will be.
            begun = {**key, "rows_removed": False, "summary_mark": row["parts_mark"]}
            await self._write([Put("steps", begun)])
        while await asyncio.to_thread(self._catalogue.has_removable_rows, *key.values()):
            began = self._mono()
            await self._write([RemoveRows(**key, limit=_ROWS)])
            await asyncio.sleep(min(1.0, max(0.0, self._mono() - began)))
        # The last removal also deletes the works that its rows referred to.
        done = Put("steps", {**key, "rows_removed": True})
        await self._write([RemoveRows(**key, limit=_ROWS), done])

    async def _retire(
        self,
        *,
        before_wall: float | None = None,
        attempt_id: int | None = None,
        before_step: int | None = None,
    ) -> None:
        async with self._changing:
            rows = await asyncio.to_thread(
                self._catalogue.kept_files,
                before_wall=before_wall,
                attempt_id=attempt_id,
                before_step=before_step,
                limit=_BATCH,
            )
            nodes = dict.fromkeys(row["node_id"] for row in rows)
            await self._ingestors.learn_nodes(nodes)
            for node in nodes:
                if self._ingestors.node_of(node) == node:  # the files of a gone node are unknown
                    await self._delete(node, [row for row in rows if row["node_id"] == node])

    async def _delete(self, node: str, rows: Sequence[KeptFile]) -> None:
        if not rows:
            return
        gone = {*await self._ingestors.discard(node, [row["path"] for row in rows])}
        deleted = [row for row in rows if row["path"] in gone]
        now = self._wall()
        await self._write(
            [
                Put("artifacts", {"artifact_id": row["artifact_id"], "deleted_wall": now})
                for row in deleted
            ]
        )
        if self._bytes is not None:
            self._bytes[node] -= sum(row["bytes"] for row in deleted)

    # --- pins -----------------------------------------------------------------------------
    async def pin(self, attempt_id: int, step: int) -> PinAnswer:
        """Pin the payloads of a step on every node that has some.

        Kept files of a pinned step stay without that; the answer also counts them.
        """
        payloads, size, gone = 0, 0, 0
        reasons: list[str] = []
        for node, rows in (await self._ring_files(attempt_id, step)).items():
            pinned = await self._ingestors.pin(node, attempt_id, step)
            payloads, size = payloads + pinned.payloads, size + pinned.bytes
            reasons += [pinned.reason] if pinned.reason else []
            gone += 0 if pinned.reason else gone_of(rows, pinned.payloads)
        files = await asyncio.to_thread(
            self._catalogue.artifacts, attempt_id, step, kind="kept", limit=_MAX_FILES
        )
        payloads, size = payloads + len(files), size + sum(row["bytes"] for row in files)
        return PinAnswer(payloads, size, gone, tuple(reasons))

    async def unpin(self, attempt_id: int, step: int) -> bool:
        """Release the payloads of a step; return whether every node's ring did."""
        nodes = await self._ring_files(attempt_id, step)
        return all([await self._ingestors.unpin(node, attempt_id, step) for node in nodes])

    async def _ring_files(self, attempt_id: int, step: int) -> dict[str, list[ArtifactRow]]:
        """Return node -> rows of `artifacts` of a step's payloads in rings, deleted ones too."""
        rows = await asyncio.to_thread(
            self._catalogue.artifacts,
            attempt_id, step, kind="ring", deleted=None, limit=_MAX_FILES,
        )  # fmt: skip
        found: dict[str, list[ArtifactRow]] = {}
        for row in sorted(rows, key=lambda row: row["node_id"]):
            found.setdefault(row["node_id"], []).append(row)
        return found

    # --- the start ------------------------------------------------------------------------
    def is_adopted(self, node: str) -> bool:
        """Return whether the adoption of a node has begun."""
        return node in self._adopted

    async def adopt_once(self, node: str) -> None:
        """Adopt a node unless that was begun; if it fails, `is_adopted` is false again."""
        if node in self._adopted:
            return
        self._adopted.add(node)
        try:
            await self.adopt(node)
        except Exception:
            logger.exception("the kept files of node %s could not be read", node)
            self._adopted.discard(node)

    async def adopt(self, node: str) -> None:
        """Reconcile the catalogue with a node's disk: orphans get rows, missing files are ended."""
        async with self._changing:
            # Read the rows first: the file of a row was written before the row.
            known = {
                row["path"]: row for row in await asyncio.to_thread(self._catalogue.kept_places)
            }
            await self._ingestors.learn_nodes({row["node_id"] for row in known.values()})
            found = await self._ingestors.kept_files(node)
            rows = [*self._moved(node, known, found), *self._lost(node, known, found)]
            rows += await self._orphans(node, [path for path in found if path not in known])
            if rows:
                await self._write(rows)
            await self._count()

    def _moved(
        self, node: str, known: Mapping[str, KeptPlace], found: Iterable[str]
    ) -> Iterable[Put]:
        for path in found:
            row = known.get(path)
            if row is not None and self._ingestors.node_of(row["node_id"]) != row["node_id"]:
                yield Put("artifacts", {"artifact_id": row["artifact_id"], "node_id": node})

    def _lost(
        self, node: str, known: Mapping[str, KeptPlace], found: Iterable[str]
    ) -> Iterable[Put]:
        there = {*found}
        for path, row in known.items():
            if row["node_id"] == node and path not in there:
                gone = {"artifact_id": row["artifact_id"], "deleted_wall": self._wall()}
                yield Put("artifacts", gone)

    async def _orphans(self, node: str, paths: Sequence[str]) -> list[Put]:
        rows: list[Put] = []
        attempts: dict[str, dict[str, int]] = {}
        for begin in range(0, len(paths), _BATCH):
            batch = paths[begin : begin + _BATCH]
            for row, run, key in await self._ingestors.describe_kept(node, batch):
                if run not in attempts:
                    of_run = await asyncio.to_thread(self._catalogue.attempts, run)
                    attempts[run] = {each["key"]: each["attempt_id"] for each in of_run}
                # Attempts of another catalogue are unknown here: their files stay.
                attempt_id = attempts[run].get(key)
                if attempt_id is not None:
                    rows.append(Put("artifacts", {**row, "attempt_id": attempt_id}))
        return rows


def _step_of(row: KeptFile) -> tuple[int, int | None]:
    return row["attempt_id"], row["step"]
