"""Routes about the numbers of a step: metrics, rounds, ranks and tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from stagescope_service.http.parameters import Deps, RankQueryOf, Round, StepTarget
from stagescope_service.http.requests import Answer, PageOf
from stagescope_service.views.models import numbers as models
from stagescope_service.views.reading.step_summaries import Slice
from stagescope_service.views.steps import numbers as view
from stagescope_service.views.steps.numbers import SliceBy, metrics_of

router = APIRouter(prefix="/steps/{step}", tags=["steps"])


@router.get("/metrics", response_model=models.Metrics)
def metrics(deps: Deps, target: StepTarget, ranks: RankQueryOf, round: Round = None) -> Answer:
    """Return the step's metrics under their published names, and what they rest on.

    `complete` is `complete`, `partial` or `unknown` for a closed step. For an open step it is
    `open`: its numbers are assembled from what has arrived so far, and `missing` names the ranks
    that have not. With `rank`, `role`, `stage` or `round` the numbers are of that slice. Read
    `comparable` and `comparability` before you trust a number. The verdict `not measured` means
    that one stream is a copy, or that a token is finite in neither. The whole step has its verdict
    in `step_comparable`. Ranks that repeated the step within the attempt are in `begun_again`: both
    passes count.
    """
    return Answer(metrics_of(deps, target, Slice(**ranks), round))


@router.get("/rounds", response_model=models.Rounds)
def rounds(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    ranks: RankQueryOf,
    by: Annotated[
        SliceBy,
        Query(description="Mask segments, true turns, or trainer version - token's version."),
    ] = "round",
) -> Answer:
    """List the mismatch by round; `tokens`, `abs_diff_sum` and `diff_sum` add up to `whole`.

    A row's `comparable` is of its own tokens: read it with the row's `step_comparable`.
    """
    return Answer(view.rounds(deps, target, page, ranks, by))


@router.get("/ranks", response_model=models.Ranks)
def ranks(deps: Deps, target: StepTarget, page: PageOf, ranks: RankQueryOf) -> Answer:
    """List the mismatch by rank, with where each ran.

    The numbers of a rank are its own, even if a replica counts in its place (`parts_counted` 0),
    and so is its verdict: read `comparable` with the row's `step_comparable`.
    """
    return Answer(view.ranks(deps, target, page, ranks))


@router.get("/tokens", response_model=models.Tokens)
def tokens(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    ranks: RankQueryOf,
    round: Round = None,
    kind: Annotated[Literal["worst", "nonfinite"] | None, Query(description="Only these.")] = None,
) -> Answer:
    """List the worst tokens (|p - q| descending), then those whose p or q is not finite.

    There are up to 64 of each, as a summary keeps them, for the step or for the requested rank.
    """
    return Answer(view.tokens(deps, target, page, ranks, round, kind))
