"""Routes about captures: the plan, requests for captures, their progress, their withdrawal."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from stagescope_service.http.auth import caller_of
from stagescope_service.http.parameters import Deps, RunPath
from stagescope_service.http.problems import check_ready
from stagescope_service.http.requests import Answer, PageOf, read_json
from stagescope_service.views.captures import listing as view
from stagescope_service.views.captures.costs import costs
from stagescope_service.views.captures.listing import already_over, default_run, states_of
from stagescope_service.views.models import captures as models
from stagescope_service.views.models.bodies import MAX_WAIT, CaptureRequest
from stagescope_service.views.reading.target import LiveRun
from stagescope_wire.errors import NotFound

router = APIRouter(tags=["captures"])

CaptureId = Annotated[str, Path(max_length=100, description="The capture's id.")]


@router.get("/plan", response_model=models.Plan)
async def plan(deps: Deps) -> Answer:
    """Return the active plan: its revision and its captures.

    Each `state` is the one in `GET /captures/{capture_id}`. A capture whose steps by number are
    over is `complete` or `partial`. It stays active for an attempt that repeats them.
    """
    reply = check_ready(await deps.commands.plan())
    ids = [each["capture_id"] for each in reply["captures"]]
    states = await asyncio.to_thread(states_of, deps, ids)
    captures = [{**each, "state": states.get(each["capture_id"])} for each in reply["captures"]]
    return Answer({**reply, "captures": captures})


@router.get("/captures", response_model=models.Captures)
def captures(
    deps: Deps,
    page: PageOf,
    run: Annotated[
        str | None,
        Query(description="Only those requested for this run."),
    ] = None,
) -> Answer:
    """List all captures that were ever requested, newest first, withdrawn ones too."""
    return Answer(view.captures(deps, page, run))


@router.get("/runs/{run:path}/capture-costs", response_model=models.CaptureCosts)
def capture_costs(deps: Deps, run: RunPath) -> Answer:
    """Tell what a capture will cost, about: what earlier dumps of the run cost.

    Each row is the largest cost of one rank in one step, of a role, stage, task and level. Before
    a capture begins, the ranks themselves estimate it: `agreement.estimates` in
    `GET /captures/{capture_id}`.
    """
    return Answer(costs(deps, run))


@router.get("/captures/{capture_id}", response_model=models.Capture)
def capture(deps: Deps, capture_id: CaptureId) -> Answer:
    """Return the progress of a capture: who acknowledged it, who collected, missed or failed.

    The `state` is `asked` (not every rank has acknowledged), `agreed` (it starts at
    `agreement.start`), `complete`, `partial`, `empty` (no rank did these stages), `given up`,
    `too late`, `refused` or `withdrawn`. Requested ranks are in `ranks`, the result of each step is
    in `steps`, every dump in `dumps`.
    """
    return Answer(view.capture(deps, capture_id))


@router.post(
    "/captures",
    response_model=models.NewCapture,
    status_code=201,
    openapi_extra=CaptureRequest.document(),
)
async def add_capture(
    request: Request,
    deps: Deps,
    wait: Annotated[
        float, Query(ge=0, le=MAX_WAIT, description="Seconds to wait for the ranks to agree.")
    ] = 2.0,
) -> Answer:
    """Request a capture and return it with its id; needs the operate token.

    Every requested rank acknowledges it first. Then `agreement.start` is fixed: a step that none
    of them can have begun before it knew. `agreement.estimates` is what each rank expects the
    capture to cost. Ranks that have not acknowledged are named in `notes`. `warnings` names what
    may be misspelt, such as a stage that no rank has run. Its paths must lie inside the allowed
    roots. Who requested it (header `X-Stagescope-User`, which token, from
    where) is kept in the audit.
    """
    spec = await read_json(request, deps.settings)
    others: list[LiveRun] = []
    if spec.get("run") is None:
        spec["run"], others = await asyncio.to_thread(default_run, deps)
    reply = check_ready(
        await deps.commands.add_capture(spec=spec, by=str(caller_of(request)), wait=wait)
    )
    if others:
        names = ", ".join(each["run"] for each in others[:20])
        note = f"requested for run {spec['run']}, the last to begin a stage; also live: {names}"
        reply = {**reply, "notes": [note, *(reply.get("notes") or ())]}
    return Answer(reply, 201)


@router.delete("/captures/{capture_id}", response_model=models.RequestedCapture)
async def remove_capture(request: Request, deps: Deps, capture_id: CaptureId) -> Answer:
    """Withdraw a capture and return it; what it has collected stays. Needs the operate token.

    `GET /captures/{capture_id}` then lists which ranks have acknowledged the withdrawal.
    """
    by = str(caller_of(request))
    try:
        reply = await deps.commands.remove_capture(capture_id=capture_id, by=by)
    except NotFound as error:
        row = await asyncio.to_thread(deps.catalogue.capture, capture_id)
        if row is None or row["removed_wall"] is None:
            raise
        raise already_over(deps, row) from error
    return Answer(check_ready(reply))
