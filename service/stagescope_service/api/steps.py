"""Routes about one step: its metrics by whole, round, rank and token; stages, dumps, scalars."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query

from stagescope_service.api import answers
from stagescope_service.api import rows as shape
from stagescope_service.api.completeness import ALL_ROWS, Arrival, arrival, begun_again, gaps
from stagescope_service.api.dependencies import (
    Dependencies,
    Deps,
    Rank,
    Role,
    Round,
    Row,
    Stage,
    StepTarget,
)
from stagescope_service.api.models import numbers
from stagescope_service.api.models import steps as models
from stagescope_service.api.requests import Answer, PageOf
from stagescope_service.api.step_summaries import MeasuredStep, Slice
from stagescope_service.api.target import Target

router = APIRouter(prefix="/steps/{step}", tags=["steps"])


@router.get("/stages", response_model=models.Stages)
def stages(
    deps: Deps,
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
    by each role's world_size, else by the attempt's last closed step. `gap` says what the numbers
    of a closed step lack, or why there are none.
    """
    now = deps.clock()
    rows, came = stages_of(deps, target)
    if superseded:
        rows = deps.catalogue.stages(
            target.attempt_id, _number(target), superseded=None, limit=ALL_ROWS
        )
    listed = [shape.stage_row(row, now) for row in rows]
    listed += [shape.absent_row(item, now) for item in came.missing if item["status"] == ABSENT]
    filtered = shape.chosen(listed, f"step {_number(target)}", stage=stage, role=role, rank=rank)
    answer = {
        **target.heading(),
        "complete": came.complete,
        "missing": came.missing,
        "gap": _gap(deps, target),
        "begun_again": _begun_again(deps, target),
        "expected": came.expected,
        "wall": now,
    }
    return Answer({**answer, **page.cut(filtered)})


@router.get("/scalars", response_model=models.Scalars)
def scalars(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
    name: Annotated[str | None, Query(max_length=500, description="Only this scalar.")] = None,
) -> Answer:
    """List the numbers that ranks handed over (`loss`, `reward`, ...), by name and rank."""
    filters = {"stage": stage, "role": role, "rank": rank, "name": name}
    found = deps.catalogue.scalars(
        target.attempt_id,
        _number(target),
        **filters,
        limit=page.limit + 1,
        offset=page.offset,
    )
    if not found and not page.offset and any(value is not None for value in filters.values()):
        every = deps.catalogue.scalars(target.attempt_id, _number(target), limit=ALL_ROWS)
        shape.chosen(every, f"step {_number(target)}", **filters)
    rows = [shape.scalar_row(row) for row in found[: page.limit]]
    said = {**target.heading(), "begun_again": _begun_again(deps, target)}
    return Answer({**said, **page.answer(rows, more=len(found) > page.limit)})


@router.get("/dumps", response_model=models.Dumps)
def dumps(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
) -> Answer:
    """List msprobe's dumps of the step: who collected, missed or failed, where, how large."""
    every = deps.catalogue.dumps(target.attempt_id, _number(target), limit=ALL_ROWS)
    found = shape.chosen(every, f"step {_number(target)}", stage=stage, role=role, rank=rank)
    return Answer({**target.heading(), **page.cut([shape.dump_row(row) for row in found])})


@router.get("/metrics", response_model=numbers.Metrics)
def metrics(
    deps: Deps,
    target: StepTarget,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
    round: Round = None,
) -> Answer:
    """Answer the step's metrics under their published names, and what they rest on.

    `complete` is `complete`, `partial` or `unknown` for a closed step and `open` for one that is
    not: its numbers are assembled from what has come so far, and `missing` names who has not.
    With `rank`, `role`, `stage` or `round` the numbers are of that slice. Read `comparable` and
    `comparability` before a number is trusted: `not measured` says that one stream is a copy.
    `begun_again` names who did the step again within the attempt: both goes count.
    """
    return Answer(metrics_of(deps, target, Slice(stage, role, rank), round))


