"""Findings, lost data and firings: as they are, and grouped by their cause."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, cast

from stagescope_service.store.queries.findings import (
    AnyOf,
    EventsTable,
    FindingOutline,
    LossOutline,
)
from stagescope_service.store.queries.reader import ScopeFilter
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.findings.groups import (
    SEVERITIES,
    extent,
    finding_key,
    finding_order,
    firing_key,
    group,
    loss_key,
    outcomes,
    over_since,
)
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import AttemptQuery, Dependencies
from stagescope_service.views.reading.rows import finding_rows, with_attempt_numbers
from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_wire.links import Link
from stagescope_wire.names import closest_by_words

MAX_GROUPED: Final = 50_000
"""Most rows that are grouped, the newest; `truncated` tells of others."""

Severity = Literal["error", "warning", "info"]


class EventQuery(NamedTuple):
    """The query parameters that select findings or losses; None: no filter."""

    step: int | None = None
    kind: str | None = None
    only: str | None = None


class AttemptScope(NamedTuple):
    """The attempts that an answer is about."""

    filters: ScopeFilter
    numbers: Mapping[int, int]
    """attempt_id -> number."""
    heading: JsonObject
    """First fields of the answer."""


def _count(losses: Iterable[LossOutline]) -> int:
    return sum(row["count"] or 1 for row in losses)


def _counts(rows: Sequence[object], groups: Sequence[object]) -> JsonObject:
    return {"groups": len(groups), "grouped": len(rows), "truncated": len(rows) >= MAX_GROUPED}


def scope_of(deps: Dependencies, query: AttemptQuery) -> AttemptScope:
    """Return the attempt that a query names, or all of its run where it names none."""
    target = deps.finder.attempt(*query)
    filters: ScopeFilter = {"attempt_id": target.attempt_id}
    if query.attempt is None:
        filters = {"run": target.run}
    heading = {**target.heading(), "attempt": query.attempt}
    return AttemptScope(filters, _attempt_numbers(deps, target.run), heading)


def _attempt_numbers(deps: Dependencies, run: str | None) -> dict[int, int]:
    """Return attempt_id -> number."""
    return {row["attempt_id"]: row["number"] for row in deps.catalogue.attempts(run)}


def only_filter(
    deps: Dependencies, table: EventsTable, scope: ScopeFilter, only: str | None
) -> AnyOf | None:
    """Return what `only` stands for: severities of findings, and kinds (rules of firings).

    Args:
        deps: the catalogue's holder.
        table: which rows are filtered.
        scope: their attempts, whose kinds the patterns are matched against.
        only: severities and patterns of kinds, joined by commas; None: no filter.

    Raises:
        NotFound: patterns alone were given and match no kind; names those that exist.
    """
    terms = [term.strip() for term in (only or "").split(",") if term.strip()]
    severities = [term for term in terms if table == "findings" and term in SEVERITIES]
    patterns = [term for term in terms if term not in severities]
    if not patterns:
        return {"severity": severities} if severities else None
    existing = deps.catalogue.kinds(table, **scope)
    kinds = [kind for kind in existing if any(fnmatch.fnmatchcase(kind, p) for p in patterns)]
    if existing and not (kinds or severities):
        more = f", or {', '.join(SEVERITIES)}" if table == "findings" else ""
        raise _unknown_kind(table, ", ".join(patterns), existing, more)
    any_of = {"rule" if table == "firings" else "kind": kinds}
    return {**any_of, "severity": severities} if severities else any_of


def check_kind(
    deps: Dependencies, table: EventsTable, scope: ScopeFilter, kind: str | None
) -> None:
    """Refuse a misspelt kind (a rule, of firings): an empty list would look like none.

    Any other kind that no row has is no error: a script may wait for its first.

    Raises:
        NotFound: it is a misspelling of a kind that exists; names those.
    """
    if kind is None:
        return
    existing = deps.catalogue.kinds(table, **scope)
    if kind not in existing and closest_by_words(kind, existing) is not None:
        raise _unknown_kind(table, kind, existing)


def _unknown_kind(
    table: EventsTable, wanted: str, existing: Sequence[str], more: str = ""
) -> NotFound:
    noun = {"findings": "finding", "losses": "loss", "firings": "firing"}[table]
    return NotFound(
        f"no {noun} is of {wanted!r:.200}", expected=f"one of {', '.join(existing[:30])}{more}"
    )


def losses(deps: Dependencies, page: Page, attempt: AttemptQuery, query: EventQuery) -> JsonObject:
    """List what was announced and never arrived, or was dropped, with the reason; last first."""
    scope = scope_of(deps, attempt)
    check_kind(deps, "losses", scope.filters, query.kind)
    rows = deps.catalogue.losses(
        **scope.filters,
        step=query.step,
        kind=query.kind,
        any_of=only_filter(deps, "losses", scope.filters, query.only),
        limit=page.limit + 1,
        offset=page.offset,
    )
    return {**scope.heading, **page.first_of(with_attempt_numbers(rows, scope.numbers))}


def findings(
    deps: Dependencies,
    page: Page,
    attempt: AttemptQuery,
    query: EventQuery,
    severity: Severity | None = None,
) -> JsonObject:
    """List what the service found to be wrong, with evidence and advice; last seen first."""
    scope = scope_of(deps, attempt)
    check_kind(deps, "findings", scope.filters, query.kind)
    rows = deps.catalogue.findings(
        **scope.filters,
        step=query.step,
        kind=query.kind,
        severity=severity,
        any_of=only_filter(deps, "findings", scope.filters, query.only),
        limit=page.limit + 1,
        offset=page.offset,
    )
    return {**scope.heading, **page.first_of(finding_rows(rows, scope.numbers))}


def finding_groups(
    deps: Dependencies, page: Page, attempt: AttemptQuery, only: str | None = None
) -> JsonObject:
    """List what was found to be wrong, a row for each kind of problem, the most severe first."""
    scope = scope_of(deps, attempt)
    any_of = only_filter(deps, "findings", scope.filters, only)
    outlines = deps.catalogue.finding_outlines(**scope.filters, any_of=any_of, limit=MAX_GROUPED)
    groups = sorted(group(outlines, finding_key), key=finding_order)
    shown = groups[page.offset : page.offset + page.limit]
    ids = [each[0]["finding_id"] for each in shown]
    by_id = {row["finding_id"]: row for row in deps.catalogue.findings(finding_id=ids)}
    rows: list[JsonObject] = [
        {
            **by_id[each[0]["finding_id"]],
            **extent(each),
            "findings": len(each),
            "count": sum(row["count"] or 1 for row in each),
            "first_wall": min(row["first_wall"] for row in each),
            "last_wall": max(row["last_wall"] for row in each),
            "over_wall": over_since(each),
        }
        for each in shown
        if each[0]["finding_id"] in by_id  # else it was withdrawn in between
    ]
    more = len(groups) > page.offset + page.limit
    listed = page.answer(finding_rows(rows, scope.numbers), more=more)
    return {**scope.heading, **_counts(outlines, groups), **listed}


def finding(deps: Dependencies, finding_id: str) -> JsonObject:
    """Return one finding in full, and in `group` the findings of its attempt with its cause."""
    candidates = deps.catalogue.finding(finding_id)
    if not candidates:
        raise NotFound(f"there is no finding {finding_id!r:.100}", see=(Link("findings"),))
    if len(candidates) > 1 and candidates[0]["finding_id"] != finding_id:
        raise InvalidInput(
            f"several findings begin with {finding_id!r:.100}", expected="more of its id"
        )
    row = candidates[0]
    same_kind = deps.catalogue.finding_outlines(
        run=row["run"], attempt_id=row["attempt_id"], kind=row["kind"], limit=MAX_GROUPED
    )
    alone = [cast("FindingOutline", row)]
    own = next(
        (
            each
            for each in group(same_kind, finding_key)
            if any(other["finding_id"] == row["finding_id"] for other in each)
        ),
        alone,
    )
    of_cause = {**extent(own), "findings": len(own), "first_id": own[0]["finding_id"]}
    (answer,) = finding_rows([row], _attempt_numbers(deps, row["run"]))
    return {**answer, "group": of_cause}


def loss_groups(
    deps: Dependencies, page: Page, attempt: AttemptQuery, only: str | None = None
) -> JsonObject:
    """List what never arrived, a row for each kind, reason, stage and role; most lost first."""
    scope = scope_of(deps, attempt)
    any_of = only_filter(deps, "losses", scope.filters, only)
    outlines = deps.catalogue.loss_outlines(**scope.filters, any_of=any_of, limit=MAX_GROUPED)
    groups = sorted(
        group(outlines, loss_key),
        key=lambda each: (-_count(each), each[0]["kind"], str(each[0]["reason"])),
    )
    rows: list[JsonObject] = [
        {
            **each[0],
            **extent(each),
            "losses": len(each),
            "count": _count(each),
            "bytes": sum(row["bytes"] or 0 for row in each),
            "first_wall": min(row["wall"] for row in each),
            "last_wall": max(row["wall"] for row in each),
        }
        for each in groups
    ]
    listed = page.cut(with_attempt_numbers(rows, scope.numbers))
    return {**scope.heading, **_counts(outlines, groups), **listed}


def firing_groups(
    deps: Dependencies, page: Page, run: str | None = None, only: str | None = None
) -> JsonObject:
    """List what fired, a row for each rule, stage and role, without withdrawn firings."""
    run = None if run is None else deps.finder.attempt(run).run
    scope: ScopeFilter = {} if run is None else {"run": run}
    any_of = only_filter(deps, "firings", scope, only)
    outlines = deps.catalogue.firing_outlines(**scope, any_of=any_of, limit=MAX_GROUPED)
    outlines = [row for row in outlines if row["withdrawn_wall"] is None]
    groups = sorted(
        group(outlines, firing_key),
        key=lambda each: (-max(row["wall"] for row in each), each[0]["rule"]),
    )
    rows: list[JsonObject] = [
        {
            **each[0],
            **extent(each),
            "outcomes": outcomes([row["actions"] for row in each]),
            "firings": len(each),
            "first_wall": min(row["wall"] for row in each),
            "last_wall": max(row["wall"] for row in each),
        }
        for each in groups
    ]
    listed = page.cut(with_attempt_numbers(rows, _attempt_numbers(deps, run)))
    return {"run": run, **_counts(outlines, groups), **listed}
