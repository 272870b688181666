"""The worst step and the worst token of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from stagescope_service.statistics.step_metrics import VERSION
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.rows import Lineage
from stagescope_service.views.reading.step_summaries import Slice
from stagescope_service.views.steps.numbers import measure, token_rows

Place = tuple[int, int]
"""(attempt_id, step)."""
_METRICS: Final = ("logprob_abs_diff/mean", "logprob_abs_diff/max")
"""Of the worst step and of the step with the worst token."""


def worst(deps: Dependencies, run: str) -> JsonObject:
    """Name a run's step with the largest mean |d|, and its token with the largest |d|.

    Steps that a later attempt repeats do not count.

    Raises:
        NotFound: no such run.
    """
    target = deps.finder.attempt(run)
    attempts = deps.catalogue.attempts(target.run)
    ids = [int(row["attempt_id"]) for row in attempts]
    stored = deps.catalogue.stored_numbers(ids, _METRICS, version=VERSION)
    lineage = Lineage(attempts)
    step, token = (_highest(deps, lineage, values, stored.places) for values in stored.values)
    found: JsonObject = {"run": target.run, "also_live": target.also_live}
    return {**found, "step": step, "token": token and {**token, **_place(deps, run, token)}}


def _highest(
    deps: Dependencies,
    lineage: Lineage,
    values: Iterable[float | str | None],
    places: Sequence[Place],
) -> JsonObject | None:
    """Return the current step with the largest finite value; None: no step has one."""
    known = sorted(
        (value, place)
        for place, value in zip(places, values, strict=True)
        if isinstance(value, float | int)
    )
    for value, place in reversed(known):  # mostly the first: few steps are repeated
        if _is_current(deps, lineage, place):
            return {"abs_diff": value, "step": place[1], "attempt": lineage.numbers[place[0]]}
    return None


def _is_current(deps: Dependencies, lineage: Lineage, place: Place) -> bool:
    """Return whether no later attempt repeats a step."""
    attempt_id, step = place
    newest = deps.catalogue.step_states([*lineage.numbers], first=step, last=step)[-1]
    return (
        newest.attempt_id == attempt_id
        and newest.superseded_by is None
        and lineage.repeated_by(attempt_id, step) is None
    )


def _place(deps: Dependencies, run: str, found: JsonObject) -> JsonObject:
    """Return where the worst token of a step is."""
    target = deps.finder.step(run, found["attempt"], found["step"])
    measured, _ = measure(deps, target, Slice())
    row = next(iter(token_rows(measured, deps.catalogue.processes(target.attempt_id))), {})
    return {name: row.get(name) for name in ("sample_uid", "role", "rank", "row", "position")}