@router.get("/rounds", response_model=numbers.Rounds)
def rounds(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
    by: Annotated[
        Literal["round", "turn", "staleness"],
        Query(description="Mask segments, true turns, or trainer version - token's version."),
    ] = "round",
) -> Answer:
    """List the mismatch by round; `tokens`, `abs_diff_sum` and `diff_sum` add up to `whole`."""
    measured = _measured(deps, target, stage, role, rank)
    summary = measured.whole.summary
    said = {
        **_opening(deps, target),
        **answers.said_of(measured),
        "by": by,
        "whole": answers.cell_row(summary.total, summary),
    }
    return Answer({**said, **page.cut(answers.slice_rows(summary, by))})


@router.get("/ranks", response_model=numbers.Ranks)
def ranks(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
) -> Answer:
    """List the mismatch by rank, with where each ran.

    A rank's numbers are its own, also where a replica counts in its place (`parts_counted` 0).
    """
    measured = _measured(deps, target, stage, None, None)
    processes = deps.catalogue.processes(target.attempt_id)
    rows = answers.rank_rows(measured, processes)
    found = shape.chosen(rows, f"step {_number(target)}", role=role, rank=rank)
    return Answer({**_opening(deps, target), **answers.said_of(measured), **page.cut(found)})


@router.get("/tokens", response_model=numbers.Tokens)
def tokens(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    stage: Stage = None,
    role: Role = None,
    rank: Rank = None,
    round: Round = None,
    kind: Annotated[Literal["worst", "nonfinite"] | None, Query(description="Only these.")] = None,
) -> Answer:
    """List the worst tokens (|p - q| descending), then those whose p or q is not finite.

    As many of each as a summary keeps (64): of the step, or of the rank that is asked for.
    """
    measured = _measured(deps, target, stage, role, rank)
    rows = answers.token_rows(measured, deps.catalogue.processes(target.attempt_id))
    if kind is not None:
        rows = [row for row in rows if row["kind"] == kind]
    if round is not None:
        rows = [row for row in rows if row["round"] == round]
    return Answer({**_opening(deps, target), **answers.said_of(measured), **page.cut(rows)})


ABSENT: Final = "not begun"


def metrics_of(
    deps: Dependencies,
    target: Target,
    cut: Slice = Slice(),  # noqa: B008
    round: int | None = None,
) -> Row:
    """Return what `/steps/{step}/metrics` answers; the API's actor answers the same.

    Raises:
        NotFound: nothing of that stage, role, rank or round was measured (yet).
    """
    assert target.step is not None
    measured = deps.measures.of(target.attempt_id, target.step, cut)
    return {**_opening(deps, target), **answers.metrics(measured, round)}


def stages_of(deps: Dependencies, target: Target) -> tuple[list[Row], Arrival]:
    """Return a step's stages (not the superseded ones) and who has arrived."""
    assert target.step is not None
    rows = deps.catalogue.stages(target.attempt_id, _number(target), limit=ALL_ROWS)
    return rows, arrival(deps.catalogue, target.attempt, target.step, rows)


def _measured(
    deps: Dependencies, target: Target, stage: str | None, role: str | None, rank: int | None
) -> MeasuredStep:
    assert target.step is not None
    return deps.measures.of(target.attempt_id, target.step, Slice(stage, role, rank))


def _opening(deps: Dependencies, target: Target) -> Row:
    """Return what answers about numbers begin with: of what, and how complete."""
    assert target.step is not None
    if target.step["closed_wall"] is not None and not target.step["missing"]:
        # Nobody is missing: who came when need not be read.
        complete, missing = target.step["completeness"] or "unknown", []
    else:
        came = stages_of(deps, target)[1]
        complete, missing = came.complete, came.missing
    return {
        **target.heading(),
        "complete": complete,
        "missing": missing,
        "gap": _gap(deps, target),
        "begun_again": _begun_again(deps, target),
    }


def _gap(deps: Dependencies, target: Target) -> str | None:
    assert target.step is not None
    return gaps(deps.catalogue, [target.step]).get((target.attempt_id, _number(target)))


def _begun_again(deps: Dependencies, target: Target) -> list[Row]:
    found = begun_again(deps.catalogue, [target.attempt_id], [_number(target)])
    return found.get((target.attempt_id, _number(target)), [])


def _number(target: Target) -> int:
    assert target.step is not None
    return int(target.step["step"])
