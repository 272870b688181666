"""Routes about findings, losses and firings: as they are, and grouped by their cause.

A NaN that persists makes a finding for each rank and step. Rows of one attempt with the same stage
and role, whose texts are equal apart from numbers and ids, make one group. Groups of findings are
sorted by severity, then by how much they name: an operator, why streams cannot be compared, a rank,
a round. The row of a group is its first finding, where the problem began; its text is true of all.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple, TypedDict

from fastapi import APIRouter, Path, Query

from stagescope.wire.errors import InvalidInput, NotFound
from stagescope.wire.schema import MOST_STEPS
from stagescope_service.api.dependencies import (
    RUN_PATTERN,
    AttemptNumber,
    Dependencies,
    Deps,
    Run,
)
from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.group_texts import (
    MAX_RANGES,
    ranges_text,
    text_of_all,
    without_values,
)
from stagescope_service.api.models import runs as models
from stagescope_service.api.requests import Answer, PageOf, pattern
from stagescope_service.api.rows import finding_rows, with_attempt_numbers
from stagescope_service.store.contract import Row
from stagescope_service.store.queries.findings import AnyOf, EventsTable

router = APIRouter(tags=["runs"])

MAX_GROUPED: Final = 50_000
"""Most rows that are grouped, the newest; `truncated` tells of others."""
SEVERITIES: Final = ("error", "warning", "info")

Only = Annotated[
    str | None,
    Query(
        max_length=500,
        description="Only these: severities (error, warning, info) and patterns of kinds "
        "(of rules, for firings), joined by commas: `error`, `streams_*,warning`.",
    ),
]


StepFilter = Annotated[int | None, Query(ge=0, lt=MOST_STEPS, description="Only this step.")]
KindFilter = Annotated[str | None, Query(max_length=200, description="Only this kind.")]


class ScopeFilter(TypedDict, total=False):
    """Filters of a query: an attempt, or all attempts of a run."""

    run: str
    attempt_id: int


class Scope(NamedTuple):
    """The attempts that an answer is about."""

    filters: ScopeFilter
    numbers: Mapping[int, int]
    """attempt_id -> number."""
    heading: JsonObject
    """First fields of the answer."""


class Extent(TypedDict):
    """The steps and ranks of a group; see `models.runs.Extent`."""

    where: str
    first_step: int | None
    last_step: int | None
    steps: int
    ranks: int


Group = list[Row]
"""Rows of a group, by step and rank."""


@router.get("/losses", response_model=models.Losses)
def losses(
    deps: Deps,
    page: PageOf,
    run: Run = None,
    attempt: AttemptNumber = None,
    step: StepFilter = None,
    kind: KindFilter = None,
    only: Only = None,
) -> Answer:
    """List what was announced and never arrived, or was dropped, with the reason; last first."""
    scope = scope_of(deps, run, attempt)
    rows = deps.catalogue.losses(
        **scope.filters,
        step=step,
        kind=kind,
        any_of=only_filter(deps, "losses", scope.filters, only),
        limit=page.limit + 1,
        offset=page.offset,
    )
    return Answer({**scope.heading, **page.first_of(with_attempt_numbers(rows, scope.numbers))})


@router.get("/findings", response_model=models.Findings)
def findings(
    deps: Deps,
    page: PageOf,
    run: Run = None,
    attempt: AttemptNumber = None,
    step: StepFilter = None,
    kind: KindFilter = None,
    severity: Annotated[str | None, Query(max_length=50, description="Only these.")] = None,
    only: Only = None,
) -> Answer:
    """List what the service noticed to be wrong, with evidence and advice; last seen first."""
    scope = scope_of(deps, run, attempt)
    rows = deps.catalogue.findings(
        **scope.filters,
        step=step,
        kind=kind,
        severity=severity,
        any_of=only_filter(deps, "findings", scope.filters, only),
        limit=page.limit + 1,
        offset=page.offset,
    )
    return Answer({**scope.heading, **page.first_of(finding_rows(rows, scope.numbers))})


@router.get("/findings/groups", response_model=models.FindingGroups)
def finding_groups(
    deps: Deps, page: PageOf, run: Run = None, attempt: AttemptNumber = None, only: Only = None
) -> Answer:
    """List what was noticed to be wrong, a row for each kind of problem, the most severe first.

    A row is the first of its findings, with a `message` that is true of all, `where` (steps and
    ranks as text), `first_step`, `last_step`, `ranks` and `steps` (how many of each), `findings`
    (how many rows of `/findings`) and `count` (how often seen). `truncated`: there were more
    findings than are grouped.
    """
    scope = scope_of(deps, run, attempt)
    any_of = only_filter(deps, "findings", scope.filters, only)
    outline = deps.catalogue.outline("findings", **scope.filters, any_of=any_of, limit=MAX_GROUPED)
    groups = sorted(_group(outline, _finding_key), key=_finding_order)
    shown = groups[page.offset : page.offset + page.limit]
    ids = [group[0]["finding_id"] for group in shown]
    by_id = {row["finding_id"]: row for row in deps.catalogue.findings(finding_id=ids)}
    rows: list[Row] = [
        {
            **by_id[group[0]["finding_id"]],
            **_extent(group),
            "message": text_of_all(row["message"] for row in group),
            "findings": len(group),
            "count": sum(row["count"] or 1 for row in group),
            "first_wall": min(row["first_wall"] for row in group),
            "last_wall": max(row["last_wall"] for row in group),
            "over_wall": _over(group),
        }
        for group in shown
        if group[0]["finding_id"] in by_id  # else it was withdrawn in between
    ]
    more = len(groups) > page.offset + page.limit
    listed = page.answer(finding_rows(rows, scope.numbers), more=more)
    return Answer({**scope.heading, **_counts(outline, groups), **listed})


@router.get("/findings/{finding_id}", response_model=models.Finding)
def finding(
    deps: Deps,
    finding_id: Annotated[str, Path(max_length=100, description="Its id, or how it begins.")],
) -> Answer:
    """Return one finding in full, and in `group` the findings of its attempt with its cause."""
    candidates = deps.catalogue.finding(finding_id)
    if not candidates:
        raise NotFound(f"there is no finding {finding_id!r:.100}", advice="see /findings")
    if len(candidates) > 1 and candidates[0]["finding_id"] != finding_id:
        raise InvalidInput(
            f"several findings begin with {finding_id!r:.100}", expected="more of its id"
        )
    row = candidates[0]
    same_kind = deps.catalogue.outline(
        "findings",
        run=row["run"],
        attempt_id=row["attempt_id"],
        kind=row["kind"],
        limit=MAX_GROUPED,
    )
    own = next(
        (
            group
            for group in _group(same_kind, _finding_key)
            if any(each["finding_id"] == row["finding_id"] for each in group)
        ),
        [row],
    )
    group = {**_extent(own), "findings": len(own), "first_id": own[0]["finding_id"]}
    (answer,) = finding_rows([row], _attempt_numbers(deps, row["run"]))
    return Answer({**answer, "group": group})


@router.get("/losses/groups", response_model=models.LossGroups)
def loss_groups(
    deps: Deps, page: PageOf, run: Run = None, attempt: AttemptNumber = None, only: Only = None
) -> Answer:
    """List what never arrived, a row for each kind, reason, stage and role; most lost first."""
    scope = scope_of(deps, run, attempt)
    any_of = only_filter(deps, "losses", scope.filters, only)
    outline = deps.catalogue.outline("losses", **scope.filters, any_of=any_of, limit=MAX_GROUPED)
    groups = _group(outline, _loss_key)
    rows: list[Row] = [
        {
            **group[0],
            **_extent(group),
            "reason": text_of_all(row["reason"] for row in group),
            "losses": len(group),
            "count": sum(row["count"] or 1 for row in group),
            "bytes": sum(row["bytes"] or 0 for row in group),
            "first_wall": min(row["wall"] for row in group),
            "last_wall": max(row["wall"] for row in group),
        }
        for group in groups
    ]
    rows.sort(key=lambda row: (-row["count"], str(row["kind"]), str(row["reason"])))
    listed = page.cut(with_attempt_numbers(rows, scope.numbers))
    return Answer({**scope.heading, **_counts(outline, groups), **listed})


@router.get("/triggers/firings/groups", response_model=models.FiringGroups, tags=["triggers"])
def firing_groups(
    deps: Deps,
    page: PageOf,
    run: Annotated[
        str | None,
        Query(
            description="Only of this run; default: of all.", json_schema_extra=pattern(RUN_PATTERN)
        ),
    ] = None,
    only: Only = None,
) -> Answer:
    """List what fired, a row for each rule, stage and role, without withdrawn firings."""
    scope: ScopeFilter = {} if run is None else {"run": deps.finder.attempt(run).run}
    any_of = only_filter(deps, "firings", scope, only)
    outline = deps.catalogue.outline("firings", **scope, any_of=any_of, limit=MAX_GROUPED)
    outline = [row for row in outline if row["withdrawn_wall"] is None]
    groups = _group(outline, _firing_key)
    rows: list[Row] = [
        {
            **group[0],
            **_extent(group),
            "message": text_of_all(row["message"] for row in group),
            "outcomes": outcomes(group),
            "firings": len(group),
            "first_wall": min(row["wall"] for row in group),
            "last_wall": max(row["wall"] for row in group),
        }
        for group in groups
    ]
    rows.sort(key=lambda row: (-row["last_wall"], row["rule"]))
    listed = page.cut(with_attempt_numbers(rows, _attempt_numbers(deps, run)))
    return Answer({"run": run, **_counts(outline, groups), **listed})


def scope_of(deps: Dependencies, run: str | None, attempt: int | None) -> Scope:
    """Return an attempt of a run, or all of them where `attempt` is None."""
    target = deps.finder.attempt(run, attempt)
    filters: ScopeFilter = {"attempt_id": target.attempt_id}
    if attempt is None:
        filters = {"run": target.run}
    heading = {**target.heading(), "attempt": attempt}
    return Scope(filters, _attempt_numbers(deps, target.run), heading)


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
        noun = {"findings": "finding", "losses": "loss", "firings": "firing"}[table]
        raise NotFound(
            f"no {noun} is of {', '.join(patterns)!r:.200}",
            expected=f"one of {', '.join(existing[:30])}"
            + (f", or {', '.join(SEVERITIES)}" if table == "findings" else ""),
        )
    any_of = {"rule" if table == "firings" else "kind": kinds}
    return {**any_of, "severity": severities} if severities else any_of


# --- groups ---------------------------------------------------------------------------------
GroupKey = tuple[object, ...]


def _group(rows: Iterable[Row], key: Callable[[Row], GroupKey]) -> list[Group]:
    """Return the rows by attempt and key, each group in the order of step and rank."""
    groups: dict[GroupKey, Group] = {}
    for row in rows:
        groups.setdefault((row["attempt_id"], *key(row)), []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: (*map(_last_if_none, (row["step"], row["rank"])),))
    return list(groups.values())


def _last_if_none(number: int | None) -> tuple[bool, int]:
    return (number is None, number or 0)


def _finding_key(row: Row) -> GroupKey:
    # Findings of a trigger have the same cause by rule and metric: messages name single tokens.
    of_trigger = row["kind"].startswith("trigger_")
    text = None if of_trigger else without_values(row["message"])
    return (row["kind"], row["severity"], row["stage"], row["role"], text, *_subject(row))


def _subject(row: Row) -> tuple[object, object]:
    """Return the operator and the metric that a finding names."""
    evidence = row.get("evidence") or {}
    return evidence.get("name"), evidence.get("metric")


def _loss_key(row: Row) -> GroupKey:
    return (row["kind"], without_values(row["reason"]), row["stage"], row["role"])


def _firing_key(row: Row) -> GroupKey:
    return (row["rule"], row["stage"], row["role"])


_CAUSE: Final = "streams_"
"""Begins the kind of a finding that says why streams cannot be compared."""


def _finding_order(group: Group) -> tuple[int, bool, int, int, tuple[bool, int], str, str]:
    """Return the sort key of a group: severity, whether it persists, how much it names, ..."""
    first = group[0]
    severity = first["severity"]
    rank = SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)
    named = (4 if _subject(first)[0] else 0) + sum(
        first[name] is not None for name in ("rank", "stage", "step")
    )
    if str(first["kind"]).startswith(_CAUSE):
        named += 3  # what rules say of the same streams follows from it
    return (
        rank, _over(group) is not None, -named, -(first["attempt_id"] or 0),
        _last_if_none(first["step"]), first["kind"], first["finding_id"],
    )  # fmt: skip


def _over(group: Group) -> float | None:
    """Return the time since when no finding of a group persists; None where one does."""
    ended = [row["over_wall"] for row in group]
    return None if any(wall is None for wall in ended) else max(ended)


def _extent(group: Group) -> Extent:
    """Return the steps and ranks of a group, as numbers and as text."""
    steps = sorted({row["step"] for row in group if row["step"] is not None})
    ranks = sorted({row["rank"] for row in group if row["rank"] is not None})
    texts = [_ranges_text("step", steps), _ranges_text("rank", ranks)]
    return {
        "where": ", ".join(text for text in texts if text),
        "first_step": steps[0] if steps else None,
        "last_step": steps[-1] if steps else None,
        "steps": len(steps),
        "ranks": len(ranks),
    }


def _ranges_text(noun: str, numbers: Sequence[int]) -> str:
    """Return sorted numbers as text, such as `steps 10-25, 30`; "" for none."""
    if not numbers:
        return ""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {ranges_text(numbers)}"


def _counts(rows: Sequence[Row], groups: Sequence[Group]) -> JsonObject:
    return {"groups": len(groups), "grouped": len(rows), "truncated": len(rows) >= MAX_GROUPED}


# --- outcomes of firings --------------------------------------------------------------------
def outcomes(group: Sequence[Row]) -> list[str]:
    """Return the results of the actions of firings as texts: captures, pins, webhooks.

    Args:
        group: rows of firings of one attempt, with their `actions` (None: not taken yet).
    """
    results = [row["actions"] for row in group if row["actions"] is not None]
    since = [actions["cools_since"] for actions in results if "cools_since" in actions]
    texts = [*_capture_outcomes(results), *_pin_outcomes(results), *_webhook_outcomes(results)]
    if since:
        text = "not taken again: the rule cools down from those of "
        texts.append(text + _ranges_text("step", sorted({*since})))
    if waiting := len(group) - len(results):
        texts.append("actions are not taken yet" + (f" of {waiting}" if results else ""))
    return texts


def _capture_outcomes(results: Sequence[Row]) -> list[str]:
    captures = [actions.get("capture") or {} for actions in results]
    ids = [*dict.fromkeys(each["capture_id"] for each in captures if each.get("capture_id"))]
    more = f" and {len(ids) - MAX_RANGES} more" if len(ids) > MAX_RANGES else ""
    texts = [f"capture {', '.join(ids[:MAX_RANGES])}{more} ordered"] if ids else []
    refusals = [each["refused"] for each in captures if each.get("refused")]
    return texts + [f"capture refused{times}: {why}" for why, times in _count_texts(refusals)]


def _pin_outcomes(results: Sequence[Row]) -> list[str]:
    # Firings of neighbouring steps pin the same steps: each step counts once.
    pins: dict[int, Row] = {}
    for actions in results:
        for pin in (actions.get("pin") or {}).get("steps") or ():
            earlier = pins.get(pin["step"])
            if earlier is None or pin["payloads"] >= earlier["payloads"]:
                pins[pin["step"]] = pin
    if not pins:
        return []
    pinned = {step: pin["payloads"] for step, pin in pins.items() if pin["payloads"]}
    gone = sum(pin["gone"] for pin in pins.values())
    if not pinned:
        text = f"pinned no payload of {_ranges_text('step', sorted(pins))}: none were left"
    else:
        payloads = sum(pinned.values())
        text = f"pinned {payloads} payload{'' if payloads == 1 else 's'} of "
        text += _ranges_text("step", sorted(pinned))
    text += f" ({gone} had left the ring before)" if gone else ""
    reasons = [why for pin in pins.values() for why in pin["reasons"]]
    return [text, *(f"not pinned{times}: {why}" for why, times in _count_texts(reasons))]


def _webhook_outcomes(results: Sequence[Row]) -> list[str]:
    calls = [actions["webhook"] for actions in results if actions.get("webhook")]
    delivered = [f"webhook {call['host']} told" for call in calls if call["delivered"]]
    failed = [
        f"webhook {call['host']} not told: {call['reason']}"
        for call in calls
        if not call["delivered"]
    ]
    return [f"{text}{times}" for text, times in (*_count_texts(delivered), *_count_texts(failed))]


def _count_texts(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return the first of the texts that differ in their values alone, each with ` 3 times`."""
    same: dict[str, list[str]] = {}
    for text in texts:
        same.setdefault(without_values(text), []).append(text)
    return [(each[0], f" {len(each)} times" if len(each) > 1 else "") for each in same.values()]
