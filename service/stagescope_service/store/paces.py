"""How the ranks of an attempt went through the parts of its steps, summed up by the database."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from stagescope.schema import PART_FIELDS
from stagescope_service.store.snapshot import Query
from stagescope_service.store.tables import stages


def paces(attempt_id: int, steps: Sequence[int]) -> Query:
    """Select per step, role, stage and part: `first` and `last` begin, `longest` seconds.

    `first` and `last` are Unix seconds of the service's clock, `longest` is monotonic; superseded
    stages do not count.
    """
    place = [stages.c[name] for name in ("step", "role", "stage", *PART_FIELDS)]
    begun = stages.c.begin_wall + sa.func.coalesce(stages.c.clock_offset, 0.0)
    return (
        sa.select(
            *place,
            sa.func.min(begun).label("first"),
            sa.func.max(begun).label("last"),
            sa.func.max(stages.c.end_mono - stages.c.begin_mono).label("longest"),
        )
        .where(
            stages.c.attempt_id == attempt_id,
            stages.c.step.in_(list(steps)),
            sa.func.coalesce(stages.c.superseded, sa.false()) == sa.false(),
        )
        .group_by(*place)
    )
