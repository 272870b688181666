"""Routes about weights: verdicts by version and tensor, and devices that differ from replicas."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from stagescope_service.http.parameters import AttemptTarget, Deps, Run, StepTarget, Version
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views import weights as view
from stagescope_service.views.models import service as models
from stagescope_service.views.weights import answer

router = APIRouter(tags=["weights"])

VerdictFilter = Annotated[
    Literal["differs", "missing", "replicas differ", "not comparable", "not compared", "agrees"]
    | None,
    Query(description="Only weights of this verdict."),
]


@router.get("/weights", response_model=models.WeightVersions)
def versions(deps: Deps, target: AttemptTarget, page: PageOf) -> Answer:
    """List the versions of an attempt's weights, newest first, with the count of each verdict.

    `names` has the first of the weights that differ or are missing.
    """
    return Answer(view.versions(deps, target, page))


@router.get("/weights/{version}", response_model=models.WeightsOfVersion)
def version(
    deps: Deps, target: AttemptTarget, version: Version, page: PageOf, verdict: VerdictFilter = None
) -> Answer:
    """List the weights of a version, the worst first: what was sent against what was received."""
    return Answer({**target.heading(), **answer(deps, target, [version], page, verdict)})


@router.get("/steps/{step}/weights", response_model=models.WeightsOfStep)
def of_step(deps: Deps, target: StepTarget, page: PageOf, verdict: VerdictFilter = None) -> Answer:
    """List the weights that were recorded at a step, the worst first.

    The `verdict` is `differs`, `missing` (on one side), `not comparable` (another dtype or shape,
    fused, sharded differently: see `reason`), `not compared` (one side recorded nothing) or
    `agrees`, bit for bit. Rollout ranks that differ are in `ranks`, ranks that differ from their
    replicas in `odd_ranks`. The newest version is returned; `versions` lists all.
    """
    return Answer(view.of_step(deps, target, page, verdict))


@router.get("/devices", response_model=models.Devices)
def devices(deps: Deps, page: PageOf, run: Run = None) -> Answer:
    """List the devices whose weights differed from their replicas', the most often outvoted first.

    `odd` counts the recorded versions in which most replicas held something else, `suspected`
    those without a majority (of two, either may be right). Over all runs, unless `run` is given.
    """
    return Answer(view.devices(deps, page, run))
