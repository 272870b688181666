"""Routes about findings, lost data and firings: as they are, and grouped by their cause."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query

from stagescope_service.http.parameters import AttemptQueryOf, Deps
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views.findings import listing as view
from stagescope_service.views.findings.listing import EventQuery, Severity
from stagescope_service.views.models import findings as models
from stagescope_wire.schema import STEP_BOUND

router = APIRouter(tags=["runs"])

Only = Annotated[
    str | None,
    Query(
        max_length=500,
        description="Only these: severities (error, warning, info) and patterns of kinds "
        "(of rules, for firings), joined by commas: `error`, `streams_*,warning`.",
    ),
]


async def event_query(
    step: Annotated[int | None, Query(ge=0, lt=STEP_BOUND, description="Only this step.")] = None,
    kind: Annotated[str | None, Query(max_length=200, description="Only this kind.")] = None,
    only: Only = None,
) -> EventQuery:
    """Return the filters of a query."""
    return EventQuery(step, kind, only)


EventQueryOf = Annotated[EventQuery, Depends(event_query)]


@router.get("/losses", response_model=models.Losses, summary="Lost data")
def losses(deps: Deps, page: PageOf, attempt: AttemptQueryOf, query: EventQueryOf) -> Answer:
    """List what was announced and never arrived, or was dropped, with the reason; last first."""
    return Answer(view.losses(deps, page, attempt, query))


@router.get("/findings", response_model=models.Findings)
def findings(
    deps: Deps,
    page: PageOf,
    attempt: AttemptQueryOf,
    query: EventQueryOf,
    severity: Annotated[Severity | None, Query(description="Only these.")] = None,
) -> Answer:
    """List what the service found to be wrong, with evidence and advice; last seen first."""
    return Answer(view.findings(deps, page, attempt, query, severity))


@router.get("/findings/groups", response_model=models.FindingGroups)
def finding_groups(deps: Deps, page: PageOf, attempt: AttemptQueryOf, only: Only = None) -> Answer:
    """List what was found to be wrong, a row for each kind of problem, the most severe first.

    A row is the first of its findings, with a `message` that is true of all. It adds `where` (steps
    and ranks as text), `first_step`, `last_step`, and `ranks` and `steps` (how many of each). It
    counts `findings` (rows of `/findings`) and `count` (how often seen). If there were more
    findings than are grouped, `truncated` is true.
    """
    return Answer(view.finding_groups(deps, page, attempt, only))


@router.get("/findings/{finding_id}", response_model=models.Finding)
def finding(
    deps: Deps,
    finding_id: Annotated[str, Path(max_length=100, description="Its id, or how it begins.")],
) -> Answer:
    """Return one finding in full, and in `group` the findings of its attempt with its cause."""
    return Answer(view.finding(deps, finding_id))


@router.get("/losses/groups", response_model=models.LossGroups, summary="Groups of lost data")
def loss_groups(deps: Deps, page: PageOf, attempt: AttemptQueryOf, only: Only = None) -> Answer:
    """List what never arrived, a row for each kind, reason, stage and role; most lost first."""
    return Answer(view.loss_groups(deps, page, attempt, only))


@router.get("/triggers/firings/groups", response_model=models.FiringGroups, tags=["triggers"])
def firing_groups(
    deps: Deps,
    page: PageOf,
    run: Annotated[
        str | None,
        Query(description="Only this run; default: all runs."),
    ] = None,
    only: Only = None,
) -> Answer:
    """List what fired, a row for each rule, stage and role, without withdrawn firings."""
    return Answer(view.firing_groups(deps, page, run, only))
