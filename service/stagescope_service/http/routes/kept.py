"""Routes about kept files and pins, and the batch that is joined from them."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from stagescope_service.dumps.joining.join import Selection
from stagescope_service.http.auth import caller_of
from stagescope_service.http.parameters import Deps, RankQueryOf, StepTarget
from stagescope_service.http.problems import check_ready
from stagescope_service.http.requests import Answer, PageOf, pattern
from stagescope_service.views import kept as view
from stagescope_service.views.models import steps as models
from stagescope_service.views.samples.batches import batch_of, open_stream
from stagescope_wire.errors import InvalidInput
from stagescope_wire.keep import SECTIONS

router = APIRouter(prefix="/steps/{step}")

Section = Annotated[
    str | None,
    Query(
        description="Only files that hold something of it.", json_schema_extra={"enum": [*SECTIONS]}
    ),
]


@router.get("/kept", response_model=models.Kept, tags=["kept files"])
def kept(
    deps: Deps, target: StepTarget, page: PageOf, ranks: RankQueryOf, section: Section = None
) -> Answer:
    """List the files that are kept of the step, by stage, role, rank and part.

    The contents of a file are in `sections`; `tensors` is name -> [dtype, shape, rows of a packed
    one]. The `state` is `kept`, `deleted` (by retention), `missing` (removed, but not by the
    service) or `unreachable` (its node is gone). Payloads that the step's pin holds in the ring are
    listed too, with the state `pinned`. Deleted files do not count in `files` and `bytes`.
    """
    return Answer(view.kept(deps, target, page, ranks, section))


@router.put("/pin", response_model=models.Pin, tags=["kept files"])
async def pin(request: Request, deps: Deps, target: StepTarget) -> Answer:
    """Keep the files and the recent payloads of a step until it is unpinned.

    Needs the operate token. Its content now, files included, is counted in `payloads` and `bytes`;
    it also holds what arrives later. Payloads that had left the ring before are `gone`. Why
    something is not pinned is in `reasons` (the ring's share for pins may be full).
    """
    reply = check_ready(
        await deps.commands.pin(
            attempt_id=target.attempt_id, step=target.step_number, by=str(caller_of(request))
        )
    )
    names = ("pinned", "payloads", "bytes", "gone", "reasons")
    return Answer({**target.heading(), **{name: reply[name] for name in names}})


@router.delete("/pin", response_model=models.Unpin, tags=["triggers"])
async def unpin(request: Request, deps: Deps, target: StepTarget) -> Answer:
    """Let the rings drop the payloads of a pinned step when they need room; needs operate.

    `unpinned` is false, with a `reason`, where it was not pinned or a ring did not answer.
    """
    reply = check_ready(
        await deps.commands.unpin(
            attempt_id=target.attempt_id, step=target.step_number, by=str(caller_of(request))
        )
    )
    reason = None
    if not target.step_row["pinned"]:
        reason = "it was not pinned"
    elif not reply["unpinned"]:
        reason = "a node's ring did not answer"
    return Answer({**target.heading(), "unpinned": reason is None, "reason": reason})


MEDIA_TYPE: Final = "application/octet-stream"


_NOT_EMPTY: Final = r"[^,\s]"

_FILE: Final = {"type": "string", "format": "binary", "description": "A safetensors file."}


@router.get(
    "/batch",
    tags=["steps"],
    response_class=StreamingResponse,
    responses={200: {"content": {MEDIA_TYPE: {"schema": _FILE}}}},
)
async def batch(
    deps: Deps,
    target: StepTarget,
    names: Annotated[
        str | None,
        Query(
            max_length=4000,
            description="Only these tensors, with commas between them.",
            json_schema_extra=pattern(_NOT_EMPTY),
        ),
    ] = None,
    stages: Annotated[
        str | None,
        Query(
            max_length=4000,
            description="Only what these stages recorded, with commas between them.",
            json_schema_extra=pattern(_NOT_EMPTY),
        ),
    ] = None,
) -> StreamingResponse:
    """Return the step's batch as one safetensors file: rows of every stage, rank and part.

    It is joined by sample id from the kept files and the payloads that the rings still hold, with
    the recorded bits. Its metadata list the source of each row, what is missing (ranks, payloads,
    tensors that were not kept) and what disagrees; `stagescope.Batch.load` reads it.
    """
    selection = Selection(_split_names(names), _split_names(stages))
    joined = await deps.computations.run(batch_of, deps, target, selection)
    size, stream = open_stream(joined)
    name = f"{target.run}-{target.number}-step{target.step_number}.safetensors"
    headers = {"content-length": str(size), "content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(stream, media_type=MEDIA_TYPE, headers=headers)


def _split_names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name for part in text.split(",") if (name := part.strip())]
    if not names:
        raise InvalidInput(f"{text!r:.100} names nothing", expected="names with commas between")
    return names
