"""Two dumps of full tensors, compared by msprobe: begun by a question, answered by a later one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request

from stagescope.wire.errors import InvalidInput, NotReady, Unreachable
from stagescope_service.api.dependencies import Dependencies, Deps, Row
from stagescope_service.api.models import operators as models
from stagescope_service.api.operator_files import place
from stagescope_service.api.operator_tables import (
    Side,
    check_fields,
    find_side,
    read_sides,
    sides_schema,
    whole_number,
)
from stagescope_service.api.requests import Answer, read_json
from stagescope_service.compare.operators.tensors import compare_tensors
from stagescope_service.store.artifacts import confine

router = APIRouter(tags=["operators"])

WAIT_SECONDS: Final = 5.0
"""How long a question waits for msprobe before it is told to ask again."""

_BODY: Final[dict[str, Any]] = sides_schema(
    limit={"type": "integer", "minimum": 1, "maximum": 10_000},
    offset={"type": "integer", "minimum": 0},
)


@router.post(
    "/operators/tensors", response_model=models.TensorPairs, openapi_extra={"requestBody": _BODY}
)
async def tensors(request: Request, deps: Deps) -> Answer:
    """Compare the full tensors of two dumps (msprobe's task `tensor`) with msprobe itself.

    A row a tensor in execution order: cosine, largest absolute and relative error, the share of
    elements within 1e-3 and 5e-3; `a` is msprobe's NPU side, `b` its bench. msprobe's verdicts are
    left out. It runs in a process of its own for up to 15 minutes: while it does, the answer is
    503 and the same question may be asked again. What side `b` leaves out is as in `a`.
    """
    said = await read_json(request, deps.settings)
    check_fields(said, "a", "b", "limit", "offset")
    limit = whole_number(said, "limit", 1000, least=1, most=10_000)
    offset = whole_number(said, "offset", 0, least=0, most=1 << 31)
    a, b, (began, future) = await asyncio.to_thread(_begin, deps, said)
    if not await _waited(future):
        raise NotReady(
            f"msprobe has been comparing them for {time.monotonic() - began:.0f} s",
            advice="ask the same again in a moment",
        )
    rows = future.result()
    return Answer(
        {
            "a": a.heading(),
            "b": b.heading(),
            "count": len(rows),
            "rows": rows[offset : offset + limit],
        }
    )


async def _waited(future: Future[list[Row]]) -> bool:
    """Wait for an answer, `WAIT_SECONDS` at most; return whether it is there."""
    waiting = asyncio.wrap_future(future)
    done, _ = await asyncio.wait([waiting], timeout=WAIT_SECONDS)
    if not done:
        # Whoever asks again hears of its error; asyncio need not complain that nobody did.
        waiting.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
    return bool(done)


def _begin(
    deps: Dependencies, said: Mapping[str, Any]
) -> tuple[Side, Side, tuple[float, Future[list[Row]]]]:
    of_a, of_b = read_sides(said)
    a = find_side(deps, of_a, "a")
    b = find_side(deps, of_b, "b", like=a)
    for side in (a, b):
        if side.row["task"] not in (None, "tensor"):
            raise InvalidInput(
                f"the dump of {place(side.row)} is of task {side.row['task']}",
                expected="a dump of msprobe's task 'tensor'",
                advice="its statistics are compared by /operators/divergence",
            )
    tables = (deps.operator_files.path(a.row), deps.operator_files.path(b.row))
    directories = (_directory(deps, a), _directory(deps, b))
    key = (a.row["checksum"], b.row["checksum"])
    return a, b, deps.long_comparisons.once(key, compare_tensors, *directories, tables)


def _directory(deps: Dependencies, side: Side) -> Path:
    directory = confine(side.row["dump_path"], deps.settings.roots)
    if not (directory / "dump.json").is_file():
        raise Unreachable(
            f"the tensors of {place(side.row)} lie on node {side.row['node_id']} alone",
            advice="a data_dir that all nodes share lets them be compared",
        )
    return directory
