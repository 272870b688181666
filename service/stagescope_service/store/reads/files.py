"""Files that are kept, and the steps that hold them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from stagescope_service.store import connect, overview, retention
from stagescope_service.store.base import Row
from stagescope_service.store.reads.reader import LIMIT, Filter, Reader, conditions
from stagescope_service.store.tables import TABLES


class FileReads(Reader):
    """Questions about kept files and pinned steps."""

    def artifacts(
        self,
        attempt_id: Filter = None,
        step: Filter = None,
        *,
        stage: Filter = None,
        rank: Filter = None,
        kind: Filter = None,
        node_id: Filter = None,
        incarnation: Filter = None,
        deleted: bool | None = False,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return files that are kept, by step and rank; deleted ones only when asked."""
        where = conditions("artifacts", locals())
        if deleted is not None:
            column = TABLES["artifacts"].c.deleted_wall
            where.append(column.is_not(None) if deleted else column.is_(None))
        return self._page("artifacts", where, "step stage rank artifact_id", limit, offset)

    def kept_steps(self, attempt_id: int) -> list[int]:
        """Return the steps of which payload files are there, the newest first."""
        table = TABLES["artifacts"].c
        query = (
            sa.select(table.step)
            .where(table.attempt_id == attempt_id, table.step.is_not(None))
            .where(table.kind.in_(("kept", "ring")), table.deleted_wall.is_(None))
            .distinct()
            .order_by(table.step.desc())
        )
        with connect.explained(self._where), self._connect() as connection:
            return [int(step) for step in connection.scalars(query)]

    def pinned_steps(self, run: str | None = None) -> list[Row]:
        """Return run, attempt and step of the steps whose payloads are pinned, newest first."""
        return self._rows(overview.pinned_steps(run))

    def kept_bytes(self) -> list[Row]:
        """Return `node_id`, `files` and `bytes` of the kept files of each node."""
        return self._rows(retention.kept_bytes())

    def kept_places(self) -> list[Row]:
        """Return `artifact_id`, `node_id` and `path` of every kept file that is there."""
        return self._rows(retention.kept_places())

    def kept_files(self, *, limit: int = LIMIT, **which: Any) -> list[Row]:
        """Return kept files that may go, the oldest first; `which` as `retention.kept_files`."""
        return self._rows(retention.kept_files(**which).limit(limit))

    def newest_kept_steps(self, attempt_id: int, *, limit: int) -> list[int]:
        """Return the newest steps of an attempt of which something is kept, newest first."""
        found = self._rows(retention.newest_kept_steps(attempt_id).limit(limit))
        return [row["step"] for row in found]
