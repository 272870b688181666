"""Routes about one step: its metrics by whole, round, rank and token; stages, dumps, scalars."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from stagescope_service.api import rows as shape
from stagescope_service.api.completeness import ALL_ROWS, Arrival, arrival
from stagescope_service.api.desk import AtDesk, Desk, Rank, Role, Row, Stage, StepTarget
from stagescope_service.api.requests import Answer, PageOf
from stagescope_service.api.target import Target

router = APIRouter(prefix="/steps/{step}", tags=["steps"])


@router.get("/stages")
def stages(
    desk: AtDesk,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
    superseded: Annotated[
        bool, Query(description="Also what a newer incarnation or report replaced.")
    ] = False,
) -> Answer:
    """Say who is in which stage: begun, ended, for how long, and who has not arrived, since when.

    A row a part of a stage on a rank, in the order of beginning; then a row with status
    `not begun` for each rank that is expected and absent. `expected` is role -> stage -> ranks,
    by each role's world_size, else by the attempt's last closed step.
    """
    now = desk.clock()
    rows, came = stages_of(desk, target)
    if superseded:
        rows = desk.catalogue.stages(
            target.attempt_id, _number(target), superseded=None, limit=ALL_ROWS
        )
    listed = [shape.stage_row(row, now) for row in rows]
    listed += [shape.absent_row(item, now) for item in came.missing if item["status"] == ABSENT]
    filtered = shape.chosen(listed, f"step {_number(target)}", stage=stage, role=role, rank=rank)
    answer = {
        **target.heading(),
        "complete": came.complete,
        "missing": came.missing,
        "expected": came.expected,
        "wall": now,
    }
    return Answer({**answer, **page.cut(filtered)})


@router.get("/scalars")
def scalars(
    desk: AtDesk,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
    name: Annotated[str | None, Query(max_length=500, description="Only this scalar.")] = None,
) -> Answer:
    """List the numbers that ranks handed over (`loss`, `reward`, ...), by name and rank."""
    filters = {"stage": stage, "role": role, "rank": rank, "name": name}
    found = desk.catalogue.scalars(
        target.attempt_id,
        _number(target),
        **filters,
        limit=page.limit + 1,
        offset=page.offset,
    )
    if not found and not page.offset and any(value is not None for value in filters.values()):
        every = desk.catalogue.scalars(target.attempt_id, _number(target), limit=ALL_ROWS)
        shape.chosen(every, f"step {_number(target)}", **filters)
    rows = [shape.scalar_row(row) for row in found[: page.limit]]
    return Answer({**target.heading(), **page.answer(rows, more=len(found) > page.limit)})


@router.get("/dumps")
def dumps(
    desk: AtDesk,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
) -> Answer:
    """List msprobe's dumps of the step: who collected, missed or failed, where, how large."""
    every = desk.catalogue.dumps(target.attempt_id, _number(target), limit=ALL_ROWS)
    found = shape.chosen(every, f"step {_number(target)}", stage=stage, role=role, rank=rank)
    return Answer({**target.heading(), **page.cut([shape.dump_row(row) for row in found])})


ABSENT = "not begun"


def stages_of(desk: Desk, target: Target) -> tuple[list[Row], Arrival]:
    """Return a step's stages (not the superseded ones) and who has arrived."""
    assert target.step is not None
    rows = desk.catalogue.stages(target.attempt_id, _number(target), limit=ALL_ROWS)
    return rows, arrival(desk.catalogue, target.attempt, target.step, rows)


def _number(target: Target) -> int:
    assert target.step is not None
    return int(target.step["step"])
