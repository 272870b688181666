"""Routes about runs, attempts, steps in lists, and what the service noticed or lost."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from stagescope_service.api import rows as shape
from stagescope_service.api.completeness import ALL_ROWS, arrival, begun_again, gaps
from stagescope_service.api.dependencies import (
    RUN_PATTERN,
    AttemptNumber,
    Dependencies,
    Deps,
    Row,
    Run,
)
from stagescope_service.api.groups import Only, only_of, scope_of
from stagescope_service.api.models import runs as models
from stagescope_service.api.requests import Answer, Page, PageOf, cursor, pattern
from stagescope_service.api.target import Target, superseded_by

router = APIRouter(tags=["runs"])

StepFilter = Annotated[int | None, Query(gt=-(10**18), lt=10**18, description="Only this step.")]


@router.get("/runs", response_model=models.Runs)
def runs(deps: Deps, page: PageOf) -> Answer:
    """List the runs, the one that was active last first, each with its newest attempt."""
    found = deps.catalogue.runs(limit=page.limit + 1, offset=page.offset)
    rows = [shape.run_row(row) for row in found[: page.limit]]
    return Answer(page.answer(rows, more=len(found) > page.limit))


@router.get("/runs/{run}/attempts", response_model=models.Attempts)
def attempts(
    deps: Deps,
    page: PageOf,
    run: Annotated[
        str, Path(description="The run's name.", json_schema_extra=pattern(RUN_PATTERN))
    ],
) -> Answer:
    """List a run's attempts, newest first: fingerprint, where it resumed, what was done again.

    `superseded` names the steps of an attempt that later attempts did again: from `from_step` on,
    by attempt `by`.
    """
    target = deps.finder.attempt(run)
    found = deps.catalogue.attempts(target.run)
    again = shape.superseded_steps(found)
    rows = [{**shape.attempt_row(row), "superseded": again[row["number"]]} for row in found]
    return Answer({"run": target.run, "also_live": target.also_live, **page.cut(rows)})


@router.get("/steps", response_model=models.Steps)
def steps(
    deps: Deps,
    page: PageOf,
    run: Run = None,
    attempt: Annotated[
        int | None, Query(ge=1, lt=1 << 31, description="Only this attempt; default: all.")
    ] = None,
) -> Answer:
    """List a run's steps, newest first: whether each is complete, and which ranks are missing.

    `complete` is about ranks and their stages; `gap` says what the numbers of a closed step lack
    (payloads that were lost, refused, dropped or not read yet), or why there are none.

    Without `attempt` the steps of every attempt are listed; those that a later attempt did again
    say so in `superseded_by`, those that a process did again within their attempt in
    `begun_again`: both goes count in their numbers.
    """
    target = deps.finder.attempt(run, attempt)
    found, following = _steps_page(deps, target, page, attempt)
    everything = deps.catalogue.attempts(target.run)
    by_id = {row["attempt_id"]: row for row in everything}
    lacking = gaps(deps.catalogue, found)
    twice = begun_again(
        deps.catalogue, {row["attempt_id"] for row in found}, {row["step"] for row in found}
    )
    rows = []
    for row in found:
        own = by_id[row["attempt_id"]]
        judged = None
        if row["closed_wall"] is None:
            at = deps.catalogue.stages(row["attempt_id"], row["step"], limit=ALL_ROWS)
            judged = arrival(deps.catalogue, own, row, at)
        again = superseded_by(row, own["number"], everything)
        place = (row["attempt_id"], row["step"])
        rows.append(shape.step_row(row, again, judged, lacking.get(place), twice.get(place, [])))
    return Answer({**target.heading(), "attempt": attempt, "rows": rows, "next": following})


def _steps_page(
    deps: Dependencies, target: Target, page: Page, attempt: int | None
) -> tuple[list[Row], str | None]:
    """Return a page of steps and the cursor of the next.

    The cursor says the last step and how many rows with it were given: steps that begin meanwhile
    move nothing.
    """
    only = None if attempt is None else target.attempt_id
    before = page.at[0] if page.at else None
    skip = page.at[1] if len(page.at) > 1 else 0
    rows = deps.catalogue.steps(only, run=target.run, before=before, limit=page.limit + skip + 1)[
        skip:
    ]
    more = len(rows) > page.limit
    rows = rows[: page.limit]
    if not more:
        return rows, None
    last = rows[-1]["step"]
    given = sum(row["step"] == last for row in rows)
    if before is not None and last + 1 == before:
        given += skip
    return rows, cursor(last + 1, given)


@router.get("/losses", response_model=models.Losses)
def losses(
    deps: Deps,
    page: PageOf,
    run: Run = None,
    attempt: AttemptNumber = None,
    step: StepFilter = None,
    kind: Annotated[str | None, Query(max_length=200, description="Only this kind.")] = None,
    only: Only = None,
) -> Answer:
    """List what was announced and never arrived, or was dropped, with the reason; last first."""
    scope, numbers, said = scope_of(deps, run, attempt)
    asked = {"kind": kind} if kind is not None else only_of(deps, "losses", scope, only)
    found = deps.catalogue.losses(
        **scope, step=step, **asked, limit=page.limit + 1, offset=page.offset
    )
    rows = shape.numbered(found[: page.limit], numbers)
    return Answer({**said, **page.answer(rows, more=len(found) > page.limit)})


@router.get("/findings", response_model=models.Findings)
def findings(
    deps: Deps,
    page: PageOf,
    run: Run = None,
    attempt: AttemptNumber = None,
    step: StepFilter = None,
    kind: Annotated[str | None, Query(max_length=200, description="Only this kind.")] = None,
    severity: Annotated[str | None, Query(max_length=50, description="Only these.")] = None,
    only: Only = None,
) -> Answer:
    """List what the service noticed to be wrong, with evidence and advice; last seen first."""
    scope, numbers, said = scope_of(deps, run, attempt)
    asked = only_of(deps, "findings", scope, only)
    said_too = {"kind": kind, "severity": severity}
    asked |= {name: value for name, value in said_too.items() if value is not None}
    found = deps.catalogue.findings(
        **scope,
        step=step,
        **asked,
        limit=page.limit + 1,
        offset=page.offset,
    )
    rows = shape.numbered(found[: page.limit], numbers)
    return Answer({**said, **page.answer(rows, more=len(found) > page.limit)})
