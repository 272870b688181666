"""Routes about hangs: who is stuck, and the stacks of processes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request

from stagescope.wire.errors import InvalidInput
from stagescope_service.api import rows as shape
from stagescope_service.api.auth import caller_of
from stagescope_service.api.dependencies import (
    AttemptNumber,
    Dependencies,
    Deps,
    Rank,
    Role,
    Row,
    Run,
    Stage,
    StepTarget,
)
from stagescope_service.api.models import steps as models
from stagescope_service.api.problems import check_ready
from stagescope_service.api.requests import Answer, Page, PageOf, read_json
from stagescope_service.api.stuck import stuck_rows
from stagescope_service.core.hang_detection import StuckRules
from stagescope_service.core.stack_requests import ANSWERED, ASKED

router = APIRouter(tags=["hangs"])

LONGEST_WAIT: Final = 60.0
_WAIT: Final = 5.0
_PAUSE: Final = 0.1

_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "run": {"type": "string"},
                    "attempt": {"type": "integer", "minimum": 1},
                    "role": {"type": "string", "description": "Only this role."},
                    "ranks": {
                        "description": "Which ranks; all where it is not given.",
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0},
                    },
                    "wait": {
                        "description": "Seconds that they have to answer.",
                        "type": "number",
                        "minimum": 0,
                        "maximum": LONGEST_WAIT,
                        "default": _WAIT,
                    },
                },
                "additionalProperties": False,
            }
        }
    },
}

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
    """Name the ranks that hold up the others of their role, since when, judged by their own past.

    A rank is stuck where it has been quiet for longer than `limit_seconds`, and others of its role
    began or ended what it did not, or (`whole_role`) all of them stand in the same part. Without
    earlier steps (`history_steps` 0) it is the lag behind the other ranks that counts. Ranks that
    wait for it are not listed. Open steps before this one are looked at, too. `findings` holds
    what was found of this step before, also what is over.
    """
    settings, now = deps.settings, deps.clock()
    assert target.step is not None
    number = target.step["step"]
    rules = StuckRules(min_seconds=settings.stuck_seconds, factor=settings.stuck_factor)
    rows = stuck_rows(deps.catalogue, target.attempt_id, number, now, rules)
    found = deps.catalogue.findings(attempt_id=target.attempt_id, step=number, kind="stage_stuck")
    rows = [
        row
        for row in rows
        if stage in (None, row["stage"]) and role in (None, row["role"])
        if rank in (None, row["rank"])
    ]
    said = {
        **target.heading(),
        "closed": target.step["closed_wall"] is not None,
        "wall": now,
        "findings": shape.numbered(found, {target.attempt_id: target.number}),
    }
    return Answer({**said, **page.cut(rows)})


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
    assert target.step is not None
    filters = {"stage": stage, "role": role, "rank": rank, "source": source}
    found = deps.catalogue.stacks(
        attempt_id=target.attempt_id,
        step=target.step["step"],
        request_id=request_id,
        **filters,
        limit=page.limit + 1,
        offset=page.offset,
    )
    return Answer({**target.heading(), **_cut(page, found)})


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
    found = deps.catalogue.stacks(
        attempt_id=target.attempt_id,
        request_id=request_id,
        role=role,
        rank=rank,
        source=source,
        limit=page.limit + 1,
        offset=page.offset,
    )
    return Answer({**target.heading(), **_cut(page, found)})


@router.post("/stacks", response_model=models.TakenStacks, openapi_extra={"requestBody": _BODY})
async def take_stacks(request: Request, deps: Deps) -> Answer:
    """Ask processes for the Python stacks of all their threads; needs the operate token.

    Also of a rank that is blocked in a collective. `rows` holds those who answered within `wait`
    seconds, `not_answered` the others, with the reason. All of it is kept: `GET /stacks`.
    """
    said = await read_json(request, deps.settings)
    _check(said)
    target = await asyncio.to_thread(deps.finder.attempt, said.get("run"), said.get("attempt"))
    wait = float(said.get("wait", _WAIT))
    reply = check_ready(
        await deps.commands.ask_stacks(
            attempt_id=target.attempt_id,
            role=said.get("role"),
            ranks=said.get("ranks"),
            seconds=wait,
            by=str(caller_of(request)),
        )
    )
    rows = await _answers(deps, reply["request_id"], reply["deadline_wall"])
    missing = [
        {"role": row["role"], "rank": row["rank"], "reason": _SILENT}
        for row in rows
        if row["state"] != ANSWERED
    ]
    answer = {
        **target.heading(),
        "request_id": reply["request_id"],
        "rows": [_row(row) for row in rows if row["state"] == ANSWERED],
        "not_answered": [*missing, *reply["refused"]],
    }
    return Answer(answer)


_SILENT: Final = (
    "no answer in time; where a call holds the interpreter lock its watchdog writes instead"
)


async def _answers(deps: Dependencies, request_id: str, deadline: float) -> list[Row]:
    """Return the rows of a request once nobody is left to answer, or at its deadline.

    They are looked for in the catalogue: it outlives the coordinator that asked.
    """
    while True:
        rows = await asyncio.to_thread(deps.catalogue.stacks, request_id=request_id)
        if deps.clock() >= deadline or all(row["state"] != ASKED for row in rows):
            return sorted(rows, key=lambda row: (row["role"], row["rank"]))
        await asyncio.sleep(_PAUSE)


def _cut(page: Page, found: list[Row]) -> Row:
    rows = [_row(row) for row in found[: page.limit]]
    return page.answer(rows, more=len(found) > page.limit)


_COLUMNS: Final = (
    "step", "stage", "role", "rank", "state", "source", "reason", "request_id", "wall",
    "answered_wall", "truncated", "threads", "incarnation",
)  # fmt: skip


def _row(row: Row) -> Row:
    return {"part": shape.part_text(row), **{name: row[name] for name in _COLUMNS}}


def _check(said: Row) -> None:
    """Refuse a request for stacks that says what it must not."""
    known = _BODY["content"]["application/json"]["schema"]["properties"]
    unknown = sorted(set(said) - set(known))
    if unknown:
        raise InvalidInput(
            f"a request for stacks has no field {', '.join(map(repr, unknown[:5]))}",
            expected=", ".join(known),
        )
    ranks, wait = said.get("ranks"), said.get("wait", _WAIT)
    if ranks is not None and not (isinstance(ranks, list) and all(map(_is_index, ranks))):
        raise InvalidInput(f"ranks are {ranks!r:.100}", expected="a list of numbers from 0")
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= LONGEST_WAIT:
        raise InvalidInput(f"wait is {wait!r:.100}", expected=f"seconds, 0 to {LONGEST_WAIT:g}")
    attempt = said.get("attempt")
    if attempt is not None and not (_is_index(attempt) and attempt > 0):
        raise InvalidInput(f"attempt is {attempt!r:.100}", expected="a number from 1")
    for name in ("run", "role"):
        if not isinstance(said.get(name), str | None):
            raise InvalidInput(f"{name} is {said[name]!r:.100}", expected="a name")


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
