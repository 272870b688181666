"""Routes about steps: the list of a run's steps, and the stages, scalars and dumps of one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from stagescope_service.figures import anatomy, timeline
from stagescope_service.figures.trace_events import trace
from stagescope_service.http.parameters import Deps, RankQueryOf, Run, StepTarget
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.http.routes.figures import TokenProperty
from stagescope_service.views.models import figures as figure_models
from stagescope_service.views.models import runs as list_models
from stagescope_service.views.models import steps as models
from stagescope_service.views.reading.completeness import ALL_ROWS
from stagescope_service.views.reading.rows import dump_row, matching
from stagescope_service.views.steps import listing as view
from stagescope_wire.schema import STEP_BOUND

router = APIRouter()


@router.get("/steps", response_model=list_models.Steps, tags=["runs"])
def steps(
    deps: Deps,
    page: PageOf,
    run: Run = None,
    attempt: Annotated[
        int | None, Query(ge=1, lt=1 << 31, description="Only this attempt; default: all.")
    ] = None,
    to: Annotated[
        int | None, Query(ge=0, lt=STEP_BOUND, description="No step after this one.")
    ] = None,
) -> Answer:
    """List a run's steps, newest first; those that a later attempt repeats come last.

    `complete` is about ranks and their stages. For a closed step, `gap` says what its numbers lack
    (payloads that were lost, refused, dropped or not read yet), or why there are none.

    Without `attempt` the steps of every attempt are listed, the current ones first. A step that a
    later attempt repeats, or resumed before, has `superseded_by`; `note` says how many there are.
    If a process repeated a step within its attempt, it has `begun_again`: both passes count in its
    numbers. Steps that no attempt reported are in `note`.
    """
    return Answer(view.steps(deps, page, run, attempt, to))


@router.get("/steps/{step}/stages", response_model=models.Stages, tags=["steps"])
def stages(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    ranks: RankQueryOf,
    superseded: Annotated[
        bool, Query(description="Also what a newer incarnation or report replaced.")
    ] = False,
) -> Answer:
    """List the stages of a step by rank: begun, ended, for how long, and which ranks are missing.

    Each part of a stage on a rank has a row, in the order of beginning. Rows with status
    `not begun` follow, one for each rank that is expected and absent. The ranks in `expected` (role
    -> stage -> ranks) come from each role's world_size, else from the attempt's last closed step.
    For a closed step, `gap` says what its numbers lack, or why there are none.
    """
    return Answer(view.stages(deps, target, page, ranks, superseded))


@router.get("/steps/{step}/scalars", response_model=models.Scalars, tags=["steps"])
def scalars(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    ranks: RankQueryOf,
    name: Annotated[str | None, Query(max_length=500, description="Only this scalar.")] = None,
) -> Answer:
    """List the numbers that ranks handed over (`loss`, `reward`, ...), by name and rank."""
    return Answer(view.scalars(deps, target, page, ranks, name))


@router.get("/steps/{step}/dumps", response_model=models.Dumps, tags=["steps"])
def dumps(deps: Deps, target: StepTarget, page: PageOf, ranks: RankQueryOf) -> Answer:
    """List msprobe's dumps of the step: who collected, missed or failed, where, how large."""
    every = deps.catalogue.dumps(target.attempt_id, target.step_number, limit=ALL_ROWS)
    rows = matching(every, f"step {target.step_number}", **ranks)
    return Answer({**target.heading(), **page.cut([dump_row(row) for row in rows])})


@router.get(
    "/steps/{step}/anatomy", response_model=figure_models.Anatomy, tags=["figures", "steps"]
)
def step_anatomy(deps: Deps, target: StepTarget, by: TokenProperty = "place") -> Answer:
    """Return |d| and d of a step by where its tokens are, or how probable or stale they are."""
    return Answer(anatomy.answer(anatomy.info(deps, target, by)))


@router.get("/steps/{step}/timeline", response_model=figure_models.Trace, tags=["figures", "steps"])
def step_trace(deps: Deps, target: StepTarget) -> Answer:
    """Return the stages of a step as trace events, for ui.perfetto.dev and chrome://tracing.

    A role is a process, a rank a thread. Slices have the stage's status; waits name the rank that
    was waited for.
    """
    name = f"{target.run}-{target.number}-step{target.step_number}.trace.json"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Answer(trace(timeline.read(deps, target)), headers=headers)
