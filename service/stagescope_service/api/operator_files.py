"""Where the API reads an operator table: in its place, or in a copy from the node that has it.

A copy is kept under the checksum of its content, so that it can never be stale.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from stagescope.wire.errors import NotFound, NotReady, StoreError, Unreachable
from stagescope_service.core.operator_tables import TABLE_WRITTEN
from stagescope_service.store.artifacts import file_checksum
from stagescope_service.store.tensorfile import disk_errors

PIECE: Final = 4 << 20
_MOST_COPIES: Final = 1 << 30
"""Bytes of copies that are kept; the ones used longest ago go first."""

Row = Mapping[str, Any]


class Nodes(Protocol):
    """The files of other nodes."""

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of a file on a node.

        Raises:
            Unreachable: the node is gone.
            NotFound, Forbidden: there is no such file, or it may not be read.
        """
        ...


class OperatorFiles:
    """Finds the file of a row of `operators`; used from several threads."""

    def __init__(self, nodes: Nodes, copies: Path) -> None:
        self._nodes = nodes
        self._copies = copies
        self._checked: dict[str, tuple[int, int, str]] = {}
        self._fetching = threading.Lock()

    def path(self, row: Row) -> Path:
        """Return a local file with the table's content.

        Raises:
            NotReady: the dump was announced and is not read yet.
            StoreError: the dump could not be read.
            Unreachable: the node that has the table is gone.
        """
        if row["digested_mark"] != row["mark"]:
            raise NotReady(
                f"the dump of {place(row)} is being read", advice="ask again in a moment"
            )
        if row["state"] != TABLE_WRITTEN:
            kind = Unreachable if row["state"] == "unreachable" else StoreError
            raise kind(f"the dump of {place(row)} has no operators: {row['reason']}")
        here = Path(row["path"])
        if self._holds(here, row):
            return here
        with self._fetching:
            copy = self._copies / f"{row['checksum']}.parquet"
            if not copy.exists():
                self._fetch(row, copy)
            with contextlib.suppress(OSError):
                os.utime(copy)
            return copy

    def _holds(self, path: Path, row: Row) -> bool:
        """Whether a file is there with this content; read once, then known by its time."""
        try:
            stat = path.stat()
            if stat.st_size != row["bytes"]:
                return False
            known = self._checked.get(str(path))
            if known is None or known[:2] != (stat.st_mtime_ns, stat.st_ino):
                known = (stat.st_mtime_ns, stat.st_ino, file_checksum(path))
                self._checked[str(path)] = known
        except (OSError, StoreError):
            return False
        return bool(known[2] == row["checksum"])

    def _fetch(self, row: Row, copy: Path) -> None:
        with disk_errors(copy):
            self._copies.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._copies)
        try:
            with disk_errors(copy), os.fdopen(descriptor, "wb") as file:
                while piece := self._piece(row, file.tell()):
                    file.write(piece)
            if file_checksum(Path(temporary)) != row["checksum"]:
                raise Unreachable(
                    f"what lies at {row['path']} is not the operators of {place(row)} any more"
                )
            os.replace(temporary, copy)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        self._make_room(copy)

    def _piece(self, row: Row, offset: int) -> bytes:
        if row["node_id"] is None:
            raise Unreachable(f"the operators of {place(row)} are gone: {row['path']}")
        try:
            return self._nodes.read_artifact(
                node_id=row["node_id"], path=row["path"], offset=offset, size=PIECE
            )
        except NotFound as error:
            raise Unreachable(
                f"the operators of {place(row)} are gone from node {row['node_id']}: {row['path']}"
            ) from error

    def _make_room(self, newest: Path) -> None:
        with disk_errors(self._copies):
            copies = [path for path in self._copies.glob("*.parquet") if path != newest]
            copies.sort(key=lambda path: path.stat().st_mtime, reverse=True)
            used = newest.stat().st_size
            for path in copies:
                used += path.stat().st_size
                if used > _MOST_COPIES:
                    path.unlink()


def place(row: Row) -> str:
    """Return where a table belongs, for a reader."""
    return f"{row['stage']} {row['role']}/{row['rank']} in step {row['step']}"
