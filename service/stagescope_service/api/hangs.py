"""Routes about hangs: stuck ranks, and the stacks of processes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request

from stagescope_service.api.auth import caller_of
from stagescope_service.api.dependencies import (
    AttemptNumber,
    Dependencies,
    Deps,
    Rank,
    Role,
    Run,
    Stage,
    StepTarget,
)
from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.models import steps as models
from stagescope_service.api.models.bodies import StacksRequest
from stagescope_service.api.problems import check_ready
from stagescope_service.api.requests import Answer, PageOf, read_body
from stagescope_service.api.rows import part_text, with_attempt_numbers
from stagescope_service.api.stuck import stuck_rows
from stagescope_service.core.hang_detection import StuckRules
from stagescope_service.core.stack_requests import ANSWERED, ASKED
from stagescope_service.store.contract import Row

router = APIRouter(tags=["hangs"])

_POLL_SECONDS: Final = 0.1
_NO_ANSWER: Final = (
    "no answer in time; where a call holds the interpreter lock its watchdog writes instead"
)
_STACK_COLUMNS: Final = (
    "step", "stage", "role", "rank", "state", "source", "reason", "request_id", "wall",
    "answered_wall", "truncated", "threads", "incarnation",
)  # fmt: skip

RequestId = Annotated[
    str | None, Query(max_length=200, description="Only the answers to this request.")
]
Source = Annotated[
    Literal["probe", "watchdog"] | None,
    Query(description="Answers to requests, or what a watchdog wrote where none was possible."),
]


@router.get("/steps/{step}/stuck", response_model=models.Stuck)
def stuck(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
) -> Answer:
    """List the ranks that hold up the others of their role, and since when.

    A rank is stuck where it has been quiet for longer than `limit_seconds` and others of its role
    began or ended a part that it did not, or (`whole_role`) all of them are in the same part. The
    limit comes from its role's earlier steps; without those (`history_steps` 0) the lag behind the
    other ranks counts. Ranks that wait for it are not listed. Open steps before this one are
    checked too. `findings` lists earlier findings of this step, also those that are over.
    """
    settings, now = deps.settings, deps.clock()
    step = target.step_number
    rules = StuckRules(min_seconds=settings.stuck_seconds, factor=settings.stuck_factor)
    rows = [
        row
        for row in stuck_rows(deps.catalogue, target.attempt_id, step, now, rules)
        if stage in (None, row["stage"]) and role in (None, row["role"])
        if rank in (None, row["rank"])
    ]
    findings = deps.catalogue.findings(attempt_id=target.attempt_id, step=step, kind="stage_stuck")
    return Answer(
        {
            **target.heading(),
            "closed": target.step_row["closed_wall"] is not None,
            "wall": now,
            "findings": with_attempt_numbers(findings, {target.attempt_id: target.number}),
            **page.cut(rows),
        }
    )


@router.get("/steps/{step}/stacks", response_model=models.StepStacks)
def step_stacks(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
    source: Source = None,
    request_id: RequestId = None,
) -> Answer:
    """List the stacks that were taken in a step, a row a process, the newest first.

    `threads` holds name, ident, `is_training` and `stack` (the innermost frame last) of each.
    `state` is `asked`, `answered` or `not answered`.
    """
    rows = deps.catalogue.stacks(
        attempt_id=target.attempt_id,
        step=target.step_number,
        request_id=request_id,
        stage=stage,
        role=role,
        rank=rank,
        source=source,
        limit=page.limit + 1,
        offset=page.offset,
    )
    return Answer({**target.heading(), **page.first_of([_stack_row(row) for row in rows])})


@router.get("/stacks", response_model=models.Stacks)
def stacks(
    deps: Deps,
    page: PageOf,
    run: Run = None,
    attempt: AttemptNumber = None,
    role: Role = None,
    rank: Rank = None,
    source: Source = None,
    request_id: RequestId = None,
) -> Answer:
    """List the stacks that were taken in an attempt, of any step, the newest first."""
    target = deps.finder.attempt(run, attempt)
    rows = deps.catalogue.stacks(
        attempt_id=target.attempt_id,
        request_id=request_id,
        role=role,
        rank=rank,
        source=source,
        limit=page.limit + 1,
        offset=page.offset,
    )
    return Answer({**target.heading(), **page.first_of([_stack_row(row) for row in rows])})


@router.post("/stacks", response_model=models.TakenStacks, openapi_extra=StacksRequest.document())
async def take_stacks(request: Request, deps: Deps) -> Answer:
    """Request the Python stacks of all threads of processes; needs the operate token.

    A rank that is blocked in a collective answers too. `rows` holds the answers within `wait`
    seconds, `not_answered` the other ranks, with the reason. All are kept: `GET /stacks`.
    """
    body = await read_body(request, deps.settings, StacksRequest)
    target = await asyncio.to_thread(deps.finder.attempt, body.run, body.attempt)
    reply = check_ready(
        await deps.commands.ask_stacks(
            attempt_id=target.attempt_id,
            role=body.role,
            ranks=body.ranks,
            seconds=body.wait,
            by=str(caller_of(request)),
        )
    )
    rows = await _wait_for_answers(deps, reply["request_id"], reply["deadline_wall"])
    missing = [
        {"role": row["role"], "rank": row["rank"], "reason": _NO_ANSWER}
        for row in rows
        if row["state"] != ANSWERED
    ]
    return Answer(
        {
            **target.heading(),
            "request_id": reply["request_id"],
            "rows": [_stack_row(row) for row in rows if row["state"] == ANSWERED],
            "not_answered": [*missing, *reply["refused"]],
        }
    )


async def _wait_for_answers(deps: Dependencies, request_id: str, deadline: float) -> list[Row]:
    """Return the rows of a request once all processes answered, or at its deadline.

    They are read from the catalogue, which outlives the coordinator that made the request.
    """
    while True:
        rows = await asyncio.to_thread(deps.catalogue.stacks, request_id=request_id)
        if deps.clock() >= deadline or all(row["state"] != ASKED for row in rows):
            return sorted(rows, key=lambda row: (row["role"], row["rank"]))
        await asyncio.sleep(_POLL_SECONDS)


def _stack_row(row: Row) -> JsonObject:
    return {"part": part_text(row), **{name: row[name] for name in _STACK_COLUMNS}}
