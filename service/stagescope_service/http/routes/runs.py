"""Routes about runs: the list, their attempts, where both streams are equal, the doctor."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from stagescope_service.coordinator.answers import Deleted
from stagescope_service.http.auth import caller_of
from stagescope_service.http.parameters import AttemptNumber, ChosenRuns, Deps, Run, RunPath
from stagescope_service.http.problems import check_ready
from stagescope_service.http.requests import Answer, PageOf, as_json, read_json
from stagescope_service.store.queries.overview import RunRow
from stagescope_service.views import run_list
from stagescope_service.views import runs as view
from stagescope_service.views.diagnosis import start_diagnosis
from stagescope_service.views.encoding import encode
from stagescope_service.views.models import runs as models
from stagescope_service.views.models.bodies import MAX_WAIT, RunChange
from stagescope_service.views.models.diagnosis import Diagnosis
from stagescope_service.views.reading.changes import change_key
from stagescope_service.views.reading.rows import run_row
from stagescope_service.views.steps.worst import worst as worst_of
from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_wire.schema import STEP_BOUND

router = APIRouter(tags=["runs"])


@router.get("/runs", response_model=models.Runs)
def runs(
    deps: Deps,
    page: PageOf,
    hidden: Annotated[bool, Query(description="Also those that are hidden.")] = False,
    name: Annotated[
        str | None, Query(min_length=1, description="Only runs with this name, or shown with it.")
    ] = None,
) -> Answer:
    """List the runs, the one that was active last first, each with its newest attempt.

    Runs that are experiments (`bisect-...`) come after all others.
    """
    rows = deps.catalogue.runs(limit=page.limit + 1, offset=page.offset, hidden=hidden, name=name)
    return Answer(page.first_of([run_row(row) for row in rows]))


@router.get("/runs/overview", response_model=models.RunsOverview)
def overview(
    deps: Deps,
    page: PageOf,
    hidden: Annotated[bool, Query(description="Also those that are hidden.")] = False,
) -> Answer:
    """List the runs with what a reader chooses by: verdict, findings, curves in small.

    The verdict is the doctor's. It is made in the background; `judgement` is null until it is
    there. If the run went on since, `current` is false, and the next one is being made.
    """
    return Answer(run_list.overview(deps, page, hidden=hidden))


@router.get("/runs/settings", response_model=models.RunSettings)
def settings(deps: Deps, run: ChosenRuns) -> Answer:
    """List the settings in which runs differ, from the newest attempt of each.

    They are what its processes reported: configuration, git, packages, environment.
    """
    return Answer(run_list.settings(deps, run))


@router.patch("/runs/{run:path}", response_model=RunRow, openapi_extra=RunChange.document())
async def change_run(request: Request, deps: Deps, run: RunPath) -> Answer:
    """Hide a run from lists, show it again, or name it for people; needs the operate token.

    Its name for questions and trainings stays. Who changed it is kept in the audit.
    """
    body = RunChange.parse(await read_json(request, deps.settings))
    changes = body.model_dump(include=body.model_fields_set)
    if not changes:
        raise InvalidInput("nothing is to be changed", expected="display_name or hidden")
    name = await asyncio.to_thread(deps.finder.run, run)
    by = str(caller_of(request))
    check_ready(await deps.commands.change_run(run=name, changes=changes, by=by))
    row = await asyncio.to_thread(deps.catalogue.run, name)
    if row is None:
        raise NotFound(f"run {name} was deleted meanwhile")
    return Answer(run_row(row))


@router.delete("/runs/{run:path}", response_model=Deleted)
async def delete_run(
    request: Request,
    deps: Deps,
    run: RunPath,
    dry_run: Annotated[bool, Query(description="Delete nothing; say what would be.")] = False,
    wait: Annotated[
        float, Query(ge=0, le=MAX_WAIT, description="Seconds to wait until it is gone.")
    ] = 5.0,
) -> Answer:
    """Delete a run: its rows, its files on every node, its captures; needs the operate token.

    A run that is live is refused (409). A run that is not gone after `wait` has `deleted` false:
    the same call may be made again until it is true. After a crash of the service the deletion
    continues by itself. Until it is over, processes that report under the run's name wait. Their
    reports then start the run from the beginning. Who deleted it is kept in the audit.

    Dumps that were imported stay on the disk, and so do engines that were registered for the run.
    """
    name = await asyncio.to_thread(deps.finder.run, run)
    by = str(caller_of(request))
    reply = await deps.commands.delete_run(run=name, dry_run=dry_run, by=by, wait=wait)
    return Answer(check_ready(reply))


@router.get("/runs/{run:path}/attempts", response_model=models.Attempts)
def attempts(deps: Deps, page: PageOf, run: RunPath) -> Answer:
    """List a run's attempts, newest first: fingerprint, where it resumed, which steps it repeats.

    `superseded` names the steps of an attempt that later attempts repeat: from `from_step` on, by
    attempt `by`. Where several repeat a step, the newest counts. `note` names the steps before an
    attempt that no attempt reported.
    """
    return Answer(view.attempts(deps, page, run))


@router.get("/runs/{run:path}/metrics", response_model=models.NumberNames)
def numbers(deps: Deps, page: PageOf, run: RunPath) -> Answer:
    """List the names that `/series` and `/figures/overview` take: metrics and logged scalars."""
    return Answer(view.numbers(deps, page, run))


@router.get("/runs/{run:path}/worst", response_model=models.Worst)
def worst(deps: Deps, run: RunPath) -> Response:
    """Name the step with the largest mean |d| of a run, and its token with the largest |d|.

    Steps that a later attempt repeats do not count.
    """
    key = change_key(deps, "worst", run, ())
    return as_json(deps.answers.of(key, lambda: encode(worst_of(deps, run))))


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


@router.get("/runs/{run:path}/diagnosis", response_model=Diagnosis)
async def diagnosis(
    deps: Deps,
    page: PageOf,
    run: RunPath,
    attempt: AttemptNumber = None,
    step: Annotated[
        int | None,
        Query(ge=0, lt=STEP_BOUND, description="Look at the steps up to this one alone."),
    ] = None,
) -> Response:
    """Compare the rulebook with the newest 2000 steps of a run: what is sick, and how sure that is.

    Each row is a symptom: `found`, `not found` or `not measured`. It has the evidence for and
    against it in numbers, the first step that shows it, and where. It says what the symptom means,
    what to do next, and what to record where it is not measured. Symptoms that were found come
    first: those of the service's own data, then precision, mismatch, reward, time and settings.
    Those that another found one explains come after them (`explained_by`), and those that ended
    last (`last_step`). Findings that no rule judged are counted in `unexplained`. Remarks that are
    no symptom, but matter to a comparison of two runs, are in `notes`. The newest measured step's
    parts of the mismatch are in `mismatch`. While the run's steps, findings and lost data stay, the
    answer holds for ten seconds, or for a minute if the run is not live.
    """
    key, future = await asyncio.to_thread(start_diagnosis, deps, run, attempt, step)
    # Others may wait for the same computation: a client that leaves does not cancel it.
    found, rows = await asyncio.shield(asyncio.wrap_future(future))
    cut = (*key, repr(page))
    return as_json(deps.answers.of(cut, lambda: encode({**found, **page.cut(rows)})))
