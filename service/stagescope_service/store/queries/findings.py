"""Queries for findings, losses, stacks, trigger rules and their firings."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import sqlalchemy as sa
from typing_extensions import ReadOnly, TypedDict, Unpack

from stagescope_service.store.queries.reader import (
    LIMIT,
    Filter,
    R,
    RankFilter,
    Reader,
    ScopeFilter,
    StepWindow,
    conditions,
    in_window,
    order_of,
)
from stagescope_service.store.tables import (
    TABLES,
    FindingRow,
    FiringRow,
    LossRow,
    StackRow,
    TriggerRulesRow,
)
from stagescope_service.store.tables.findings import (
    FindingInBrief,
    FiredActions,
    FiringInBrief,
    LossInBrief,
)

EventsTable = Literal["findings", "losses", "firings"]
AnyOf: TypeAlias = Mapping[str, Sequence[str]]
"""Column -> values; a row with one of the values of any of the columns is found."""


class LossFilter(ScopeFilter, total=False):
    """Selects losses."""

    step: Filter
    kind: Filter


class FindingFilter(LossFilter, total=False):
    """Selects findings."""

    finding_id: Filter
    severity: Filter


class FiringFilter(ScopeFilter, total=False):
    """Selects firings."""

    step: Filter
    rule: Filter


class StackFilter(RankFilter, total=False):
    """Selects process stacks."""

    attempt_id: Filter
    step: Filter
    request_id: Filter
    source: Filter


_ORDER: Final = {
    "findings": "-last_wall finding_id",
    "losses": "-wall loss_id",
    "firings": "-wall -attempt_id -step rule",
}
"""Table -> the order of its rows, the newest first."""


class Outline(TypedDict):
    """A finding, loss or firing in brief."""

    attempt_id: ReadOnly[int | None]
    step: ReadOnly[int | None]
    stage: ReadOnly[str | None]
    role: ReadOnly[str | None]
    rank: ReadOnly[int | None]


class FindingOutline(FindingInBrief):
    """A finding without its advice; with evidence where it names an operator or a rule's metric."""

    attempt_id: int | None


class LossOutline(LossInBrief):
    """A loss without its run."""

    attempt_id: int | None


class FiringOutline(FiringInBrief):
    """A firing without its evidence."""

    attempt_id: int | None
    actions: FiredActions | None


class FindingPlace(TypedDict):
    """The rank and stage of a step that a finding is about."""

    attempt_id: int
    step: int
    role: str
    stage: str | None
    rank: int


class LostPayloads(TypedDict):
    """The payloads of a step that were lost: how many, and one of the reasons."""

    attempt_id: int
    step: int
    count: int
    reason: str


