"""Queries for kept files and the steps that have any."""

from __future__ import annotations

from typing import TypedDict

import sqlalchemy as sa

from stagescope_service.store.queries import overview
from stagescope_service.store.queries.reader import LIMIT, Filter, R, Reader, conditions, of_few
from stagescope_service.store.tables import (
    ArtifactRow,
    OperatorTableRow,
    artifacts,
    operators,
    steps,
)

_THERE = (artifacts.c.kind == "kept") & artifacts.c.deleted_wall.is_(None)


class KeptBytes(TypedDict):
    """The kept files of a node: how many, and their bytes."""

    node_id: str
    files: int
    bytes: int


class KeptPlace(TypedDict):
    """Where a kept file lies."""

    artifact_id: str
    node_id: str
    path: str


class KeptFile(KeptPlace):
    """A kept file, its size and its step."""

    bytes: int
    attempt_id: int
    step: int | None


class PinnedStep(TypedDict):
    """A step whose payloads are pinned."""

    run: str
    attempt: int
    """The attempt's number."""
    step: int


class FileQueries(Reader):
    """Queries for kept files and pinned steps."""

    def artifacts(
        self,
        attempt_id: Filter = None,
        step: Filter = None,
        *,
        kind: Filter = None,
        incarnation: Filter = None,
        deleted: bool | None = False,
        limit: int = LIMIT,
    ) -> list[ArtifactRow]:
        """Return artifacts by step and rank, without deleted ones by default."""
        where = conditions(
            "artifacts", attempt_id=attempt_id, step=step, kind=kind, incarnation=incarnation
        )
        if deleted is not None:
            column = artifacts.c.deleted_wall
            where.append(column.is_not(None) if deleted else column.is_(None))
        order = "step stage rank artifact_id"
        return self._page(ArtifactRow, "artifacts", where, order, limit)

    def placed_artifacts(self, prefix: str) -> list[ArtifactRow]:
        """Return the artifacts whose path begins with `prefix`."""
        return self._placed(ArtifactRow, artifacts, prefix)

    def placed_operators(self, prefix: str) -> list[OperatorTableRow]:
        """Return the operator tables whose path begins with `prefix`."""
        return self._placed(OperatorTableRow, operators, prefix)

    def _placed(self, row: type[R], table: sa.Table, prefix: str) -> list[R]:
        where = table.c.path.startswith(prefix, autoescape=True)
        return self._rows(row, sa.select(table).where(where))

    def kept_steps(self, attempt_id: int) -> list[int]:
        """Return the steps that have payload files, the newest first."""
        table = artifacts.c
        kept = table.kind.in_(("kept", "ring")) & table.deleted_wall.is_(None)
        return self._values(_steps_with(attempt_id, kept))

    def pinned_steps(self, run: str | None = None) -> list[PinnedStep]:
        """Return run, attempt and step of the steps whose payloads are pinned, newest first."""
        return self._rows(PinnedStep, overview.pinned_steps(run))

    def kept_bytes(self) -> list[KeptBytes]:
        """Return `node_id`, `files` and `bytes` of the kept files of each node."""
        node_id = artifacts.c.node_id
        size = sa.func.coalesce(sa.func.sum(artifacts.c.bytes), 0).label("bytes")
        query = sa.select(node_id, sa.func.count().label("files"), size).where(_THERE)
        return self._rows(KeptBytes, query.group_by(node_id))

    def kept_places(self) -> list[KeptPlace]:
        """Return `artifact_id`, `node_id` and `path` of every existing kept file."""
        place = (artifacts.c.artifact_id, artifacts.c.node_id, artifacts.c.path)
        return self._rows(KeptPlace, sa.select(*place).where(_THERE))

    def kept_files(
        self,
        *,
        node_id: str | None = None,
        before_wall: float | None = None,
        attempt_id: int | None = None,
        before_step: int | None = None,
        limit: int = LIMIT,
    ) -> list[KeptFile]:
        """Return the kept files that may be deleted (their step is not pinned), the oldest first.

        Args:
            node_id: only files on this node.
            before_wall: only files written before this time.
            attempt_id: only files of this attempt.
            before_step: only files of earlier steps.
            limit: maximum number of files.
        """
        table = artifacts.c
        where = [_THERE, sa.func.coalesce(steps.c.pinned, sa.false()) == sa.false()]
        where += conditions("artifacts", node_id=node_id) + of_few("artifacts", attempt_id)
        where += [table.wall < before_wall] if before_wall is not None else []
        where += [table.step < before_step] if before_step is not None else []
        of_step = (steps.c.attempt_id == table.attempt_id) & (steps.c.step == table.step)
        query = (
            sa.select(*(table[name] for name in KeptFile.__annotations__))
            .select_from(artifacts.outerjoin(steps, of_step))
            .where(*where)
            .order_by(table.wall, table.step, table.artifact_id)
        )
        return self._rows(KeptFile, query.limit(limit))

    def newest_kept_steps(self, attempt_id: int, *, limit: int) -> list[int]:
        """Return the newest steps of an attempt that have kept files, newest first."""
        return self._values(_steps_with(attempt_id, _THERE).limit(limit))


def _steps_with(attempt_id: int, *where: sa.ColumnElement[bool]) -> sa.Select[int]:
    step = artifacts.c.step
    query = sa.select(step).where(*where, *of_few("artifacts", attempt_id), step.is_not(None))
    return query.distinct().order_by(step.desc())
