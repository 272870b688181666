"""Routes of the report of a run or a step, and of the bundle of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, BinaryIO, Final, Literal, NamedTuple

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response, StreamingResponse

from stagescope_service.http.access_tokens import AccessTokens
from stagescope_service.http.parameters import AttemptNumber, Deps, RunPath
from stagescope_service.report.bundle.making import make_bundle
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
    "/runs/{run:path}/report",
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


MEDIA_TYPE: Final = "application/gzip"

DEFAULT_BYTES: Final = 2 << 30

_CHUNK: Final = 1 << 20

_FILE: Final = {"type": "string", "format": "binary", "description": "A tar.gz file."}


class BundleQuery(NamedTuple):
    """The query parameters of a bundle."""

    step: int
    attempt: int | None
    tensors: bool
    limit_bytes: int


async def bundle_query(
    step: Annotated[int, Query(ge=0, lt=STEP_BOUND, description="The trainer's step.")],
    attempt: AttemptNumber = None,
    tensors: Annotated[
        bool,
        Query(description="With the step's tensors: log-probs, and prompts and responses as ids."),
    ] = True,
    limit_bytes: Annotated[
        int, Query(ge=1 << 20, le=1 << 40, description="Most bytes of its files; others are named.")
    ] = DEFAULT_BYTES,
) -> BundleQuery:
    """Return the requested parts of a bundle."""
    return BundleQuery(step, attempt, tensors, limit_bytes)


@router.get(
    "/runs/{run:path}/bundle",
    response_class=StreamingResponse,
    responses={200: {"content": {MEDIA_TYPE: {"schema": _FILE}}}},
)
async def bundle(
    request: Request, deps: Deps, run: RunPath, query: Annotated[BundleQuery, Depends(bundle_query)]
) -> StreamingResponse:
    """Return a step as one archive without secrets, for whoever must look at it elsewhere.

    It holds the run's rows of the catalogue, the step's tensors, operators, findings, stacks and
    fingerprint, and its report. Logs that the training's variables name are included if they lie
    inside the allowed roots. Its `manifest.json` lists every file with its checksum, and what was
    left out, and why. Use `stagescope attach FILE` to open it without a service.
    """
    target = deps.finder.step(run, query.attempt, query.step)
    tokens: AccessTokens | None = request.app.state.tokens
    secrets = () if tokens is None else (tokens.read, tokens.operate)
    made = await deps.long_computations.run(
        make_bundle, deps, target, tensors=query.tensors, limit=query.limit_bytes, secrets=secrets
    )
    headers = {
        "content-length": str(made.bytes),
        "content-disposition": f'attachment; filename="{made.name}"',
    }
    return StreamingResponse(_chunks(made.file), media_type=MEDIA_TYPE, headers=headers)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_CHUNK):
            yield piece