class FindingQueries(Reader):
    """Queries for findings, losses, stacks, trigger rules and their firings."""

    def finding_outlines(
        self, *, any_of: AnyOf | None = None, limit: int = LIMIT, **filters: Unpack[FindingFilter]
    ) -> list[FindingOutline]:
        """Return the findings in brief, the newest first."""
        return self._outlines(FindingOutline, "findings", limit, any_of, **filters)

    def loss_outlines(
        self, *, any_of: AnyOf | None = None, limit: int = LIMIT, **filters: Unpack[LossFilter]
    ) -> list[LossOutline]:
        """Return the losses in brief, the newest first."""
        return self._outlines(LossOutline, "losses", limit, any_of, **filters)

    def firing_outlines(
        self, *, any_of: AnyOf | None = None, limit: int = LIMIT, **filters: Unpack[FiringFilter]
    ) -> list[FiringOutline]:
        """Return the firings in brief, the newest first, including withdrawn ones."""
        return self._outlines(FiringOutline, "firings", limit, any_of, **filters)

    def _outlines(
        self, row: type[R], name: EventsTable, limit: int, any_of: AnyOf | None, **filters: object
    ) -> list[R]:
        table = TABLES[name]
        shown: dict[str, sa.ColumnElement[object]] = {
            column: table.c[column] for column in row.__annotations__
        }
        if name == "findings":
            of_rule = table.c.kind.startswith("trigger_", autoescape=True)
            named = (table.c.kind == "non_finite_operator") | of_rule
            shown["evidence"] = sa.case((named, table.c.evidence)).label("evidence")
        query = sa.select(*shown.values()).where(*_conditions(name, any_of, **filters))
        return self._rows(row, query.order_by(*order_of(table, _ORDER[name])).limit(limit))

    def _events(
        self,
        row: type[R],
        name: EventsTable,
        limit: int,
        offset: int,
        any_of: AnyOf | None,
        **filters: object,
    ) -> list[R]:
        where = _conditions(name, any_of, **filters)
        return self._page(row, name, where, _ORDER[name], limit, offset)

    def kinds(self, name: EventsTable, **scope: Unpack[ScopeFilter]) -> list[str]:
        """Return the existing kinds of findings or losses, or the rules with firings."""
        table = TABLES[name]
        column = table.c["rule" if name == "firings" else "kind"]
        query = sa.select(column).where(*conditions(name, **scope)).distinct()
        return self._values(query.order_by(column))

    def finding(self, finding_id: str) -> list[FindingRow]:
        """Return the findings whose id has this prefix, at most two."""
        column = TABLES["findings"].c.finding_id
        query = sa.select(TABLES["findings"]).where(column.startswith(finding_id, autoescape=True))
        return self._rows(FindingRow, query.order_by(column).limit(2))

    def findings(
        self,
        *,
        any_of: AnyOf | None = None,
        limit: int = LIMIT,
        offset: int = 0,
        **filters: Unpack[FindingFilter],
    ) -> list[FindingRow]:
        """Return findings, the most recently seen first."""
        return self._events(FindingRow, "findings", limit, offset, any_of, **filters)

    def finding_marks(self, attempt_id: Filter, *, limit: int) -> dict[str, Hashable]:
        """Return id -> what changes with the row, of findings in the order of `findings`."""
        table = TABLES["findings"]
        names = ("finding_id", "last_wall", "over_wall", "count", "severity", "step")
        query = (
            sa.select(*(table.c[name] for name in names))
            .where(*conditions("findings", attempt_id=attempt_id))
            .order_by(*order_of(table, _ORDER["findings"]))
            .limit(limit)
        )
        return {row[0]: row[1:] for row in self._tuples(query)}

    def places_of_finding(
        self,
        kind: str,
        attempts: Sequence[int],
        steps: Sequence[int] | None = None,
        **window: Unpack[StepWindow],
    ) -> list[FindingPlace]:
        """Return the places of findings of a kind, in order.

        Args:
            kind: the kind.
            attempts: ids of the attempts.
            steps: the steps; None selects all in the window.
            window: the first and the last step.
        """
        table = TABLES["findings"]
        columns = [table.c[name] for name in ("attempt_id", "step", "role", "stage", "rank")]
        where = [table.c.kind == kind, *in_window("findings", attempts, **window)]
        where.append(columns[1].is_not(None) if steps is None else columns[1].in_(list(steps)))
        return self._rows(FindingPlace, sa.select(*columns).where(*where).order_by(*columns))

    def losses(
        self,
        *,
        any_of: AnyOf | None = None,
        limit: int = LIMIT,
        offset: int = 0,
        **filters: Unpack[LossFilter],
    ) -> list[LossRow]:
        """Return losses, the newest first."""
        return self._events(LossRow, "losses", limit, offset, any_of, **filters)

    def lost_payloads(
        self, attempts: Sequence[int], **window: Unpack[StepWindow]
    ) -> list[LostPayloads]:
        """Return the steps that lost payloads."""
        table = TABLES["losses"]
        by = (table.c.attempt_id, table.c.step)
        where = [*in_window("losses", attempts, **window), by[1].is_not(None)]
        where.append(table.c.kind == "payload")
        count = sa.func.sum(sa.func.coalesce(table.c.count, 1)).label("count")
        query = sa.select(*by, count, sa.func.min(table.c.reason).label("reason")).where(*where)
        return self._rows(LostPayloads, query.group_by(*by))

    def stacks(
        self, *, limit: int = LIMIT, offset: int = 0, **filters: Unpack[StackFilter]
    ) -> list[StackRow]:
        """Return process stacks, requested or written by watchdogs, the newest first."""
        order = "-wall role rank incarnation request_id"
        where = conditions("stacks", **filters)
        return self._page(StackRow, "stacks", where, order, limit, offset)

    def trigger_rules(self) -> TriggerRulesRow | None:
        """Return the latest trigger rules, or None; `document` contains secrets."""
        found = self._page(TriggerRulesRow, "trigger_rules", [], "-revision", 1)
        return found[0] if found else None

    def firings(
        self,
        *,
        any_of: AnyOf | None = None,
        limit: int = LIMIT,
        offset: int = 0,
        **filters: Unpack[FiringFilter],
    ) -> list[FiringRow]:
        """Return firings, the newest first, including withdrawn ones."""
        return self._events(FiringRow, "firings", limit, offset, any_of, **filters)


def _conditions(
    name: EventsTable, any_of: AnyOf | None, **filters: object
) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of filters, and that one of the columns of `any_of` has its value."""
    columns = TABLES[name].c
    chosen = [] if any_of is None else [columns[key].in_([*any_of[key]]) for key in any_of]
    return [*conditions(name, **filters), *([sa.or_(*chosen)] if chosen else [])]
