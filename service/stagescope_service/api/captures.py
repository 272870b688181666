"""Routes about orders: the plan, a capture, how far it has come, its withdrawal."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request

from stagescope.wire.captures import CAPTURE_FIELDS, SHORTHANDS
from stagescope.wire.errors import NotFound
from stagescope_service.api.auth import caller_of
from stagescope_service.api.capture_progress import progress
from stagescope_service.api.dependencies import Dependencies, Deps, Row
from stagescope_service.api.models import captures as models
from stagescope_service.api.problems import check_ready
from stagescope_service.api.requests import Answer, PageOf, read_json
from stagescope_service.core.captures.agreement import AGREED, DONE
from stagescope_service.core.captures.plan import validate_capture

router = APIRouter(tags=["captures"])

LONGEST_WAIT: Final = 60.0

_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["stages", "steps"],
                "properties": {
                    name: {"description": text}
                    for name, text in {**CAPTURE_FIELDS, **SHORTHANDS}.items()
                },
                "additionalProperties": False,
            }
        }
    },
}

CaptureId = Annotated[str, Path(max_length=100, description="The capture's id.")]


@router.get("/plan", response_model=models.Plan)
async def plan(deps: Deps) -> Answer:
    """Return the plan in force: its revision and its captures.

    `state` of each is that of `GET /captures/{capture_id}`: one whose steps by number are over is
    `complete` or `partial`, and stays in force for an attempt that does them again.
    """
    said = check_ready(await deps.commands.plan())
    states = await asyncio.to_thread(
        _states, deps, [each["capture_id"] for each in said["captures"]]
    )
    captures = [{**each, "state": states.get(each["capture_id"])} for each in said["captures"]]
    return Answer({**said, "captures": captures})


@router.get("/captures", response_model=models.Captures)
def captures(
    deps: Deps,
    page: PageOf,
    run: Annotated[
        str | None, Query(max_length=100, description="Only those ordered for this run.")
    ] = None,
) -> Answer:
    """List the captures that were ever ordered, newest first, withdrawn ones too."""
    answer = page.cut(deps.catalogue.captures(run=run))
    rows = [
        {**row, "state": progress(deps.catalogue, row)["state"]}
        if row["state"] in (AGREED, DONE)
        else row
        for row in answer["rows"]
    ]
    return Answer({**answer, "rows": rows})


@router.get("/captures/{capture_id}", response_model=models.Capture)
def capture(deps: Deps, capture_id: CaptureId) -> Answer:
    """Say how far a capture has come: who acknowledged it, who collected, missed or failed.

    `state` is `asked` (not every rank has acknowledged), `agreed` (it starts at
    `agreement.start`), `complete`, `partial`, `given up`, `too late`, `refused` or `withdrawn`.
    `ranks` lists whom it asks, `steps` what each step came to, `dumps` every dump.
    """
    row = deps.catalogue.capture(capture_id)
    if row is None:
        raise NotFound(f"no capture {capture_id!r:.100}", advice="see /captures for all of them")
    return Answer(progress(deps.catalogue, row))


@router.post(
    "/captures",
    response_model=models.NewCapture,
    status_code=201,
    openapi_extra={"requestBody": _BODY},
)
async def add_capture(
    request: Request,
    deps: Deps,
    wait: Annotated[
        float,
        Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for the ranks to agree."),
    ] = 2.0,
) -> Answer:
    """Order a capture and return it with its id; needs the operate token.

    Every asked rank acknowledges first; only then is `agreement.start` fixed, a step that none of
    them can have begun before it knew. `agreement.estimates` is what each rank reckons that it
    takes. Ranks that have not acknowledged are named in `notes`. Its paths must lie inside the
    allowed roots. Who ordered it (header `X-Stagescope-User`, which token, from where) is kept in
    the audit.
    """
    spec = await read_json(request, deps.settings)
    valid = await asyncio.to_thread(_validated, deps, spec)
    others: list[Row] = []
    if valid["run"] is None:
        valid["run"], others = await asyncio.to_thread(_default_run, deps)
    reply = await deps.commands.add_capture(spec=valid, by=str(caller_of(request)), wait=wait)
    said = check_ready(reply)
    if others:
        names = ", ".join(str(each["run"]) for each in others[:20])
        note = f"ordered for run {valid['run']}, the last to begin a stage; also live: {names}"
        said = {**said, "notes": [note, *(said.get("notes") or ())]}
    return Answer(said, 201)


@router.delete("/captures/{capture_id}", response_model=models.OrderedCapture)
async def remove_capture(request: Request, deps: Deps, capture_id: CaptureId) -> Answer:
    """Withdraw a capture and return it; what it has collected stays. Needs the operate token.

    `GET /captures/{capture_id}` then says which ranks have acknowledged that it is gone.
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


def _already_over(deps: Dependencies, row: Row) -> NotFound:
    """Return the error of a removal of what is no longer in force."""
    capture_id, state = row["capture_id"], progress(deps.catalogue, row)["state"]
    by = f", removed by {row['removed_by']}" if row["removed_by"] else ""
    return NotFound(
        f"capture {capture_id} is no longer in force: it is {state}{by}",
        advice=f"nothing is left to remove; what it collected stays: see /captures/{capture_id}",
    )


def _states(deps: Dependencies, capture_ids: list[str]) -> dict[str, str]:
    """Return what captures came to so far."""
    rows = [deps.catalogue.capture(capture_id) for capture_id in capture_ids]
    return {
        row["capture_id"]: progress(deps.catalogue, row)["state"] for row in rows if row is not None
    }


def _default_run(deps: Dependencies) -> tuple[str | None, list[Row]]:
    """Return the run that questions without one are about, and the others that are live.

    None where it is over or none has reported: the coordinator then says what an order may be for.
    """
    try:
        target = deps.finder.attempt(None)
    except NotFound:
        return None, []
    if target.attempt["ended_wall"] is not None:
        return None, []
    return target.run, target.also_live


def _validated(deps: Dependencies, spec: dict[str, Any]) -> dict[str, Any]:
    # In a thread: resolving a path's links may wait for a slow file system.
    return validate_capture(spec, allowed_roots=[str(root) for root in deps.settings.roots])
