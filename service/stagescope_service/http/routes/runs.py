"""Routes about runs: the list, their attempts, and the steps in which both streams are equal."""

from __future__ import annotations

from fastapi import APIRouter

from stagescope_service.http.parameters import AttemptNumber, Deps, Run, RunPath
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views import runs as view
from stagescope_service.views.models import runs as models
from stagescope_service.views.reading.rows import run_row

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
