"""Routes about operators: what a dump holds, where it first went wrong, where two first differ."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request

from stagescope.wire.errors import InvalidInput, NotFound, StagescopeError
from stagescope_service.api.dependencies import Dependencies, Deps, Rank, Role, Row, Stage
from stagescope_service.api.models import operators as models
from stagescope_service.api.operator_tables import (
    OperatorTarget,
    group_of,
    is_digested,
    place_row,
    table_row,
    tables_of,
)
from stagescope_service.api.requests import Answer, Page, PageOf, cursor
from stagescope_service.api.target import Target
from stagescope_service.compare.operators import apart
from stagescope_service.dumps.msprobe.operator_query import (
    OperatorFilter,
    read_operators,
    read_stack,
)

router = APIRouter(tags=["operators"])

_FIRST: Final = (
    "order", "name", "operator", "module_class", "parent", "direction", "section", "index",
    "non_finite", "dtype", "shape", "source", "stack_id", "bad_inputs",
)  # fmt: skip


Part = Annotated[
    str | None,
    Query(max_length=100, description="Only this part: occurrence.epoch.minibatch.microbatch."),
]
CaptureId = Annotated[str | None, Query(max_length=200, description="Only dumps of this capture.")]


@router.get("/steps/{step}/operators", response_model=models.Operators)
def operators(
    deps: Deps,
    target: OperatorTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
    part: Part = None,
    capture_id: CaptureId = None,
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
        str | None,
        Query(max_length=100, description="input_args, output, parameters, grad, ..."),
    ] = None,
    dtype: Annotated[str | None, Query(max_length=100, description="Such as bfloat16.")] = None,
    non_finite: Annotated[
        bool, Query(description="Only tensors with a NaN or an infinity.")
    ] = False,
) -> Answer:
    """List operator calls in execution order: a row an argument, result, parameter or gradient.

    `tables` says what there is: a table a dump, with its `state` (`announced`: it is being read),
    whether it is `truncated` and where, and what its DONE.json says (`done` null: it has none, the
    rank did not come to its end). Step `latest` is the newest that has operators. `source` is the
    first frame of the stack outside torch. Numbers are float64: an int64 beyond 2^53 is rounded.
    """
    chosen = {"stage": stage, "role": role, "rank": rank, "part": part, "capture_id": capture_id}
    tables = tables_of(deps, target, **chosen)
    where = OperatorFilter(
        name=name,
        kind=kind,
        direction=direction,
        section=section,
        dtype=dtype,
        non_finite=non_finite,
    )
    rows, following, unread = _page_of(deps, tables, page, where)
    listed = [table_row(row) | unread.get(at, {}) for at, row in enumerate(tables)]
    return Answer({**target.heading(), "tables": listed, "rows": rows, "next": following})


@router.get("/steps/{step}/operators/stack", response_model=models.OperatorStack)
def stack(
    deps: Deps,
    target: OperatorTarget,
    stack_id: Annotated[str, Query(max_length=100, description="A row's `stack_id`.")],
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
    part: Part = None,
    capture_id: CaptureId = None,
) -> Answer:
    """Return the Python frames of an operator's call, the innermost first, as msprobe wrote them.

    `stack_id` is of one dump: stage, role, rank, part and capture say of which.
    """
    chosen = {"stage": stage, "role": role, "rank": rank, "part": part, "capture_id": capture_id}
    row = _one(tables_of(deps, target, **chosen))
    frames = read_stack(deps.operator_files.path(row), stack_id)
    return Answer({**target.heading(), **place_row(row), "stack_id": stack_id, "frames": frames})


@router.get("/steps/{step}/operators/non-finite", response_model=models.NonFiniteOperators)
async def non_finite(
    request: Request,
    deps: Deps,
    target: OperatorTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    part: Part = None,
    capture_id: CaptureId = None,
) -> Answer:
    """Name the first operator with a NaN or infinite result on each rank, and the earliest.

    A row a dump; `name` is null where all results were finite (or masks: these are counted).
    `not_read` counts calls that handed on memory without reading it, such as a view of a buffer
    before it is filled: what was left there is no evidence.
    `certain` is false where what was found may be a mask. Ranks share an order of calls: the one
    whose first stands lowest is `earliest`, `together` are all that found it there (after a
    collective every rank has it). `order_differs` names ranks that went another way.
    """
    chosen = {"stage": stage, "role": role, "part": part, "capture_id": capture_id}
    rows, earliest = await deps.comparisons.run(_non_finite, deps, target, chosen)
    return Answer({**target.heading(), "earliest": earliest, **page.cut(rows)})


def _page_of(
    deps: Dependencies, tables: list[Row], page: Page, where: OperatorFilter
) -> tuple[list[Row], str | None, dict[int, Row]]:
    """Return rows, the cursor of those that follow, and which tables could not be read."""
    at, offset = (*(max(number, 0) for number in page.at), 0, 0)[:2]
    rows: list[Row] = []
    unread: dict[int, Row] = {}
    while at < len(tables) and len(rows) < page.limit:
        try:
            path = deps.operator_files.path(tables[at])
            found = read_operators(path, where, offset=offset, limit=page.limit - len(rows))
        except StagescopeError as error:
            # The other ranks' tables answer all the same; this one says why it does not.
            if is_digested(tables[at]):
                unread[at] = {"state": error.code, "reason": str(error)}
            at, offset = at + 1, 0
            continue
        place = place_row(tables[at])
        names = list(found.columns)
        rows += [
            {**place, **dict(zip(names, values, strict=True))}
            for values in zip(*found.columns.values(), strict=True)
        ]
        offset += len(found.columns["name"])
        if not found.more:
            at, offset = at + 1, 0
    return rows, cursor(at, offset) if at < len(tables) else None, unread


def _one(rows: list[Row]) -> Row:
    if not rows:
        raise NotFound("there is no such dump")
    if len(rows) > 1:
        raise InvalidInput(
            f"{len(rows)} dumps fit", expected="stage, role, rank, part and capture_id of one"
        )
    return rows[0]


def _non_finite(
    deps: Dependencies, target: Target, chosen: Mapping[str, Any]
) -> tuple[list[Row], Row | None]:
    rows: list[Row] = []
    earliest: Row | None = None
    for _, group in groupby(tables_of(deps, target, **chosen), key=group_of):
        tables = list(group)
        found = _over_ranks(deps, tables)
        for row in tables:
            shown = _first_row(row, found)
            rows.append(shown)
            if earliest is None and found is not None and found["earliest"] == row["rank"]:
                earliest = {**shown, "together": found["together"]}
    return rows, earliest


def _over_ranks(deps: Dependencies, tables: list[Row]) -> Row | None:
    """Return the answer over the ranks that can be read; None where all is finite everywhere."""
    found = [row for row in tables if row["first_non_finite"] is not None]
    if not found:
        return None
    paths = {}
    for row in tables:
        try:
            paths[row["rank"]] = deps.operator_files.path(row)
        except StagescopeError:  # noqa: PERF203 - it is listed with its state
            continue
    rows = sum(row["rows"] for row in tables if row["rank"] in paths)
    return apart.non_finite(paths, rows=rows)


def _first_row(row: Row, found: Row | None) -> Row:
    of_table = table_row(row)
    first = row["first_non_finite"] or {}
    rank = row["rank"]
    summary = row["summary"] or {}
    return {
        **place_row(row),
        **{name: first.get(name) for name in _FIRST},
        "certain": row["certain"] if first else None,
        "earliest": found is not None and found["earliest"] == rank,
        "order_differs": found is not None and rank in found["order_differs"],
        "culprits": summary.get("culprits"),
        "masks": summary.get("masks"),
        "not_read": summary.get("not_read"),
        **{name: of_table[name] for name in ("state", "reason", "truncated", "done")},
    }
