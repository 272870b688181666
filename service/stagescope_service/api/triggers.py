"""Routes about triggers: the rules in force, what fired, budgets, dry runs, pins."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request

from stagescope.wire.errors import InvalidInput
from stagescope_service.api.auth import caller_of
from stagescope_service.api.dependencies import Dependencies, Deps, Row, Run, StepTarget
from stagescope_service.api.groups import Only, only_of
from stagescope_service.api.models import steps as step_models
from stagescope_service.api.models import triggers as models
from stagescope_service.api.problems import check_ready
from stagescope_service.api.requests import Answer, PageOf, read_json
from stagescope_service.triggers.replay import Fired, replay
from stagescope_service.triggers.rules import Rules, defaults, defaults_text, read_yaml
from stagescope_service.triggers.series import shown
from stagescope_service.triggers.spending import spent

router = APIRouter(tags=["triggers"])

MOST_STEPS: Final = 20_000
_STEPS: Final = 1000
_RUNS: Final = 200
_FIRINGS: Final = 10_000
_DOCUMENT: Final = ("rules", "runs", "yaml")

_FIELDS: Final[dict[str, Any]] = {
    "rules": {"type": "array", "items": {"type": "object"}},
    "runs": {"type": "object", "description": "Run or pattern -> {capture: auto, budget}."},
    "yaml": {"type": "string", "description": "The document as YAML, instead of rules and runs."},
}
_TEST_FIELDS: Final[dict[str, Any]] = {
    "run": {"type": "string"},
    "steps": {"type": "integer", "minimum": 1, "maximum": MOST_STEPS, "default": _STEPS},
}


def _body(properties: dict[str, Any], *, required: bool) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"required": required, "content": {"application/json": {"schema": schema}}}


@router.get("/triggers", response_model=models.Triggers)
def triggers(deps: Deps, run: Run = None) -> Answer:
    """Return the rules in force, when each fired last, and the budgets of captures.

    With `run`, only what fired in that run. `budgets` names every run that may be captured unasked:
    what it may spend, what it spent, and `refusal`, why no more (null: there is room). `pinned` are
    steps whose payloads stay in the rings. Webhooks are shown by their hosts alone.
    """
    rules, about = _in_force(deps)
    fired = [
        row
        for row in deps.catalogue.firings(run=run, limit=_FIRINGS)
        if row["withdrawn_wall"] is None
    ]
    rows = []
    for rule in rules.rules:
        own = [row for row in fired if row["rule"] == rule.name]
        last = _firing(own[0]) if own else None
        rows.append({**rule.wire(secrets=False), "fired": len(own), "last_fired": last})
    runs = rules.wire()["runs"]
    return Answer(
        {
            **about,
            "rules": rows,
            "runs": runs,
            "budgets": _budgets(deps, rules, run),
            "pinned": deps.catalogue.pinned_steps(run),
        }
    )


@router.put(
    "/triggers",
    response_model=models.NewTriggers,
    openapi_extra={"requestBody": _body(_FIELDS, required=True)},
)
async def set_triggers(request: Request, deps: Deps) -> Answer:
    """Put rules in force for the steps that close from now on; needs the operate token.

    They replace all that were in force. Who gave them is kept in the audit. A rule that cannot be
    right is refused with its field.
    """
    said = await read_json(request, deps.settings)
    rules = await asyncio.to_thread(_document, said)
    if rules is None:
        raise InvalidInput("no rules are given", expected="rules (a list), or yaml (a text)")
    reply = await deps.commands.set_triggers(document=rules.wire(), by=str(caller_of(request)))
    return Answer({**check_ready(reply), **rules.wire(secrets=False)})


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
    """List what fired, the last first, with what became of its actions.

    One with `withdrawn_wall` no longer stands: the step summary was formed again, and says
    something else.
    """
    scope = {} if run is None else {"run": run}
    asked = {"rule": rule} if rule is not None else only_of(deps, "firings", scope, only)
    found = deps.catalogue.firings(**scope, **asked, limit=page.limit + 1, offset=page.offset)
    rows = [_firing(row) for row in found[: page.limit]]
    return Answer(page.answer(rows, more=len(found) > page.limit))


@router.post(
    "/triggers/test",
    response_model=models.DryRun,
    openapi_extra={"requestBody": _body({**_FIELDS, **_TEST_FIELDS}, required=False)},
)
async def try_triggers(request: Request, deps: Deps) -> Answer:
    """Say which of a run's stored steps would have fired: a dry run, of which nothing follows.

    Without rules those in force are tried; without `run` the one whose training stage began last.
    The newest `steps` closed steps are looked at, as if each had just been aggregated. The read
    token is enough.
    """
    said = await read_json(request, deps.settings)
    return Answer(await asyncio.to_thread(_dry_run, deps, said))


@router.delete("/steps/{step}/pin", response_model=step_models.Unpin)
async def unpin(request: Request, deps: Deps, target: StepTarget) -> Answer:
    """Let the payloads of a pinned step leave the rings when room is needed; needs operate.

    `unpinned` is false, with a `reason`, where it was not pinned or a ring did not answer.
    """
    assert target.step is not None
    number = int(target.step["step"])
    reply = await deps.commands.unpin(
        attempt_id=target.attempt_id, step=number, by=str(caller_of(request))
    )
    done, was = bool(check_ready(reply)["unpinned"]), bool(target.step["pinned"])
    reason = (
        None if was and done else "a node's ring did not answer" if was else "it was not pinned"
    )
    return Answer({**target.heading(), "unpinned": was and done, "reason": reason})


def _in_force(deps: Dependencies) -> tuple[Rules, Row]:
    row = deps.catalogue.trigger_rules()
    if row is None:  # the coordinator has not come so far yet
        return defaults(), {"revision": 0, "wall": None, "by": None, "source": "defaults"}
    about = {name: row[name] for name in ("revision", "wall", "by", "source")}
    return Rules.parse(row["document"]), about


def _budgets(deps: Dependencies, rules: Rules, run: str | None) -> list[Row]:
    found = []
    for row in deps.catalogue.runs(limit=_RUNS):
        budget = rules.budget_of(row["run"], row["settings"])
        if budget is None or run not in (None, row["run"]):
            continue
        cost = spent(deps.catalogue, row["run"])
        found.append(
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
    return found


def _document(said: Row) -> Rules | None:
    """Return the rules that a body holds; None where it holds none."""
    unknown = sorted(set(said) - set(_DOCUMENT))
    if unknown:
        raise InvalidInput(
            f"there is no field {', '.join(map(repr, unknown))[:200]}",
            expected=f"one of {', '.join(_DOCUMENT)}",
        )
    if "yaml" in said:
        if not isinstance(said["yaml"], str) or len(said) > 1:
            raise InvalidInput("yaml is no text, or not alone", expected="yaml, or rules and runs")
        return read_yaml(said["yaml"])
    return Rules.parse(said) if said else None


def _dry_run(deps: Dependencies, said: Row) -> Row:
    asked = {name: said.pop(name, None) for name in _TEST_FIELDS}
    rules = _document(said)
    if rules is None:
        rules = _in_force(deps)[0]
    steps = _STEPS if asked["steps"] is None else asked["steps"]
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
        raise InvalidInput(f"steps is {steps!r:.100}", expected=f"1 to {MOST_STEPS} newest steps")
    target = deps.finder.attempt(asked["run"])
    fired, looked = replay(deps.catalogue, target.run, rules, most=steps)
    live = {
        (row["attempt_id"], row["step"], row["rule"])
        for row in deps.catalogue.firings(run=target.run, limit=_FIRINGS)
        if row["withdrawn_wall"] is None
    }
    return {
        "run": target.run,
        "also_live": target.also_live,
        "steps": looked,
        "rules": [rule.name for rule in rules.rules],
        "rows": [_would_fire(each, live) for each in fired],
    }


def _would_fire(fired: Fired, live: set[tuple[int, int, str]]) -> Row:
    facts, said = fired.facts, fired.evidence
    return {
        "attempt": facts.attempt,
        "step": facts.step,
        "rule": fired.rule.name,
        "value": said.numbers["value"],
        "metric": said.numbers["metric"],
        "stage": said.stage,
        "role": said.role,
        "rank": said.rank,
        "round": said.round,
        "message": said.message,
        "evidence": said.evidence(),
        "fired_live": (facts.attempt_id, facts.step, fired.rule.name) in live,
    }


def _firing(row: Row) -> Row:
    evidence = shown(row["evidence"] or {})
    return {
        "run": row["run"],
        "attempt": evidence.get("attempt"),
        **{name: row[name] for name in _SHOWN},
        "evidence": evidence,
    }


_SHOWN: Final = (
    "step", "rule", "stage", "role", "rank", "round", "message", "wall", "revision", "actions",
    "withdrawn_wall",
)  # fmt: skip
