"""Queries for kept files and the steps that have any."""

from __future__ import annotations

from typing import TypedDict

import sqlalchemy as sa

from stagescope_service.store.queries import overview
from stagescope_service.store.queries.reader import LIMIT, Filter, Reader, conditions, of_few
from stagescope_service.store.snapshot import Query
from stagescope_service.store.tables import TABLES, ArtifactRow, OperatorTableRow, artifacts, steps

_THERE = (artifacts.c.kind == "kept") & artifacts.c.deleted_wall.is_(None)
_OLDEST_FIRST = (artifacts.c.wall, artifacts.c.step, artifacts.c.artifact_id)


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


def kept_bytes() -> Query:
    """Select `node_id`, `files` and `bytes` of the kept files of each node."""
    size = sa.func.coalesce(sa.func.sum(artifacts.c.bytes), 0).label("bytes")
    return (
        sa.select(artifacts.c.node_id, sa.func.count().label("files"), size)
        .where(_THERE)
        .group_by(artifacts.c.node_id)
    )


def kept_places() -> Query:
    """Select `artifact_id`, `node_id` and `path` of every existing kept file."""
    return sa.select(artifacts.c.artifact_id, artifacts.c.node_id, artifacts.c.path).where(_THERE)


def kept_files(
    *,
    node_id: str | None = None,
    before_wall: float | None = None,
    attempt_id: int | None = None,
    before_step: int | None = None,
) -> Query:
    """Select the kept files that may be deleted (their step is not pinned), the oldest first.

    Args:
        node_id: only files on this node.
        before_wall: only files written before this time.
        attempt_id: only files of this attempt.
        before_step: only files of earlier steps.
    """
    where = [_THERE, sa.func.coalesce(steps.c.pinned, sa.false()) == sa.false()]
    if node_id is not None:
        where.append(artifacts.c.node_id == node_id)
    if before_wall is not None:
        where.append(artifacts.c.wall < before_wall)
    if attempt_id is not None:
        where += of_few("artifacts", attempt_id)
    if before_step is not None:
        where.append(artifacts.c.step < before_step)
    of_step = (steps.c.attempt_id == artifacts.c.attempt_id) & (steps.c.step == artifacts.c.step)
    names = ("artifact_id", "node_id", "path", "bytes", "attempt_id", "step")
    columns = [artifacts.c[name] for name in names]
    return (
        sa.select(*columns)
        .select_from(artifacts.outerjoin(steps, of_step))
        .where(*where)
        .order_by(*_OLDEST_FIRST)
    )


def newest_kept_steps(attempt_id: int) -> sa.Select[int]:
    """Select the steps of an attempt that have kept files, the newest first."""
    return (
        sa.select(artifacts.c.step)
        .where(_THERE, *of_few("artifacts", attempt_id), artifacts.c.step.is_not(None))
        .distinct()
        .order_by(artifacts.c.step.desc())
    )


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
            column = TABLES["artifacts"].c.deleted_wall
            where.append(column.is_not(None) if deleted else column.is_(None))
        order = "step stage rank artifact_id"
        return self._page(ArtifactRow, "artifacts", where, order, limit)

    def placed_artifacts(self, prefix: str) -> list[ArtifactRow]:
        """Return the artifacts whose path begins with `prefix`."""
        table = TABLES["artifacts"]
        where = table.c.path.startswith(prefix, autoescape=True)
        return self._rows(ArtifactRow, sa.select(table).where(where))

    def placed_operators(self, prefix: str) -> list[OperatorTableRow]:
        """Return the operator tables whose path begins with `prefix`."""
        table = TABLES["operators"]
        where = table.c.path.startswith(prefix, autoescape=True)
        return self._rows(OperatorTableRow, sa.select(table).where(where))

    def kept_steps(self, attempt_id: int) -> list[int]:
        """Return the steps that have payload files, the newest first."""
        table = TABLES["artifacts"].c
        query = (
            sa.select(table.step)
            .where(*of_few("artifacts", attempt_id), table.step.is_not(None))
            .where(table.kind.in_(("kept", "ring")), table.deleted_wall.is_(None))
            .distinct()
            .order_by(table.step.desc())
        )
        return self._values(query)

    def pinned_steps(self, run: str | None = None) -> list[PinnedStep]:
        """Return run, attempt and step of the steps whose payloads are pinned, newest first."""
        return self._rows(PinnedStep, overview.pinned_steps(run))

    def kept_bytes(self) -> list[KeptBytes]:
        """Return `node_id`, `files` and `bytes` of the kept files of each node."""
        return self._rows(KeptBytes, kept_bytes())

    def kept_places(self) -> list[KeptPlace]:
        """Return `artifact_id`, `node_id` and `path` of every existing kept file."""
        return self._rows(KeptPlace, kept_places())

    def kept_files(
        self,
        *,
        node_id: str | None = None,
        before_wall: float | None = None,
        attempt_id: int | None = None,
        before_step: int | None = None,
        limit: int = LIMIT,
    ) -> list[KeptFile]:
        """Return the kept files that may be deleted, the oldest first; see `files.kept_files`."""
        query = kept_files(
            node_id=node_id, before_wall=before_wall, attempt_id=attempt_id, before_step=before_step
        )
        return self._rows(KeptFile, query.limit(limit))

    def newest_kept_steps(self, attempt_id: int, *, limit: int) -> list[int]:
        """Return the newest steps of an attempt that have kept files, newest first."""
        return self._values(newest_kept_steps(attempt_id).limit(limit))
