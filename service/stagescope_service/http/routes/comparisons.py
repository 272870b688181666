"""Routes that compare steps, attempts, runs or directories: tensors, or fingerprints."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from stagescope_service.compare.report.html import as_html
from stagescope_service.http.parameters import Deps
from stagescope_service.http.requests import Answer, PageOf, pattern, read_body
from stagescope_service.views.comparisons.comparing import (
    SIDE_PATTERN,
    attempt_differences,
    compare_sides,
    find_attempt,
)
from stagescope_service.views.models import comparisons as models
from stagescope_service.views.models.bodies import ComparisonRequest
from stagescope_service.views.models.comparisons import COMPARISON_RESPONSE

router = APIRouter(tags=["comparison"])

_SideText = Annotated[
    str,
    Query(
        max_length=200,
        description="`RUN[@ATTEMPT][:STEP]`.",
        json_schema_extra=pattern(SIDE_PATTERN),
    ),
]

_AttemptText = Annotated[
    str,
    Query(
        max_length=200,
        description="`run[@attempt]`; default: the run's newest attempt.",
        json_schema_extra=pattern(r"^(?!\.{1,2}(@|$))[A-Za-z0-9._-]{1,100}(@[0-9]{1,9})?$"),
    ),
]

_NUMBER: Final = r"[0-9]{1,9}(\.[0-9]{1,9})?(e-?[0-9]{1,2})?"

_TOLERANCE: Final = rf"[^;=]+={_NUMBER}(,{_NUMBER})?"


@router.post(
    "/comparisons",
    openapi_extra=ComparisonRequest.document(closed=False),
    responses=COMPARISON_RESPONSE,
)
async def comparisons(request: Request, deps: Deps) -> Answer:
    """Compare what is kept of two or three steps: a verdict, the first difference, likely causes.

    A side is `RUN[@ATTEMPT][:STEP]`, or `{"directory": PATH}` in the service's roots (also a saved
    batch or another single file). Without a step it is all steps that every side still holds, 50 at
    most. Trajectories are paired by sample. Every rank, part and tensor that any side has counts.
    In `changes` are the differences of the attempts' fingerprints, and of the streams' attributes
    in the steps' payloads (`STAGE.STREAM.temperature`). Give `tolerances` as `PATTERN=ATOL[,RTOL]`.
    While the comparison is computed the answer is 503; repeat the request.
    """
    body = await read_body(request, deps.settings, ComparisonRequest)
    return Answer((await compare_sides(deps, body)).to_json())


@router.get("/comparisons/page", response_class=HTMLResponse)
async def page(
    deps: Deps,
    a: _SideText,
    b: _SideText,
    c: Annotated[
        str | None,
        Query(max_length=200, description="A third side.", json_schema_extra=pattern(SIDE_PATTERN)),
    ] = None,
    tolerances: Annotated[
        str | None,
        Query(
            max_length=2000,
            description="`PATTERN=ATOL[,RTOL]`, joined by `;`.",
            json_schema_extra=pattern(f"^{_TOLERANCE}(;{_TOLERANCE})*$"),
        ),
    ] = None,
) -> HTMLResponse:
    """Return the answer of `POST /comparisons` as one self-contained page, with pictures."""
    body = ComparisonRequest(
        a=a, b=b, c=c, tolerances=tolerances.split(";") if tolerances else None
    )
    compared = await compare_sides(deps, body)
    return HTMLResponse(await asyncio.to_thread(lambda: as_html(compared.to_json())))


@router.get("/diff", response_model=models.Diff)
def diff(deps: Deps, a: _AttemptText, b: _AttemptText, page: PageOf) -> Answer:
    """List what differs between two attempts or runs, what decides numbers first.

    It compares their fingerprints, and where each rank ran. A fingerprint has git, hashes of the
    script and of loaded modules outside of installed packages, configuration, packages, drivers,
    and the environment without secrets. A difference may mean other `numbers`, another `place`, or
    only another `start`: this is its `weight`. Sides without a fingerprint are in `unknown`. The
    `note` says what could not be compared.
    """
    differences = attempt_differences(deps, find_attempt(deps, a), find_attempt(deps, b))
    return Answer({**differences.heading, **page.cut(differences.rows)})
