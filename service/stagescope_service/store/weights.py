"""Questions about recorded weights, as selects."""

from __future__ import annotations

from typing import Any, TypeAlias

import sqlalchemy as sa

from stagescope_service.store.tables import TABLES

Query: TypeAlias = "sa.Select[*tuple[Any, ...]]"

_records = TABLES["weights"]
_verdicts = TABLES["weight_verdicts"]


def newest_version(attempt_id: int) -> Query:
    """Select the highest version that an attempt recorded, as `version` (null: none)."""
    highest = sa.func.max(_records.c.version).label("version")
    return sa.select(highest).where(_records.c.attempt_id == attempt_id)


def versions_of_step(attempt_id: int, step: int) -> Query:
    """Select the versions that were recorded at a step, the highest first."""
    of_step = (_records.c.attempt_id == attempt_id) & (_records.c.step == step)
    return sa.select(_records.c.version).where(of_step).distinct().order_by(sa.desc("version"))


def incomplete(attempt_id: int, before: int) -> Query:
    """Select the versions below `before` whose verdict was not complete."""
    unsettled = (_verdicts.c.attempt_id == attempt_id) & (_verdicts.c.version < before)
    return sa.select(_verdicts.c.version).where(unsettled, _verdicts.c.complete == sa.false())


def unweighed() -> Query:
    """Select (attempt_id, version) of which more was recorded than the verdict rests on."""
    recorded = (
        sa.select(_records.c.attempt_id, _records.c.version, sa.func.count().label("records"))
        .group_by(_records.c.attempt_id, _records.c.version)
        .subquery()
    )
    same = (_verdicts.c.attempt_id == recorded.c.attempt_id) & (
        _verdicts.c.version == recorded.c.version
    )
    return (
        sa.select(recorded.c.attempt_id, recorded.c.version)
        .outerjoin(_verdicts, same)
        .where(sa.func.coalesce(_verdicts.c.records, 0) < recorded.c.records)
        .order_by(recorded.c.attempt_id, recorded.c.version)
    )
