"""What the service noticed, what was lost, and the rules that it looks by."""

from __future__ import annotations

from stagescope_service.store.base import Row
from stagescope_service.store.reads.reader import LIMIT, Filter, Reader, conditions


class NoticedReads(Reader):
    """Questions about findings, losses, stacks, triggers and what they fired."""

    def findings(
        self,
        *,
        run: Filter = None,
        attempt_id: Filter = None,
        step: Filter = None,
        kind: Filter = None,
        severity: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return findings, the last seen first."""
        return self._page(
            "findings", conditions("findings", locals()), "-last_wall finding_id", limit, offset
        )

    def losses(
        self,
        *,
        run: Filter = None,
        attempt_id: Filter = None,
        step: Filter = None,
        kind: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return losses, the last first."""
        return self._page("losses", conditions("losses", locals()), "-wall loss_id", limit, offset)

    def stacks(
        self,
        *,
        attempt_id: Filter = None,
        step: Filter = None,
        request_id: Filter = None,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        source: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return the stacks of processes, asked for or written by watchdogs, the newest first."""
        order = "-wall role rank incarnation request_id"
        return self._page("stacks", conditions("stacks", locals()), order, limit, offset)

    def trigger_rules(self) -> Row | None:
        """Return the rules of triggers that were given last; `document` holds secrets."""
        found = self._page("trigger_rules", [], "-revision", 1)
        return found[0] if found else None

    def firings(
        self,
        *,
        run: Filter = None,
        attempt_id: Filter = None,
        step: Filter = None,
        rule: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return what fired, the last first; firings that were taken back too."""
        return self._page(
            "firings",
            conditions("firings", locals()),
            "-wall -attempt_id -step rule",
            limit,
            offset,
        )
