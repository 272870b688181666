"""The route that returns a step's batch: its payload files, joined, as one safetensors file."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from stagescope_service.dumps.joining.join import Selection
from stagescope_service.http.parameters import Deps, StepTarget
from stagescope_service.http.requests import pattern
from stagescope_service.views.samples.batches import batch_of, open_stream
from stagescope_wire.errors import InvalidInput

router = APIRouter(prefix="/steps/{step}", tags=["steps"])

MEDIA_TYPE: Final = "application/octet-stream"


_NOT_EMPTY: Final = r"[^,\s]"

_FILE: Final = {"type": "string", "format": "binary", "description": "A safetensors file."}


@router.get(
    "/batch",
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
