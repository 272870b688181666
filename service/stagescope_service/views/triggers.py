"""Triggers: the active rules, their budgets, and firings."""

from __future__ import annotations

import fnmatch
from typing import Final

from stagescope_service.rules.budget import spent
from stagescope_service.rules.document import Rules, defaults, read_yaml
from stagescope_service.rules.replay import replay
from stagescope_service.rules.series import shown
from stagescope_service.store.queries.reader import ScopeFilter
from stagescope_service.store.tables import FiringRow
from stagescope_service.store.tables.findings import FiringColumns
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.findings.listing import check_kind, only_filter
from stagescope_service.views.models import triggers as models
from stagescope_service.views.models.bodies import REPLAYED_STEPS, DryRunRequest, RulesRequest
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.rows import as_row, chosen_columns
from stagescope_wire.errors import InvalidInput
from stagescope_wire.names import closest_by_words

_MAX_RUNS: Final = 200

MAX_FIRINGS: Final = 10_000


def rules_in_force(deps: Dependencies) -> tuple[Rules, JsonObject]:
    """Return the rules, and the fields of an answer about their origin."""
    row = deps.catalogue.trigger_rules()
    if row is None:  # the coordinator has not stored any yet
        return defaults(), {"revision": 0, "wall": None, "by": None, "source": "defaults"}
    origin = chosen_columns(row, ("revision", "wall", "by", "source"))
    return Rules.parse(row["document"]), origin


def run_notes(deps: Dependencies, rules: Rules) -> list[str]:
    """Return a note on each run, or pattern, of a document that no known run has."""
    known = [str(row["run"]) for row in deps.catalogue.runs(limit=_MAX_RUNS)] if rules.runs else []
    notes = []
    for name in rules.runs:
        if fnmatch.filter(known, name) or deps.catalogue.has_run(name):
            continue
        meant = closest_by_words(name, known)
        suggestion = "" if meant is None else f" (did you mean {meant}?)"
        notes.append(
            f"no run {name!r} is known (yet){suggestion}: what is allowed there waits for one"
        )
    return notes


def _budgets(deps: Dependencies, rules: Rules, run: str | None) -> list[JsonObject]:
    rows: list[JsonObject] = []
    for row in deps.catalogue.runs(limit=_MAX_RUNS):
        budget = rules.budget_of(row["run"], row["settings"])
        if budget is None or run not in (None, row["run"]):
            continue
        cost = spent(deps.catalogue, row["run"])
        rows.append(
            {
                "run": row["run"],
                "budget": budget.wire(),
                "spent": {
                    "captures": cost.captures,
                    "bytes": cost.bytes,
                    "seconds": cost.seconds,
                    "share": cost.seconds / cost.run_seconds if cost.run_seconds else 0.0,
                },
                "under_way": list(cost.under_way),
                "refusal": budget.refusal(cost),
            }
        )
    return rows


def _firing_row(row: FiringRow) -> models.Firing:
    evidence = shown(row["evidence"])
    return as_row(models.Firing, row, attempt=evidence.get("attempt"), evidence=evidence)


def triggers(deps: Dependencies, run: str | None = None) -> JsonObject:
    """Return the active rules, when each fired last, and the budgets of captures."""
    if run is not None:
        run = deps.finder.run(run)
    rules, origin = rules_in_force(deps)
    firings = [
        row
        for row in deps.catalogue.firings(run=run, limit=MAX_FIRINGS)
        if row["withdrawn_wall"] is None
    ]
    rows = []
    for rule in rules.rules:
        own = [row for row in firings if row["rule"] == rule.name]
        last = _firing_row(own[0]) if own else None
        rows.append({**rule.wire(secrets=False), "fired": len(own), "last_fired": last})
    return {
        **origin,
        "rules": rows,
        "runs": rules.wire()["runs"],
        "budgets": _budgets(deps, rules, run),
        "pinned": deps.catalogue.pinned_steps(run),
        "notes": run_notes(deps, rules),
    }


def firings(
    deps: Dependencies,
    page: Page,
    run: str | None = None,
    rule: str | None = None,
    only: str | None = None,
) -> JsonObject:
    """List the firings of rules, the last first, with the results of their actions."""
    if run is not None:
        run = deps.finder.run(run)
    scope: ScopeFilter = {} if run is None else {"run": run}
    if all(rule != each.name for each in rules_in_force(deps)[0].rules):
        check_kind(deps, "firings", scope, rule)
    any_of = only_filter(deps, "firings", scope, only)
    rows = deps.catalogue.firings(
        **scope, rule=rule, any_of=any_of, limit=page.limit + 1, offset=page.offset
    )
    return page.first_of([_firing_row(row) for row in rows])


def dry_run(deps: Dependencies, body: DryRunRequest) -> JsonObject:
    """Return what rules would have fired in the newest steps of a run."""
    rules = parse_rules(body)
    if rules is None:
        rules = rules_in_force(deps)[0]
    target = deps.finder.attempt(body.run)
    fired, steps = replay(deps.catalogue, target.run, rules, most=body.steps or REPLAYED_STEPS)
    live = {
        (row["attempt_id"], row["step"], row["rule"])
        for row in deps.catalogue.firings(run=target.run, limit=MAX_FIRINGS)
        if row["withdrawn_wall"] is None
    }
    return {
        **target.run_heading(),
        "steps": steps,
        "rules": [rule.name for rule in rules.rules],
        "rows": [_would_fire_row(each, live) for each in fired],
    }


def _would_fire_row(row: FiringColumns, live: set[tuple[int, int, str]]) -> JsonObject:
    """Return a firing of a dry run.

    Args:
        row: of the dry run.
        live: (attempt_id, step, rule) of the real firings.
    """
    evidence = shown(row["evidence"])
    columns = ("step", "rule", "stage", "role", "rank", "round", "message")
    return {
        "attempt": evidence.pop("attempt"),
        **chosen_columns(row, columns),
        "value": evidence["value"],
        "metric": evidence["metric"],
        "evidence": evidence,
        "fired_live": (row["attempt_id"], row["step"], row["rule"]) in live,
    }


def parse_rules(body: RulesRequest) -> Rules | None:
    """Return the rules of a body; None where it has none."""
    document = body.rules_document()
    if "yaml" in document:
        if len(document) > 1:
            raise InvalidInput("yaml is not alone", expected="yaml, or rules and runs")
        rules = read_yaml(body.yaml)
    elif document:
        rules = Rules.parse(document)
    else:
        return None
    rules.check_captures()
    return rules
