"""Routes about triggers: the active rules, firings, budgets and dry runs."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from stagescope_service.coordinator.answers import WebhookTest
from stagescope_service.http.auth import caller_of
from stagescope_service.http.parameters import Deps, Run
from stagescope_service.http.problems import check_ready
from stagescope_service.http.requests import Answer, PageOf, read_body
from stagescope_service.http.routes.findings import Only
from stagescope_service.rules.document import defaults, defaults_text
from stagescope_service.views import triggers as view
from stagescope_service.views.models import triggers as models
from stagescope_service.views.models.bodies import DryRunRequest, RulesRequest
from stagescope_service.views.triggers import dry_run, parse_rules, run_notes
from stagescope_wire.errors import InvalidInput

router = APIRouter(tags=["triggers"])


@router.get("/triggers", response_model=models.Triggers)
def triggers(deps: Deps, run: Run = None) -> Answer:
    """Return the active rules, when each fired last, and the budgets of captures.

    With `run`, only firings in that run. Every run that triggers may capture is in `budgets`: what
    it may spend, what it spent, and in `refusal` why it may spend no more (null: it may). Steps
    whose payloads stay in the rings are in `pinned`. A webhook shows only host and format.
    """
    return Answer(view.triggers(deps, run))


@router.put("/triggers", response_model=models.NewTriggers, openapi_extra=RulesRequest.document())
async def set_triggers(request: Request, deps: Deps) -> Answer:
    """Activate rules for the steps that close from now on; needs the operate token.

    They replace all active rules. Who set them is kept in the audit. An invalid rule is refused
    with the name of its field.
    """
    body = await read_body(request, deps.settings, RulesRequest)
    rules = await asyncio.to_thread(parse_rules, body)
    if rules is None:
        raise InvalidInput("no rules are given", expected="rules (a list), or yaml (a text)")
    reply = await deps.commands.set_triggers(document=rules.wire(), by=str(caller_of(request)))
    notes = await asyncio.to_thread(run_notes, deps, rules)
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
    return Answer(view.firings(deps, page, run, rule, only))


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
    return Answer(await asyncio.to_thread(dry_run, deps, body))


@router.post("/triggers/{rule}/test", response_model=WebhookTest)
async def test_webhook(
    request: Request,
    deps: Deps,
    rule: Annotated[str, Path(max_length=100, description="Name of an active rule.")],
) -> Answer:
    """Send a test message to the webhook of a rule, and return what the other side answered.

    The message is marked as a test and tells the rule's newest firing, or a made-up one. It is sent
    once, by the coordinator; who sent it is kept in the audit. Needs the operate token.
    """
    reply = await deps.commands.test_webhook(rule=rule, by=str(caller_of(request)))
    return Answer(check_ready(reply))
