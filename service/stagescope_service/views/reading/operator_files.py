"""Finds the files of operator tables: the table itself, or a copy fetched from its node.

A copy is stored under the checksum of its content, so that it is never stale.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from stagescope_service.core.operators import TABLE_WRITTEN
from stagescope_service.store.artifacts import file_checksum
from stagescope_service.store.tables import OperatorTableRow
from stagescope_service.store.tensorfile import disk_errors
from stagescope_wire.errors import NotFound, NotReady, StoreError, Unreachable

CHUNK: Final = 4 << 20
"""Bytes of one read from another node."""
_MAX_CHECKSUMS: Final = 4096
"""Files whose checksums are remembered."""
_MAX_COPIES: Final = 1 << 30
"""Most bytes of stored copies; the least recently used are deleted first."""


class Nodes(Protocol):
    """Reads files of other nodes."""

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of a file on a node.

        Raises:
            Unreachable: the node is gone.
            NotFound, Forbidden: there is no such file, or it may not be read.
        """
        ...


class OperatorFiles:
    """Finds the file of a row of `operators`; thread-safe."""

    def __init__(self, nodes: Nodes, copies: Path) -> None:
        self._nodes = nodes
        self._copies = copies
        self._checksums: dict[str, tuple[int, int, str]] = {}
        """Path -> its modification time, inode and checksum; the last used comes last."""
        self._lock = threading.Lock()
        self._fetching: dict[str, tuple[threading.Lock, int]] = {}
        """Checksum -> the lock of its copy, and how many threads hold or wait for it."""

    def path(self, row: OperatorTableRow) -> Path:
        """Return a local file with the table's content.

        Raises:
            NotReady: the dump was announced but not read yet.
            StoreError: the dump could not be read.
            Unreachable: the node that has the table is gone.
        """
        if row["digested_mark"] != row["mark"]:
            raise NotReady(
                f"the dump of {describe_table(row)} is being read", advice="ask again in a moment"
            )
        if row["state"] != TABLE_WRITTEN:
            kind = Unreachable if row["state"] == "unreachable" else StoreError
            raise kind(f"the dump of {describe_table(row)} has no operators: {row['reason']}")
        path = Path(row["path"] or "")
        if self._has_content(path, row):
            return path
        with self._alone_with(str(row["checksum"])):
            copy = self._copies / f"{row['checksum']}.parquet"
            if not copy.exists():
                self._fetch(row, copy)
            with contextlib.suppress(OSError):
                os.utime(copy)
            return copy

    @contextlib.contextmanager
    def _alone_with(self, checksum: str) -> Iterator[None]:
        """Let one thread at a time fetch a copy; those of other copies do not wait for it."""
        with self._lock:
            lock, users = self._fetching.get(checksum, (threading.Lock(), 0))
            self._fetching[checksum] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._fetching.pop(checksum)
                if users > 1:
                    self._fetching[checksum] = (lock, users - 1)

    def _has_content(self, path: Path, row: OperatorTableRow) -> bool:
        """Return whether a file has the table's content; it is read again when it changed."""
        try:
            stat = path.stat()
            if stat.st_size != row["bytes"]:
                return False
            with self._lock:
                cached = self._checksums.pop(str(path), None)
            if cached is None or cached[:2] != (stat.st_mtime_ns, stat.st_ino):
                cached = (stat.st_mtime_ns, stat.st_ino, file_checksum(path))
            with self._lock:
                self._checksums[str(path)] = cached
                while len(self._checksums) > _MAX_CHECKSUMS:
                    del self._checksums[next(iter(self._checksums))]
        except (OSError, StoreError):
            return False
        return cached[2] == row["checksum"]

    def _fetch(self, row: OperatorTableRow, copy: Path) -> None:
        with disk_errors(copy):
            self._copies.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._copies)
        try:
            with disk_errors(copy), os.fdopen(descriptor, "wb") as file:
                while chunk := self._read_chunk(row, file.tell()):
                    file.write(chunk)
            if file_checksum(Path(temporary)) != row["checksum"]:
                raise Unreachable(
                    f"what lies at {row['path']} is not the operators of {describe_table(row)} "
                    "any more"
                )
            os.replace(temporary, copy)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        self._delete_oldest(copy)

    def _read_chunk(self, row: OperatorTableRow, offset: int) -> bytes:
        if row["node_id"] is None:
            raise Unreachable(f"the operators of {describe_table(row)} are gone: {row['path']}")
        try:
            return self._nodes.read_artifact(
                node_id=row["node_id"], path=row["path"] or "", offset=offset, size=CHUNK
            )
        except NotFound as error:
            raise Unreachable(
                f"the operators of {describe_table(row)} are gone from node {row['node_id']}: "
                f"{row['path']}"
            ) from error

    def _delete_oldest(self, newest: Path) -> None:
        """Delete the least recently used copies beyond the limit."""
        with disk_errors(self._copies):
            copies = []
            for path in self._copies.glob("*.parquet"):
                with contextlib.suppress(FileNotFoundError):  # another thread deletes some, too
                    copies.append((path.stat(), path))
            copies.sort(key=lambda each: (each[1] == newest, each[0].st_mtime), reverse=True)
            used = 0
            for stat, path in copies:
                used += stat.st_size
                if used > _MAX_COPIES and path != newest:
                    path.unlink(missing_ok=True)


def describe_table(row: OperatorTableRow) -> str:
    """Return the stage, rank and step of a table as text."""
    return f"{row['stage']} {row['role']}/{row['rank']} in step {row['step']}"
