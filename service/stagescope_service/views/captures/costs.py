"""What earlier dumps of a run cost: what the next capture of the same will cost, about."""

from __future__ import annotations

from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.reading.dependencies import Dependencies


def costs(deps: Dependencies, run: str) -> JsonObject:
    """Return the largest cost of a rank in a step, by role, stage, task and level."""
    target = deps.finder.attempt(run)
    attempts = {row["attempt_id"]: row["number"] for row in deps.catalogue.attempts(target.run)}
    rows = [
        {**row, "attempt": attempts[row["attempt_id"]]}
        for row in deps.catalogue.dump_costs([*attempts])
    ]
    for row in rows:
        del row["attempt_id"]
    return {**target.heading(), "rows": rows, "next": None}
