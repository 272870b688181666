"""The route of the report."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response

from stagescope.wire.schema import STEP_BOUND
from stagescope_service.api.dependencies import AttemptNumber, Dependencies, Deps, RunPath
from stagescope_service.api.encoding import encode
from stagescope_service.api.models import report as models
from stagescope_service.api.report.content import make_report
from stagescope_service.api.report.parts import file_name
from stagescope_service.api.report.rendering import as_html, as_markdown

router = APIRouter(tags=["runs"])

Format = Literal["json", "html", "md"]

_MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "html": "text/html; charset=utf-8",
    "md": "text/markdown; charset=utf-8",
}


@router.get(
    "/runs/{run}/report",
    response_model=models.Report,
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
    """Report what is known of a run, or of one of its steps: verdicts, tables, figures, advice.

    The formats have one content, of the same numbers and figures as the other routes'. Markdown
    has no figures, and the first rows and lines alone. What is missing is in each section's `gaps`.
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
    return encode(found.to_json()), name
