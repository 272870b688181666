"""What was ordered of ranks, and the dumps and operator tables that came of it."""

from __future__ import annotations

import sqlalchemy as sa

from stagescope_service.store.contract import Row
from stagescope_service.store.queries.reader import LIMIT, Filter, Reader, conditions
from stagescope_service.store.tables import TABLES


class CaptureReads(Reader):
    """Questions about captures, dumps and operators."""

    def captures(self, *, run: Filter = None, state: Filter = None) -> list[Row]:
        """Return captures, the last ordered first; removed ones too."""
        return self._page("captures", conditions("captures", locals()), "-created_wall capture_id")

    def capture(self, capture_id: str) -> Row | None:
        """Return one capture, or None."""
        return self._one("captures", capture_id=capture_id)

    def captured(self, capture_id: str, *, limit: int = LIMIT) -> list[Row]:
        """Return the dumps of a capture, by attempt, step, stage, role and rank."""
        return self._page(
            "dumps",
            [TABLES["dumps"].c.capture_id == capture_id, TABLES["dumps"].c.step.is_not(None)],
            "attempt_id step stage role rank occurrence epoch minibatch microbatch incarnation",
            limit,
        )

    def dumps(
        self,
        attempt_id: Filter = None,
        step: Filter = None,
        *,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        capture_id: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return msprobe dumps by step, stage and rank, in every state."""
        return self._page(
            "dumps",
            conditions("dumps", locals()),
            "step stage role rank work_key",
            limit,
            offset,
        )

    def operators(
        self,
        attempt_id: Filter = None,
        step: Filter = None,
        *,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        capture_id: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return the operator tables of dumps, the earliest dump first."""
        return self._page(
            "operators",
            conditions("operators", locals()),
            "step announced_wall role rank work_key capture_id incarnation",
            limit,
            offset,
        )

    def operator_steps(self, attempt_id: int, *, limit: int = 8) -> list[int]:
        """Return the newest steps of an attempt that have operators, newest first."""
        table = TABLES["operators"]
        of_attempt = (table.c.attempt_id == attempt_id) & table.c.step.is_not(None)
        query = sa.select(table.c.step).where(of_attempt).distinct()
        found = self._rows(query.order_by(table.c.step.desc()).limit(limit))
        return [row["step"] for row in found]
