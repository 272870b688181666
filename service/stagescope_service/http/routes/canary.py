"""Routes about the canary: verdicts by version, engine instance and pair of arms."""

from __future__ import annotations

from fastapi import APIRouter

from stagescope_service.http.parameters import AttemptTarget, Deps, Version
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views import canary as view
from stagescope_service.views.models import canary as models

router = APIRouter(tags=["canary"])


@router.get("/canary", response_model=models.CanaryVersions)
def versions(deps: Deps, target: AttemptTarget, page: PageOf) -> Answer:
    """List the versions of an attempt that a canary scored, newest first, by engine instance.

    Each pair of arms has its mean difference, the bound above which it differs, and what the bound
    was derived from.
    """
    return Answer(view.versions(deps, target, page))


@router.get("/canary/{version}", response_model=models.CanaryOfVersion)
def version(deps: Deps, target: AttemptTarget, version: Version, page: PageOf) -> Answer:
    """List the sequences of a version in each pair of arms, the worst first.

    Each has its worst token: position, token id and both log-probs.
    """
    return Answer(view.of_version(deps, target, version, page))
