"""Routes about runs: the list, their attempts, where both streams are equal, the doctor."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Final

from fastapi import APIRouter, Query

from stagescope_service.http.parameters import AttemptNumber, Deps, Run, RunPath
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views import runs as view
from stagescope_service.views.diagnosis import diagnosis_of
from stagescope_service.views.models import runs as models
from stagescope_service.views.models.diagnosis import Diagnosis
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.rows import run_row
from stagescope_wire.schema import STEP_BOUND

router = APIRouter(tags=["runs"])


@router.get("/runs", response_model=models.Runs)
def runs(deps: Deps, page: PageOf) -> Answer:
    """List the runs, the one that was active last first, each with its newest attempt."""
    rows = deps.catalogue.runs(limit=page.limit + 1, offset=page.offset)
    return Answer(page.first_of([run_row(row) for row in rows]))


@router.get("/runs/{run}/attempts", response_model=models.Attempts)
def attempts(deps: Deps, page: PageOf, run: RunPath) -> Answer:
    """List a run's attempts, newest first: fingerprint, where it resumed, which steps it repeats.

    `superseded` names the steps of an attempt that later attempts repeat: from `from_step` on, by
    attempt `by`. `note` names the steps before an attempt that no attempt reported.
    """
    return Answer(view.attempts(deps, page, run))


@router.get("/runs/{run}/metrics", response_model=models.NumberNames)
def numbers(deps: Deps, page: PageOf, run: RunPath) -> Answer:
    """List the names that `/series` and `/figures/overview` take: metrics and logged scalars."""
    return Answer(view.numbers(deps, page, run))


@router.get("/exact", response_model=models.Exact)
def exact(deps: Deps, run: Run = None, attempt: AttemptNumber = None) -> Answer:
    """List the steps in which trainer and rollout are equal, and the first difference.

    Streams are equal if every token has the same number in both. A value in bfloat16 equals the
    same value in float32, and -0.0 equals 0.0. The verdict `exact` needs equal streams of two
    producers. If one producer, or an unknown one, made both streams, the step is `not measured`.
    Each of `rows` is a range of steps of one verdict (and one `reason`), with the number of tokens
    it rests on. The first step that differs is `first`, with the first token in it by sample and
    position, as far as non-finite tokens were kept (`is_first`). All of it is in `text`.

    Without `attempt` it reads the current attempts: a step that is repeated belongs to the later
    one.
    """
    return Answer(view.exact(deps, run, attempt))


_MAX_AGE: Final = 60.0
"""Seconds for which a diagnosis of unchanged steps answers: late scalars do not change a step."""


@router.get("/runs/{run}/diagnosis", response_model=Diagnosis)
async def diagnosis(
    deps: Deps,
    page: PageOf,
    run: RunPath,
    attempt: AttemptNumber = None,
    step: Annotated[
        int | None,
        Query(ge=0, lt=STEP_BOUND, description="Look at the steps up to this one alone."),
    ] = None,
) -> Answer:
    """Compare the rulebook with the newest 2000 steps of a run: what is sick, and how sure that is.

    Each row is a symptom: `found`, `not found` or `not measured`. It has the evidence for and
    against it in numbers, the first step that shows it, and where. It says what the symptom means,
    what to do next, and what to record where it is not measured. Symptoms that were found come
    first: those of the service's own data, then precision, mismatch, reward, time and settings.
    Those that another found one explains come after them (`explained_by`), and those that ended
    last (`last_step`). Findings that no rule judged are counted in `unexplained`. Remarks that are
    no symptom, but matter to a comparison of two runs, are in `notes`. The newest measured step's
    mismatch is taken apart in `mismatch`. While the run's steps, findings and losses stay, the
    answer is computed once a minute.
    """
    key = await asyncio.to_thread(_change_key, deps, run, attempt, step)
    _, future = deps.computations.start_once(key, diagnosis_of, deps, run, attempt, step)
    # Others may wait for the same computation: a client that leaves does not cancel it.
    found, rows = await asyncio.shield(asyncio.wrap_future(future))
    return Answer({**found, **page.cut(rows)})


def _change_key(
    deps: Dependencies, run: str, attempt: int | None, step: int | None
) -> tuple[str, ...]:
    """Return the key of a diagnosis: one of unchanged steps is computed once in `_MAX_AGE`."""
    target = deps.finder.attempt(run, attempt)
    attempts = deps.catalogue.attempts(target.run)
    mark = deps.catalogue.change_mark([row["attempt_id"] for row in attempts])
    states = [(row["number"], row["ended_wall"], row["resumed_from_step"]) for row in attempts]
    period = int(time.monotonic() / _MAX_AGE)
    return ("diagnosis", target.run, repr((attempt, step, period, states)), mark)
