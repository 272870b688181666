"""Routes that compare steps, attempts, runs or directories: tensors, or fingerprints."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from stagescope_service.api.comparison_sides import ComparedSide, find_sides, open_side
from stagescope_service.api.dependencies import Dependencies, Deps, wait_for
from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.models import comparisons as models
from stagescope_service.api.models.bodies import ComparisonRequest
from stagescope_service.api.models.comparisons import COMPARISON_RESPONSE
from stagescope_service.api.requests import Answer, PageOf, pattern, read_body
from stagescope_service.api.target import Target
from stagescope_service.compare.comparison import compare
from stagescope_service.compare.fingerprints import (
    AttemptFingerprint,
    FingerprintDifference,
    fingerprint_differences,
    in_order,
    not_compared,
    stream_differences,
)
from stagescope_service.compare.report import as_json
from stagescope_service.compare.report.html import as_html
from stagescope_service.compare.results import DumpComparison
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.core.stream_attributes import StreamValues, streams_of_payloads
from stagescope_wire.errors import InvalidInput, NotReady
from stagescope_wire.schema import read_target

router = APIRouter(tags=["comparison"])

SIDE_PATTERN: Final = r"^(?!\.{1,2}([@:]|$))[A-Za-z0-9._-]{1,100}(@[0-9]{1,9})?(:[0-9]{1,18})?$"
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
_PAYLOADS: Final = 10_000
"""Payloads of a side that are searched for attributes of their streams."""
_NUMBER: Final = r"[0-9]{1,9}(\.[0-9]{1,9})?(e-?[0-9]{1,2})?"
_TOLERANCE: Final = rf"[^;=]+={_NUMBER}(,{_NUMBER})?"


class _Compared(NamedTuple):
    """A comparison of tensors, and the differences of the first two attempts' fingerprints."""

    comparison: DumpComparison
    changes: JsonObject | None
    """As `/diff` returns them; None: fewer than two sides are attempts."""

    def to_json(self) -> JsonObject:
        """Return the answer of `POST /comparisons`."""
        return {**as_json(self.comparison), "changes": self.changes}


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
    differences = attempt_differences(deps, _find_attempt(deps, a), _find_attempt(deps, b))
    return Answer({**differences.heading, **page.cut(differences.rows)})


async def compare_sides(deps: Dependencies, body: ComparisonRequest) -> _Compared:
    """Return the result of a comparison.

    Raises:
        NotReady: it takes longer than a request waits.
    """
    began, future = await asyncio.to_thread(_start, deps, body)
    if not await wait_for(future):
        raise NotReady(
            f"they have been compared for {time.monotonic() - began:.0f} s",
            advice="ask the same again in a moment",
        )
    return future.result()


def _start(deps: Dependencies, body: ComparisonRequest) -> tuple[float, Future[_Compared]]:
    texts = body.tolerances or []
    tolerances = Tolerances.parse(texts)
    sides = find_sides(deps, [side for side in (body.a, body.b, body.c) if side is not None])
    # The key changes when a step grows or a file goes.
    key = ("comparison", *(side.version() for side in sides), *texts)
    return deps.long_computations.start_once(key, _compared, deps, sides, tolerances)


def _compared(
    deps: Dependencies, sides: Sequence[ComparedSide], tolerances: Tolerances
) -> _Compared:
    root = deps.settings.data_path / "copies"
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as copies:
        dumps = [open_side(deps, side, Path(copies)) for side in sides]
        comparison = compare(dumps, tolerances=tolerances)
    of_runs = [side for side in sides if side.target is not None]
    targets = [side.target for side in sides if side.target is not None]
    if len(targets) < 2:
        return _Compared(comparison, None)
    of_streams = stream_differences(*(_streams_of(deps, side) for side in of_runs[:2]))
    differences = attempt_differences(deps, targets[0], targets[1], of_streams)
    return _Compared(comparison, {**differences.heading, "rows": differences.rows})


def _streams_of(deps: Dependencies, side: ComparedSide) -> StreamValues:
    """Return the attributes of streams that the payloads of a side's steps report."""
    assert side.target is not None
    attempt_id, steps = side.target.attempt_id, list(side.steps)
    rows = deps.catalogue.payloads(attempt_id, steps, state="ingested", limit=_PAYLOADS)
    return streams_of_payloads(rows, deps.catalogue.replaced(attempt_id, steps))


# --- fingerprints ---------------------------------------------------------------------------
class AttemptDifferences(NamedTuple):
    """The differences of two attempts' fingerprints."""

    heading: JsonObject
    """First fields of the answer."""
    rows: list[JsonObject]


def attempt_differences(
    deps: Dependencies, a: Target, b: Target, also: Sequence[FingerprintDifference] = ()
) -> AttemptDifferences:
    """Return the differences between two attempts, as `/diff` answers them, and others."""
    fingerprints = {"a": _fingerprint(deps, a), "b": _fingerprint(deps, b)}
    differences = in_order([*fingerprint_differences(*fingerprints.values()), *also])
    heading: JsonObject = {
        "a": _attempt_heading(a),
        "b": _attempt_heading(b),
        "counts": dict(Counter(each.weight for each in differences)),
        "unknown": [name for name, each in fingerprints.items() if not each.fingerprint],
        "note": "; ".join(not_compared(fingerprints["a"], fingerprints["b"])) or None,
    }
    return AttemptDifferences(heading, [each._asdict() for each in differences])


def _find_attempt(deps: Dependencies, text: str) -> Target:
    """Return the attempt that `run[@attempt]` names.

    Raises:
        NotFound: no such run or attempt.
        InvalidInput: the text names a step too, or cannot be parsed.
    """
    requested = read_target(text)
    if requested.step is not None:
        raise InvalidInput(f"{text!r} names a step", expected="RUN[@ATTEMPT]")
    return deps.finder.attempt(requested.run, requested.attempt)


def _fingerprint(deps: Dependencies, target: Target) -> AttemptFingerprint:
    processes = deps.catalogue.processes(target.attempt_id)
    return AttemptFingerprint(deps.catalogue.fingerprint(target.attempt_id), processes)


def _attempt_heading(target: Target) -> JsonObject:
    row = target.attempt
    return {
        "run": target.run,
        "attempt": target.number,
        "begun": row["opened_wall"],
        "resumed_from_step": row["resumed_from_step"],
    }
