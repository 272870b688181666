"""Routes about operators: the calls of a dump, their stacks, and the first non-finite results."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from stagescope_service.dumps.msprobe.operator_query import OperatorFilter
from stagescope_service.http.parameters import (
    AttemptKey,
    AttemptNumber,
    Deps,
    RankQueryOf,
    Role,
    Run,
    Stage,
    StepText,
)
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views.models import operators as models
from stagescope_service.views.operators import tables as view
from stagescope_service.views.operators.tables import TableFilters, first_non_finite
from stagescope_service.views.reading.target import Target

router = APIRouter(tags=["operators"])

PartText = Annotated[
    str | None,
    Query(max_length=100, description="Only this part: occurrence.epoch.minibatch.microbatch."),
]

CaptureId = Annotated[str | None, Query(max_length=200, description="Only dumps of this capture.")]


async def rank_tables_query(
    stage: Stage = None, role: Role = None, part: PartText = None, capture_id: CaptureId = None
) -> TableFilters:
    """Return the operator tables of a query, of all ranks."""
    return {"stage": stage, "role": role, "part": part, "capture_id": capture_id}


async def tables_query(
    ranks: RankQueryOf, part: PartText = None, capture_id: CaptureId = None
) -> TableFilters:
    """Return the operator tables of a query."""
    return {**ranks, "part": part, "capture_id": capture_id}


TableFiltersOf = Annotated[TableFilters, Depends(tables_query)]


async def operator_query(
    name: Annotated[
        str | None,
        Query(max_length=500, description="A pattern with * and ?, or a text in the name."),
    ] = None,
    kind: Annotated[
        str | None, Query(max_length=100, description="Module, Functional, Torch, Tensor, ...")
    ] = None,
    direction: Annotated[
        str | None,
        Query(max_length=100, description="forward, backward, parameters_grad or debug."),
    ] = None,
    section: Annotated[
        str | None, Query(max_length=100, description="input_args, output, parameters, grad, ...")
    ] = None,
    dtype: Annotated[str | None, Query(max_length=100, description="Such as bfloat16.")] = None,
    non_finite: Annotated[
        bool, Query(description="Only tensors with a NaN or an infinity.")
    ] = False,
) -> OperatorFilter:
    """Return the filter of a query."""
    return OperatorFilter(
        name=name,
        kind=kind,
        direction=direction,
        section=section,
        dtype=dtype,
        non_finite=non_finite,
    )


def operator_target(
    deps: Deps,
    step: StepText,
    run: Run = None,
    attempt: AttemptNumber = None,
    attempt_key: AttemptKey = None,
) -> Target:
    """Return the step of a path; `latest` is the newest one that has operators."""
    return view.operator_target(deps, step, run, attempt, attempt_key)


OperatorTarget = Annotated[Target, Depends(operator_target)]


@router.get("/steps/{step}/operators", response_model=models.Operators)
def operators(
    deps: Deps,
    target: OperatorTarget,
    page: PageOf,
    table_filters: TableFiltersOf,
    filters: Annotated[OperatorFilter, Depends(operator_query)],
) -> Answer:
    """List operator calls in execution order: a row an argument, result, parameter or gradient.

    The tables, one a dump, are in `tables`. Each has a `state` (`announced`: it is being read). It
    says whether it is `truncated` and where, and in `done` the content of its DONE.json (null: the
    rank did not reach its end and wrote none). Step `latest` is the newest that has operators. The
    first frame of the stack outside torch is `source`. Numbers are float64: an int64 beyond 2^53 is
    rounded.
    """
    return Answer(view.operators(deps, target, page, table_filters, filters))


@router.get("/steps/{step}/operators/stack", response_model=models.OperatorStack)
def stack(
    deps: Deps,
    target: OperatorTarget,
    filters: TableFiltersOf,
    stack_id: Annotated[str, Query(max_length=100, description="A row's `stack_id`.")],
) -> Answer:
    """Return the Python frames of an operator's call, the innermost first, as msprobe wrote them.

    A `stack_id` belongs to one dump, which stage, role, rank, part and capture identify.
    """
    return Answer(view.stack(deps, target, filters, stack_id))


@router.get("/steps/{step}/operators/non-finite", response_model=models.NonFiniteOperators)
async def non_finite(
    deps: Deps,
    target: OperatorTarget,
    page: PageOf,
    filters: Annotated[TableFilters, Depends(rank_tables_query)],
) -> Answer:
    """Name the first operator with a NaN or infinite result on each rank, and the earliest.

    Each dump has a row. Its `name` is null where all results were finite (or masks: these are
    counted). Tensors with a least and a largest value are counted in `measured`, those without them
    in `unmeasured`: nothing is known of these. Calls that passed on memory without reading it are
    counted in `not_read`, such as a view of a buffer before it is filled. Its previous content is
    no evidence. Where the value may be a mask, `certain` is false. Ranks share an order of calls.
    The rank whose first such call is lowest in it is `earliest`. All ranks with the same call are
    `together` (after a collective, every rank). Ranks with another order have `order_differs`.
    """
    rows, earliest = await deps.computations.run(first_non_finite, deps, target, filters)
    return Answer({**target.heading(), "earliest": earliest, **page.cut(rows)})
