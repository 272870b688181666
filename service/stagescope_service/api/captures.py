"""Routes about captures: the plan, requests for captures, their progress, their withdrawal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from stagescope_service.api.auth import caller_of
from stagescope_service.api.capture_progress import progress
from stagescope_service.api.dependencies import RUN_PATTERN, Dependencies, Deps
from stagescope_service.api.models import captures as models
from stagescope_service.api.models.bodies import MAX_WAIT, CaptureRequest
from stagescope_service.api.problems import check_ready
from stagescope_service.api.requests import Answer, PageOf, pattern, read_json
from stagescope_service.api.target import LiveRun
from stagescope_service.core.captures.agreement import AGREED, DONE
from stagescope_service.store.tables import CaptureRow
from stagescope_wire.errors import NotFound
from stagescope_wire.links import Link

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
    states = await asyncio.to_thread(_states, deps, ids)
    captures = [{**each, "state": states.get(each["capture_id"])} for each in reply["captures"]]
    return Answer({**reply, "captures": captures})


@router.get("/captures", response_model=models.Captures)
def captures(
    deps: Deps,
    page: PageOf,
    run: Annotated[
        str | None,
        Query(
            description="Only those requested for this run.",
            json_schema_extra=pattern(RUN_PATTERN),
        ),
    ] = None,
) -> Answer:
    """List all captures that were ever requested, newest first, withdrawn ones too."""
    every = deps.catalogue.captures(run=run)
    if run is not None and not every:  # a capture may wait for a run that has not reported yet
        deps.finder.check_run(run)
    rows = [
        {**row, "state": progress(deps.catalogue, row).state}
        if row["state"] in (AGREED, DONE)
        else row
        for row in every[page.offset : page.offset + page.limit]
    ]
    return Answer(page.answer(rows, more=len(every) > page.offset + page.limit))


@router.get("/captures/{capture_id}", response_model=models.Capture)
def capture(deps: Deps, capture_id: CaptureId) -> Answer:
    """Return the progress of a capture: who acknowledged it, who collected, missed or failed.

    The `state` is `asked` (not every rank has acknowledged), `agreed` (it starts at
    `agreement.start`), `complete`, `partial`, `empty` (no rank did these stages), `given up`,
    `too late`, `refused` or `withdrawn`. Requested ranks are in `ranks`, the result of each step is
    in `steps`, every dump in `dumps`.
    """
    row = deps.catalogue.capture(capture_id)
    if row is None:
        raise NotFound(
            f"no capture {capture_id!r:.100}", see=(Link("captures", shows="all of them"),)
        )
    return Answer(progress(deps.catalogue, row).answer())


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
        float,
        Query(ge=0, le=MAX_WAIT, description="Seconds to wait for the ranks to agree."),
    ] = 2.0,
) -> Answer:
    """Request a capture and return it with its id; needs the operate token.

    Every requested rank acknowledges it first. Then `agreement.start` is fixed: a step that none
    of them can have begun before it knew. `agreement.estimates` is what each rank expects the
    capture to cost. Ranks that have not acknowledged are named in `notes`. Its paths must lie
    inside the allowed roots. Who requested it (header `X-Stagescope-User`, which token, from
    where) is kept in the audit.
    """
    spec = await read_json(request, deps.settings)
    others: list[LiveRun] = []
    if spec.get("run") is None:
        spec["run"], others = await asyncio.to_thread(_default_run, deps)
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
        raise _already_over(deps, row) from error
    return Answer(check_ready(reply))


def _already_over(deps: Dependencies, row: CaptureRow) -> NotFound:
    """Return the error of removing a capture that is no longer active."""
    capture_id, state = row["capture_id"], progress(deps.catalogue, row).state
    by = f", removed by {row['removed_by']}" if row["removed_by"] else ""
    return NotFound(
        f"capture {capture_id} is no longer in force: it is {state}{by}",
        advice="nothing is left to remove; what it collected stays",
        see=(Link("captures", name=capture_id),),
    )


def _states(deps: Dependencies, capture_ids: Iterable[str]) -> dict[str, str]:
    """Return the states of captures by id."""
    rows = [deps.catalogue.capture(capture_id) for capture_id in capture_ids]
    return {
        row["capture_id"]: progress(deps.catalogue, row).state for row in rows if row is not None
    }


def _default_run(deps: Dependencies) -> tuple[str | None, list[LiveRun]]:
    """Return the run of requests without one, and the other live ones.

    A run that has ended is waited for. None if no run has reported: the coordinator then says what
    a capture may be requested for.
    """
    try:
        target = deps.finder.attempt(None)
    except NotFound:
        return None, []
    return target.run, target.also_live
