"""One step: the steps beside it in its run, and its numbers or why it has none."""

from __future__ import annotations

from stagescope_service.store.queries.overview import ListedStep
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.step_summaries import Slice
from stagescope_service.views.reading.target import Target
from stagescope_service.views.steps.numbers import metrics_of
from stagescope_wire.errors import NotFound
from stagescope_wire.links import with_links


def one(
    deps: Dependencies, target: Target, part: Slice, round: int | None, *, is_own: bool
) -> JsonObject:
    """Return a step's neighbours, and the numbers of a part of it or why there are none.

    Args:
        deps: of the service.
        target: the step.
        part: which of its tokens.
        round: only this round; None: all.
        is_own: whether the request names the attempt. Then the attempt's own steps are its
            neighbours, and only beyond them the current ones.
    """
    numbers, unmeasured = None, None
    try:
        numbers = metrics_of(deps, target, part, round)
    except NotFound as error:
        advice = with_links(error.advice, error.see)
        unmeasured = {"wrong": error.wrong, "expected": error.expected, "advice": advice}
    return {
        **target.heading(),
        "earlier": _neighbour(deps, target, is_own=is_own, before=target.step_number),
        "later": _neighbour(deps, target, is_own=is_own, after=target.step_number),
        "repeats": _repeats(deps, target),
        "numbers": numbers,
        "unmeasured": unmeasured,
    }


def _repeats(deps: Dependencies, target: Target) -> list[int]:
    """Return the numbers of the earlier attempts that have the step, the newest first."""
    step = target.step_number
    rows = deps.catalogue.steps(run=target.run, before=step + 1, after=step - 1, superseded=True)
    return sorted((row["attempt"] for row in rows if row["attempt"] < target.number), reverse=True)


def _neighbour(
    deps: Dependencies,
    target: Target,
    *,
    is_own: bool,
    before: int | None = None,
    after: int | None = None,
) -> JsonObject | None:
    """Return the nearest step on one side; None: there is none."""
    rows: list[ListedStep] = []
    if is_own:
        rows = deps.catalogue.steps(target.attempt_id, before=before, after=after, limit=1)
    if not rows:
        rows = deps.catalogue.steps(
            run=target.run, before=before, after=after, superseded=False, limit=1
        )
    return {"step": rows[0]["step"], "attempt": rows[0]["attempt"]} if rows else None
