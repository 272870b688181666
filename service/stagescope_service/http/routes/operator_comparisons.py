"""Routes that compare two operator tables: the first operator that differs, or full tensors."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request

from stagescope_service.http.parameters import Deps
from stagescope_service.http.requests import Answer, read_body
from stagescope_service.views.models import operators as models
from stagescope_service.views.models.bodies import DivergenceRequest, TensorsRequest
from stagescope_service.views.operators.comparisons import find_divergence, start_tensors
from stagescope_service.views.reading.dependencies import wait_for
from stagescope_wire.errors import NotReady

router = APIRouter(tags=["operators"])


@router.post(
    "/operators/divergence",
    response_model=models.Divergence,
    openapi_extra=DivergenceRequest.document(),
)
async def divergence(request: Request, deps: Deps) -> Answer:
    """Find the first operator in which two dumps differ: ranks, steps, attempts, runs, devices.

    Calls are paired by operator and context, not by their counters. They are compared in the order
    of side `a` by the relative difference of min, max, mean and norm. The threshold is `factor`
    times the eps of the coarsest dtype up to there (4; 100 where the devices are of two kinds). The
    answers `first_parameter` and `first_gradient` are separate: between replicas on different data
    every activation differs, and no parameter may. Fields that side `b` leaves out are as in `a`.

    With `ranks` the tensors of a side's ranks are put together before they are compared, so that
    runs of other parallel layouts compare. `shards` of a row name the ranks in which it differs.
    """
    body = await read_body(request, deps.settings, DivergenceRequest)
    return Answer(await deps.computations.run(find_divergence, deps, body))


@router.post(
    "/operators/tensors", response_model=models.TensorPairs, openapi_extra=TensorsRequest.document()
)
async def tensors(request: Request, deps: Deps) -> Answer:
    """Compare the full tensors of two dumps (msprobe's task `tensor`) with msprobe itself.

    Each tensor has a row, in execution order: cosine, largest absolute and relative error, the
    share of elements within 1e-3 and 5e-3. Side `a` is msprobe's NPU side, `b` its bench. The
    verdicts of msprobe are left out. It runs in its own process for up to 15 minutes. Meanwhile the
    answer is 503; repeat the request. Fields that side `b` leaves out are as in `a`.
    """
    body = await read_body(request, deps.settings, TensorsRequest)
    sides, began, future = await asyncio.to_thread(start_tensors, deps, body)
    if not await wait_for(future):
        raise NotReady(
            f"msprobe has been comparing them for {time.monotonic() - began:.0f} s",
            advice="ask the same again in a moment",
        )
    rows = future.result()
    return Answer(
        {
            "a": sides[0].heading(),
            "b": sides[1].heading(),
            "count": len(rows),
            "rows": rows[body.offset : body.offset + body.limit],
        }
    )
