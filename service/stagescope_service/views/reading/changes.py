"""What tells whether an answer about a whole run may be another one now."""

from __future__ import annotations

from typing import Final

from stagescope_service.views.reading.answers import Key
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_wire.names import BISECT, EXPERIMENT

MAX_AGE: Final = 60.0
"""Seconds for which an answer holds, since late scalars and samples change no step."""


def change_key(deps: Dependencies, name: str, run: str, asked: object) -> Key:
    """Return a key that changes whenever an answer about a run may.

    Args:
        deps: the catalogue's holder.
        name: of the kind of answer.
        run: the run.
        asked: what else selects the answer; its `repr` counts.

    Raises:
        NotFound: no such run.
    """
    target = deps.finder.attempt(run)
    attempts = deps.catalogue.attempts(target.run)
    mark = deps.catalogue.change_mark([row["attempt_id"] for row in attempts])
    states = [(row["number"], row["ended_wall"], row["resumed_from_step"]) for row in attempts]
    bisected = len(deps.catalogue.settings_of_runs(f"{EXPERIMENT}{target.run}-", BISECT))
    period = int(deps.clock() / MAX_AGE)
    known = repr((target.display_name, asked, period, states, bisected))
    return (name, target.run, known, mark)
