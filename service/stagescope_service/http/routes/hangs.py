"""Routes about hangs: the ranks that are stuck in a step, and the Python stacks of processes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request

from stagescope_service.core.hangs.stack_requests import ANSWERED, ASKED
from stagescope_service.http.auth import caller_of
from stagescope_service.http.parameters import (
    AttemptKey,
    AttemptNumber,
    AttemptQueryOf,
    Deps,
    Rank,
    RankQueryOf,
    Role,
    Run,
    Stage,
    StepTarget,
    StepText,
)
from stagescope_service.http.problems import check_ready
from stagescope_service.http.requests import Answer, PageOf, read_body
from stagescope_service.store.tables import StackRow
from stagescope_service.views.hangs import stacks as stacks_view
from stagescope_service.views.hangs import stuck as stuck_view
from stagescope_service.views.hangs.stacks import StackQuery, stack_row
from stagescope_service.views.models import steps as models
from stagescope_service.views.models.bodies import StacksRequest
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target

router = APIRouter(tags=["hangs"])


def stuck_target(
    deps: Deps,
    step: StepText,
    run: Run = None,
    attempt: AttemptNumber = None,
    attempt_key: AttemptKey = None,
) -> Target:
    """Return the step of a path, or an attempt that has begun none."""
    return stuck_view.stuck_target(deps, step, run, attempt, attempt_key)


StuckTarget = Annotated[Target, Depends(stuck_target)]


@router.get("/steps/{step}/stuck", response_model=models.Stuck)
def stuck(deps: Deps, target: StuckTarget, page: PageOf, ranks: RankQueryOf) -> Answer:
    """List the ranks that hold up the others of their role, and since when.

    A stuck rank has been quiet for longer than `limit_seconds`. Others of its role began or ended a
    part that it did not, or all of them are in the same part (`whole_role`). The limit comes from
    its role's earlier steps; without those (`history_steps` 0) the lag behind the other ranks
    counts. Ranks that wait for it are not listed. One that never reported (`unheard`), though
    earlier steps closed without it, is listed once the others are late. Open steps before this one
    are checked too. Earlier findings of this step are in `findings`, also those that are over.

    `latest` is the newest attempt's, even if that has begun no step yet: then `step` is null, and
    `note` says for how long.
    """
    return Answer(stuck_view.stuck(deps, target, page, **ranks))


_POLL_SECONDS: Final = 0.1

_NO_ANSWER: Final = (
    "no answer in time; where a call holds the interpreter lock its watchdog writes instead"
)


async def stack_query(
    role: Role = None,
    rank: Rank = None,
    source: Annotated[
        Literal["probe", "watchdog"] | None,
        Query(description="Answers to requests, or what a watchdog wrote where none was possible."),
    ] = None,
    request_id: Annotated[
        str | None, Query(max_length=200, description="Only the answers to this request.")
    ] = None,
) -> StackQuery:
    """Return the filters of a query."""
    return {"role": role, "rank": rank, "source": source, "request_id": request_id}


StackQueryOf = Annotated[StackQuery, Depends(stack_query)]


@router.get("/steps/{step}/stacks", response_model=models.StepStacks)
def step_stacks(
    deps: Deps, target: StepTarget, page: PageOf, filters: StackQueryOf, stage: Stage = None
) -> Answer:
    """List the stacks that were taken in a step, a row a process, the newest first.

    Each of `threads` has name, ident, `is_training` and `stack` (the innermost frame last). The
    `state` is `asked`, `answered` or `not answered`.
    """
    return Answer(stacks_view.step_stacks(deps, target, page, filters, stage))


@router.get("/stacks", response_model=models.Stacks)
def stacks(deps: Deps, page: PageOf, attempt: AttemptQueryOf, filters: StackQueryOf) -> Answer:
    """List the stacks that were taken in an attempt, of any step, the newest first."""
    return Answer(stacks_view.stacks(deps, page, attempt, filters))


@router.post("/stacks", response_model=models.TakenStacks, openapi_extra=StacksRequest.document())
async def take_stacks(request: Request, deps: Deps) -> Answer:
    """Request the Python stacks of all threads of processes; needs the operate token.

    A rank that is blocked in a collective answers too. Answers within `wait` seconds are in `rows`,
    the other ranks, with the reason, in `not_answered`. All are kept: `GET /stacks`.
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
            "rows": [stack_row(row) for row in rows if row["state"] == ANSWERED],
            "not_answered": [*missing, *reply["refused"]],
        }
    )


async def _wait_for_answers(deps: Dependencies, request_id: str, deadline: float) -> list[StackRow]:
    """Return the rows of a request once all processes answered, or at its deadline.

    They are read from the catalogue, which outlives the coordinator that made the request.
    """
    while True:
        rows = await asyncio.to_thread(deps.catalogue.stacks, request_id=request_id)
        if deps.clock() >= deadline or all(row["state"] != ASKED for row in rows):
            return sorted(rows, key=lambda row: (row["role"], row["rank"]))
        await asyncio.sleep(_POLL_SECONDS)
