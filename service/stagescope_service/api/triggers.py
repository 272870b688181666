"""Routes about triggers: the active rules, firings, budgets and dry runs."""

from __future__ import annotations

import asyncio
import fnmatch
from typing import Annotated, Final

from fastapi import APIRouter, Path, Query, Request

from stagescope_service.api.auth import caller_of
from stagescope_service.api.dependencies import Dependencies, Deps, Run
from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.findings import Only, check_kind, only_filter
from stagescope_service.api.models import triggers as models
from stagescope_service.api.models.bodies import REPLAYED_STEPS, DryRunRequest, RulesRequest
from stagescope_service.api.problems import check_ready
from stagescope_service.api.requests import Answer, PageOf, read_body
from stagescope_service.api.rows import as_row, chosen_columns
from stagescope_service.coordinator.trigger_actions import WebhookTest
from stagescope_service.rules.budget import spent
from stagescope_service.rules.document import Rules, defaults, defaults_text, read_yaml
from stagescope_service.rules.replay import replay
from stagescope_service.rules.series import shown
from stagescope_service.store.queries.reader import ScopeFilter
from stagescope_service.store.tables import FiringRow
from stagescope_service.store.tables.findings import FiringColumns
from stagescope_wire.errors import InvalidInput
from stagescope_wire.names import closest_by_words

router = APIRouter(tags=["triggers"])

_MAX_RUNS: Final = 200
_MAX_FIRINGS: Final = 10_000


@router.get("/triggers", response_model=models.Triggers)
def triggers(deps: Deps, run: Run = None) -> Answer:
    """Return the active rules, when each fired last, and the budgets of captures.

    With `run`, only firings in that run. Every run that triggers may capture is in `budgets`: what
    it may spend, what it spent, and in `refusal` why it may spend no more (null: it may). Steps
    whose payloads stay in the rings are in `pinned`. A webhook shows only host and format.
    """
    if run is not None:
        deps.finder.check_run(run)
    rules, origin = _rules_in_force(deps)
    firings = [
        row
        for row in deps.catalogue.firings(run=run, limit=_MAX_FIRINGS)
        if row["withdrawn_wall"] is None
    ]
    rows = []
    for rule in rules.rules:
        own = [row for row in firings if row["rule"] == rule.name]
        last = _firing_row(own[0]) if own else None
        rows.append({**rule.wire(secrets=False), "fired": len(own), "last_fired": last})
    return Answer(
        {
            **origin,
            "rules": rows,
            "runs": rules.wire()["runs"],
            "budgets": _budgets(deps, rules, run),
            "pinned": deps.catalogue.pinned_steps(run),
            "notes": _run_notes(deps, rules),
        }
    )


@router.put("/triggers", response_model=models.NewTriggers, openapi_extra=RulesRequest.document())
async def set_triggers(request: Request, deps: Deps) -> Answer:
    """Activate rules for the steps that close from now on; needs the operate token.

    They replace all active rules. Who set them is kept in the audit. An invalid rule is refused
    with the name of its field.
    """
    body = await read_body(request, deps.settings, RulesRequest)
    rules = await asyncio.to_thread(_parse_rules, body)
    if rules is None:
        raise InvalidInput("no rules are given", expected="rules (a list), or yaml (a text)")
    reply = await deps.commands.set_triggers(document=rules.wire(), by=str(caller_of(request)))
    notes = await asyncio.to_thread(_run_notes, deps, rules)
    return Answer({**check_ready(reply), **rules.wire(secrets=False), "notes": notes})


@router.get("/triggers/defaults", response_model=models.DefaultTriggers)
def default_triggers() -> Answer:
    """Return the rules that ship, as YAML with their comments and as data."""
    return Answer({"yaml": defaults_text(), **defaults().wire(secrets=False)})


@router.get("/triggers/firings", response_model=models.Firings)
def firings(
    deps: Deps,
    page: PageOf,
    run: Run = None,
    rule: Annotated[str | None, Query(max_length=100, description="Only this rule.")] = None,
    only: Only = None,
) -> Answer:
    """List the firings of rules, the last first, with the results of their actions.

    A firing with `withdrawn_wall` is no longer valid: the step was aggregated again, with another
    result.
    """
    if run is not None:
        deps.finder.check_run(run)
    scope: ScopeFilter = {} if run is None else {"run": run}
    if all(rule != each.name for each in _rules_in_force(deps)[0].rules):
        check_kind(deps, "firings", scope, rule)
    any_of = only_filter(deps, "firings", scope, only)
    rows = deps.catalogue.firings(
        **scope, rule=rule, any_of=any_of, limit=page.limit + 1, offset=page.offset
    )
    return Answer(page.first_of([_firing_row(row) for row in rows]))


@router.post(
    "/triggers/test",
    response_model=models.DryRun,
    openapi_extra=DryRunRequest.document(required=False),
)
async def try_triggers(request: Request, deps: Deps) -> Answer:
    """Return which of a run's stored steps would have fired: a dry run without any action.

    Without rules it tries the active ones; without `run` the run whose training stage began last.
    The newest `steps` closed steps are evaluated, as if each had just been aggregated. The read
    token is enough.
    """
    body = await read_body(request, deps.settings, DryRunRequest)
    return Answer(await asyncio.to_thread(_dry_run, deps, body))


@router.post("/triggers/{rule}/test", response_model=WebhookTest)
async def test_webhook(
    request: Request,
    deps: Deps,
    rule: Annotated[str, Path(max_length=100, description="Name of a rule in force.")],
) -> Answer:
    """Send a test message to the webhook of a rule, and return what the other side answered.

    The message is marked as a test and tells the rule's newest firing, or a made-up one. It is sent
    once, by the coordinator; who sent it is kept in the audit. Needs the operate token.
    """
    reply = await deps.commands.test_webhook(rule=rule, by=str(caller_of(request)))
    return Answer(check_ready(reply))


def _rules_in_force(deps: Dependencies) -> tuple[Rules, JsonObject]:
    """Return the rules, and the fields of an answer about their origin."""
    row = deps.catalogue.trigger_rules()
    if row is None:  # the coordinator has not stored any yet
        return defaults(), {"revision": 0, "wall": None, "by": None, "source": "defaults"}
    origin = chosen_columns(row, ("revision", "wall", "by", "source"))
    return Rules.parse(row["document"]), origin


def _run_notes(deps: Dependencies, rules: Rules) -> list[str]:
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


def _parse_rules(body: RulesRequest) -> Rules | None:
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


def _dry_run(deps: Dependencies, body: DryRunRequest) -> JsonObject:
    rules = _parse_rules(body)
    if rules is None:
        rules = _rules_in_force(deps)[0]
    target = deps.finder.attempt(body.run)
    fired, steps = replay(deps.catalogue, target.run, rules, most=body.steps or REPLAYED_STEPS)
    live = {
        (row["attempt_id"], row["step"], row["rule"])
        for row in deps.catalogue.firings(run=target.run, limit=_MAX_FIRINGS)
        if row["withdrawn_wall"] is None
    }
    return {
        "run": target.run,
        "also_live": target.also_live,
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


def _firing_row(row: FiringRow) -> models.Firing:
    evidence = shown(row["evidence"])
    return as_row(models.Firing, row, attempt=evidence.get("attempt"), evidence=evidence)
