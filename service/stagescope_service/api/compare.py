"""Two or three steps, attempts, runs or directories held against each other, tensor by tensor."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from stagescope.wire.errors import InvalidInput, NotReady
from stagescope_service.api.dependencies import Dependencies, Deps
from stagescope_service.api.diff import attempts_apart
from stagescope_service.api.models.comparisons import COMPARISON_RESPONSE
from stagescope_service.api.operator_tables import check_fields
from stagescope_service.api.requests import Answer, pattern, read_json
from stagescope_service.api.sides import Side, check_sides, find_sides, open_side
from stagescope_service.compare.comparison import compare
from stagescope_service.compare.report import as_json
from stagescope_service.compare.report.html import as_html
from stagescope_service.compare.results import Comparison
from stagescope_service.compare.tolerances import Tolerances

router = APIRouter(tags=["comparison"])

WAIT_SECONDS: Final = 5.0
"""How long a question waits for the comparison before it is told to ask again."""

_SIDE: Final[dict[str, Any]] = {
    "oneOf": [
        {"type": "string", "description": "RUN[@ATTEMPT][:STEP]"},
        {"type": "object", "properties": {"directory": {"type": "string"}}},
    ]
}
_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["a", "b"],
                "properties": {
                    **dict.fromkeys("abc", _SIDE),
                    "tolerances": {"type": "array", "items": {"type": "string"}},
                },
            }
        }
    },
}
_SIDE_PATTERN: Final = r"^(?!\.{1,2}([@:]|$))[A-Za-z0-9._-]{1,100}(@[0-9]{1,9})?(:[0-9]{1,18})?$"
_SideText = Annotated[
    str,
    Query(
        max_length=200,
        description="`RUN[@ATTEMPT][:STEP]`.",
        json_schema_extra=pattern(_SIDE_PATTERN),
    ),
]
_NUMBER: Final = r"[0-9]{1,9}(\.[0-9]{1,9})?(e-?[0-9]{1,2})?"
_TOLERANCE: Final = rf"[^;=]+={_NUMBER}(,{_NUMBER})?"


@router.post("/comparisons", openapi_extra={"requestBody": _BODY}, responses=COMPARISON_RESPONSE)
async def comparisons(request: Request, deps: Deps) -> Answer:
    """Compare what is kept of two or three steps: a verdict, the first difference, likely causes.

    A side is `RUN[@ATTEMPT][:STEP]` (without a step: all steps that every side still holds, 50 at
    most), or `{"directory": PATH}` in the service's roots (also a saved batch or another single
    file). Trajectories are paired by sample; every rank, part and tensor that any side has counts.
    `changes` says what differs in the attempts' fingerprints. `tolerances`: `PATTERN=ATOL[,RTOL]`.
    While it is computed the answer is 503, and the same question may be asked again.
    """
    said = await read_json(request, deps.settings)
    check_fields(said, "a", "b", "c", "tolerances")
    found, changes = await _answer(deps, said)
    return Answer({**as_json(found), "changes": changes})


@router.get("/comparisons/page", response_class=HTMLResponse)
async def page(
    deps: Deps,
    a: _SideText,
    b: _SideText,
    c: Annotated[
        str | None,
        Query(
            max_length=200, description="A third side.", json_schema_extra=pattern(_SIDE_PATTERN)
        ),
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
    """Return what `POST /comparisons` answers as one self-contained page, with pictures."""
    said = {"a": a, "b": b, "c": c, "tolerances": tolerances.split(";") if tolerances else None}
    found, changes = await _answer(deps, said)
    return HTMLResponse(
        await asyncio.to_thread(lambda: as_html({**as_json(found), "changes": changes}))
    )


async def _answer(
    deps: Dependencies, said: Mapping[str, Any]
) -> tuple[Comparison, dict[str, Any] | None]:
    began, future = await asyncio.to_thread(_begin, deps, said)
    waiting = asyncio.wrap_future(future)
    done, _ = await asyncio.wait([waiting], timeout=WAIT_SECONDS)
    if not done:
        # Whoever asks again hears of its error; asyncio need not complain that nobody did.
        waiting.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        raise NotReady(
            f"they have been compared for {time.monotonic() - began:.0f} s",
            advice="ask the same again in a moment",
        )
    return future.result()


def _begin(
    deps: Dependencies, said: Mapping[str, Any]
) -> tuple[float, Future[tuple[Comparison, dict[str, Any] | None]]]:
    texts = said.get("tolerances") or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidInput(f"tolerances is {texts!r:.200}", expected="a list of PATTERN=ATOL")
    tolerances = Tolerances.parse(texts)
    sides = find_sides(deps, list(check_sides(said)))
    # A step that still grows, or a file that went, is another question.
    key = ("comparison", *(side.mark() for side in sides), *texts)
    return deps.long_comparisons.once(key, _compared, deps, sides, tolerances)


def _compared(
    deps: Dependencies, sides: list[Side], tolerances: Tolerances
) -> tuple[Comparison, dict[str, Any] | None]:
    root = deps.settings.data_path / "copies"
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as copies:
        dumps = [open_side(deps, side, Path(copies)) for side in sides]
        found = compare(dumps, tolerances=tolerances)
    targets = [side.target for side in sides if side.target is not None]
    apart = attempts_apart(deps, targets[0], targets[1]) if len(targets) > 1 else None
    return found, apart
