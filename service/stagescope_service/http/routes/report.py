"""The report of a run or a step: its sections, its files, and the route that returns them.

HTML opens without network access. The templates escape all text, in Markdown too.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response

from stagescope_service.http.parameters import AttemptNumber, Deps, RunPath
from stagescope_service.report.parts import Report, file_name
from stagescope_service.report.rendering import as_html, as_markdown, make_report
from stagescope_service.views.encoding import encode
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_wire.schema import STEP_BOUND

router = APIRouter(tags=["runs"])

Format = Literal["json", "html", "md"]

_MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "html": "text/html; charset=utf-8",
    "md": "text/markdown; charset=utf-8",
}


@router.get(
    "/runs/{run}/report",
    response_model=Report,
    responses={200: {"content": {
        "text/html": {"schema": {"type": "string", "description": "One self-contained page."}},
        "text/markdown": {"schema": {"type": "string", "description": "For a pull request."}},
    }}},
)  # fmt: skip
async def report(
    deps: Deps,
    run: RunPath,
    attempt: AttemptNumber = None,
    step: Annotated[
        int | None,
        Query(ge=0, lt=STEP_BOUND, description="That step in detail; default: the whole run."),
    ] = None,
    format: Annotated[
        Format, Query(description="`html` is one file for a browser without network access.")
    ] = "json",
) -> Response:
    """Report on a run, or on one of its steps: verdicts, tables, figures, advice.

    All formats have the same content, with the numbers and figures of the other routes. Markdown
    has no figures, and only the first rows and lines. Each section lists missing data in `gaps`.
    """
    body, name = await deps.computations.run(_report_of, deps, run, attempt, step, format)
    return Response(
        body, media_type=_MEDIA_TYPES[format],
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )  # fmt: skip


def _report_of(
    deps: Dependencies, run: str, attempt: int | None, step: int | None, format: Format
) -> tuple[bytes, str]:
    """Return the file of a report, and its name."""
    found = make_report(deps, run, attempt=attempt, step=step)
    name = file_name(found, format)
    if format == "html":
        return as_html(found).encode(), name
    if format == "md":
        return as_markdown(found).encode(), name
    return encode(dataclasses.asdict(found)), name
