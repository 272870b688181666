"""Which kept files there are and which may go, as selects; files of pinned steps never do."""

from __future__ import annotations

from typing import Any, TypeAlias

import sqlalchemy as sa

from stagescope_service.store.tables import artifacts, steps

Query: TypeAlias = "sa.Select[*tuple[Any, ...]]"

_THERE = (artifacts.c.kind == "kept") & artifacts.c.deleted_wall.is_(None)
_OLDEST_FIRST = (artifacts.c.wall, artifacts.c.step, artifacts.c.artifact_id)


def kept_bytes() -> Query:
    """Select `node_id`, `files` and `bytes` of what each node holds."""
    size = sa.func.coalesce(sa.func.sum(artifacts.c.bytes), 0).label("bytes")
    return (
        sa.select(artifacts.c.node_id, sa.func.count().label("files"), size)
        .where(_THERE)
        .group_by(artifacts.c.node_id)
    )


def kept_places() -> Query:
    """Select `artifact_id`, `node_id` and `path` of every kept file that is there."""
    return sa.select(artifacts.c.artifact_id, artifacts.c.node_id, artifacts.c.path).where(_THERE)


def kept_files(
    *,
    node_id: str | None = None,
    before_wall: float | None = None,
    attempt_id: int | None = None,
    before_step: int | None = None,
) -> Query:
    """Select the kept files that may go, the oldest first: those of no pinned step.

    Args:
        node_id: only this node's.
        before_wall: only those written before.
        attempt_id: only this attempt's.
        before_step: only those of earlier steps.
    """
    where = [_THERE, sa.func.coalesce(steps.c.pinned, sa.false()) == sa.false()]
    if node_id is not None:
        where.append(artifacts.c.node_id == node_id)
    if before_wall is not None:
        where.append(artifacts.c.wall < before_wall)
    if attempt_id is not None:
        where.append(artifacts.c.attempt_id == attempt_id)
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


def newest_kept_steps(attempt_id: int) -> Query:
    """Select the steps of an attempt of which something is kept, the newest first."""
    return (
        sa.select(artifacts.c.step)
        .where(_THERE, artifacts.c.attempt_id == attempt_id, artifacts.c.step.is_not(None))
        .distinct()
        .order_by(artifacts.c.step.desc())
    )
