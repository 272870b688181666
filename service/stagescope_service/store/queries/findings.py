"""Queries for findings, losses, stacks, trigger rules and their firings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import sqlalchemy as sa

from stagescope_service.store.contract import Row
from stagescope_service.store.queries.reader import LIMIT, Filter, Reader, conditions
from stagescope_service.store.tables import (
    TABLES,
)

EventsTable = Literal["findings", "losses", "firings"]
AnyOf: TypeAlias = Mapping[str, Sequence[str]]
"""Column -> values; a row with one of the values of any of the columns is found."""

_OUTLINES: Final[dict[str, tuple[str, str]]] = {
    "findings": (
        "finding_id attempt_id step stage role rank kind severity message count first_wall "
        "last_wall over_wall",
        "-last_wall finding_id",
    ),
    "losses": (
        "loss_id attempt_id step stage role rank kind reason count bytes wall", "-wall loss_id",
    ),
    "firings": (
        "run attempt_id step rule stage role rank round message wall actions withdrawn_wall",
        "-wall -attempt_id -step rule",
    ),
}  # fmt: skip
"""Table -> columns that describe a row briefly, and the order with the newest first."""


class FindingQueries(Reader):
    """Queries for findings, losses, stacks, trigger rules and their firings."""

    def outline(
        self,
        name: EventsTable,
        *,
        run: Filter = None,
        attempt_id: Filter = None,
        step: Filter = None,
        kind: Filter = None,
        severity: Filter = None,
        any_of: AnyOf | None = None,
        limit: int = LIMIT,
    ) -> list[Row]:
        """Return the findings, losses or firings without their advice, the newest first.

        Findings that name an operator or a rule's metric include their `evidence`.
        """
        table = TABLES[name]
        columns, order = _OUTLINES[name]
        shown: list[sa.ColumnElement[Any]] = [table.c[column] for column in columns.split()]
        if name == "findings":
            named = (table.c.kind == "non_finite_operator") | table.c.kind.startswith(
                "trigger_", autoescape=True
            )
            shown.append(sa.case((named, table.c.evidence)).label("evidence"))
        by = [
            table.c[column[1:]].desc() if column.startswith("-") else table.c[column]
            for column in order.split()
        ]
        where = _conditions(name, locals())
        query = sa.select(*shown).where(*where).order_by(*by)
        return self._rows(query.limit(limit))

    def kinds(
        self, name: EventsTable, *, run: Filter = None, attempt_id: Filter = None
    ) -> list[str]:
        """Return the existing kinds of findings or losses, or the rules with firings."""
        table = TABLES[name]
        column = table.c["rule" if name == "firings" else "kind"]
        query = sa.select(column.label("kind")).where(*conditions(name, locals())).distinct()
        return [str(row["kind"]) for row in self._rows(query.order_by(column))]

    def finding(self, finding_id: str) -> list[Row]:
        """Return the findings whose id has this prefix, at most two."""
        column = TABLES["findings"].c.finding_id
        query = sa.select(TABLES["findings"]).where(column.startswith(finding_id, autoescape=True))
        return self._rows(query.order_by(column).limit(2))

    def findings(
        self,
        *,
        finding_id: Filter = None,
        run: Filter = None,
        attempt_id: Filter = None,
        step: Filter = None,
        kind: Filter = None,
        severity: Filter = None,
        any_of: AnyOf | None = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return findings, the most recently seen first."""
        return self._page(
            "findings",
            _conditions("findings", locals()),
            "-last_wall finding_id",
            limit,
            offset,
        )

    def places_of_finding(
        self,
        kind: str,
        attempts: Sequence[int],
        steps: Sequence[int] | None = None,
        *,
        first: int | None = None,
        last: int | None = None,
    ) -> list[Row]:
        """Return `attempt_id`, `step`, `stage`, `role`, `rank` of findings of a kind, in order.

        Args:
            kind: the kind.
            attempts: ids of the attempts.
            steps: the steps; None selects all from `first` to `last`, both included.
            first, last: None means no bound.
        """
        table = TABLES["findings"]
        columns = [table.c[name] for name in ("attempt_id", "step", "role", "stage", "rank")]
        where = [table.c.kind == kind, columns[0].in_(list(attempts)), columns[1].is_not(None)]
        where += [columns[1].in_(list(steps))] if steps is not None else []
        where += [columns[1] >= first] if first is not None else []
        where += [columns[1] <= last] if last is not None else []
        return self._rows(sa.select(*columns).where(*where).order_by(*columns))

    def losses(
        self,
        *,
        loss_id: Filter = None,
        run: Filter = None,
        attempt_id: Filter = None,
        step: Filter = None,
        kind: Filter = None,
        any_of: AnyOf | None = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return losses, the newest first."""
        return self._page("losses", _conditions("losses", locals()), "-wall loss_id", limit, offset)

    def lost_payloads(
        self, attempts: Sequence[int], *, first: int | None = None, last: int | None = None
    ) -> list[Row]:
        """Return `attempt_id`, `step`, `count` and a `reason` of steps that lost payloads."""
        table = TABLES["losses"]
        by = (table.c.attempt_id, table.c.step)
        where = [by[0].in_(list(attempts)), by[1].is_not(None), table.c.kind == "payload"]
        where += [by[1] >= first] if first is not None else []
        where += [by[1] <= last] if last is not None else []
        count = sa.func.sum(sa.func.coalesce(table.c.count, 1)).label("count")
        query = sa.select(*by, count, sa.func.min(table.c.reason).label("reason")).where(*where)
        return self._rows(query.group_by(*by))

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
        """Return process stacks, requested or written by watchdogs, the newest first."""
        order = "-wall role rank incarnation request_id"
        return self._page("stacks", conditions("stacks", locals()), order, limit, offset)

    def trigger_rules(self) -> Row | None:
        """Return the latest trigger rules, or None; `document` contains secrets."""
        found = self._page("trigger_rules", [], "-revision", 1)
        return found[0] if found else None

    def firings(
        self,
        *,
        run: Filter = None,
        attempt_id: Filter = None,
        step: Filter = None,
        rule: Filter = None,
        any_of: AnyOf | None = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return firings, the newest first, including withdrawn ones."""
        return self._page(
            "firings",
            _conditions("firings", locals()),
            "-wall -attempt_id -step rule",
            limit,
            offset,
        )


def _conditions(name: EventsTable, arguments: Mapping[str, Any]) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of a query's arguments: its filters, and `any_of`."""
    columns, any_of = TABLES[name].c, arguments["any_of"]
    chosen = [] if any_of is None else [columns[key].in_([*any_of[key]]) for key in any_of]
    return [*conditions(name, arguments), *([sa.or_(*chosen)] if chosen else [])]
