"""The route about hangs: the ranks that are stuck in a step."""

from __future__ import annotations

from fastapi import APIRouter

from stagescope_service.http.parameters import Deps, Rank, Role, Stage, StepTarget
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views.hangs import stuck as view
from stagescope_service.views.models import steps as models

router = APIRouter(tags=["hangs"])


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

    A stuck rank has been quiet for longer than `limit_seconds`. Others of its role began or ended a
    part that it did not, or all of them are in the same part (`whole_role`). The limit comes from
    its role's earlier steps; without those (`history_steps` 0) the lag behind the other ranks
    counts. Ranks that wait for it are not listed. One that never reported (`unheard`), though
    earlier steps closed without it, is listed once the others are late. Open steps before this one
    are checked too. Earlier findings of this step are in `findings`, also those that are over.
    """
    return Answer(view.stuck(deps, target, page, stage, role, rank))
