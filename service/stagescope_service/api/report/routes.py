"""The report of a run or a step: its sections put together, and the route that answers it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response

import stagescope
from stagescope.wire.errors import StagescopeError
from stagescope.wire.schema import STEP_BOUND
from stagescope_service.api.dependencies import AttemptNumber, Dependencies, Deps, RunPath
from stagescope_service.api.encoding import encode
from stagescope_service.api.redaction import Redactor
from stagescope_service.api.report.content import OF_RUN, OF_STEP
from stagescope_service.api.report.parts import (
    Report,
    ReportScope,
    ReportSection,
    file_name,
    redacted,
    shortened,
)
from stagescope_service.api.report.rendering import as_html, as_markdown

router = APIRouter(tags=["runs"])

MAX_FIGURE_BYTES: Final = 2_500_000
"""Of all figures as JSON: with plotly's own 4.8 MB the file stays below 8 MB."""

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
    return encode(dataclasses.asdict(found)), name


def make_report(
    deps: Dependencies,
    run: str,
    *,
    attempt: int | None,
    step: int | None,
    at_step: Callable[[str], None] = lambda name: None,
) -> Report:
    """Return the report of a run, or of one of its steps.

    Args:
        deps: the collaborators.
        run: its name.
        attempt: its number; None: the attempts in force.
        step: the trainer's step; None: the whole run.
        at_step: called with the name of each section before it is made.

    Raises:
        NotFound: there is no such run, attempt or step.
    """
    scope = ReportScope.find(deps, run, attempt, step)
    makers = OF_RUN if step is None else OF_STEP
    sections: list[ReportSection] = []
    for name, (title, make) in makers.items():
        at_step(name)
        try:
            section = make(scope)
        except StagescopeError as error:
            section = ReportSection(name, title, gaps=[shortened(str(error))])
        if section is not None:
            sections.append(dataclasses.replace(section, name=name, title=section.title or title))
    redactor = Redactor()
    number = scope.target.number if step is not None else attempt
    parts = {"": scope.run, "attempt ": number, "step ": step}
    return Report(
        title=", ".join(f"{what}{each}" for what, each in parts.items() if each is not None),
        run=scope.run,
        attempt=number,
        step=step,
        made_wall=deps.clock(),
        version=stagescope.__version__,
        verdicts=redacted(scope.verdicts, redactor),
        sections=redacted(_within(sections, MAX_FIGURE_BYTES), redactor),
    )


def _within(sections: Iterable[ReportSection], most: int) -> list[ReportSection]:
    """Return sections without the figures that do not fit into `most` bytes; they are named."""
    kept, used = [], 0
    for section in sections:
        figures, gaps = [], list(section.gaps)
        for figure in section.figures:
            size = len(encode(figure["figure"]))
            if used + size > most:
                gaps.append(
                    f"figure {figure['name']} has {size} bytes and is left out: "
                    f"GET /figures/{figure['name']} has it"
                )
                continue
            used += size
            figures.append(figure)
        kept.append(dataclasses.replace(section, figures=figures, gaps=gaps))
    return kept
